"""The norm that shares its opening with the dot after it: against float64, at both ends of its table, what it sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import run_dealt
from hypothesis import given, settings
from hypothesis import strategies as st
from meanings import meanings

from spu_llm.primitives.fixed import Fixed, encode
from spu_llm.primitives.norm import NormPlan, encode_phi, norm_dot, normalised, root_table, rounded_phi
from spu_llm.primitives.squares import weighted_squares

WIDTH = 24
LOW, HIGH = 0.5, 8.0
PLAN = NormPlan(root_table(WIDTH, LOW / 2, HIGH, segments=256))
X_BITS, KERNEL_BITS = 28, 19


def rows(n, mean_square, width=WIDTH, seed=0):
    """Rows of random numbers with this mean square each."""
    x = np.random.default_rng(seed).standard_normal((n, width))
    return x * (np.asarray(mean_square) / np.mean(x**2, -1))[..., None] ** 0.5


def encoded(x, kernel, unit=1.0):
    return Fixed(encode(x, X_BITS), X_BITS), Fixed(encode(kernel / unit, KERNEL_BITS), KERNEL_BITS)


def kernel_of(m, seed=1):
    return 0.3 * np.random.default_rng(seed).standard_normal((WIDTH, m))


def reference(x, kernel):
    return x @ kernel / np.sqrt(np.mean(x**2, -1, keepdims=True))


@settings(deadline=None, max_examples=5)
@given(n=st.sampled_from([1, 3, 7]), m=st.sampled_from([1, 5]), unit_bits=st.integers(-6, UNIT_BITS), seed=st.integers(0, 99))
def test_against_float64(n, m, unit_bits, seed):
    """Whatever the size of x, its unit brings it into the table; what is rounded as it is opened counts more if x is small."""
    unit = 2.0 ** (unit_bits / 2)
    x = unit * rows(n, np.random.default_rng(seed).uniform(LOW, HIGH, n), seed=seed)
    kernel = kernel_of(m, seed)
    found, _ = run_dealt(lambda x, w: norm_dot(x, w, PLAN, unit_factor(unit)), *encoded(x, kernel, unit), operands=[1])
    assert (found.bits, found.modulus) == (PLAN.output_bits + PLAN.root_bits, 64)
    want, size = reference(x, kernel), np.mean(x**2, -1).min() ** 0.5
    rounded = 2.0**-PLAN.activation_bits * np.abs(kernel).sum(0).max() + 2.0**-PLAN.square_bits * np.abs(want).max()
    assert np.abs(found.raw / 2.0**found.bits - want).max() < 2e-3 + rounded / size


@pytest.mark.parametrize("mean_square", [LOW, HIGH - 0.01])
def test_at_both_ends_of_the_table(mean_square):
    x = rows(200, np.full(200, mean_square))
    found, _ = run_dealt(lambda x: normalised(x, PLAN, unit_factor(1.0)), encoded(x, np.zeros((WIDTH, 1)))[0])
    assert np.abs(found.raw / 2.0**found.bits - x / mean_square**0.5).max() < 3e-3


def test_learned_epsilon():
    """A large epsilon counts, and with it no row is too small."""
    plan = NormPlan(root_table(WIDTH, 0.0, HIGH, epsilon=0.5, segments=256))
    x = rows(5, [1e-4, 0.01, 0.1, 1.0, HIGH - 0.01])
    found, _ = run_dealt(lambda x: normalised(x, plan, unit_factor(1.0)), encoded(x, np.zeros((WIDTH, 1)))[0])
    want = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 0.5)
    assert np.abs(found.raw / 2.0**found.bits - want).max() < 3e-3


@pytest.mark.parametrize(("operands", "kernel_bytes"), [([1], 0), ([], 8 * WIDTH * 5)])
def test_cost(operands, kernel_bytes):
    """x; the sum of squares; its inverse root together with the dot."""
    n, m = 3, 5
    args = encoded(rows(n, np.ones(n)), kernel_of(m))
    _, cost = run_dealt(lambda x, w: norm_dot(x, w, PLAN, unit_factor(1.0)), *args, operands=operands)
    assert cost.messages == 3
    assert cost.bytes == 8 * (n * WIDTH + n * m) + 16 * n + kernel_bytes


def test_two_dots_share_the_norm():
    """Traced twice, the opening of x still serves both; squares and roots are looked up once each."""
    x, w = encoded(rows(2, [1.0, 2.0]), kernel_of(6))

    def function(x, w):
        return norm_dot(x, w, PLAN, unit_factor(1.0)), norm_dot(x, w[:, :2], PLAN, unit_factor(1.0))

    (whole, part), cost = run_dealt(function, x, w)
    assert np.abs(whole.raw[:, :2] - part.raw).max() / 2.0**whole.bits < 4e-3
    assert cost.messages == 3
    assert cost.bytes == 8 * (2 * WIDTH + WIDTH * 8 + 2 * 8) + 2 * 16 * 2


def test_meanings_agree():
    x = rows(3, [LOW, 1.0, HIGH - 0.01])
    kernel = kernel_of(2)
    want = reference(x, kernel)

    def function(x, w):
        return norm_dot(x, w, PLAN, unit_factor(1.0))

    for name, found in meanings(function, *encoded(x, kernel), stock=("SEMI2K", "ABY3")).items():
        assert np.abs(found.raw / 2.0**found.bits - want).max() < 1e-2, name


def test_vmap():
    x = rows(6, np.linspace(LOW, HIGH - 0.01, 6)).reshape(2, 3, WIDTH)
    function = jax.vmap(lambda x: normalised(x, PLAN, unit_factor(1.0)))
    found, cost = run_dealt(function, Fixed(encode(x, X_BITS), X_BITS))
    want = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))
    assert np.abs(found.raw / 2.0**found.bits - want).max() < 3e-3
    assert cost.messages == 3


@pytest.mark.parametrize("bits", range(-6, UNIT_BITS + 1))
def test_units(bits):
    factor = unit_factor(2.0 ** (bits / 2))
    assert factor.dtype == np.int64
    assert factor == 2 ** (UNIT_BITS - bits)


def test_no_rows():
    found, cost = run_dealt(lambda x: normalised(x, PLAN, unit_factor(1.0)), Fixed(np.zeros((0, WIDTH), np.int64), X_BITS))
    assert found.raw.shape == (0, WIDTH)
    assert cost.messages == 0
