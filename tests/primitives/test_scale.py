"""The product that truncates its operands as they are opened: exact in the ring, at the ends of its bounds, broadcast."""

import jax
import numpy as np
import pytest
from harness import run_dealt, run_plain
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from meanings import garbled, meanings

from spu_llm.primitives.contract import contract
from spu_llm.primitives.fixed import Fixed
from spu_llm.primitives.scale import scale


def is_product(found, x, y, off=(0, 1)):
    """Whether found = (x + 0 or 1) * (y + 0 or 1) modulo 2^64."""
    with np.errstate(over="ignore"):
        return np.any([found == (x + i) * (y + j) for i in off for j in off], axis=0).all()


@settings(deadline=None, max_examples=12)
@given(
    shapes=st.sampled_from([((), ()), ((1,), (1,)), ((5,), (5,)), ((3, 4), (3, 1)), ((2, 1, 3), (4, 1)), ((3,), ())]),
    moduli=st.tuples(st.integers(3, 64), st.integers(3, 64)),
    data=st.data(),
)
def test_any_values_below_the_bounds(shapes, moduli, data):
    raws, shifts, args = [], [], []
    for shape, modulus in zip(shapes, moduli, strict=True):
        most = 2 ** (modulus - 2)
        values = st.sampled_from([most - 1, -most]) | st.integers(-most, most - 1)
        raws.append(data.draw(arrays.arrays(np.int64, shape, elements=values)))
        shifts.append(data.draw(st.integers(0, modulus - 2)))
        args.append(Fixed(garbled(raws[-1], modulus, data.draw(st.integers(0, 2**61))), 2 + shifts[-1], modulus))
    found, cost = run_dealt(lambda x, y: scale(x, y, 2, 2), *args)
    assert (found.bits, found.modulus) == (4, 64)
    assert found.raw.shape == np.broadcast_shapes(*shapes)
    assert is_product(found.raw, *(raw >> shift for raw, shift in zip(raws, shifts, strict=True)))
    assert (cost.messages, cost.bytes) == (1, 8 * sum(raw.size for raw in raws))


@pytest.mark.parametrize("moduli", [(64, 64), (43, 64), (30, 12)])
def test_every_mask_at_the_bounds(moduli):
    ends = [[2 ** (modulus - 2) - 1, -(2 ** (modulus - 2)), 0] for modulus in moduli]
    x, y = (np.tile(part.reshape(-1), 300) for part in np.meshgrid(*ends))
    found, _ = run_dealt(
        lambda x, y: scale(x, y, 4, 4), *(Fixed(raw, 9, modulus) for raw, modulus in zip((x, y), moduli, strict=True))
    )
    assert is_product(found.raw, x >> 5, y >> 5)


def test_cost():
    """32 dealer bytes an output element, beside 16 an operand element."""
    x, y = Fixed(np.zeros((3, 10), np.int64), 20), Fixed(np.zeros((3, 1), np.int64), 20)
    _, cost = run_dealt(lambda x, y: scale(x, y, 10, 10), x, y)
    assert (cost.messages, cost.bytes) == (1, 8 * 33)
    assert sum(cost.dealer_bytes) == 32 * 30 + 16 * 33
    assert abs(cost.dealer_bytes[0] - cost.dealer_bytes[1]) <= 8 * 30
    _, square = run_dealt(lambda x: scale(x, x, 10, 10), x)
    assert (square.messages, square.bytes) == (1, 8 * 30)


def test_operand_and_value_opened_before():
    random = np.random.default_rng(0)
    x, w = Fixed(random.integers(-(2**40), 2**40, (4, 6)), 20), Fixed(random.integers(-(2**40), 2**40, 6), 30)

    def function(x, w):
        return scale(x, w, 12, 12), contract("nk,nk->n", x, x, 0, 0)

    (found, _), cost = run_dealt(function, x, w, operands=[1])
    assert is_product(found.raw, x.raw >> 8, w.raw >> 18)
    assert (cost.messages, cost.bytes) == (1, 8 * 24)


def test_meanings_agree():
    random = np.random.default_rng(0)
    x, y = Fixed(random.integers(-(2**33), 2**33, (3, 4)), 28), Fixed(random.integers(-(2**30), 2**30, (3, 1)), 24)

    def function(x, y):
        return scale(x, y, 14, 12), jax.vmap(lambda a, b: scale(a, b, 14, 12), (1, None), 1)(x, y.reshape(3))

    for name, (found, mapped) in meanings(function, x, y).items():
        off = (-1, 0, 1) if name == "CHEETAH" else (0, 1)
        assert is_product(found.raw, x.raw >> 14, y.raw >> 12, off), name
        assert is_product(mapped.raw, x.raw >> 14, y.raw >> 12, off), name


def test_vmap_over_either_operand():
    random = np.random.default_rng(1)
    x, y = Fixed(random.integers(-99, 99, (3, 4)), 0), Fixed(random.integers(-99, 99, (4, 2)), 0)
    for axes, args in (((0, None), (x, y[:, 0])), ((None, 1), (x[0], y)), ((1, 0), (x, y[:, :1]))):
        function = jax.vmap(lambda a, b: scale(a, b, 0, 0), axes)
        assert (run_dealt(function, *args)[0].raw == run_plain(function, *args).raw).all()


def test_nothing_and_refused():
    found, _ = run_dealt(lambda x, y: scale(x, y, 2, 2), Fixed(np.zeros((3, 0), np.int64), 4), Fixed(np.zeros((3, 1), np.int64), 4))
    assert found.raw.shape == (3, 0)
    for x_bits, y_bits in ((5, 2), (2, 5)):
        with pytest.raises(ValueError, match=r"4 fraction bits modulo 2\^64 cannot be rounded to 5; use 0 to 4"):
            scale(found, found, x_bits, y_bits)
