"""The quality benchmark: its sums against transformers and by hand, planted choices, and a whole run on a tiny model."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import GPT2, TEXT, write_checkpoint, write_tokenizer
from flax_models import pretrained
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax
from transformers import FlaxGPT2LMHeadModel

from spu_llm.bench import quality, reading
from spu_llm.bench.quality import choice_sums, passage_sums
from spu_llm.bench.reading import (
    CONTEXT,
    CONTINUATION,
    Question,
    Side,
    Void,
    answer,
    choices,
    cut_passage,
    log_probabilities,
    pass_lengths,
    plain_side,
    read_passage,
    read_questions,
)
from spu_llm.cli import main
from spu_llm.errors import UserError
from spu_llm.models import load_checkpoint

PREFIX = (3, 5)
WORDS = re.findall(r"\w+", TEXT)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A GPT-2 of one layer with a tokenizer, its folder, and transformers' own model of it."""
    config = GPT2 | {"n_layer": 1, "n_positions": 128}
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", config)
    write_tokenizer(folder, 97)
    return load_checkpoint(folder), folder, pretrained(FlaxGPT2LMHeadModel, folder)


def counting(steps):
    """A side whose every token is followed by the one `steps` further on, surely."""

    def advance(ids):
        rows = np.zeros((len(ids), 97), np.float32)
        rows[np.arange(len(ids)), (np.asarray(ids) + steps) % 97] = 20
        return rows

    return Side(advance, lambda length: None, 0)


@given(st.integers(1, 700))
def test_passes_are_powers_of_two_that_add_up(count):
    lengths = list(pass_lengths(count))
    assert sum(lengths) == count
    assert all(length & (length - 1) == 0 and length <= 64 for length in lengths)
    assert lengths == sorted(lengths, reverse=True)


def test_log_probabilities_stand_extremes():
    logits = np.asarray([[0, 0, 0], [1e4, 0, -1e4], [-3e4, -3e4, -3e4 + 1]], np.float32)
    np.testing.assert_allclose(log_probabilities(logits), log_softmax(logits.astype(np.float64), -1), atol=1e-12)


def test_perplexity_is_that_of_transformers(tiny):
    checkpoint, _, theirs = tiny
    text = " ".join(WORDS * 4)
    ids = checkpoint.tokenizer.encode(text)
    rows = np.asarray(theirs(np.asarray([[*PREFIX, *ids]])).logits[0], np.float64)[len(PREFIX) : -1]
    want = -log_softmax(rows, -1)[np.arange(len(ids) - 1), ids[1:]]
    sides = {"plain": plain_side(checkpoint, PREFIX, 128), "secure": plain_side(checkpoint, PREFIX, 128)}
    for _ in range(2):  # the second time after a roll back
        record = read_passage(sides, cut_passage(checkpoint.tokenizer, text, 256))
        assert record["tokens"] == record["same"] == len(ids) - 1 > 64
        assert record["nll"]["plain"] == pytest.approx(want.sum(), abs=1e-3)
        assert record["logit_error"] == 0
    sums = passage_sums([record, {"void": True}])
    assert sums["perplexity"]["plain"] == pytest.approx(np.exp(want.mean()), rel=1e-4)
    assert (sums["passages"], sums["void_passages"], sums["perplexity"]["change"]) == (1, 1, 0)


def test_passages_that_are_all_void():
    with pytest.raises(UserError, match="every passage"):
        passage_sums([{"void": True}])


def test_sums_by_hand():
    def record(tokens, plain, secure, same, word):
        return {
            "tokens": tokens, "nll": {"plain": plain, "secure": secure}, "same": same, "logit_error": 0.1 * tokens,
            "word": word and dict(zip(("plain", "secure"), word, strict=True)),
        }  # fmt: skip

    records = [record(3, 6.0, 6.3, 3, (True, False)), record(2, 4.0, 4.0, 1, (True, True)), record(5, 5.0, 5.2, 5, None)]
    sums = passage_sums(records)
    assert sums["perplexity"] == pytest.approx({"plain": np.exp(1.5), "secure": np.exp(1.55), "change": np.exp(0.05) - 1})
    differences = np.asarray([0.3, 0.0, 0.2]) - 0.05 * np.asarray([3, 2, 5])
    assert sums["perplexity_change_standard_error"] == pytest.approx(np.sqrt((differences**2).sum()) / 10)
    assert sums["top1_agreement"] == 0.9 and sums["max_logit_error"] == 0.5
    assert sums["last_word"] == {"items": 2, "plain": 1.0, "secure": 0.5, "change": -0.5, "lost": 1, "won": 0}


def test_last_word_is_what_tokens_begin_and_end_with(tiny):
    tokenizer = tiny[0].tokenizer
    for text, word in (("over the lazy dog.", " dog"), ("was the word", " word"), ('the word was "secret".', None), ("dog", None)):
        passage = cut_passage(tokenizer, text, 256)
        assert passage.ids == tokenizer.encode(text)
        assert passage.word is None if word is None else tokenizer.decode(passage.ids[1:][passage.word]) == word
    length = len(tokenizer.encode("over the lazy dog"))
    assert cut_passage(tokenizer, "over the lazy dog", length).word is not None
    assert cut_passage(tokenizer, "over the lazy dog", length - 1).word is None  # part of the word was cut off


