"""Truncation by SPU's own products: right up to the bound that it promises, for every number of steps."""

from functools import partial
from unittest import mock

import harness
import numpy as np
import pytest

from spu_llm.primitives.fixed import Fixed
from spu_llm.primitives.stock import shifted
from spu_llm.runtime import ProtocolConfig

SHIFTS = [0, 1, 2, 8, 15, 16, 17, 20, 31, 32, 33, 44]
LONG = [shift for shift in SHIFTS if shift >= 16]


def largest(bits, count=60):
    """Integers of either sign just within 2^bits, others with their top bit set, and small ones."""
    random = np.random.default_rng(bits)
    ends = [0, 1, -1, 2**bits - 1, -(2**bits) + 1]
    big = random.integers(2 ** (bits - 1), 2**bits, count) * random.choice([-1, 1], count)
    return np.concatenate([ends, big, random.integers(-(2**20), 2**20, count)])


def units_off(name, bits, shifts):
    """(the integers, for each shift by how many units raw * 2^-shift is missed at most) on a protocol."""
    raw = largest(bits)
    with mock.patch.object(harness, "ProtocolConfig", partial(ProtocolConfig, name=name)):
        found = harness.run_stock(lambda x: [Fixed(shifted(x.raw, shift), 0) for shift in shifts], Fixed(raw, 0))
    return [float(np.abs(part.raw - raw / 2.0**shift).max()) for part, shift in zip(found, shifts, strict=True)]


def allowed(name, shift):
    """A step is off by less than a unit (CHEETAH: two); an earlier one's counts half at most, and so does what is added between."""
    one = 0 if shift == 0 else 2 if name == "CHEETAH" else 1
    return one + (1.5 if shift > 16 else 0)


@pytest.mark.parametrize("name", ["SEMI2K", "ABY3", "CHEETAH"])
@pytest.mark.parametrize(("bits", "shifts"), [(44, SHIFTS), (55, LONG), (60, LONG)], ids=["44", "55", "60"])
def test_right_within_its_bound(name, bits, shifts):
    off = units_off(name, bits, shifts)
    assert all(error <= allowed(name, shift) for error, shift in zip(off, shifts, strict=True)), off


@pytest.mark.parametrize("shift", [1, 8, 15, 16, 17, 33])
def test_the_bound_is_no_lower_than_need_be(shift):
    """All is well below it; within a bit above, some products wrap."""
    bits = 44 + min(shift, 16)
    assert units_off("SEMI2K", bits, [shift])[0] <= allowed("SEMI2K", shift)
    assert units_off("SEMI2K", bits + 1, [shift])[0] > 2**10


@pytest.mark.parametrize("shift", [16, 24])
@pytest.mark.parametrize("name", ["SEMI2K", "ABY3"])
def test_the_mean_is_right(name, shift):
    """Rounding is by chance, so that many roundings do not add up."""
    raw = np.full(4000, 13 << (shift - 2))
    with mock.patch.object(harness, "ProtocolConfig", partial(ProtocolConfig, name=name)):
        found = harness.run_stock(lambda x: Fixed(shifted(x.raw, shift), 0), Fixed(raw, 0))
    assert set(np.unique(found.raw)) == {3, 4}
    assert abs(found.raw.mean() - 3.25) < 6 * 0.5 / 4000**0.5
