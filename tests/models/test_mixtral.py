"""The mixture of experts in plaintext against transformers' torch code (see make_mixtral_reference.py), and in fixed point."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import enable_x64
from safetensors.numpy import load_file
from scipy import special

from spu_llm.errors import UserError
from spu_llm.models import PlainDecoder, load_checkpoint
from spu_llm.models.calibration import Calibration, LayerRanges
from spu_llm.models.config import DecoderConfig
from spu_llm.models.decoder import Decoder
from spu_llm.models.fixed_experts import mix
from spu_llm.models.mixtral import routing
from spu_llm.models.plan import plan_model
from spu_llm.primitives.fixed import Fixed, encode

FOLDER = Path(__file__).parent / "mixtral"
BITS = 14


@pytest.fixture(scope="module")
def decoder():
    return load_checkpoint(FOLDER).decoder


@pytest.mark.parametrize("length", [1, 40])
def test_logits_match_torch(length, decoder):
    kept = load_file(FOLDER / "logits.safetensors")
    tokens, want = kept[f"tokens.{length}"], kept[f"logits.{length}"]
    assert np.abs(PlainDecoder(decoder, 40).advance(tokens) - want).max() < 1e-4
    stepwise = PlainDecoder(decoder, 40)
    parts = [stepwise.advance(part) for part in np.split(tokens, [1]) if len(part)]
    assert np.abs(np.concatenate(parts) - want).max() < 1e-4


def test_the_reference_depends_on_routing(decoder):
    """So that the comparison above can fail: other numbers of experts a token give other logits."""
    kept = load_file(FOLDER / "logits.safetensors")
    for k in (1, 4):
        other = Decoder(dataclasses.replace(decoder.config, experts_per_token=k), decoder.params)
        assert np.abs(PlainDecoder(other, 40).advance(kept["tokens.40"]) - kept["logits.40"]).max() > 0.5


def weights_of(logits, k):
    """float64, of equal logits the first ones."""
    mask = np.zeros(logits.shape)
    np.put_along_axis(mask, np.argsort(-logits, -1, kind="stable")[:, :k], 1.0, -1)
    kept = special.softmax(logits.astype(np.float64), -1) * mask
    return kept / kept.sum(-1, keepdims=True)


ROUTING = jax.jit(routing, static_argnums=1)


@settings(deadline=None, max_examples=60)
@given(case=st.sampled_from([(1, 1), (2, 1), (3, 2), (4, 4), (8, 2), (9, 5)]), ties=st.booleans(), seed=st.integers(0, 999))
def test_routing(case, ties, seed):
    """Few numbers, so that many are equal, or any."""
    experts, k = case
    random = np.random.default_rng(seed)
    logits = random.integers(-2, 3, (16, experts)) if ties else 20 * random.standard_normal((16, experts))
    found = np.asarray(ROUTING(logits.astype(np.float32), k))
    assert np.abs(found - weights_of(logits.astype(np.float32), k)).max() < 1e-6
    assert ((found > 0).sum(-1) <= k).all()


def test_experts_that_are_all_the_same_are_one_llama_layer(decoder):
    """However many are chosen: the weights add up to 1."""
    config, params = decoder.config, decoder.params
    gate_up, down = params["layers"][0]["gate_up"]["kernel"], params["layers"][0]["down"]["kernel"]
    gate, up = gate_up[:, : config.ffn], gate_up[:, config.hidden : config.hidden + config.ffn]
    shared = {name: params["layers"][0][name] for name in ("attention_norm", "qkv", "out", "ffn_norm")}
    one = shared | {"gate_up": {"kernel": np.concatenate([gate, up], 1)}, "down": {"kernel": down[: config.ffn]}}
    copies = {
        "router": params["layers"][0]["router"],
        "gate_up": {"kernel": np.concatenate([np.tile(gate, config.experts), np.tile(up, config.experts)], 1)},
        "down": {"kernel": np.tile(down[: config.ffn], (config.experts, 1))},
    }
    llama = dataclasses.replace(config, family="llama", layers=1, experts=None, experts_per_token=None)
    want = PlainDecoder(Decoder(llama, params | {"layers": [one]}), 20).advance(range(11))
    for k in (1, 3):
        mixture = dataclasses.replace(config, layers=1, experts_per_token=k)
        found = PlainDecoder(Decoder(mixture, params | {"layers": [shared | copies]}), 20).advance(range(11))
        assert np.abs(found - want).max() < 1e-4


def shape(experts, k, width=6, ffn=5):
    numbers = {"rope_base": 1e4, "experts": experts, "experts_per_token": k}
    return DecoderConfig("mixtral", 9, width, 1, 1, 1, ffn, 9, 1e-5, True, **numbers)


def plan_for(config, logits):
    """The layer's plan where calibration saw logits between these."""
    ranges = LayerRanges((0.9, 1.1), (0.9, 1.1), (-5.0, 1.0), (-1.0, 1.0), (-5.0, 5.0), logits)
    return plan_model(config, Calibration((ranges,), (np.zeros((config.width + 3, 1)),), (0.9, 1.1), 9)).blocks[0]


