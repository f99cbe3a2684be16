"""SOAL's own functions (ICLR 2026), as far as StableHLO can say them, to be measured beside ours.

What cannot be said: each party forming its factor of 2^fraction from its own share. Here the fraction's power is a polynomial, and
an integer part is SPU's floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy.optimize import least_squares, linprog

from spu_llm.primitives.stock import FRACTION_BITS, as_real, as_ring

PAPER_CUBIC = (0.913389, -0.860195, 1.028723, -0.359165)
"""Of the inverse root's start, in powers of x - 1 (SOAL, "RMSNorm")."""
RANGE = 0.1, 2.75
_LOG2_E = 1.4426950408889634
_BITS = 5  # of an integer part
_ABOVE = 6  # exp's argument in base 2 is below


def inverse_root(x: Any, cubic: Sequence[float], steps: int = 2) -> Any:
    """A cubic start in powers of x - 1 and Newton steps y (3 - x y^2) / 2."""
    z = x - 1
    square = z * z
    start = jnp.stack([z, square, square * z], axis=-1) @ jnp.asarray(cubic[1:], x.dtype) + cubic[0]
    return _newton(x, start, steps)


def _newton(x: Any, y: Any, steps: int) -> Any:
    for _ in range(steps):
        y = y * (1.5 - 0.5 * (x * (y * y)))
    return y


def cubic_error(cubic: Sequence[float], steps: int) -> float:
    """The largest relative error over RANGE after so many Newton steps, in float64."""
    x = np.linspace(*RANGE, 20001)
    y = np.polynomial.polynomial.polyval(x - 1, cubic)
    return float(np.abs(_newton(x, y, steps) * np.sqrt(x) - 1).max())


def fitted_cubic() -> tuple[float, ...]:
    """The cubic start whose error after two Newton steps is least: that of the least relative error, then improved."""
    x = np.linspace(*RANGE, 2001)
    columns = np.vander(x - 1, 4, increasing=True) * np.sqrt(x)[:, None]
    ones = np.ones((len(x), 1))
    bound = np.concatenate([np.ones(len(x)), -np.ones(len(x))])
    start = linprog(
        [0, 0, 0, 0, 1], A_ub=np.block([[columns, -ones], [-columns, -ones]]), b_ub=bound, bounds=[(None, None)] * 5, method="highs"
    ).x[:4]

    def residual(cubic: np.ndarray) -> np.ndarray:
        return (_newton(x, np.vander(x - 1, 4, increasing=True) @ cubic, 2) * np.sqrt(x) - 1) * 1e3

    best, weights = start, np.ones_like(x)
    for _ in range(30):  # Lawson's re-weighting turns least squares into the least largest error
        start = least_squares(lambda cubic, w=weights: residual(cubic) * w, start).x
        errors = np.abs(residual(start))
        best = min(best, start, key=lambda cubic: np.abs(residual(cubic)).max())
        weights = np.sqrt(weights**2 * (errors / errors.max() + 0.02))
    return tuple(best.tolist())


def _parts(u: Any) -> tuple[Any, Any]:
    """The integer part of u, an integer, and the fraction: floor by one shift of the ring element, so on SPU only."""
    whole = as_ring(u) >> FRACTION_BITS
    return whole, u - as_real(whole << FRACTION_BITS).astype(u.dtype)


def _power(bits: Sequence[Any], dtype: Any) -> Any:
    """2^-n of an integer n from its bits, the low one first: a small table a bit, and their product."""
    factors = [1.0 + bit.astype(dtype) * (2.0 ** -(2**i) - 1.0) for i, bit in enumerate(bits)]
    while len(factors) > 1:
        pairs = [a * b for a, b in zip(factors[::2], factors[1::2], strict=False)]
        factors = pairs + factors[2 * len(pairs) :]
    return factors[0]


def _fraction(f: Any) -> Any:
    """2^f on [0, 1) by a cubic through Chebyshev's points."""
    cubic = np.polynomial.Chebyshev.interpolate(np.exp2, 3, (0, 1)).convert(kind=np.polynomial.Polynomial).coef
    square = f * f
    return jnp.stack([f, square, square * f], axis=-1) @ jnp.asarray(cubic[1:], f.dtype) + float(cubic[0])


def exponential(x: Any) -> Any:
    """exp of either sign in [-18, 4]: with u below 0 the bits of its integer part, turned, are those of a power's exponent."""
    whole, fraction = _parts(x * _LOG2_E - _ABOVE)
    power = _power([((whole >> i) & 1) ^ 1 for i in range(_BITS)], x.dtype)
    return power * (_fraction(fraction) * 2.0 ** (_ABOVE - 1))


def silu(x: Any) -> Any:
    """x over 1 + 2^u, u = -x log2 e, |x| < 16: where u >= 0 both terms are divided by 2^integer part, so that none overflows; the
    sum then lies in [1, 3), and a quadratic start and one Newton step invert it."""
    whole, fraction = _parts(x * -_LOG2_E)
    negative = (whole >> 63) & 1
    size = _power([((whole >> i) & 1) ^ negative for i in range(_BITS)], x.dtype)  # of the integer part, or of its complement
    sign = negative.astype(x.dtype)
    rest = 1.0 - sign
    raised = _fraction(fraction)
    one = sign + size * rest
    total = one + raised * (rest + 0.5 * (size * sign))
    y = jnp.stack([total, total * total], axis=-1) @ jnp.asarray(_QUADRATIC[1:], x.dtype) + _QUADRATIC[0]
    return x * (one * (y * (2 - total * y)))


def reciprocal(x: Any, low: float, high: float) -> Any:
    """The most significant bit by comparisons with every power of two in [low, high], a quadratic start, two Newton steps."""
    edges = 2.0 ** np.arange(np.ceil(np.log2(low)), np.floor(np.log2(high)) + 1)
    below = x < jnp.asarray(edges, x.dtype)[:, None]
    inverses = 0.5 / edges
    steps = inverses - np.append(inverses[1:], 0.5 * inverses[-1])
    factor = 0.5 * float(inverses[-1]) + jnp.sum(jnp.where(below, jnp.asarray(steps, x.dtype)[:, None], 0.0), axis=0)
    z = x * factor  # in [1/2, 1)
    y = jnp.stack([z, z * z], axis=-1) @ jnp.asarray(_HALF_QUADRATIC[1:], x.dtype) + _HALF_QUADRATIC[0]
    for _ in range(2):
        y = y * (2 - z * y)
    return y * factor


def _quadratic(low: float, high: float) -> tuple[float, ...]:
    """The quadratic of the least relative error to 1 / x."""
    x = np.linspace(low, high, 2001)
    columns, ones = np.vander(x, 3, increasing=True) * x[:, None], np.ones((len(x), 1))
    bound = np.concatenate([np.ones(len(x)), -np.ones(len(x))])
    matrix = np.block([[columns, -ones], [-columns, -ones]])
    return tuple(linprog([0, 0, 0, 1], A_ub=matrix, b_ub=bound, bounds=[(None, None)] * 4, method="highs").x[:3].tolist())


_QUADRATIC = _quadratic(1.0, 3.0)
_HALF_QUADRATIC = _quadratic(0.5, 1.0)
