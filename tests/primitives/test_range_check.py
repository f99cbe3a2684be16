"""The range check: silent in range, whatever the masks; loud outside the margin, wherever one value is; telling nothing else."""

import jax
import numpy as np
import pytest
from harness import run_dealt, run_plain, run_stock
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.primitives.compare import relu
from spu_llm.primitives.fixed import Fixed
from spu_llm.primitives.range_check import out_of_range

PLANS = [(64, 32), (64, 20), (64, 40), (64, 0), (64, 62), (50, 38), (40, 8), (34, 32), (4, 2)]


def above(modulus, shape, random):
    """What may lie above the modulus."""
    return random.integers(-(2**62), 2**62, shape) << modulus if modulus < 64 else 0


def each_row(low, width_bits):
    return jax.vmap(lambda row: out_of_range(row, low, width_bits))


@pytest.mark.parametrize(("modulus", "b"), PLANS)
def test_in_range_is_never_reported(modulus, b):
    random = np.random.default_rng(b)
    low = int(random.integers(-(2 ** (modulus - 2)), 1 - 2**b // 2))
    raw = random.integers(low, low + 2**b, (2000, 5))
    raw[:2] = low, low + 2**b - 1, low, low, low + 2**b - 1
    raw = raw + above(modulus, raw.shape, random)
    found, cost = run_dealt(each_row(low, b), Fixed(raw, 0, modulus))
    assert (found.raw == 0).all()
    assert (cost.messages, cost.bytes) == (1, 8 * raw.size)  # the opening that another protocol has already paid for


@pytest.mark.parametrize(("modulus", "b"), PLANS)
def test_one_outside_is_always_reported(modulus, b):
    """10,000 values anywhere in the ring but for the range and its margins, each among others in range."""
    random = np.random.default_rng(b)
    low = int(random.integers(-(2 ** (modulus - 2)), 1 - 2**b // 2))
    raw = random.integers(low, low + 2**b, (10_000, 3))
    # Distances from the range's upper margin round the ring to its lower one, small ones as often as large.
    free = 2**modulus - 3 * 2**b
    steps = np.array([int(min(free, 2.0**power)) for power in random.uniform(0, modulus, 10_000)], object)
    far = np.where(random.random(10_000) < 0.5, low + 2 * 2**b + steps - 1, low - 2**b - steps + 1)
    far[:4] = low + 2 * 2**b, low - 2**b, low + 2 * 2**b, low - 2**b
    wrapped = np.array([(int(x) + 2**63) % 2**64 - 2**63 for x in far], np.int64)
    raw[np.arange(10_000), random.integers(0, 3, 10_000)] = wrapped
    raw = raw + above(modulus, raw.shape, random)
    found, _ = run_dealt(each_row(low, b), Fixed(raw, 0, modulus))
    assert (found.raw != 0).all()


def test_all_outside_is_reported_and_the_margin_now_and_then():
    random = np.random.default_rng(0)
    far = random.integers(2**20, 2**30, (3000, 40))
    near = np.repeat(np.array([[-1], [-1000], [1023], [1024 + 1], [1024 + 1000]]), 2000, 1).reshape(-1, 1)
    (a, b), _ = run_dealt(lambda x, y: (each_row(0, 10)(x), each_row(0, 10)(y)), Fixed(far, 0, 44), Fixed(near, 0, 44))
    assert (a.raw != 0).all()
    rates = (b.raw.reshape(5, 2000) != 0).mean(1)
    assert np.abs(rates - np.array([1, 1000, 0, 1, 1000]) / 1024).max() < 0.05


def test_the_sum_tells_nothing_else():
    """Of the same value out of range, under fresh weights every time: any multiple of its largest power of two."""
    found, _ = run_dealt(each_row(0, 10), Fixed(np.full((4000, 1), 1 << 12), 0, 44))  # z = 4, z^2 - z = 12
    odd = (found.raw.view(np.uint64) >> np.uint64(30 + 2)).astype(np.int64)  # z has 34 bits, twelve two twos
    assert (found.raw & ((1 << 32) - 1) == 0).all()
    assert (odd & 1 == 1).all()
    assert len(np.unique(odd)) > 3990
    assert abs((odd >> 20 & 1).mean() - 0.5) < 0.05


@settings(deadline=None, max_examples=10)
@given(shape=st.sampled_from([(), (1,), (7,), (2, 3, 1)]), inside=st.booleans(), width=st.integers(-3, 6))
def test_any_shape_and_scale(shape, inside, width):
    random = np.random.default_rng(width + 9)
    low = -1.5
    x = low + random.uniform(0, 2.0**width, shape)
    if not inside:
        x = x + 2.0 ** (width + 2)
    raw = np.floor(x * 2**20).astype(np.int64)
    found, _ = run_dealt(lambda x: out_of_range(x, low, width), Fixed(raw, 20))
    assert found.raw.shape == ()
    assert (found.raw == 0) == inside


def test_checks_add_up_and_share_the_opening():
    raw = np.arange(-50, 50)

    def function(x):
        return relu(x, 39), out_of_range(x, -64, 7) + out_of_range(x, -50, 9)

    (_, check), cost = run_dealt(function, Fixed(raw, 0))
    assert check.raw == 0
    assert (cost.messages, cost.bytes) == (3, 8 * 3 * 100)


@pytest.mark.parametrize(
    ("modulus", "b", "size"),
    [(64, 32, 4), (64, 31, 8), (64, 33, 12), (50, 20, 12), (50, 10, 8)],
)
def test_dealer_bytes(modulus, b, size):
    n = 100
    _, cost = run_dealt(lambda x: out_of_range(x, 0, b), Fixed(np.zeros(n, np.int64), 0, modulus))
    assert sum(cost.dealer_bytes) == size * n + 8


def test_plaintext_and_stock_spu_count():
    x = Fixed(np.array([[-5, -4, 0], [3, 4, 100]]), 0)
    for run in (run_plain, run_stock):
        assert run(lambda x: out_of_range(x, -4, 3), x).raw == 3
        assert run(each_row(-4, 3), x).raw.tolist() == [1, 2]


def test_nothing_and_too_wide():
    found, _ = run_dealt(lambda x: out_of_range(x, 0, 3), Fixed(np.zeros((0, 2), np.int64), 0))
    assert found.raw == 0
    with pytest.raises(ValueError, match=r"a range of 2\^29 units cannot be checked modulo 2\^30"):
        out_of_range(Fixed(np.zeros(2, np.int64), 9, 30), 0, 20)
