"""What users write, in the primitives' arithmetic and between two parties, against plain JAX."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spu_llm
from spu_llm.errors import UserError
from spu_llm.runtime import ProtocolConfig, Session, Slot
from spu_llm.runtime.assisted import Assisted

RANDOM = np.random.default_rng(0)
X = RANDOM.uniform(-6, 6, (3, 16)).astype(np.float32)
W = (0.3 * RANDOM.standard_normal((16, 8))).astype(np.float32)


def hand_gelu(x):
    return 0.5 * x * (1 + jax.scipy.special.erf(x / 2**0.5))


def hand_softmax(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)


FUNCTIONS = {
    "gelu": (jax.nn.gelu, 1e-3),
    "gelu exact": (lambda x: jax.nn.gelu(x, approximate=False), 1e-3),
    "gelu by hand": (hand_gelu, 1e-3),
    "silu": (jax.nn.silu, 1e-3),
    "softplus": (jax.nn.softplus, 1e-3),
    "elu": (jax.nn.elu, 1e-3),
    "tanh": (jnp.tanh, 1e-3),
    "sigmoid": (jax.nn.sigmoid, 1e-3),
    "relu": (jax.nn.relu, 1e-5),
    "leaky relu": (jax.nn.leaky_relu, 1.1e-2),
    "clip": (lambda x: jnp.clip(x, -1, 2), 1.1e-2),
    "maximum": (lambda x: jnp.maximum(x[0], x[1]), 1e-5),
    "minimum": (lambda x: jnp.minimum(x, 1.5), 1e-5),
    "max along an axis": (lambda x: x.max(0), 1e-5),
    "polynomial": (lambda x: (x - 1) * (2 * x + 0.3), 5e-3),
    "softmax": (jax.nn.softmax, 3e-4),
    "softmax by hand": (hand_softmax, 3e-4),
    "log softmax": (jax.nn.log_softmax, 1e-3),
    "einsum": (lambda x: jnp.einsum("ab,cb->ac", x, x), 2e-2),
    "public factor": (lambda x: x @ np.asarray(W) / 7, 1e-3),
    "mean and variance": (lambda x: (x.mean(-1), x.var(-1)), 1e-2),
    "shapes": (lambda x: jnp.concatenate([x.T[1:3, ::-1], jnp.zeros((2, 3))])[:, None].repeat(2, 1), 1e-5),
    "scan": (lambda x: jax.lax.scan(lambda c, row: (c + row, c * 0.5), jnp.zeros(16), x), 1e-3),
    "public loop": (lambda x: jax.lax.fori_loop(0, 3, lambda i, v: v * 0.5 + i, x), 1e-3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    function, tolerance = FUNCTIONS[name]
    got, want = spu_llm.enable(function)(X), function(X)
    for ours, theirs in zip(jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves(want), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert np.abs(ours - theirs).max() < tolerance


def norms(x, w, scale, bias):
    layer_norm = nn.LayerNorm().apply({"params": {"scale": scale, "bias": bias}}, x)
    return layer_norm @ w, rms(x) * scale @ w, jax.nn.softmax(x @ w) @ w.T


def test_between_two_parties():
    scale, bias = RANDOM.standard_normal((2, 16)).astype(np.float32)
    args = (X, W, scale, bias)
    plugin = spu_llm.enable(norms, ranges=spu_llm.calibrate(norms, args))
    want = norms(*args)
    with Session(ProtocolConfig()) as session:
        for name, value in zip("xwsb", args, strict=True):
            session.share(name, value, "client" if name == "x" else "owner")
        assisted = Assisted(session)
        program = plugin.compile(assisted, *args)
        with session.phase("ours") as ours:
            assisted.run(program, tuple("xwsb"), ("norm", "rms", "soft"))
        for name, theirs in zip(("norm", "rms", "soft"), want, strict=True):
            assert np.abs(session.receive(name) - theirs).max() < 3e-3
        stock = session.compile("stock", norms, tuple(Slot(value.shape) for value in args))
        with session.phase("stock") as theirs:
            session.run(stock, tuple("xwsb"), ("n", "r", "s"))
    assert ours.messages * 5 < theirs.messages and ours.bytes * 4 < theirs.bytes
    assert program.program.reveals == ours.messages  # every message is an opening


REFUSED = {
    "sort": (lambda x: jax.lax.sort(x), "sort of a secret has no rule"),
    "secret index": (lambda x: jax.lax.dynamic_slice(x, (x[0, 0].astype(int), 0), (1, 16)), "cannot become int32"),
    "secret loop": (
        lambda x: jax.lax.while_loop(lambda v: v[0, 0] > 1, lambda v: v * 0.5, x),
        "the end of a loop depends on a secret",
    ),
    "two secrets": (lambda x: jnp.arctan2(x, x[::-1]), "atan2 of a secret has no rule"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_line(name):
    function, message = REFUSED[name]
    with pytest.raises(UserError) as caught:
        spu_llm.enable(function)(X)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert "test_functions.py" in str(caught.value)
