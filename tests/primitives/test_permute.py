"""Shuffles: one order for all arrays, back again, another order every time, any order as likely."""

import itertools

import jax
import numpy as np
import pytest
from harness import run_dealt, run_plain, run_stock
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.errors import UserError
from spu_llm.primitives.contract import contract
from spu_llm.primitives.fixed import Fixed
from spu_llm.primitives.permute import _order, permutation, permute, shuffle


def numbered(*shape):
    return np.random.default_rng(0).integers(-(2**62), 2**62, shape)


@settings(deadline=None, max_examples=12)
@given(n=st.sampled_from([1, 2, 3, 7, 16, 33]), columns=st.sampled_from([(), (1,), (3,), (2, 3)]))
def test_one_order_for_all_and_back(n, columns):
    raw, places = numbered(n, *columns), np.arange(n)

    def function(x, index):
        order = permutation(n)
        moved = permute(order, x)
        return moved, permute(order, index), permute(order, moved, inverse=True)

    (moved, index, back), cost = run_dealt(function, Fixed(raw, 5), Fixed(places, 0))
    assert sorted(index.raw) == list(places)
    assert (moved.raw == raw[index.raw]).all()
    assert (back.raw == raw).all()
    assert moved.bits == 5
    assert (cost.messages, cost.bytes) == (2, 8 * (2 * raw.size + n))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_shuffle_along_an_axis(axis):
    raw = numbered(5, 4)
    (a, b), cost = run_dealt(lambda x, y: shuffle(x, y, axis=axis), Fixed(raw, 0, 40), Fixed(raw + 1, 0))
    n = raw.shape[axis]
    assert ((b.raw - 1) & (2**40 - 1) == a.raw & (2**40 - 1)).all()
    assert (np.sort(b.raw - 1, axis) == np.sort(raw, axis)).all()
    # The whole message: both arrays. The dealer: a function of log2 n - 2 levels a row to each party, a word an element.
    assert (cost.messages, cost.bytes) == (1, 16 * raw.size)
    keys = {4: 32 * n, 5: (32 + 16) * n + 1}[n]
    assert sum(cost.dealer_bytes) == 2 * keys + 8 * 2 * raw.size


def test_an_order_of_its_own_every_time():
    def function(x):
        return permute(permutation(30), x), permute(permutation(30), x)

    seen = [found.raw.tolist() for _ in range(2) for found in run_dealt(function, Fixed(np.arange(30), 0))[0]]
    assert len({tuple(order) for order in seen}) == 4
    # A second run of one program, too.
    assert run_dealt(function, Fixed(np.arange(30), 0), runs=2)[0][0].raw.tolist() not in seen


def test_every_order_is_as_likely():
    words = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, (24000, 4))
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    for row in words:
        counts[tuple(_order(row).tolist())] += 1
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 23 + 6 * 46**0.5


def test_what_was_opened_is_not_opened_again():
    def function(x):
        return contract("nd,nd->n", x, x), *shuffle(x)

    _, cost = run_dealt(function, Fixed(numbered(6, 2) >> 40, 0))
    assert (cost.messages, cost.bytes) == (1, 8 * 12)


def test_keys_are_the_order_without_a_dealer():
    raw, keys = numbered(7, 2), np.random.default_rng(1).integers(0, 2**61, 7)

    def function(x, k):
        return shuffle(x, keys=k)[0]

    for run in (run_plain, run_stock):
        assert (run(function, Fixed(raw, 0), Fixed(keys, 0)).raw == raw[np.argsort(keys)]).all()
    found, _ = run_dealt(function, Fixed(raw, 0), Fixed(keys, 0))
    assert (np.sort(found.raw, 0) == np.sort(raw, 0)).all()
    assert (run_plain(lambda x: shuffle(x)[0], Fixed(raw, 0)).raw == raw).all()
    with pytest.raises(UserError, match="needs secret keys"):
        run_stock(lambda x: shuffle(x)[0], Fixed(raw, 0))


def test_vmap_over_columns():
    raw = numbered(3, 5)

    def function(x):
        order = permutation(5)
        return jax.vmap(lambda row: permute(order, row))(x), permute(order, x, axis=1)

    (mapped, whole), _ = run_dealt(function, Fixed(raw, 0))
    assert (mapped.raw == whole.raw).all()


def test_refuses_another_matrix():
    with pytest.raises(UserError, match="the dealer does not know its order"):
        run_dealt(lambda x: permute(x, x), Fixed(np.eye(3, dtype=np.int64), 0))


def test_nothing():
    (found,), cost = run_dealt(lambda x: shuffle(x), Fixed(np.zeros((3, 0), np.int64), 0))
    assert found.raw.shape == (3, 0)
    assert cost.messages == 0
