"""The norm that shares its opening with the dot after it: against float64 whatever phi, at the ends of its table, what it sends."""

import jax
import numpy as np
import pytest
from harness import run_dealt
from hypothesis import given, settings
from hypothesis import strategies as st
from meanings import meanings

from spu_llm.primitives.fixed import Fixed, encode
from spu_llm.primitives.norm import NormPlan, encode_phi, norm_dot, normalised, root_table, rounded_phi

WIDTH = 24
LOW, HIGH = 0.5, 8.0
PLAN = NormPlan(root_table(WIDTH, LOW / 2, HIGH, segments=256))
X_BITS, KERNEL_BITS = 28, 22
PHI_BITS = PLAN.weight_bits(X_BITS)


def rows(n, mean_square, width=WIDTH, seed=0):
    """Rows of random numbers with this mean square each."""
    x = np.random.default_rng(seed).standard_normal((n, width))
    return x * (np.asarray(mean_square) / np.mean(x**2, -1))[..., None] ** 0.5


def kernel_of(m, seed=1):
    return 0.3 * np.random.default_rng(seed).standard_normal((WIDTH, m))


def stream(x):
    return Fixed(encode(x, X_BITS), X_BITS)


def weight(phi, bits=PHI_BITS):
    return Fixed(encode_phi(phi, bits), bits)


def arguments(x, kernel, phi=1.0):
    """x, phi times the kernel, and phi^2."""
    return stream(x), Fixed(encode(kernel * rounded_phi(phi, PHI_BITS), KERNEL_BITS), KERNEL_BITS), weight(phi)


def dotted(x, kernel, phi):
    return norm_dot(x, kernel, PLAN, phi)


def reals(found):
    return found.raw / 2.0**found.bits


def reference(x, kernel):
    return x @ kernel / np.sqrt(np.mean(x**2, -1, keepdims=True))


def tolerance(x, kernel, phi):
    """Of the table, and of rounding: x for the dot and for its squares (six deviations of at most half a unit), then the dot."""
    size = np.mean(x**2, -1).min() ** 0.5
    rounded = 3 * 2.0**-PLAN.activation_bits * np.square(kernel).sum(0).max() ** 0.5 + 2.0**-PLAN.output_bits / phi
    squared = 3 * 2.0**-PLAN.square_bits / WIDTH**0.5 * np.abs(reference(x, kernel)).max()
    return 1e-3 + (rounded + squared) / size


@settings(deadline=None, max_examples=6)
@given(
    n=st.sampled_from([1, 3, 7]), m=st.sampled_from([1, 5]), size=st.sampled_from([1 / 32, 1 / 4, 1.0, 11.0, 500.0]),
    operands=st.sampled_from([[], [1, 2]]), seed=st.integers(0, 99),
)  # fmt: skip
def test_against_float64(n, m, size, operands, seed):
    """Whatever the size of x, its phi brings it into the table; what is rounded as it is opened counts more if x is small."""
    phi, kernel = rounded_phi(1 / size, PHI_BITS), kernel_of(m, seed)
    x = rows(n, np.random.default_rng(seed).uniform(LOW, HIGH, n), seed=seed) / phi
    found, _ = run_dealt(dotted, *arguments(x, kernel, phi), operands=operands)
    assert (found.bits, found.modulus) == (PLAN.output_bits + PLAN.root_bits, 64)
    assert np.abs(reals(found) - reference(x, kernel)).max() < tolerance(x, kernel, phi)


def test_phi_cancels():
    """The same rows under several phi, all of which leave them in the table."""
    x, kernel, phis = rows(5, np.full(5, 3.0)), kernel_of(4), (0.45, 0.7, 1.0, 1.234, 1.6)
    weights = [part for phi in phis for part in arguments(x, kernel, phi)[1:]]

    def function(x, *weights):
        return [dotted(x, *weights[i : i + 2]) for i in range(0, len(weights), 2)]

    found, cost = run_dealt(function, stream(x), *weights, operands=range(1, 1 + len(weights)))
    for phi, one in zip(phis, found, strict=True):
        assert np.abs(reals(one) - reference(x, kernel)).max() < tolerance(x, kernel, phi)
    assert cost.messages == 3
    assert cost.bytes == 8 * x.size + len(phis) * (8 * 5 * 4 + 16 * 5)  # x is opened once


@pytest.mark.parametrize(("size", "bits"), [(1e-3, 5), (1e-3, 40), (0.3, 17), (1.0, 3), (64.0, 17), (1e4, 17)])
def test_phi_in_the_ring(size, bits):
    """Rounded to what the ring holds of its square, which is never 0."""
    held = encode_phi(size, bits)
    assert held.dtype == np.int64 and held.shape == ()
    assert rounded_phi(size, bits) ** 2 * 2.0**bits == pytest.approx(float(held), rel=1e-12)
    assert held == 1 or abs(float(held) - size**2 * 2.0**bits) <= 0.5
    assert held >= 1


