"""M of tokens against transformers' own models, one token a row; what is kept when a run is cut short."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import GPT2, LLAMA, tensors
from flax_models import pretrained
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from planting import planted
from safetensors.numpy import save_file
from transformers import FlaxGPT2LMHeadModel, FlaxLlamaForCausalLM

from spu_llm.models import load_checkpoint, trace
from spu_llm.soal.special import Activations, special

PREFIX = [3, 50]
BIG = 41


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny Llama in which the embedding of one token is large."""
    return planted(tmp_path_factory.mktemp("llama") / "model", LLAMA, "model.embed_tokens.weight", [BIG])


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A tiny GPT-2 in which the embedding of the first position is large."""
    return planted(tmp_path_factory.mktemp("gpt2") / "model", GPT2, "transformer.wpe.weight", [0])


def captured(model, ids):
    """Outputs of all modules of a transformers model, by path, for rows of ids."""
    ids = np.asarray(ids)
    places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)

    @jax.jit
    def apply(params):
        given = ids, np.ones_like(ids), places
        return model.module.apply({"params": params}, *given, capture_intermediates=True, mutable=["intermediates"])

    return apply(model.params)[1]["intermediates"]


def output(tree, *path):
    """What a module gave, the first of several things: [rows, positions, ...]."""
    for name in path:
        tree = tree[name]
    value = tree["__call__"][0]
    return np.asarray(value[0] if isinstance(value, tuple) else value)


def brute_llama(folder, ids):
    """[rows, positions, 2] by transformers: the stream before each norm, and gates."""
    arrays_ = tensors(LLAMA)
    arrays_["model.embed_tokens.weight"][BIG] *= 300.0
    arrays_["lm_head.weight"] = arrays_["model.embed_tokens.weight"]
    copy = folder.with_name("untied")
    copy.mkdir(exist_ok=True)
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(arrays_, copy / "model.safetensors", metadata={"format": "pt"})
    tree = captured(pretrained(FlaxLlamaForCausalLM, copy), ids)["model"]
    x = output(tree, "embed_tokens")
    streams, gates = [x], []
    for i in ("0", "1"):
        layer = tree["layers"][i]
        streams += [x + output(layer, "self_attn"), output(tree, "layers", i)]
        gates.append(output(layer, "mlp", "gate_proj"))
        x = streams[-1]
    return np.stack([np.abs(streams).max((0, 3)), np.abs(gates).max((0, 3))], axis=-1)


def brute_gpt2(folder, ids):
    """The same, with the stream centred as layer norm centres it."""
    model = pretrained(FlaxGPT2LMHeadModel, folder)
    tree = captured(model, ids)["transformer"]
    x = output(tree, "wte") + output(tree, "wpe")
    streams, gates = [x], []
    for i in ("0", "1"):
        layer = tree["h"][i]
        streams += [x + output(layer, "attn"), output(tree, "h", i)]
        gates.append(output(layer, "mlp", "c_fc"))
        x = streams[-1]
    streams = [x - x.mean(-1, keepdims=True) for x in streams]
    return np.stack([np.abs(streams).max((0, 3)), np.abs(gates).max((0, 3))], axis=-1)


def test_vocabulary_of_llama_equals_transformers(llama, tmp_path):
    found = Activations(load_checkpoint(llama).decoder, tmp_path).of_vocabulary(PREFIX)
    want = brute_llama(llama, [[*PREFIX, token] for token in range(97)])[:, -1]
    np.testing.assert_allclose(found, want, rtol=2e-4)
    assert special(found, np.median(found, axis=0), 8.0) == [BIG]


def test_first_positions_of_gpt2_equal_transformers(gpt2, tmp_path):
    found = Activations(load_checkpoint(gpt2).decoder, tmp_path).of_vocabulary([])
    want = brute_gpt2(gpt2, [[token] for token in range(97)])[:, -1]
    np.testing.assert_allclose(found, want, rtol=2e-4)


def test_positions_of_passages_equal_transformers(llama, tmp_path):
    passages = [[5, BIG, 96, 7], [BIG, 8, 9, 10]]
    found = Activations(load_checkpoint(llama).decoder, tmp_path).of(PREFIX, passages, "the text")
    want = brute_llama(llama, [[*PREFIX, *passage] for passage in passages])[:, len(PREFIX) :]
    np.testing.assert_allclose(found, want.reshape(-1, 2), rtol=2e-4)


@given(
    arrays(np.float32, (12, 2), elements=st.floats(0.125, 1e5, width=32)),
    st.floats(1.5, 20),
)
@settings(max_examples=100, deadline=None)
def test_special_is_the_rule(maxima, eta):
    median = np.median(maxima, axis=0)
    worst = [max(row[0] / median[0], row[1] / median[1]) for row in maxima]
    found = special(maxima, median, eta)
    assert sorted(found) == [i for i in range(12) if worst[i] > eta]
    assert [worst[i] for i in found] == sorted((worst[i] for i in found), reverse=True)


KILLED = """
import os, sys
from pathlib import Path
from spu_llm.models import load_checkpoint, trace
from spu_llm.soal.special import Activations
trace.ROWS = 32
def dying(items, what, unit):
    for i, item in enumerate(items):
        if i == 2:
            os._exit(9)
        yield item
Activations(load_checkpoint(Path(sys.argv[1])).decoder, Path(sys.argv[2]), dying).of_vocabulary([3, 50])
"""


def test_a_killed_scan_goes_on_where_it_stopped(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "ROWS", 32)
    decoder = load_checkpoint(llama).decoder
    whole = Activations(decoder, tmp_path / "fresh").of_vocabulary(PREFIX)
    done = subprocess.run([sys.executable, "-c", KILLED, llama, tmp_path / "cut"], timeout=300)
    assert done.returncode == 9
    counts = []

    def counting(items, what, unit):
        counts.append(len(items))
        return items

    for _ in range(2):  # 97 tokens are four sequences of 32; the second time none is left
        np.testing.assert_array_equal(Activations(decoder, tmp_path / "cut", counting).of_vocabulary(PREFIX), whole)
        assert counts == [2]
    (kept,) = (tmp_path / "cut").iterdir()
    kept.write_bytes(kept.read_bytes()[:200])
    np.testing.assert_array_equal(Activations(decoder, tmp_path / "cut", counting).of_vocabulary(PREFIX), whole)
    assert counts == [2, 4]


def test_what_was_kept_is_of_the_same_prefix_and_passages(llama, tmp_path):
    activations = Activations(load_checkpoint(llama).decoder, tmp_path)
    first = activations.of([3], [[5, 6]], "the text")
    assert not np.array_equal(activations.of([4], [[5, 6]], "the text"), first)
    assert not np.array_equal(activations.of([3], [[5, 7]], "the text"), first)
    assert len(activations.of([3], [[5], [6]], "the text")) == 2
    assert len(list(tmp_path.iterdir())) == 4
