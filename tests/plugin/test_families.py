"""transformers' own Flax models, unmodified, with causal and padding masks, between two parties and against stock SPU."""

import jax
import numpy as np
import pytest
import transformers
from jax.experimental import enable_x64
from spu import libspu
from spu.utils.simulation import Simulator, sim_jax

import spu_llm
from spu_llm.runtime import ProtocolConfig, Session, Slot
from spu_llm.runtime.assisted import Assisted

VOCABULARY, LENGTH = 61, 6
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}  # GPT-2 has two layers


def make_gpt2():
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    return transformers.FlaxGPT2LMHeadModel(config, seed=0)


def make_llama():
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1, intermediate_size=24, max_position_embeddings=16)
    return transformers.FlaxLlamaForCausalLM(config, seed=0)


def make_opt():
    config = transformers.OPTConfig(**SMALL, ffn_dim=24, max_position_embeddings=16, word_embed_proj_dim=16)
    return transformers.FlaxOPTForCausalLM(config, seed=0)


def make_t5():
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.FlaxT5ForConditionalGeneration(config, seed=0)


FAMILIES = {"gpt2": make_gpt2, "llama": make_llama, "opt": make_opt, "t5": make_t5}


def forward(model, family, mask):
    """The user's function: tokens and weights secret, the padding mask public; every family adds its causal mask itself."""
    if family == "t5":
        return lambda ids, params: model(ids, attention_mask=mask, decoder_input_ids=ids[:, :3], params=params).logits
    return lambda ids, params: model(ids, attention_mask=mask, params=params).logits


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """(name, plugin, arguments, which positions count)."""
    model = FAMILIES[request.param]()
    random = np.random.default_rng(0)

    def grown(x):
        return np.asarray(x) + (0.15 * random.standard_normal(x.shape)).astype(np.float32)

    params = jax.tree_util.tree_map(grown, model.params)  # as initialised, attention would be nearly uniform
    ids = random.integers(2, VOCABULARY, (2, LENGTH)).astype(np.int32)
    mask = np.ones((2, LENGTH), np.int32)
    mask[0, :2] = 0  # padded on the left, so that in the first two rows the causal mask hides the rest
    shown = np.ones((2, 3), bool) if request.param == "t5" else mask > 0
    function = forward(model, request.param, mask)
    return request.param, spu_llm.enable(function, ranges=spu_llm.calibrate(function, (ids, params))), (ids, params), shown


def test_logits_and_traffic(family):
    name, plugin, args, shown = family
    want = np.asarray(plugin.function(*args))[shown]
    leaves, tree = jax.tree_util.tree_flatten(args)
    names = tuple(f"x{i}" for i in range(len(leaves)))
    with Session(ProtocolConfig()) as session:
        for variable, leaf in zip(names, leaves, strict=True):
            session.share(variable, leaf, "client" if variable == "x0" else "owner")
        assisted = Assisted(session)
        program = plugin.compile(assisted, *args)
        with session.phase("ours") as ours:
            assisted.run(program, names, "logits")
        error = np.abs(session.receive("logits")[shown] - want).max()
        stock = session.compile(
            name, lambda *flat: plugin.function(*tree.unflatten(flat)), tuple(Slot(x.shape, x.dtype) for x in leaves)
        )
        with session.phase("stock") as theirs:
            session.run(stock, names, "logits")
    assert error < 5e-3
    assert ours.messages * 10 < theirs.messages and ours.bytes * 2 < theirs.bytes


def test_under_sim_jax(family):
    _, plugin, args, shown = family
    want = np.asarray(plugin.function(*args))[shown]
    simulator = Simulator.simple(2, libspu.ProtocolKind.SEMI2K, libspu.FieldType.FM64)
    with spu_llm.enable(ranges=plugin.ranges):
        got = sim_jax(simulator, plugin.function)(*args)
    assert np.abs(got[shown] - want).max() < 5e-3
    with enable_x64():
        got = sim_jax(simulator, plugin.program)(plugin.deal(*args), *args)
    assert np.abs(got[shown] - want).max() < 5e-3


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"], indirect=True)  # T5's decoder hides none of these tokens
def test_hidden_tokens_change_nothing(family):
    """Other tokens where the padding mask hides them: to the last bit the same result."""
    _, plugin, (ids, params), shown = family
    other = ids.copy()
    other[0, :2] = [7, 9]
    assert np.array_equal(plugin(ids, params)[shown], plugin(other, params)[shown])
