"""The schedule of openings: what is ready goes out together, what was opened stays open, calls are seen through, loops refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import run_dealt, run_plain
from jax.experimental import enable_x64
from scipy import special

from spu_llm.dealer.material import Uniform
from spu_llm.dealer.table import Table
from spu_llm.errors import UserError
from spu_llm.primitives.compare import is_negative
from spu_llm.primitives.contract import contract
from spu_llm.primitives.dealing import with_material
from spu_llm.primitives.fixed import Fixed, encode
from spu_llm.primitives.lookup import lookup
from spu_llm.primitives.scale import scale
from spu_llm.primitives.truncate import truncate

BITS = 20
SIGMOID = Table(special.expit, jax.nn.sigmoid, -8.0, 32, -1, 3)
X = Fixed(encode(np.linspace(-4, 4, 10), BITS), BITS)


def sigmoid(x):
    """With as many fraction bits as x, so that it can be applied again. 2 messages."""
    return truncate(lookup(x, SIGMOID), BITS)


def agrees(function, *args, operands=(), within=2.0**-5):
    """The cost between two parties, where the results are those in plaintext but for rounding."""
    found, cost = run_dealt(function, *args, operands=operands)
    for ours, plain in zip(jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(run_plain(function, *args)), strict=True):
        assert np.abs(ours - plain).max() <= within * 2.0**BITS
    return cost


# Messages


def test_independent_protocols_share_a_message():
    cost = agrees(lambda x, y: (truncate(x, 4), truncate(y, 4), is_negative(x - y, 4)), X, X)
    assert (cost.messages, cost.bytes) == (1, 8 * 30)
    # In whatever order they are written: each step of three chains goes with the same step of the others.
    chains = agrees(lambda x, y, z: [sigmoid(sigmoid(v)) for v in (x, y, z)], X, X, X)
    assert chains.messages == 4


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_chain_takes_its_depth(depth):
    def chain(x):
        for _ in range(depth):
            x = sigmoid(x)
        return x

    cost = agrees(chain, X)
    assert (cost.messages, cost.bytes) == (2 * depth, 2 * depth * 8 * 10)


def test_branches_of_other_lengths():
    """As many messages as the longest: short ones go with its first."""

    def function(x, y):
        return sigmoid(sigmoid(x)) + truncate(y, 10).at_bits(BITS) + sigmoid(y)

    assert agrees(function, X, X).messages == 4


def test_a_value_is_opened_once():
    def function(x):
        return truncate(x, 4), sigmoid(x), contract("n,n->", x, x, 10, 10), scale(x, x, 10, 8)

    cost = agrees(function, X, within=0.1)
    assert (cost.messages, cost.bytes) == (2, 8 * 20)  # x, and the truncation within `sigmoid`


def test_an_operand_that_waits_for_another_goes_ahead():
    """y is opened with the first message, though its product needs x's function, too."""
    cost = agrees(lambda x, y: contract("n,n->n", sigmoid(x), y, 10, 10), X, X)
    assert (cost.messages, cost.bytes) == (3, 8 * 40)


def test_nothing_to_open():
    cost = agrees(lambda x, y: (x, x + y, x.with_raw(jnp.int64(7) * jnp.ones(2, jnp.int64))), X, X)
    assert (cost.messages, sum(cost.dealer_bytes)) == (0, 0)


def test_what_is_not_used_is_dealt_and_opened_all_the_same():
    """Nothing is decided by whether a result is used, so that it does not hang on SPU's compiler."""

    def function(x):
        sigmoid(x)
        return truncate(x, 4)

    assert agrees(function, X).messages == 2


def test_views_of_operands():
    """Reshaped and transposed they are still opened; a slice is another value."""
    w = Fixed(np.random.default_rng(0).integers(-99, 99, (10, 6)), 0)

    def moved(x, w):
        return contract("n,mn->m", x, w.with_raw(w.raw.T)), contract("n,nab->ab", x, w.reshape(10, 2, 3))

    assert agrees(moved, X, w, operands=[1]).bytes == 8 * 10
    assert agrees(lambda x, w: contract("n,nm->m", x, w[:, :2]), X, w, operands=[1]).bytes == 8 * 30


