"""A smooth function of one secret number by a chain of squarings, in plain JAX: no comparison, no division, no dealer.

y_0 = scale x + shift and y_i = y_(i-1)^2 + constants[i-1]; the result is the last y, or a public weighted sum of them all: a
polynomial of degree 2^k whose 2 k + 3 coefficients are fitted to one range (`fit.py`). Ours; the iteration (1 + x / 2^k)^(2^k) of
CrypTen's exponential is the member with all constants 0. It diverges outside its range, so the range must be known: that is what
narrowing provides (SOAL, ICLR 2026).

SEMI2K: 2 messages and 20 bytes a squaring, 1 message and 4 bytes for the scale and for the weights. ABY3: 3 messages, 20 bytes;
2 messages, 12 bytes. CHEETAH: 2 messages and 19 bytes, and for its triple about 157 bytes made in batches; 1 message, 3 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True)
class Chain:
    """A function on [low, high]. `weights`, of y_0 to y_k, may be empty: then the result is y_k.

    `error` is the largest one over the range, absolute, or relative where the function's file says so, in real arithmetic.
    All coefficients are multiples of 2^-18, so that SPU holds them exactly.
    """

    low: float
    high: float
    scale: float
    shift: float
    constants: tuple[float, ...]
    weights: tuple[float, ...] = ()
    offset: float = 0.0
    error: float = 0.0

    @property
    def levels(self) -> int:
        """Squarings, one after another."""
        return len(self.constants)


def evaluate(x: Any, chain: Chain) -> Any:
    """The function at each x."""
    values = squares(x, chain)
    return weighted(values, chain.weights) + chain.offset if chain.weights else values[-1]


def squares(x: Any, chain: Chain) -> list[Any]:
    """y_0 to y_k."""
    values = [(x if chain.scale == 1 else x * chain.scale) + chain.shift]
    for constant in chain.constants:
        values.append(values[-1] * values[-1] + constant)
    return values


def weighted(values: Sequence[Any], weights: Any) -> Any:
    """The sum of arrays times numbers: one truncation for all of them, where a product each would take one each."""
    return jnp.stack(values, axis=-1) @ jnp.asarray(weights, values[0].dtype)
