"""Ring integers and SPU's own fixed-point numbers: what the stock meanings of the primitives stand on.

SPU holds a real x as round(x * 2^f). A bitcast between float64 and int64 is free there and gives that integer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

FRACTION_BITS = 18
"""SPU's own f that the stock meanings assume; programs compiled for them must run with `fxp_fraction_bits` = 18."""

_STEP = 16


def as_ring(x: jax.Array) -> jax.Array:
    """The ring integer that holds a real."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.float64), jnp.int64)


def as_real(raw: jax.Array) -> jax.Array:
    """The real that a ring integer holds."""
    return jax.lax.bitcast_convert_type(raw, jnp.float64)


def to_real(raw: jax.Array, bits: int) -> jax.Array:
    """The number raw / 2^bits as an SPU real; one SPU truncation where the scales differ."""
    if bits == FRACTION_BITS:
        return as_real(raw)
    if bits < FRACTION_BITS:
        return as_real(raw * (1 << (FRACTION_BITS - bits)))
    return as_real(shifted(raw, bits - FRACTION_BITS))


def to_raw(x: jax.Array, bits: int) -> jax.Array:
    """An SPU real as a ring integer of `bits` fraction bits; finer than f by zeros, coarser by a truncation."""
    if bits >= FRACTION_BITS:
        return as_ring(x) * (1 << (bits - FRACTION_BITS))
    return shifted(as_ring(x), FRACTION_BITS - bits)


def shifted(raw: Any, shift: int) -> Any:
    """raw >> shift by SPU's truncation: products of fixed-point numbers with 2^-step, steps of at most 16 bits.

    Right for |raw| < 2^(44 + min(shift, 16)), as tried on all three protocols; products with 2^-17 and less wrap at 2^46 already.
    A product rounds by chance, so that its mean is right. One is added between steps, far less than a unit of the result, because
    two products without an addition between become one with 2^-shift.
    """
    step = min(shift, _STEP)
    while step > 0:
        raw = as_ring(as_real(raw) * 2.0**-step)
        shift -= step
        step = min(shift, _STEP)
        raw = raw + min(step, 1)
    return raw