# Calls


@jax.custom_jvp
def custom(raw):
    return sigmoid(Fixed(raw, BITS)).raw


custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[0]))


@jax.custom_vjp
def reverse(raw):
    return sigmoid(Fixed(raw, BITS)).raw


reverse.defvjp(lambda raw: (reverse(raw), None), lambda _, g: (g,))


def nested(raw):
    """Two calls deep, one of them used twice and one with a constant of its own."""
    half = jnp.full(raw.shape, 1 << (BITS - 1))
    inner = jax.jit(lambda r: sigmoid(Fixed(r + half, BITS)).raw)
    return jax.jit(lambda r: inner(inner(r)) + inner(r))(raw)


CALLS = {
    "jit": (jax.jit(lambda raw: sigmoid(Fixed(raw, BITS)).raw), 2),
    "nested": (nested, 4),
    "checkpoint": (jax.checkpoint(lambda raw: sigmoid(Fixed(raw, BITS)).raw), 2),
    "custom_jvp": (custom, 2),
    "custom_vjp": (reverse, 2),
    "vmap of jit": (jax.vmap(jax.jit(lambda raw: sigmoid(Fixed(raw, BITS)).raw)), 2),
    "returns its argument": (jax.jit(lambda raw: (raw, sigmoid(Fixed(raw, BITS)).raw)), 2),
    "returns a number": (lambda raw: raw + jax.jit(lambda r: (sigmoid(Fixed(r, BITS)).raw, 3))(raw)[1], 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_seen_through(name):
    function, messages = CALLS[name]
    cost = agrees(lambda x: jax.tree_util.tree_map(lambda raw: Fixed(raw, BITS), function(x.raw)), X)
    assert cost.messages == messages


def test_two_calls_of_one_function_get_masks_of_their_own():
    function = jax.jit(lambda raw: truncate(Fixed(raw, BITS), 4).raw)
    shape = jax.ShapeDtypeStruct((5,), np.int64)
    with enable_x64():
        dealt = with_material(lambda a, b: (function(a), function(b), function(a)), [shape, shape], {}, {})
    assert sum(isinstance(deal, Uniform) for deal in dealt.specification.deals) == 2  # a is opened once


def loop(length):
    return lambda raw: jax.lax.scan(lambda carry, _: (truncate(Fixed(carry, BITS), 4).raw, None), raw, None, length)[0]


LOOPS = {
    "scan": loop(3),
    "while": lambda raw: jax.lax.while_loop(lambda r: r.sum() > 0, lambda r: truncate(Fixed(r, BITS), 4).raw, raw),
    "cond": lambda raw: jax.lax.cond(raw.sum() > 0, lambda r: truncate(Fixed(r, BITS), 4).raw, lambda r: r, raw),
    "scan, in a call": jax.jit(loop(3)),
    "scan, of a map": lambda raw: jax.lax.map(lambda r: truncate(Fixed(r, BITS), 4).raw, raw),
    "scan, with a call inside": lambda raw: jax.lax.scan(lambda c, _: (CALLS["jit"][0](c), None), raw, None, 2)[0],
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_refused(name):
    with pytest.raises(UserError) as caught:
        run_dealt(lambda x: x.with_raw(LOOPS[name](x.raw)), X)
    kind = name.split(",")[0]
    assert (
        str(caught.value) == f"{kind}: dealer protocols cannot run inside it, since each round needs its own masks; unroll the loop"
    )


def test_loops_without_primitives_are_none_of_our_business():
    def function(x):
        _, doubled = jax.lax.scan(lambda carry, row: (carry, row * 2), 0, np.arange(3))
        return truncate(x.with_raw(x.raw[:3] * doubled), 4)

    assert agrees(function, X).messages == 1
