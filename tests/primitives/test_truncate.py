"""Truncation by one opening: at most one unit off up to the very bound, with the right mean; what it sends."""

import jax
import numpy as np
import pytest
from harness import run_dealt
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from meanings import garbled, meanings

from spu_llm.primitives.fixed import Fixed
from spu_llm.primitives.truncate import truncate

SHAPES = st.sampled_from([(), (1,), (7,), (3, 1, 5)])


def dropping(shift, modulus=64):
    """A function that drops `shift` bits, and what makes its input of raw integers."""
    return lambda x: truncate(x, 3), lambda raw: Fixed(raw, 3 + shift, modulus)


@settings(deadline=None, max_examples=20)
@given(modulus=st.integers(3, 64), shape=SHAPES, data=st.data())
def test_any_value_below_the_bound(modulus, shape, data):
    """Whatever is above the modulus."""
    most = 2 ** (modulus - 2)
    ends = st.sampled_from([0, -1, most - 1, -most])
    raw = data.draw(arrays.arrays(np.int64, shape, elements=ends | st.integers(-most, most - 1)))
    shift = data.draw(st.integers(1, modulus - 2))
    function, of = dropping(shift, modulus)
    found, _ = run_dealt(function, of(garbled(raw, modulus, data.draw(st.integers(0, 2**61)))))
    assert (found.bits, found.modulus, found.raw.shape) == (3, 64, shape)
    assert np.isin(found.raw - (raw >> shift), (0, 1)).all()


@pytest.mark.parametrize(("modulus", "shift"), [(64, 2), (64, 30), (64, 62), (50, 14), (12, 10), (3, 1)])
def test_every_mask_at_the_bound(modulus, shift):
    most = 2 ** (modulus - 2)
    raw = np.repeat([most - 1, -most, 0, -1], 1000)
    function, of = dropping(shift, modulus)
    found, _ = run_dealt(function, of(raw))
    assert np.isin(found.raw - (raw >> shift), (0, 1)).all()


def test_beyond_the_bound_it_is_off_by_a_period():
    """The bound is where it is said to be."""
    function, of = dropping(20)
    raw = np.full(4000, 2**62 + 2**61)
    off = run_dealt(function, of(raw))[0].raw - (raw >> 20)
    assert 0.1 < (np.abs(off) > 1).mean() < 0.4
    assert np.isin(off, (0, 1, -(2**44), 1 - 2**44)).all()


@pytest.mark.parametrize("part", [0, 1, 64, 128, 255])
def test_rounds_up_as_often_as_its_fraction_says(part):
    function, of = dropping(8)
    raw = np.repeat([5 * 256 + part, -5 * 256 + part], 4000)
    up = run_dealt(function, of(raw))[0].raw - (raw >> 8)
    assert np.abs(up.reshape(2, -1).mean(1) - part / 256).max() < 6 * 0.5 / 4000**0.5
    assert part or not up.any()


def test_cost():
    function, of = dropping(14)
    _, cost = run_dealt(function, of(np.zeros((3, 5), np.int64)))
    assert (cost.messages, cost.bytes) == (1, 8 * 15)
    assert sum(cost.dealer_bytes) == 16 * 15
    # An operand was opened before.
    _, opened = run_dealt(function, of(np.zeros(7, np.int64)), operands=[0])
    assert (opened.messages, opened.bytes) == (0, 0)


def test_operand():
    function, of = dropping(9)
    raw = np.random.default_rng(0).integers(-(2**62), 2**62, 300)
    assert np.isin(run_dealt(function, of(raw), operands=[0])[0].raw - (raw >> 9), (0, 1)).all()


@pytest.mark.parametrize("shift", [3, 18, 40])
def test_meanings_agree(shift):
    """Stock SPU truncates 16 bits at a time; a step may be one unit off, and a later one in the half unit added before it, too."""
    function, of = dropping(shift)
    raw = np.random.default_rng(0).integers(-(2**44), 2**44, (3, 4))
    allowed = {"plaintext": 0, "jit": 0, "dealer": 1}
    for name, found in meanings(jax.vmap(function, in_axes=1, out_axes=1), of(raw)).items():
        off = np.abs(found.raw - (raw >> shift)).max()
        assert off <= allowed.get(name, 1 + (shift > 16)), name


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_nothing(shape):
    function, of = dropping(4)
    found, cost = run_dealt(function, of(np.zeros(shape, np.int64)))
    assert found.raw.shape == shape
    assert cost.messages == 0


@pytest.mark.parametrize(
    ("bits", "modulus", "to", "message"),
    [
        (12, 64, 12, "truncate from 12 to 12 fraction bits: nothing to drop"),
        (12, 64, 13, "truncate from 12 to 13 fraction bits: nothing to drop"),
        (12, 12, 1, r"12 fraction bits modulo 2\^12 cannot be rounded to 1; use 2 to 12"),
        (70, 64, 7, r"70 fraction bits modulo 2\^64 cannot be rounded to 7; use 8 to 70"),
    ],
)
def test_refuses_what_cannot_be_dropped(bits, modulus, to, message):
    with pytest.raises(ValueError, match=message):
        truncate(Fixed(np.zeros(3, np.int64), bits, modulus), to)
