"""Alignment: what acceptance means, that it rises, and that a broken run goes on."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import GPT2, LLAMA, write_checkpoint, write_tokenizer
from scipy.special import softmax

from spu_llm.cli.align import align_command
from spu_llm.errors import UserError
from spu_llm.models import PlainDecoder, load_checkpoint
from spu_llm.models.sequences import sequence_weights
from spu_llm.models.source import ModelConfig
from spu_llm.post import align as module
from spu_llm.post.align import AlignConfig, acceptance, align

CONFIG = AlignConfig(steps=40, top_k=8, batch=4, length=16, rate=1e-2, held_out=64)


@pytest.fixture(scope="module")
def pair(checkpoints, tmp_path_factory):
    """A target, and a draft of another family with its tokenizer."""
    folder = write_checkpoint(tmp_path_factory.mktemp("draft") / "model", GPT2, seed=5)
    write_tokenizer(folder, 97)
    return ModelConfig(name="target", path=checkpoints["llama"], prefix=(3,)), ModelConfig(name="draft", path=folder, prefix=(3,))


def test_acceptance_is_what_p_and_q_share(pair):
    decoders = [load_checkpoint(model.path).decoder for model in pair]
    tokens = np.random.default_rng(1).integers(0, 97, (3, 20))
    found = acceptance(*decoders, tokens, sequence_weights(20, (1, 2)))
    logits = [np.stack([PlainDecoder(d, 20).advance(row) for row in tokens]).astype(np.float64) for d in decoders]
    shared = np.minimum(*(softmax(rows, -1) for rows in logits)).sum(-1)[:, 1:]
    assert found.positions == 57
    assert np.isclose(found.rate, shared.mean(), atol=1e-5)
    assert np.isclose(found.agreement, (logits[0].argmax(-1) == logits[1].argmax(-1))[:, 1:].mean())
    targets = tokens[:, 2:, None]
    losses = [-np.log(np.take_along_axis(softmax(rows, -1)[:, 1:-1], targets, -1)).mean() for rows in logits]
    assert np.allclose([found.target_perplexity, found.draft_perplexity], np.exp(losses), rtol=1e-4)
    starts = [row[i : i + 4] for row in shared for i in range(19 - 4 + 1)]
    a = found.rate
    assert np.allclose([found.tokens_per_round[n] for n in (4, 8, 16)], [(1 - a ** (n + 1)) / (1 - a) for n in (4, 8, 16)])
    assert np.isclose(found.along_text[4], np.mean([1 + np.cumprod(rates).sum() for rates in starts]), atol=1e-4)


@pytest.mark.parametrize("top_k", [8, None])
def test_an_aligned_draft_is_accepted_more_often(top_k, pair, text, tmp_path):
    report = align(*pair, [text], AlignConfig(**{**vars(CONFIG), "top_k": top_k}), tmp_path)
    before, after = (report["acceptance"][when]["rate"] for when in ("before", "after"))
    assert after > before + 0.1
    written = load_checkpoint(tmp_path / "model")
    assert written.tokenizer is not None
    assert written.decoder.config.family == "gpt2"
    assert (tmp_path / "teacher").exists() == (top_k is not None)


def test_a_broken_alignment_goes_on(pair, text, tmp_path, monkeypatch):
    whole = align(*pair, [text], CONFIG, tmp_path / "whole")
    asked = []
    best = module._TopTeacher._best

    def breaking(self, tokens):
        asked.append(1)
        if len(asked) == 50:  # in the second half
            raise KeyboardInterrupt
        return best(self, tokens)

    monkeypatch.setattr(module._TopTeacher, "_best", breaking)
    with pytest.raises(KeyboardInterrupt):
        align(*pair, [text], CONFIG, tmp_path / "broken")
    resumed = align(*pair, [text], CONFIG, tmp_path / "broken")
    computed = len(asked)
    assert resumed["acceptance"] == whole["acceptance"] and resumed["loss"] == whole["loss"]
    again = align(*pair, [text], CONFIG, tmp_path / "broken")
    assert len(asked) == computed and again["acceptance"] == whole["acceptance"]
    assert {path.stat().st_mode & 0o77 for path in (tmp_path / "broken/teacher").iterdir()} == {0}


def test_what_cannot_be_aligned(pair, text, tmp_path):
    target, draft = pair
    other = write_checkpoint(tmp_path / "other", LLAMA)
    with pytest.raises(UserError, match="model other: no tokenizer"):
        align(target, ModelConfig(name="other", path=other), [text], CONFIG, tmp_path)
    write_tokenizer(other, 60)
    with pytest.raises(UserError, match="in one tokenizer"):
        align(target, ModelConfig(name="other", path=other), [text], CONFIG, tmp_path)
    wide = write_checkpoint(tmp_path / "wide", LLAMA | {"vocab_size": 101})
    write_tokenizer(wide, 97)
    with pytest.raises(UserError, match="gives 97 logits and the draft 101"):
        align(target, ModelConfig(name="wide", path=wide), [text], CONFIG, tmp_path)
    short = tmp_path / "short.txt"
    short.write_text("the quick brown fox")
    with pytest.raises(UserError, match=r"longer|more text"):
        align(target, draft, [short], CONFIG, tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        align(target, draft, [tmp_path / "nowhere.txt"], CONFIG, tmp_path)


def test_command(pair, text, tmp_path):
    for model in pair:
        (tmp_path / f"{model.name}.yaml").write_text(f"name: {model.name}\npath: {model.path}\nprefix: [3]\n")
    arguments = [
        "--target",
        tmp_path / "target.yaml",
        "--draft",
        tmp_path / "draft.yaml",
        "--text",
        text,
        "--out",
        tmp_path / "out",
    ]
    arguments += ["--steps", "3", "--length", "16", "--held-out", "32", "--top-k", "full", "--quiet"]
    done = CliRunner().invoke(align_command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["config"]["top_k"] is None and report["config"]["steps"] == 3
    assert set(report["acceptance"]["after"]["tokens_per_round"]) == {"4", "8", "16"}
    assert report["seconds"]["training"] > 0 and report["peak_rss_bytes"] > 1e7
    assert "before" in done.output
    refused = CliRunner().invoke(align_command, [str(argument) for argument in [*arguments[:-3], "--top-k", "0"]])
    assert refused.exit_code == 2 and "give a number from 1, or full" in refused.output
