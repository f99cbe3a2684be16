"""Tables of the functions that models use, with tails, so that a wide range costs a period only."""

from __future__ import annotations

from math import ceil, log2

import jax
import numpy as np
from scipy import special

from ..dealer.table import Table


def gelu(low: float = -8.0, segments: int = 64, width_bits: int = -2, approximate: bool = False) -> Table:
    """GELU, exact or (`approximate`) by tanh."""

    def exact(x: np.ndarray) -> np.ndarray:
        return x * special.ndtr(x)

    def by_tanh(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))

    return Table(by_tanh if approximate else exact, lambda x: jax.nn.gelu(x, approximate), low, segments, width_bits, 3, place_bits=11)


def silu(low: float = -16.0, segments: int = 128, width_bits: int = -2) -> Table:
    """x * sigmoid(x)."""
    return Table(lambda x: x * special.expit(x), jax.nn.silu, low, segments, width_bits, 2)


def exponential(low: float, high: float, largest: float, segments: int = 128, degree: int = 3) -> Table:
    """exp on [low, high]; constant above `largest`, a bound that keeps the values small."""

    def saturated(x: np.ndarray) -> np.ndarray:
        return np.exp(np.minimum(x, largest))

    return Table(saturated, jax.numpy.exp, low, segments, ceil(log2((high - low) / (segments - 1))), degree)


def reciprocal(low: float, high: float, segments: int = 256, degree: int = 2) -> Table:
    """1 / x on [0, high]; constant below `low`."""
    width = ceil(log2(high / (segments - 1)))
    return Table(lambda x: 1 / np.maximum(x, low), lambda x: 1.0 / x, 0.0, segments, width, degree)