def test_a_planted_choice_is_found():
    passages = [[(start + i) % 97 for i in range(CONTEXT + CONTINUATION)] for start in range(0, 97, 5)] + [[1] * 40]
    questions = choices(passages, 15, seed=2)
    assert len(questions) == 15
    assert len({question.answer for question in questions}) == 4
    for question in questions:
        context, right = question.options[question.answer]
        assert right[0] == (context[-1] + 1) % 97
        assert len({end for _, end in question.options}) == 4
        assert np.argmax(answer(counting(1), question)) == question.answer
    assert questions == choices(passages, 15, seed=2) != choices(passages, 15, seed=3)
    assert choices(passages[:3], 15, seed=2) == []


def test_choices_are_by_mean_log_probability_and_counted_by_side():
    """The long right end has one likely token more than the short wrong one, and one unlikely."""
    question = Question((((5,), (6, 7, 8, 20)), ((5,), (9, 10))), 0)
    scores = answer(counting(1), question)
    unlikely, likely = -20 - np.log(1 + 96 * np.exp(-20)), -np.log(1 + 96 * np.exp(-20))
    assert scores == pytest.approx([(3 * likely + unlikely) / 4, (likely + unlikely) / 2])
    records = [{"answer": 0, "plain": scores, "secure": [-2.0, -1.0]}, {"void": True}]
    assert choice_sums(records) == {
        "items": 1, "plain": 1.0, "secure": 0.0, "change": -1.0, "lost": 1, "won": 0, "same_choice": 0, "void": 1,
    }  # fmt: skip


def test_contexts_may_differ_in_a_question():
    question = Question((((5, 6), (7,)), ((5, 8), (7,))), 0)
    assert np.argmax(answer(counting(1), question)) == 0


def test_a_void_pass_is_told_from_other_errors():
    def advance(message):
        def fail(ids):
            raise UserError(message)

        return fail

    with pytest.raises(Void):
        Side(advance("range check: a value left its table"), lambda length: None, 0).read([1])
    with pytest.raises(UserError, match="capacity"):
        Side(advance("3 positions exceed the cache capacity"), lambda length: None, 0).read([1])


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"options": [["a", "b"]], "answer": 1}', '{"options": [["", "b"]], "answer": 0}', '{"options": "ab"}']
)
def test_what_is_no_question_is_refused(line, tiny, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"options": [["the quick", " dog"], ["the lazy", " dog"]], "answer": 1}\n' + line)
    assert read_questions(path, tiny[0].tokenizer, 1)[0].answer == 1
    with pytest.raises(UserError, match=r"q\.jsonl: line 2 is no question"):
        read_questions(path, tiny[0].tokenizer, 2)


def test_a_whole_run_that_broke_off(tiny, tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    drawn = (" ".join(random.choice(WORDS, 10)) + " dog." for _ in range(2000))
    lines = [line for line in drawn if len(tiny[0].tokenizer.encode(line)) == 13][:40]  # few lengths: little to compile
    assert len(lines) == 40
    (tmp_path / "calibration.txt").write_text("\n".join(lines[6:]))
    (tmp_path / "words.txt").write_text("\n".join(lines[:6]))
    (tmp_path / "asked.jsonl").write_text('{"options": [["the quick", " dog"], ["the lazy", " dog"]], "answer": 1}\n')
    model = {"name": "tiny", "path": str(tiny[1]), "prefix": list(PREFIX), "calibration": str(tmp_path / "calibration.txt")}
    (tmp_path / "tiny.yaml").write_text(json.dumps(model))
    out, text = tmp_path / "new" / "quality.json", str(tmp_path / "words.txt")
    arguments = ["bench", "quality", "--model", str(tmp_path / "tiny.yaml"), "--text", text, "--out", str(out), "--quiet"]
    arguments += ["--questions", str(tmp_path / "asked.jsonl"), "--tokens", "20", "--words", "1", "--choices", "2", "--check", "3"]
    for name, tokens in (("CONTEXT", 4), ("CONTINUATION", 8)):  # small, for the same reason
        monkeypatch.setattr(quality, name, tokens)
        monkeypatch.setattr(reading, name, tokens)
    checked, ask = [], quality.answer_both
    check = quality.check_emulation
    monkeypatch.setenv("SPU_LLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(quality, "check_emulation", lambda *given: checked.append(1) or check(*given))
    monkeypatch.setattr(quality, "answer_both", lambda *given: 1 / 0)
    broken = CliRunner().invoke(main, arguments)
    assert isinstance(broken.exception, ZeroDivisionError), broken.output
    monkeypatch.setattr(quality, "answer_both", ask)
    monkeypatch.setattr(quality, "read_passage", lambda *given: 1 / 0)  # all passages were finished
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert checked == [1] and not list(out.parent.glob("*.items"))
    assert found["emulation_equals_secure"].items() >= {"tokens": 3, "equal_bits": 64, "ring_bits": 64}.items()
    (measured,) = found["texts"].values()
    assert measured["tokens"] == 24 and measured["void_passages"] == 0
    assert abs(measured["perplexity"]["change"]) < 0.01
    assert measured["choice"]["items"] == 2 and found["questions"]["asked"]["items"] == 1
    assert "64 of 64 bits of every logit are equal" in done.output
    short = CliRunner().invoke(main, [*arguments, "--tokens", "100000"])
    assert short.exit_code == 2 and "words.txt: has" in short.output
    (tmp_path / "words.txt").write_text("the lazy dog")
    few = CliRunner().invoke(main, [*arguments, "--tokens", "2", "--words", "0"])
    assert few.exit_code == 2 and "words.txt: has fewer than 4 passages of 12 tokens" in few.output


def test_help_has_an_example():
    found = CliRunner().invoke(main, ["bench", "quality", "--help"])
    assert "spu-llm bench quality --text brown.txt" in found.output