@pytest.mark.parametrize("segments", [2, 128, 8192])
@pytest.mark.parametrize("width", [1, 24, 768, 4096])
def test_phi_has_the_bits_that_its_table_leaves(width, segments):
    """One more and the lookup has no room: squares are known modulo 2^(64 - what x drops)."""
    plan = NormPlan(root_table(width, 1 / 4, 4.0, segments))
    bits = plan.weight_bits(X_BITS)

    def shape_of(bits):
        x = Fixed(jax.ShapeDtypeStruct((2, width), np.int64), X_BITS)
        return jax.eval_shape(lambda x, phi: normalised(x, plan, phi), x, Fixed(jax.ShapeDtypeStruct((), np.int64), bits))

    with jax.experimental.enable_x64():
        assert shape_of(bits).shape == (2, width)
        with pytest.raises(ValueError, match="has no room"):
            shape_of(bits + 1)


@pytest.mark.parametrize("mean_square", [LOW, HIGH - 0.01])
def test_at_both_ends_of_the_table(mean_square):
    x = rows(200, np.full(200, mean_square))
    found, _ = run_dealt(lambda x, phi: normalised(x, PLAN, phi), stream(x), weight(1.0), operands=[1])
    assert np.abs(reals(found) - x / mean_square**0.5).max() < 3e-3


@pytest.mark.parametrize("phi", [1.0, 0.6])
def test_learned_epsilon(phi):
    """A large epsilon counts, is not scaled with phi, and with it no row is too small."""
    plan = NormPlan(root_table(WIDTH, 0.1, HIGH, segments=256), epsilon=0.5)
    bits = plan.weight_bits(X_BITS)
    x = rows(5, [1e-4, 0.01, 0.1, 1.0, HIGH - 0.51])
    found, _ = run_dealt(lambda x, phi: normalised(x, plan, phi), stream(x), weight(phi, bits), operands=[1])
    want = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 0.5) / rounded_phi(phi, bits)
    assert np.abs(reals(found) - want).max() < 3e-3 / phi


@pytest.mark.parametrize(("operands", "others"), [([1, 2], 0), ([2], 8 * WIDTH * 5), ([1], 8), ([], 8 * WIDTH * 5 + 8)])
def test_cost(operands, others):
    """x; the sum of squares; its inverse root together with the dot. Kernel and phi cost nothing if they were opened before."""
    n, m = 3, 5
    _, cost = run_dealt(dotted, *arguments(rows(n, np.ones(n)), kernel_of(m)), operands=operands)
    assert cost.messages == 3
    assert cost.bytes == 8 * (n * WIDTH + n * m) + 16 * n + others


def test_two_dots_share_the_norm():
    """Traced twice, the opening of x still serves both; squares and roots are looked up once each."""

    def function(x, w, phi):
        return dotted(x, w, phi), dotted(x, w[:, :2], phi)

    (whole, part), cost = run_dealt(function, *arguments(rows(2, [1.0, 2.0]), kernel_of(6)))
    assert np.abs(whole.raw[:, :2] - part.raw).max() / 2.0**whole.bits < 4e-3
    assert cost.messages == 3
    assert cost.bytes == 8 * (2 * WIDTH + WIDTH * 8 + 2 * 8 + 1) + 2 * 16 * 2


@pytest.mark.parametrize("phi", [1.0, 0.37])
def test_meanings_agree(phi):
    phi = rounded_phi(phi, PHI_BITS)
    x = rows(3, [LOW, 1.0, HIGH - 0.01]) / phi
    kernel = kernel_of(2)
    for name, found in meanings(dotted, *arguments(x, kernel, phi), stock=("SEMI2K", "ABY3")).items():
        assert np.abs(reals(found) - reference(x, kernel)).max() < 1e-2, name


def test_vmap():
    """Of rows, and of kernels; phi is one."""
    x = rows(6, np.linspace(LOW, HIGH - 0.01, 6)).reshape(2, 3, WIDTH)
    kernels = np.stack([kernel_of(2, seed) for seed in range(2)])
    function = jax.vmap(lambda x, w, phi: (normalised(x, PLAN, phi), dotted(x, w, phi)), (0, 0, None))
    (found, dots), cost = run_dealt(function, *arguments(x, kernels), operands=[1, 2])
    want = x / np.sqrt(np.mean(x**2, -1, keepdims=True))
    assert np.abs(reals(found) - want).max() < 3e-3
    assert np.abs(reals(dots) - want @ kernels).max() < 4e-3
    assert cost.messages == 3


def test_no_rows():
    x = Fixed(np.zeros((0, WIDTH), np.int64), X_BITS)
    found, cost = run_dealt(lambda x, phi: normalised(x, PLAN, phi), x, weight(1.0), operands=[1])
    assert found.raw.shape == (0, WIDTH)
    assert cost.messages == 0
