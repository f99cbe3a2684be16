"""How it is switched on and off, and how material reaches the call."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import enable_x64
from spu import libspu
from spu.utils import frontend, simulation
from spu.utils.simulation import Simulator, sim_jax

import spu_llm
from spu_llm.errors import UserError

RANDOM = np.random.default_rng(1)
X = RANDOM.uniform(-4, 4, (3, 16)).astype(np.float32)
W = (0.3 * RANDOM.standard_normal((16, 8))).astype(np.float32)


@jax.jit
def layer(x, w):
    return jax.nn.softmax(jax.nn.gelu(x @ w))


def simulator(protocol="SEMI2K", parties=2, field="FM64"):
    return Simulator.simple(parties, getattr(libspu.ProtocolKind, protocol), getattr(libspu.FieldType, field))


def square(x):
    return x * x


def patched():
    return frontend.compile, simulation.Simulator.__call__, jax.nn.gelu, jax.nn.softmax, jax.config.jax_enable_x64


def opens(fn):
    return "spu.reveal" in fn.pphlo


def test_sim_jax_with_material_given():
    plugin = spu_llm.enable(layer)
    with enable_x64():
        got = sim_jax(simulator(), plugin.program)(plugin.deal(X, W), X, W)
    assert np.abs(got - layer(X, W)).max() < 1e-3


def test_enable_disable_enable_again():
    """`layer` is jitted and was run, so JAX has it in its caches; each call still gets what is in force."""
    want, before, sim = layer(X, W), patched(), simulator()
    fn = sim_jax(sim, layer)
    for enabled in (False, True, False, True):
        if enabled:
            with spu_llm.enable():
                got = fn(X, W)
        else:
            got = fn(X, W)
        assert opens(fn) == enabled
        assert np.abs(got - want).max() < (1e-3 if enabled else 2e-2)
        assert patched() == before
    assert np.array_equal(layer(X, W), want)


def test_nothing_is_left_after_an_exception():
    before = patched()
    with pytest.raises(UserError), spu_llm.enable():
        assert patched() != before
        sim_jax(simulator(), lambda x: jnp.sort(x))(X)
    assert patched() == before
    with spu_llm.enable(), spu_llm.enable(dealer=False):
        pass
    assert patched() == before


def test_every_call_uses_new_material():
    plugin = spu_llm.enable(layer)
    assert not np.array_equal(plugin.deal(X, W), plugin.deal(X, W))
    other = spu_llm.enable(square)
    assert not np.array_equal(other.deal(X), pickle.loads(pickle.dumps(other)).deal(X))


def test_decorator_and_static_arguments():
    @spu_llm.enable(softmax_reference="first")
    def attend(x, w):
        return jax.nn.softmax(0.1 * x @ w)

    assert np.abs(attend(X, W) - jax.nn.softmax(0.1 * X @ W)).max() < 1e-3
    with spu_llm.enable():
        got = sim_jax(simulator(), lambda x, n: x[:, :n] * n, static_argnums=(1,))(X, 3)
    assert np.abs(got - X[:, :3] * 3).max() < 1e-3


@pytest.mark.parametrize("protocol,parties", [("SEMI2K", 2), ("ABY3", 3), ("CHEETAH", 2)])
def test_stock_protocols_without_a_dealer(protocol, parties):
    def masked(x, w):
        scores = jnp.where(jnp.tril(jnp.ones((3, 8))) > 0, x @ w, -1e9)
        return jax.nn.softmax(scores), jnp.argmax(x, -1)

    with spu_llm.enable(dealer=False):
        fn = sim_jax(simulator(protocol, parties), masked)
        got, best = fn(X, W)
    assert not opens(fn)
    assert np.abs(got - masked(X, W)[0]).max() < 1e-2
    assert np.array_equal(best, masked(X, W)[1])


def test_material_must_be_whole():
    plugin = spu_llm.enable(layer)
    with pytest.raises(UserError, match="arrives as int32"):
        sim_jax(simulator(), plugin.program)(plugin.deal(X, W), X, W)
    with enable_x64(), pytest.raises(UserError, match="deal for the same shapes"):
        sim_jax(simulator(), plugin.program)(plugin.deal(X[:1], W), X, W)
    with pytest.raises(UserError, match="needs material"):
        sim_jax(simulator(), plugin)(X, W)


@pytest.mark.parametrize(
    "sim,message", [(("ABY3", 3), "protocol"), (("SEMI2K", 3), "number of parties"), (("SEMI2K", 2, "FM128"), "field")]
)
def test_wrong_simulator(sim, message):
    with pytest.raises(UserError, match=message), spu_llm.enable():
        sim_jax(simulator(*sim), layer)(X, W)


def test_options_are_checked_where_written():
    with pytest.raises(UserError, match="softmax_reference"):
        spu_llm.enable(softmax_reference="median")
    with pytest.raises(UserError, match="no argument of the function"):
        spu_llm.enable(layer, public={"mask": 1})(X, W)
