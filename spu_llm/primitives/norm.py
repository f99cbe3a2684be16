"""RMS norm fused with the dot that follows it: both stand on one opening of the activations.

y = (x @ W) / rms(x): the norm's scale is applied after the dot, its gain is folded into W, and for a layer norm the mean is
folded into whatever writes x (centred rows), so that x comes centred. 3 rounds: x; the sum of squares; its inverse root
together with x @ W. 8 bytes for each element of x and y and 16 for each row.

phi, a secret of the weights' owner, brings the mean square of phi x near 1, whatever the layer, so that a narrow table serves
it; it cancels, as the kernel holds phi W. (SOAL, ICLR 2026: gain * phi x / sqrt(mean((phi x)^2) + epsilon).)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

import jax
import numpy as np

from ..dealer.plan import continue_from
from ..dealer.table import Table
from .contract import contract
from .fixed import Fixed
from .lookup import lookup
from .scale import scale
from .squares import weighted_squares


@dataclass(frozen=True)
class NormPlan:
    """Scales of a fused norm, whose sum of squares is taken of phi * x for a secret phi (SOAL, "scaling").

    root: table of 1 / rms over phi^2 times the sum of squares; epsilon: added to the mean square. activation_bits: of x before
    the dot; square_bits: of x for its squares; output_bits, root_bits: of x @ W and of the inverse root before their product.
    """

    root: Table
    epsilon: float = 0.0
    activation_bits: int = 14
    square_bits: int = 9
    output_bits: int = 13
    root_bits: int = 15

    def weight_bits(self, stream_bits: int) -> int:
        """Fraction bits of phi^2, so that the table's period fits what is left of the ring when x is opened for its squares.

        Squares have 2 square_bits + weight_bits fraction bits, modulo 2^(64 - stream_bits + square_bits); a lookup leaves 2.
        """
        return 62 - stream_bits - self.square_bits - self.root.width_bits - self.root.depth


def encode_phi(phi: float, bits: int) -> np.ndarray:
    """phi^2 in the ring, at least one unit: int64 []. Whoever multiplies weights by phi takes it from here (`rounded_phi`)."""
    return np.asarray(max(1, round(phi**2 * 2.0**bits)), np.int64)


def rounded_phi(phi: float, bits: int) -> float:
    """The phi whose square the ring holds: the norm is exact for it, since phi cancels."""
    return float((encode_phi(phi, bits) * 2.0**-bits) ** 0.5)


def norm_dot(x: Fixed, kernel: Fixed, plan: NormPlan, weight: Fixed) -> Fixed:
    """x [n, width] (centred), kernel [width, m] holding phi W -> [n, m], output_bits + root_bits fraction bits, whole ring.

    `weight` is phi^2, a secret scalar of `plan.weight_bits` fraction bits. The table must cover the weighted sums of squares.
    """
    y = contract("nk,km->nm", x, kernel, plan.activation_bits)
    return scale(y, inverse_root(x, plan, weight), plan.output_bits, plan.root_bits)


def normalised(x: Fixed, plan: NormPlan, weight: Fixed) -> Fixed:
    """x / rms(phi x) without a dot: the same rounds and scales."""
    return scale(x, inverse_root(x, plan, weight), plan.output_bits, plan.root_bits)


def inverse_root(x: Fixed, plan: NormPlan, weight: Fixed) -> Fixed:
    """1 / rms(phi x) of each row: [n, 1]. The sum of squares and a lookup: 2 rounds."""
    squares = weighted_squares(x, weight, plan.square_bits, plan.epsilon * x.shape[-1])
    return lookup(squares, plan.root, modulus=64).reshape(-1, 1)


def root_table(width: int, low: float, high: float, segments: int, degree: int = 3) -> Table:
    """1 / sqrt(s / width) for sums of squares s of `width` numbers whose mean is in [low, high]."""
    width_bits = ceil(log2(width * high / (segments - 1)))

    def root(s: np.ndarray) -> np.ndarray:
        return 1.0 / np.sqrt(s / width)

    def stock(s: jax.Array) -> jax.Array:
        return jax.lax.rsqrt(s * (1.0 / width))

    span = low * width, 2.0**width_bits * (segments - 1)
    return Table(continue_from(root, span, 2.0**width_bits, degree), stock, 0.0, segments, width_bits, degree, bits=16)
