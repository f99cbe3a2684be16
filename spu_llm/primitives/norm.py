"""RMS norm fused with the dot that follows it: both stand on one opening of the activations.

y = (x @ W) / rms(x): the norm's scale is applied after the dot, its gain is folded into W, and for a layer norm the mean is
folded into whatever writes x (centred rows), so that x comes centred. 3 rounds: x; the sum of squares; its inverse root
together with x @ W. 8 bytes for each element of x and y and 16 for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Any

import jax
import numpy as np

from ..dealer.table import Table
from .contract import contract
from .fixed import Fixed
from .lookup import lookup
from .scale import scale

UNIT_BITS = 4
"""x is measured in a unit, so that one table serves every layer: 2^(UNIT_BITS / 2) at most, its square a power of two."""


@dataclass(frozen=True)
class NormPlan:
    """Scales of a fused norm.

    root: table of 1 / rms over the sum of squares of x / unit; activation_bits: of x before the dot; square_bits: of x for its
    squares, which are large; output_bits, root_bits: of x @ W and of the inverse root before their product.
    """

    root: Table
    activation_bits: int = 14
    square_bits: int = 10
    output_bits: int = 12
    root_bits: int = 16


def norm_dot(x: Fixed, kernel: Fixed, plan: NormPlan, unit: Any) -> Fixed:
    """x [n, width] (centred), kernel [width, m] holding W / unit -> [n, m], output_bits + root_bits fraction bits, whole ring.

    `unit` is the public integer 2^UNIT_BITS / unit^2. The table must cover the sums of squares (see `root_table`).
    """
    y = contract("nk,km->nm", x, kernel, plan.activation_bits)
    return scale(y, _inverse_root(x, plan, unit), plan.output_bits, plan.root_bits)


def normalised(x: Fixed, plan: NormPlan, unit: Any) -> Fixed:
    """x / rms(x / unit) without a dot: the same rounds and scales."""
    return scale(x, _inverse_root(x, plan, unit), plan.output_bits, plan.root_bits)


def _inverse_root(x: Fixed, plan: NormPlan, unit: Any) -> Fixed:
    squares = contract("nk,nk->n", x, x, plan.square_bits, plan.square_bits)
    squares = Fixed(squares.raw * unit, squares.bits + UNIT_BITS, squares.modulus)
    return lookup(squares, plan.root, modulus=64).reshape(-1, 1)


def unit_factor(unit: float) -> np.int64:
    """The public integer that `norm_dot` takes for a unit, whose square is a power of two up to 2^UNIT_BITS."""
    return np.int64(round(2.0**UNIT_BITS / unit**2))


def square_bits(root: Table, stream_bits: int) -> int:
    """Fraction bits of x for its squares so that a table's period fits what is left of the ring: 10 at most.

    Squares of b bits, in units, have 2 b + UNIT_BITS fraction bits, modulo 2^(64 - stream_bits + b); a lookup leaves 2 bits.
    """
    period = root.width_bits + root.depth
    return min(10, 62 - stream_bits - UNIT_BITS - period)


def root_table(width: int, low: float, high: float, epsilon: float = 0.0, segments: int = 4096) -> Table:
    """1 / sqrt(s / width + epsilon) for sums of squares s of `width` numbers whose mean is in [low, high]; constant below."""

    def root(s: np.ndarray) -> np.ndarray:
        return 1.0 / np.sqrt(np.maximum(s / width, low) + epsilon)

    def stock(s: jax.Array) -> jax.Array:
        return jax.lax.rsqrt(s * (1.0 / width) + epsilon)

    return Table(root, stock, 0.0, segments, ceil(log2(width * high / (segments - 1))), 3, bits=16)
