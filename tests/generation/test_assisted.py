"""Decoding by dealer protocols against plaintext: families, several tokens at once, passes, roll back, and what it opens."""

import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import GPT2, LLAMA, OPT, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.bench.layer import LayerShape
from spu_llm.errors import UserError
from spu_llm.generation import AssistedDecoder
from spu_llm.generation import assisted as module
from spu_llm.generation.cache_rows import CacheRows
from spu_llm.generation.secure import fitting_window
from spu_llm.models import PlainDecoder, load_checkpoint
from spu_llm.models.calibration import calibrate
from spu_llm.runtime import ProtocolConfig, Session

PROMPT = [5, 17, 96, 2, 40]
PREFIX = (7, 8)
ONE_HEAD_UNTIED = LLAMA | {"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": False}
GPT2_LAYER = GPT2 | {"n_layer": 1}
OPT_LAYER = OPT | {"num_hidden_layers": 1}
ERROR = 0.1  # of logits up to 7: roundings are random, mostly 0.01 and seldom more than 0.05


def calibrated(decoder):
    random = np.random.default_rng(0)
    texts = [random.integers(0, decoder.config.vocabulary, length).tolist() for length in [18] * 30 + [2] * 30]
    return calibrate(decoder, texts, PREFIX)


def both(decoder, calibration=None, capacity=20, ring="FM64", appends=False):
    """A session with an assisted decoder set up in it, and the plaintext decoder at the same position."""
    session = Session(ProtocolConfig(ring=ring))
    assisted = AssistedDecoder(session, decoder, calibration or calibrated(decoder), capacity, PREFIX, appends=appends)
    assisted.set_up()
    plain = PlainDecoder(decoder, capacity)
    plain.advance(PREFIX)
    return session, assisted, plain


def loaded(config, tmp_path):
    return load_checkpoint(write_checkpoint(tmp_path / "model", config)).decoder


def off(assisted, plain, tokens, last_only=False):
    """By how much the logits of the same tokens differ at most."""
    found, want = assisted.advance(tokens, last_only), plain.advance(tokens)
    want = want[-1:] if last_only else want
    assert found.shape == want.shape
    return np.abs(found - want).max()


@pytest.mark.parametrize(
    ("config", "messages"),
    [(GPT2_LAYER, 15), (LLAMA, 16), (OPT_LAYER, 17)],
    ids=["gpt2", "llama", "opt"],
)
def test_logits_equal_plaintext(config, messages, tmp_path):
    """Many tokens or one, after any others; messages are those of the openings, whatever the number of tokens.

    Where there are two layers, each has tables, and so programs, of its own.
    """
    decoder = loaded(config, tmp_path)
    calibration = calibrated(decoder)
    *first, last = calibration.layers
    wide = dataclasses.replace(last, relative=(-60.0, last.relative[1]), activation=(-25.0, 12.0))
    session, assisted, plain = both(decoder, dataclasses.replace(calibration, layers=(*first, wide)))
    assert len(set(assisted.plan.blocks)) == decoder.config.layers
    with session:
        for name, tokens in (("five", PROMPT), ("one", [11]), ("again", PROMPT[::-1])):
            with session.phase(name):
                assert off(assisted, plain, tokens) < ERROR
        assisted.roll_back(8)
        plain.length = 8
        assert off(assisted, plain, [50]) < ERROR
        with pytest.raises(ValueError, match="roll back"):
            assisted.roll_back(1)
    expected = 10  # embedding and output layer: ids, logits, and 8 openings
    for block in assisted.plan.blocks:
        expected += messages + (2 if block.softmax.refinement is None else 4)
    assert [session.phases[name].messages for name in ("five", "one", "again")] == [expected] * 3


def test_a_prompt_in_passes(tmp_path, monkeypatch):
    """Logits are those of one pass, of the last token or of all; a failing pass takes back those before it."""
    monkeypatch.setattr(module, "_PASS", 2)
    session, assisted, plain = both(loaded(ONE_HEAD_UNTIED | {"num_hidden_layers": 1}, tmp_path))
    with session:
        assert assisted.passes(5) == [2, 2, 1]
        with session.phase("prompt"):
            assert off(assisted, plain, PROMPT, last_only=True) < ERROR
        assert assisted.length == 7
        assert off(assisted, plain, PROMPT[:4]) < ERROR
        assisted.roll_back(4)
        plain.length = 4
        with monkeypatch.context() as patch:
            run, sizes = assisted.run_layers, []

            def failing(n):
                sizes.append(n)
                if len(sizes) == 2:
                    raise UserError("the second pass fails")
                run(n)

            patch.setattr(assisted, "run_layers", failing)
            with pytest.raises(UserError, match="the second pass fails"):
                assisted.advance(PROMPT)
            assert (sizes, assisted.length) == ([2, 2], 4)
        assert off(assisted, plain, [90, 3, 41]) < ERROR
        assert assisted.length == 7
    layers = sum(16 + (2 if block.softmax.refinement is None else 4) for block in assisted.plan.blocks)
    assert session.phases["prompt"].messages == 3 * (4 + layers) + 6  # each pass embeds and runs layers, the last gives logits


