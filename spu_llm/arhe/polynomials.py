"""Polynomials in place of functions: degrees known before the run, coefficients and domains from calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.polynomial import chebyshev, polynomial

from ..errors import UserError

_LARGEST = {3: 5, 4: 13, 5: 27, 6: 59, 7: 119, 8: 247}
"""Levels: the largest degree that OpenFHE evaluates in so many, on [-1, 1]."""

STEEP = polynomial.Polynomial(np.array([0, 5850, 0, -34974, 0, 97015, 0, -113492, 0, 46623]) / 2**10)
"""g4 of Cheon et al. (ASIACRYPT 2020): odd, maps [-1, 1] into itself, slope 5.7 at 0: parts small values."""
FLAT = polynomial.Polynomial(np.array([0, 315, 0, -420, 0, 378, 0, -180, 0, 35]) / 2**7)
"""f4 of the same: flat at -1 and 1: brings parted values to them."""


def series_depth(degree: int) -> int:
    """Levels that a Chebyshev series of this degree takes. Raises UserError for degrees that no table covers."""
    for depth, largest in _LARGEST.items():
        if 1 <= degree <= largest:
            return depth
    raise UserError(f"degree {degree}: polynomials have degrees from 1 to {max(_LARGEST.values())}; give another degree")


@dataclass(frozen=True)
class Degrees:
    """Degrees of the polynomials, and how many steep and flat parts a sign is composed of: known before any run.

    `squarings`: exp(x) is a polynomial for exp(x / 2^squarings), squared so often. Of CutMax (cutmax.py): squarings of each `cuts`
    and `shares` round, the degrees of their factors, and the sign's parts.
    """

    inverse_root: int = 27
    exponential: int = 13
    squarings: int = 2
    reciprocal: int = 59
    activation: int = 27
    steep: int = 3
    flat: int = 2
    cuts: tuple[int, ...] = (3, 4)
    shares: tuple[int, ...] = (5, 2, 2)
    cut_factor: int = 27
    share_factor: int = 119
    cut_steep: int = 0
    cut_flat: int = 2

    def __post_init__(self) -> None:
        """Raise UserError for degrees out of range."""
        for name in ("inverse_root", "exponential", "reciprocal", "activation", "cut_factor", "share_factor"):
            series_depth(getattr(self, name))
        for name in ("squarings", "steep", "flat", "cut_steep", "cut_flat"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}; give a number of 0 or more")
        if min(self.steep + self.flat, self.cut_steep + self.cut_flat) < 1:
            raise UserError("a sign of no polynomial; give steep or flat parts")
        if not self.shares or min(*self.cuts, *self.shares, 1) < 1:
            raise UserError(f"cuts {self.cuts}, shares {self.shares}: give one share at least, and squarings of 1 or more")


@dataclass(frozen=True)
class Series:
    """A Chebyshev series for a function on [low, high]; `coefficients` are for (x - middle) / half, which lies in [-1, 1].

    The change to [-1, 1] is folded into the linear map before it, so it costs no level.
    """

    coefficients: np.ndarray
    low: float
    high: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return chebyshev.chebval((x - self.middle) / self.half, self.coefficients)

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2

    @property
    def middle(self) -> float:
        return (self.high + self.low) / 2


def fit(function: Callable[[np.ndarray], np.ndarray], low: float, high: float, degree: int) -> Series:
    """The Chebyshev interpolant of a function on [low, high]: within a logarithmic factor of the best polynomial."""
    half, middle = (high - low) / 2, (high + low) / 2
    return Series(chebyshev.chebinterpolate(lambda u: function(middle + half * u), degree), low, high)


def fit_reciprocal(low: float, high: float, degree: int) -> Series:
    """The polynomial p nearest to 1 / x on [low, high], low > 0, in relative error: 1 - x p(x) is a Chebyshev polynomial there."""
    half, middle = (high - low) / 2, (high + low) / 2
    top = np.eye(1, degree + 2, degree + 1)[0]

    def value(u: np.ndarray) -> np.ndarray:
        return (1 - chebyshev.chebval(-u, top) / chebyshev.chebval(middle / half, top)) / (middle + half * u)

    return Series(chebyshev.chebinterpolate(value, degree), low, high)


def sign_series(degrees: Degrees) -> list[np.ndarray]:
    """Chebyshev coefficients of the sign's parts in their order: steep ones, then flat ones."""
    return [chebyshev.poly2cheb(part.coef) for part in [STEEP] * degrees.steep + [FLAT] * degrees.flat]
