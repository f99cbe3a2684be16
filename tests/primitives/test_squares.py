"""Weighted sums of squares: to the last bit against numpy's integers, odd shapes, what they open and what they refuse."""

from itertools import product

import jax
import numpy as np
import pytest
from harness import run_dealt, run_plain
from hypothesis import given, settings
from hypothesis import strategies as st
from meanings import garbled, meanings

from spu_llm.primitives.contract import contract
from spu_llm.primitives.fixed import Fixed
from spu_llm.primitives.squares import weighted_squares


def anything(random, *shape):
    """Any ring integers."""
    return random.integers(-(2**63), 2**63 - 1, shape)


def squares(x, weight, added=0):
    """What is computed, in numpy's integers modulo 2^64."""
    return weight * (np.square(x).sum(-1) + np.int64(added))


def explained(found, x, weight, left, added=0):
    """Whether some choice of 0 or 1 more for each of the elements of a row gives what was found modulo 2^left."""
    choices = [
        (found - squares(x + np.array(more), weight, added)) << (64 - left) == 0 for more in product((0, 1), repeat=x.shape[-1])
    ]
    return np.any(choices, axis=0).all()


SHAPES = [(1,), (5,), (1, 1), (0, 3), (1, 7), (3, 2), (2, 1, 3), (4, 0)]


