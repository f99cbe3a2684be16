"""Thresholds on magnitudes against transformers' own models, whose modules are intercepted, and against SciPy's roots."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from conftest import CONFIGS, GPT2, LLAMA, OPT, write_checkpoint
from flax_models import pretrained
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from transformers import FlaxGPT2LMHeadModel, FlaxLlamaForCausalLM, FlaxOPTForCausalLM

from spu_llm.comet.thresholds import ThresholdedReader, calibrate, largest_share
from spu_llm.errors import UserError
from spu_llm.models import load_checkpoint
from spu_llm.models.losses import perplexity
from spu_llm.models.sequences import sequence_weights

MODELS = {"llama": FlaxLlamaForCausalLM, "gpt2": FlaxGPT2LMHeadModel, "opt": FlaxOPTForCausalLM}
SECOND = {"llama": ("mlp", "down_proj"), "gpt2": ("mlp", "c_proj"), "opt": (None, "fc2")}
"""Where transformers applies the second kernel: the module's parent, or None for any, and its name."""
CASES = {
    "llama": LLAMA | {"tie_word_embeddings": False},  # transformers' Flax Llama has no tied head
    "llama, one head, odd sizes": LLAMA
    | {"tie_word_embeddings": False, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 37},
    "gpt2": GPT2,
    "opt, one layer": OPT | {"num_hidden_layers": 1},
}
RULES = [(name, rule) for name in CASES for rule in ("hidden", "gate") if rule == "hidden" or "llama" in name]


def theirs(model, config, tokens, rule, thresholds=None):
    """transformers' logits of tokens [n] with small units set to 0 before the second kernel; magnitudes [layers, n, hidden]."""
    parent, name = SECOND[config["model_type"]]
    gates, seen = [], []

    def intercept(call, args, kwargs, context):
        module = context.module
        if module.name == "gate_proj":
            gates.append(call(*args, **kwargs))
            return gates[-1]
        if module.name != name or (parent and module.parent.name != parent):
            return call(*args, **kwargs)
        units = args[0]
        magnitudes = abs(units if rule == "hidden" else jax.nn.silu(gates[-1]))
        seen.append(np.asarray(magnitudes).reshape(len(tokens), -1))
        return call(units if thresholds is None else units * (magnitudes >= thresholds[len(seen) - 1]))

    with nn.intercept_methods(intercept):
        logits = model(tokens[None]).logits[0]
    return np.asarray(logits), np.stack(seen)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Our decoder and theirs, of each case."""
    found = {}
    for name, config in CASES.items():
        folder = write_checkpoint(tmp_path_factory.mktemp("model") / "model", config)
        found[name] = load_checkpoint(folder).decoder, pretrained(MODELS[config["model_type"]], folder)
    return found


@pytest.mark.parametrize(("name", "rule"), RULES)
@pytest.mark.parametrize(("length", "prefix"), [(1, ()), (23, (5, 7))])
def test_thresholds_are_quantiles_and_cut_what_they_should(name, rule, length, prefix, models):
    ours, model = models[name]
    text = np.random.default_rng(length).integers(2, 97, length)
    tokens = np.concatenate([np.asarray(prefix, int), text])
    _, magnitudes = theirs(model, CASES[name], tokens, rule)
    magnitudes = magnitudes[:, len(prefix) :].reshape(len(magnitudes), -1)
    shares = [0.7, 0.95] if name.startswith("opt") else [0.25, 0.9]  # more than ReLU gives by itself
    found = calibrate(ours, [text[: length // 2], text[length // 2 :]], shares, rule, prefix)
    assert np.abs(found - np.quantile(magnitudes, shares, axis=1, method="higher")).max() < 1e-4
    for share, thresholds in zip(shares, found, strict=True):
        between = thresholds * 1.0001  # that rounding may not decide
        want, seen = theirs(model, CASES[name], tokens, rule, between)
        logits, zeros = ThresholdedReader(ours, rule)(tokens[None], between)
        assert np.abs(np.asarray(logits)[0] - want).max() < 1e-3
        assert np.abs(zeros[:, 0] - (seen < between[:, None, None]).mean(-1)).max() < 1.5 / seen.shape[-1]
        # later layers see what earlier ones cut away; the quantile's own value is cut too
        assert abs(zeros[0, 0, len(prefix) :].mean() - share) <= 2 / magnitudes.shape[1] + 1e-6


@pytest.mark.parametrize("family", CONFIGS)
def test_no_zeros_no_change(family, checkpoints):
    decoder = load_checkpoint(checkpoints[family]).decoder
    rows = np.random.default_rng(1).integers(0, 97, (5, 12))
    weights = sequence_weights(12, (1, 2, 3))
    thresholds = calibrate(decoder, [rows[0]], 0.0)
    found, zeros = ThresholdedReader(decoder).perplexity(rows, weights, thresholds, batch=2)
    assert np.isclose(found, perplexity(decoder, rows, weights), rtol=1e-5)
    assert (thresholds == 0).all() and zeros.shape == (2,)
    assert ((zeros > 0.2) == (family == "opt")).all()


@pytest.fixture(scope="module")
def long_text():
    return np.random.default_rng(2).integers(0, 97, 4000)


def test_a_long_text_is_sampled_evenly(long_text, checkpoints):
    decoder = load_checkpoint(checkpoints["llama"]).decoder
    parts = np.split(long_text, [1, 500, 501, 3000])
    thresholds = calibrate(decoder, parts, 0.6, "gate")
    rows = long_text[: 31 * 128].reshape(31, 128)
    _, zeros = ThresholdedReader(decoder, "gate").perplexity(rows, np.ones(128), thresholds)
    assert np.abs(zeros - 0.6).max() < 0.01


@given(rises=st.lists(st.floats(1e-4, 0.2), min_size=1, max_size=8), loss=st.floats(1e-3, 0.5), base=st.floats(2, 1000))
def test_the_share_where_a_loss_is_reached(rises, loss, base):
    shares = np.linspace(0, 0.9, len(rises) + 1)
    curve = base * (1 + np.concatenate([[0], np.cumsum(rises)]))
    found = largest_share(shares, curve, loss)
    if curve[-1] <= base * (1 + loss):
        assert np.isclose(found, shares[-1])
        return
    want = brentq(lambda share: np.interp(share, shares, curve) / base - 1 - loss, 0, 0.9, xtol=1e-12)
    assert np.isclose(found, want, atol=1e-6)


def test_the_first_crossing_counts():
    assert np.isclose(largest_share([0, 0.4, 0.6, 0.8], [100, 99, 102, 100.5], 0.01), 0.4 + 0.2 * 2 / 3)
    assert largest_share([0.0], [100]) == 0


@settings(max_examples=5, deadline=None)
@given(share=st.floats(-10, 10).filter(lambda share: not 0 <= share < 1))
def test_shares_that_are_none(share, checkpoints):
    with pytest.raises(UserError, match="give shares of zeros from 0 to below 1"):
        calibrate(load_checkpoint(checkpoints["opt"]).decoder, [[1, 2]], share)


def test_what_has_no_thresholds(checkpoints):
    opt, llama = (load_checkpoint(checkpoints[family]).decoder for family in ("opt", "llama"))
    with pytest.raises(UserError, match="family opt: has no gate"):
        calibrate(opt, [[1, 2]], 0.5, "gate")
    with pytest.raises(UserError, match="hold no token"):
        calibrate(opt, [[], []], 0.5)
    with pytest.raises(UserError, match="give one for each of 2 layers"):
        ThresholdedReader(llama)(np.zeros((1, 3), int), np.zeros(3))
