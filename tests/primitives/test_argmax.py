"""The place of the largest number against numpy: ties, any axis, one level or several; what it sends."""

import jax
import numpy as np
import pytest
from harness import run_dealt, run_plain, run_stock
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.primitives.argmax import argmax, group_size
from spu_llm.primitives.fixed import Fixed


def place(raw, axis=-1):
    return (np.expand_dims(raw.argmax(axis), axis) == np.arange(raw.shape[axis]).reshape([-1] + [1] * (-axis - 1))).astype(np.int64)


@settings(deadline=None, max_examples=15)
@given(
    n=st.sampled_from([1, 2, 3, 5, 16, 17, 19, 33]),
    lead=st.sampled_from([(), (1,), (3,), (2, 2)]),
    span=st.sampled_from([0, 1, 3, 1000, 2**61]),
    seed=st.integers(0, 999),
)
def test_between_parties(n, lead, span, seed):
    raw = np.random.default_rng(seed).integers(-span, span + 1, (*lead, n))
    found, _ = run_dealt(argmax, Fixed(raw, 7))
    assert (found.raw == place(raw)).all()
    assert found.bits == 0


@pytest.mark.parametrize("n", [100, 300])
def test_several_levels(n):
    raw = np.random.default_rng(n).integers(-20, 21, (2, n))
    raw[1] = -(2**20)
    found, _ = run_dealt(lambda x: argmax(x, bits=22), Fixed(raw, 0))
    assert (found.raw == place(raw)).all()


@pytest.mark.parametrize(("n", "levels"), [(16, [16]), (64, [5, 13]), (256, [16, 16])])
def test_cost(n, levels):
    _, cost = run_dealt(lambda x: argmax(x, bits=39), Fixed(np.zeros(n, np.int64), 0))
    sent, left = 0, n
    for level, size in enumerate(levels):
        assert group_size(left) == size
        groups = -(-left // size)
        # Each number; two openings a pair; each rank; from the second level on each index.
        sent += groups * (size + size * (size - 1) + size + (size if level else 0))
        left = groups
    several = len(levels) > 1
    assert cost.messages == 4 * len(levels) + several
    assert cost.bytes == 8 * (sent + several)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_axis(axis):
    raw = np.random.default_rng(0).integers(-9, 9, (4, 3))
    found, _ = run_dealt(lambda x: argmax(x, axis, 20), Fixed(raw, 0))
    assert (found.raw == place(raw, axis - 2 if axis >= 0 else axis)).all()


@pytest.mark.parametrize("n", [6, 20])
def test_vmap_plaintext_and_stock_spu(n):
    raw = np.random.default_rng(n).integers(-9, 9, (n, 3))
    for run in (run_plain, run_stock, lambda *args: run_dealt(*args)[0]):
        assert (run(jax.vmap(lambda x: argmax(x, bits=20), in_axes=1), Fixed(raw, 0)).raw == place(raw.T)).all()


def test_nothing():
    found, cost = run_dealt(argmax, Fixed(np.zeros((0, 3), np.int64), 0))
    assert found.raw.shape == (0, 3)
    assert cost.messages == 0


def test_groups_get_fewer():
    for n in range(2, 5000):
        assert 2 <= group_size(n) <= 16
        assert -(-n // group_size(n)) < n