@settings(deadline=None, max_examples=12)
@given(
    shape=st.sampled_from(SHAPES), operands=st.sampled_from([[], [0], [1], [0, 1]]), added=st.integers(0, 2**20),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_exact_for_any_integers(shape, operands, added, seed):
    """Nothing is rounded here, so nothing is off. A batch of rows of 0 elements is a sum all the same."""
    random = np.random.default_rng(seed)
    x, weight = anything(random, *shape), anything(random)
    found, cost = run_dealt(
        lambda x, w: weighted_squares(x, w, 3, added / 4.0**3), Fixed(x, 3), Fixed(weight, 5), operands=operands
    )
    want = squares(x, weight, added)
    assert found.raw.shape == want.shape
    assert (found.raw == want).all()
    assert (found.bits, found.modulus) == (11, 64)
    opened = x.size * (0 not in operands) + (1 not in operands)
    assert (cost.messages, cost.bytes) == (int(opened > 0), 8 * opened)
    assert sum(cost.dealer_bytes) == 8 * x.size + 16 * want.size


@settings(deadline=None, max_examples=12)
@given(
    shape=st.sampled_from([(1,), (5,), (1, 1), (40, 1), (9, 4), (2, 3, 2)]), modulus=st.integers(4, 64), data=st.data(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_rounded_as_it_is_opened(shape, modulus, data, seed):
    """Right modulo what is left of x's modulus, each element 0 or 1 unit too large, whatever is above."""
    shift = data.draw(st.integers(1, modulus - 2))
    random = np.random.default_rng(seed)
    x, weight = random.integers(-(2 ** (modulus - 1)), 2 ** (modulus - 1), shape), anything(random)
    added, operands = data.draw(st.sampled_from([0, 1, 12345])), data.draw(st.sampled_from([[], [1]]))
    args = Fixed(garbled(x, modulus, data.draw(st.integers(0, 2**61))), 9 + shift, modulus), Fixed(weight, 0)
    found, cost = run_dealt(lambda x, w: weighted_squares(x, w, 9, added / 4.0**9), *args, operands=operands)
    assert (found.bits, found.modulus) == (18, modulus - shift)
    assert explained(found.raw, x >> shift, weight, modulus - shift, added)
    assert (cost.messages, cost.bytes) == (1, 8 * x.size + 8 * (1 not in operands))
    assert sum(cost.dealer_bytes) == 16 * x.size + 16 * (x.size // shape[-1])  # 8 an element more for what is dropped of the mask


def test_rounding_has_the_right_mean():
    """Stochastic rounding: (3 + a fraction of 0.3) is 3 in 70% of the openings."""
    raw = np.full((4000, 1), 3 * 2**10 + 300)
    found, _ = run_dealt(lambda x, w: weighted_squares(x, w, 0), Fixed(raw, 10), Fixed(np.int64(7), 0), operands=[1])
    assert set(np.unique(found.raw)) == {7 * 9, 7 * 16}
    assert abs((found.raw == 7 * 16).mean() - 300 / 2**10) < 6 * 0.5 / 4000**0.5


def test_the_opening_serves_others_too():
    """Of x, a dot and other roundings; of the weight, a second sum."""
    random = np.random.default_rng(0)
    x, y, w = random.integers(-(2**30), 2**30, (3, 4)), random.integers(-99, 99, (2, 4)), np.int64(-5)

    def function(x, y, w):
        return weighted_squares(x, w, 20), weighted_squares(x, w, 10), weighted_squares(y, w, 0), contract("nk,mk->nm", x, y, 12)

    (exact, rounded, second, dot), cost = run_dealt(function, Fixed(x, 20), Fixed(y, 0), Fixed(w, 0), operands=[2])
    assert (exact.raw == squares(x, w)).all() and (second.raw == squares(y, w)).all()
    assert explained(rounded.raw, x >> 10, w, 54)
    assert np.abs(dot.raw - (x >> 8) @ y.T).max() <= np.abs(y).sum()
    assert (cost.messages, cost.bytes) == (1, 8 * (12 + 8))


def test_added():
    """In units of the squares, before the weight."""
    x = Fixed(np.array([[2, 3], [0, 0]]) << 10, 10)
    found = run_plain(lambda x, w: weighted_squares(x, w, 9, 0.75), x, Fixed(np.int64(3) << 7, 7))
    assert (found.raw / 2.0**found.bits == [3 * 13.75, 3 * 0.75]).all()


def test_meanings_agree():
    """Exact where nothing is rounded; else by half a unit an element, on stock SPU either way."""
    random = np.random.default_rng(0)
    x, weight = Fixed(random.integers(-(2**20), 2**20, (3, 5)), 12), Fixed(np.int64(1234), 10)

    def function(x, w):
        return weighted_squares(x, w, 12, 1.0), weighted_squares(x, w, 4, 1.0)

    exact = squares(x.raw, weight.raw, 4**12)
    units = np.abs(x.raw >> 8) + 1
    for name, (whole, rounded) in meanings(function, x, weight).items():
        assert (whole.raw == exact).all(), name
        off = np.abs(rounded.raw - squares(x.raw >> 8, weight.raw, 4**4)).max()
        assert off <= (0 if name in ("plaintext", "jit") else weight.raw * (2 * units + 1).sum(-1).max()), name


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap(axis):
    """A batch of rows is more rows, under one weight that is opened once."""
    random = np.random.default_rng(axis)
    x, weight = anything(random, *np.insert([3, 4], axis, 5)), anything(random)
    function = jax.vmap(lambda x, w: weighted_squares(x, w, 0), (axis, None))
    found, cost = run_dealt(function, Fixed(x, 0), Fixed(weight, 0))
    assert (found.raw == squares(np.moveaxis(x, axis, 0), weight)).all()
    assert (run_plain(function, Fixed(x, 0), Fixed(weight, 0)).raw == found.raw).all()
    assert (cost.messages, cost.bytes) == (1, 8 * x.size + 8)


@pytest.mark.parametrize("axes", [(None, 0), (0, 0)])
def test_refuses_a_batch_of_weights(axes):
    args = Fixed(np.zeros((2, 2), np.int64), 0), Fixed(np.zeros(2, np.int64), 0)
    with pytest.raises(ValueError, match="weighted_squares takes one weight for a whole batch; loop over weights"):
        run_plain(jax.vmap(lambda x, w: weighted_squares(x, w, 0), axes), *args)


@pytest.mark.parametrize("bits", [11, -1])
def test_refuses_bits_that_x_has_not(bits):
    x = Fixed(np.zeros((2, 2), np.int64), 10, 12)
    with pytest.raises(ValueError, match=rf"10 fraction bits modulo 2\^12 cannot be rounded to {bits}; use 0 to 10"):
        weighted_squares(x, Fixed(np.int64(1), 0), bits)
