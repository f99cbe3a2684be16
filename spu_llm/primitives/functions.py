"""Tables of the functions that models use, with tails, so that a wide range costs a period only."""

from __future__ import annotations

from math import ceil, log2

import jax
import numpy as np
from scipy import special

from ..dealer.table import ExponentialTable, Table


def gelu(low: float = -8.0, segments: int = 64, approximate: bool = False) -> Table:
    """GELU, exact or (`approximate`) by tanh, by segments of width 1 / 4."""

    def exact(x: np.ndarray) -> np.ndarray:
        return x * special.ndtr(x)

    def by_tanh(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))

    function = by_tanh if approximate else exact
    return Table(function, lambda x: jax.nn.gelu(x, approximate), low, segments, -2, 2, place_bits=11)


def silu(low: float = -20.0, segments: int = 64) -> Table:
    """x * sigmoid(x), by segments of width 2 / 3."""
    return Table(lambda x: x * special.expit(x), jax.nn.silu, low, segments, 1, 3, place_bits=11, factor=3)


def exponential(low: float, largest: float, segments: int = 64, width_bits: int = 0, degree: int = 5) -> Table:
    """exp from `low` on, cut at exp(largest): a bound that keeps values small and softmax sums within their table."""
    return ExponentialTable(np.exp, jax.numpy.exp, low, segments, width_bits, degree, bits=12, place_bits=12, largest=largest)


def reciprocal(low: float, high: float, segments: int = 256, degree: int = 2) -> Table:
    """1 / x on [0, high]; constant below `low`."""
    width = ceil(log2(high / (segments - 1)))
    return Table(lambda x: 1 / np.maximum(x, low), lambda x: 1.0 / x, 0.0, segments, width, degree)


def twice_log(segments: int, width_bits: int) -> Table:
    """2 log x from 0 on; constant below half a segment."""
    least = 2.0 ** (width_bits - 1)

    def log(x: np.ndarray) -> np.ndarray:
        return 2 * np.log(np.maximum(x, least))

    return Table(log, lambda x: 2 * jax.numpy.log(x), 0.0, segments, width_bits, 2)


def power_of_two(segments: int, width_bits: int) -> Table:
    """A power of two near 1 / x for each segment from 0 on, so that x times it lies in [0.5, 2] above the first one."""
    width = 2.0**width_bits

    def power(x: np.ndarray) -> np.ndarray:
        return 2.0 ** -np.round(np.log2(np.maximum(x, width)))

    return Table(power, lambda x: jax.numpy.exp2(-jax.numpy.round(jax.numpy.log2(x))), 0.0, segments, width_bits, 0)
