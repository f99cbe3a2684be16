"""Fixed-point numbers with their scale written on them, so that truncations are chosen, never implied."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

RING_BITS = 64


@struct.dataclass
class Fixed:
    """The real numbers raw / 2^bits. `raw` is an int64 array, right modulo 2^modulus only.

    Sums keep the scale, products add scales, and nothing truncates but `truncate` and what opens a value. A smaller
    modulus comes from truncation inside an opening; `lift` (a truncation of its own) brings back the whole ring.
    """

    raw: Any
    bits: int = struct.field(pytree_node=False)
    modulus: int = struct.field(pytree_node=False, default=RING_BITS)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.raw.shape)

    def with_raw(self, raw: Any) -> Fixed:
        """Other raw values of the same scale: for reshapes, transposes and slices."""
        return Fixed(raw, self.bits, self.modulus)

    def reshape(self, *shape: int) -> Fixed:
        return self.with_raw(self.raw.reshape(*shape))

    def __getitem__(self, index: Any) -> Fixed:
        return self.with_raw(self.raw[index])

    def at_bits(self, bits: int) -> Fixed:
        """The same numbers with more fraction bits: a local product."""
        if bits < self.bits:
            raise ValueError(f"{self.bits} fraction bits cannot become {bits} locally; use truncate")
        return Fixed(self.raw * (1 << (bits - self.bits)), bits, min(RING_BITS, self.modulus + bits - self.bits))

    def __add__(self, other: Fixed) -> Fixed:
        a, b = aligned(self, other)
        return Fixed(a.raw + b.raw, a.bits, min(a.modulus, b.modulus))

    def __sub__(self, other: Fixed) -> Fixed:
        a, b = aligned(self, other)
        return Fixed(a.raw - b.raw, a.bits, min(a.modulus, b.modulus))

    def times_integer(self, factor: Any) -> Fixed:
        """Product with public integers; the scale stays."""
        return self.with_raw(self.raw * factor)

    def sum(self, axis: int, keepdims: bool = False) -> Fixed:
        return self.with_raw(jnp.sum(self.raw, axis=axis, keepdims=keepdims))


def aligned(a: Fixed, b: Fixed) -> tuple[Fixed, Fixed]:
    """Both numbers at the finer of their scales."""
    bits = max(a.bits, b.bits)
    return a.at_bits(bits), b.at_bits(bits)


def dropped(x: Fixed, bits: int) -> int:
    """How many bits of x go when it is rounded down to `bits` fraction bits. ValueError where no sign would be left, or none go."""
    shift = x.bits - bits
    if not 0 <= shift <= x.modulus - 2:
        least = max(0, x.bits - x.modulus + 2)
        raise ValueError(f"{x.bits} fraction bits modulo 2^{x.modulus} cannot be rounded to {bits}; use {least} to {x.bits}")
    return shift


def encode(x: Any, bits: int) -> np.ndarray:
    """Real numbers as ring integers, rounded to nearest, on this machine. Raises ValueError where they do not fit 62 bits."""
    scaled = np.round(np.asarray(x, np.float64) * 2.0**bits)
    if scaled.size and not np.abs(scaled).max() < 2.0**62:
        raise ValueError(f"{np.abs(x).max():g} does not fit the ring with {bits} fraction bits; use fewer")
    return scaled.astype(np.int64)


def decode(raw: Any, bits: int) -> np.ndarray:
    """The inverse of `encode`."""
    return np.asarray(raw, np.int64) / 2.0**bits