@pytest.mark.parametrize(
    ("n", "experts", "k", "spread"),
    [(1, 1, 1, 0.0), (7, 2, 1, 3.0), (5, 3, 3, 1.0), (1, 4, 2, 0.0), (40, 5, 2, 5.0), (40, 6, 3, 6.2)],
)
def test_fixed_point(n, experts, k, spread):
    """Logits all equal to far apart: the largest spread takes the tables with a power of two."""
    config, random = shape(experts, k), np.random.default_rng(n)
    logits = spread * random.uniform(-1, 1, (n, experts))
    logits = encode(logits - logits.mean(-1, keepdims=True), 2 * BITS) / 2.0 ** (2 * BITS)
    gate, up = (2 * random.standard_normal((n, config.hidden)) for _ in range(2))
    down = encode(random.standard_normal((config.hidden, config.width)), BITS)
    plan = plan_for(config, (-spread, spread))
    assert (plan.routing.softmax.power is not None) == (spread == 6.2)
    h = Fixed(encode(np.concatenate([gate, up, logits], 1), 2 * BITS), 2 * BITS)
    with enable_x64():
        found = jax.jit(lambda raw: mix(config, plan.routing, plan.activation, Fixed(raw, 2 * BITS), Fixed(down, BITS)))(h.raw)
    units = (gate * special.expit(gate) * up).reshape(n, experts, config.ffn)
    outputs = np.einsum("nef,efw->new", units, down.reshape(experts, config.ffn, -1) / 2.0**BITS)
    want = np.einsum("new,ne->nw", outputs, weights_of(logits, k))
    assert (found.bits, found.modulus) == (2 * BITS, 64)
    assert np.abs(np.asarray(found.raw) / 2.0**found.bits - want).max() < 5e-4 * (1 + np.abs(outputs).max())


def test_logits_beyond_the_tables_are_refused():
    assert plan_for(shape(4, 2), (-1.0, 1.0)).routing.shift == 0
    with pytest.raises(UserError, match=r"an expert's logit is 9\.0 above the mean"):
        plan_for(shape(4, 2), (-9.0, 9.0))
    llama = dataclasses.replace(shape(4, 2), family="llama", experts=None, experts_per_token=None)
    assert plan_for(llama, (0.0, 0.0)).routing is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 128}, "sliding_window is 128, less than the 256 positions"),
        ({"num_experts_per_tok": 5}, "5 experts a token of 4"),
        ({"num_local_experts": 0}, "2 experts a token of 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu' is supported for mixtral"),
        ({"num_local_experts": 3}, "has shape|has no place"),
        ({"num_local_experts": 5}, "no tensor .*experts.4"),
        ({"intermediate_size": 40}, "has shape"),
    ],
)
def test_configs_that_cannot_run(change, message, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message):
        load_checkpoint(folder)


def test_what_a_config_leaves_out_is_as_in_transformers(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    for key in ("rope_theta", "num_experts_per_tok", "sliding_window", "head_dim"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 4096}))
    found = load_checkpoint(folder).decoder.config
    assert (found.rope_base, found.experts_per_token) == (1e6, 2)


def test_half_a_mixture_is_none():
    with pytest.raises(ValueError, match="None experts a token of 4"):
        shape(4, None)