@pytest.mark.parametrize("appends", [False, True])
def test_a_pass_whose_logits_are_given_row_by_row(appends, tmp_path):
    """As `advance` gives them at once; what is rolled back leaves no trace, whether its rows are written again or not."""
    decoder = loaded(LLAMA | {"num_hidden_layers": 1}, tmp_path)
    session, assisted, plain = both(decoder, appends=appends)
    with session:
        assisted.advance(PROMPT[:3])
        plain.advance(PROMPT[:3])
        for tokens, kept in (([3, 50, 9], 1), ([50, 4, 4], 3), ([1], 1)):
            assisted.score(tokens)
            want = plain.advance(tokens)
            with session.phase("rows") as phase:
                assert max(np.abs(assisted.row(i) - want[i]).max() for i in range(kept)) < ERROR
            assert phase.messages == kept
            session.phases.pop("rows")
            plain.length += kept - len(tokens)
            assisted.roll_back(plain.length)
        assert assisted.rows.written == (12 if appends else 10)
        with pytest.raises(UserError, match="capacity"):
            assisted.score([1] * 20)


@given(st.data())
def test_rows_of_a_cache(data):
    """Every position held is seen by what comes after it, once; nothing else is."""
    appends, prefix = data.draw(st.booleans()), data.draw(st.integers(0, 3))
    rows, made = CacheRows(prefix, appends), prefix
    for _ in range(data.draw(st.integers(0, 6))):
        count = data.draw(st.integers(1, 4))
        assert rows.written == (made if appends else rows.length)
        width = rows.written + count + data.draw(st.integers(0, 3))
        seen = rows.seen(count, width)
        assert seen.sum(1).tolist() == list(range(rows.length + 1, rows.length + count + 1))
        where = rows.rows_of(range(rows.length + count), count)
        assert seen[-1, where].all() and where[rows.length :].tolist() == list(range(rows.written, rows.written + count))
        rows.append(count)
        made += count
        rows.take_back(data.draw(st.integers(prefix, rows.length)))
        assert rows.length >= prefix


@settings(deadline=None, max_examples=60)
@given(
    start=st.integers(0, 300), count=st.integers(1, 300), most=st.sampled_from([1, 7, 64]), scores=st.sampled_from([1, 1000, 9000]),
)  # fmt: skip
def test_passes_fit_memory(start, count, most, scores):
    """No pass of more than `most` tokens, or of more scores than fit unless it is one token's; smaller only for that."""
    config = LayerShape("gpt2", 16, 4, 4, 16, 599).config()
    decoder = SimpleNamespace(decoder=SimpleNamespace(config=config), rows=CacheRows(start), capacity=600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PASS", most)
        patch.setattr(module, "_SCORES", scores)
        sizes = AssistedDecoder.passes(decoder, count)
    assert sum(sizes) == count and min(sizes) >= 1 and max(sizes) <= most

    def looked_up(at, size):
        return 4 * size * fitting_window(config, at, size, 600).mask.shape[1]

    for i, size in enumerate(sizes):
        at = start + sum(sizes[:i])
        assert size == 1 or looked_up(at, size) <= scores
        assert i == len(sizes) - 1 or size == most or looked_up(at, most) > scores


def test_a_layer_out_of_scale_ends_in_an_error(tmp_path, monkeypatch):
    """Also if it was in a pass before the one that gives the logits."""
    monkeypatch.setattr(module, "_PASS", 1)
    decoder = loaded(GPT2_LAYER, tmp_path)
    calibration = calibrated(decoder)
    scaled = copy.deepcopy(decoder.params)
    scaled["layers"][0]["qkv"]["kernel"] = 100 * scaled["layers"][0]["qkv"]["kernel"]
    session, assisted, _ = both(dataclasses.replace(decoder, params=scaled), calibration)
    with session:
        with pytest.raises(UserError, match="range check"):
            assisted.advance([3, 4])
        assert assisted.length == len(PREFIX)


def test_the_128_bit_ring_gives_the_same(tmp_path):
    session, assisted, plain = both(loaded(GPT2_LAYER, tmp_path), ring="FM128")
    with session:
        for token in PROMPT[:3]:  # by the program that set-up compiles
            assert off(assisted, plain, [token]) < ERROR
