"""The functions that a user can name: what they are in numpy and in JAX, the range they are stated for, a planned table each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from scipy import special

from ..dealer.plan import Shape, table_of
from ..dealer.table import Table

MAX_ERROR = 6e-4
"""Every default table is within this on its range, whatever the mask."""


@dataclass(frozen=True, eq=False)
class NamedFunction:
    """A function in numpy and in `stock` JAX, and its default table on the range [low, high]."""

    numpy: Callable[[np.ndarray], np.ndarray]
    stock: Callable[[Any], Any]
    low: float
    high: float
    table: Table

    @property
    def span(self) -> tuple[float, float]:
        return self.low, self.high


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


# Shape(segments, width_bits, degree, factor, continued), bits, place_bits of the fewest dealer bytes, by
#     spu-llm plan-table --function NAME --low LOW --high HIGH --error 5.5e-4
# which leaves a tenth of MAX_ERROR for masks that were not drawn.
_PLANNED: dict[str, tuple[Callable, Callable, float, float, Shape, int, int]] = {
    "gelu": (lambda x: x * special.ndtr(x), partial(jax.nn.gelu, approximate=False), -8.0, 8.0, Shape(16, 3, 5, 7), 16, 16),
    "gelu_tanh": (_gelu_tanh, jax.nn.gelu, -8.0, 8.0, Shape(8, 4, 8, 7), 12, 16),
    "silu": (lambda x: x * special.expit(x), jax.nn.silu, -16.0, 16.0, Shape(16, 4, 6, 7), 14, 16),
    "sigmoid": (special.expit, jax.nn.sigmoid, -16.0, 16.0, Shape(16, 4, 5, 7), 13, 14),
    "tanh": (np.tanh, jax.numpy.tanh, -8.0, 8.0, Shape(32, 2, 4, 7), 12, 13),
    "exp": (np.exp, jax.numpy.exp, -16.0, 4.0, Shape(64, 0, 4, 3), 12, 16),
    "reciprocal": (lambda x: 1 / x, lambda x: 1.0 / x, 0.25, 16.0, Shape(128, -3, 5, 1, True), 12, 13),
    "rsqrt": (lambda x: 1 / np.sqrt(x), jax.lax.rsqrt, 0.0625, 8.0, Shape(256, -5, 4, 1, True), 15, 12),
    "erf": (special.erf, jax.lax.erf, -4.0, 4.0, Shape(8, 3, 6, 7), 12, 13),
    "softplus": (lambda x: np.logaddexp(x, 0), jax.nn.softplus, -16.0, 16.0, Shape(16, 4, 6, 7), 13, 13),
}

NAMED: dict[str, NamedFunction] = {
    name: NamedFunction(function, stock, low, high, table_of(shape, function, stock, (low, high), bits, place_bits))
    for name, (function, stock, low, high, shape, bits, place_bits) in _PLANNED.items()
}
