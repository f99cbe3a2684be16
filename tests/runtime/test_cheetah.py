"""What programs become on CHEETAH: the same values for fewer bytes, and nothing changed where that is not known to be right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import enable_x64
from spu import libspu

from spu_llm.models.layers import softmax
from spu_llm.runtime import ProtocolConfig, Session, Slot, cheetah
from spu_llm.runtime.cheetah import batched, rewritten

BITS = 18


def names(function, *args):
    """Primitives of a function as it is rewritten, of those inside calls, too."""

    def inside(jaxpr):
        for eqn in jaxpr.eqns:
            inner = eqn.params.get("jaxpr")
            yield from inside(inner.jaxpr) if inner else [eqn.primitive.name]

    return list(inside(jax.make_jaxpr(rewritten(function, BITS))(*args).jaxpr))


@settings(max_examples=12, deadline=None)
@given(st.tuples(*[st.integers(1, most) for most in (7, 5, 6, 9)]), st.integers(1, 300), st.randoms(use_true_random=False))
def test_few_products_are_the_batch(shape, results, random):
    batch, n, k, m = shape
    numbers = np.random.default_rng(random.randrange(1 << 30))
    x, y = numbers.integers(-99, 99, (batch, n, k)), numbers.integers(-99, 99, (batch, k, m))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cheetah, "_RESULTS", results)
        np.testing.assert_array_equal(batched(jnp.asarray(x), jnp.asarray(y)), x @ y)


@pytest.mark.parametrize(("tokens", "products"), [(1, 1), (4, 1), (5, 2), (64, 4), (512, 1)])
def test_products_by_shape(tokens, products):
    """8 heads' scores of 64 positions: as many heads share a product as give 2^14 numbers; if not two, SPU gets the batch."""
    q, keys = np.zeros((tokens, 8, 32), np.float32), np.zeros((64, 8, 32), np.float32)
    assert names(lambda q, k: jnp.einsum("nhd,lhd->hnl", q, k), q, keys).count("dot_general") == products


@pytest.mark.parametrize("subscripts", ["nhd,lhd->hnl", "hnl,lhd->nhd", "abcd,baed->ceba", "xhd,dxyh->hxy"])
def test_dimensions_in_any_order(subscripts):
    sizes = dict(zip("nhdlabcexy", (3, 4, 5, 6, 2, 3, 4, 5, 2, 3), strict=True))
    numbers = np.random.default_rng(0)
    x, y = (numbers.standard_normal([sizes[letter] for letter in part]) for part in subscripts.split("->")[0].split(","))
    found = rewritten(lambda x, y: jnp.einsum(subscripts, x, y), BITS)(x, y)
    np.testing.assert_allclose(found, np.einsum(subscripts, x, y), rtol=1e-5, atol=1e-5)


SQUARE = np.ones((6, 6), np.float32)


@pytest.mark.parametrize(
    "function",
    [
        jnp.exp,
        lambda x: jnp.exp(x - jnp.max(x, 0)[:, None]),  # another axis' maxima
        lambda x: jnp.exp(x - jnp.max(2 * x, 0)),
        lambda x: jnp.exp(jnp.max(x, 0) - x),
        lambda x: 1.0 / jnp.sum(x),
        lambda x: x / jnp.sum(x * x),
    ],
)
def test_what_is_not_known_stays(function):
    assert names(function, SQUARE) == [eqn.primitive.name for eqn in jax.make_jaxpr(function)(SQUARE).jaxpr.eqns]


def test_softmax_has_neither():
    for function in (lambda x: softmax(x, x > 0), jax.jit(lambda x: softmax(x, x > 0)), jax.nn.softmax):
        with enable_x64():
            found = names(function, SQUARE)
        assert "exp" not in found and "div" not in found and "rsqrt" in found


@pytest.fixture(scope="module")
def session():
    with Session(ProtocolConfig(name="CHEETAH")) as session:
        yield session


def run(session, name, function, *args):
    """Its output, and the bytes of the second pass of two."""
    slots = []
    for i, value in enumerate(args):
        session.share(f"{name}{i}", value, "client")
        slots.append(Slot(value.shape, value.dtype))
    program = session.compile(name, function, tuple(slots))
    for _ in range(2):
        with session.phase(name) as phase:
            before = phase.bytes
            session.run(program, tuple(f"{name}{i}" for i in range(len(args))), "y")
    return session.receive("y"), phase.bytes - before


def test_exponentials_of_what_is_not_positive(session):
    """At every bit alone, at many together, where the result ends, and where scores are masked."""
    x = np.concatenate([-(2.0 ** np.arange(-18, 5)), -np.random.default_rng(0).exponential(3, 39), [0, -15.999, -1e4]])
    x = x.astype(np.float32).reshape(5, 13)
    x[:, 0] = 0  # every row's maximum
    found, _ = run(session, "exp", lambda x: jnp.exp(x - jnp.max(x, -1, keepdims=True)), x)
    assert np.abs(found - np.exp(x.astype(np.float64))).max() < 6e-5


def test_softmax_against_float64(session):
    x = (4 * np.random.default_rng(1).standard_normal((3, 2, 21))).astype(np.float32)
    mask = np.arange(21) < np.array([[9], [21]])
    found, _ = run(session, "softmax", lambda x: softmax(x, mask), x)
    want = np.where(mask, np.exp(x.astype(np.float64)), 0)
    assert np.abs(found - want / want.sum(-1, keepdims=True)).max() < 3e-4


def test_operands_stay_with_their_owner(session):
    """The client holds zeros, nothing is sent, and a product sends three fifths of one with shares."""
    numbers = np.random.default_rng(2)
    x, w = (numbers.standard_normal(shape).astype(np.float32) for shape in ((1, 100), (100, 130)))
    shared, bytes_shared = run(session, "shared", jnp.matmul, x, w)
    with session.phase("operand") as phase:
        session.share_operand("w", w, "owner")
    assert phase.bytes == 0 and phase.messages == 0
    chunk = libspu.ValueChunk()
    chunk.ParseFromString(session.parties[0].submit(session.parties[0].runtime.get_var, "w").result().share_chunks[0])
    assert not any(chunk.content)
    program = session.compile("own", jnp.matmul, (Slot(x.shape), Slot(w.shape)))
    with session.phase("own") as phase:
        session.run(program, ("shared0", "w"), "y")
    for found in (shared, session.receive("y")):
        assert np.abs(found - x @ w).max() < 1e-3
    assert phase.bytes < 0.65 * bytes_shared
