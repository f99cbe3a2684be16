"""Proof for the client that values stayed in their ranges: one opened element for all lookups of a program.

A value was opened as c = x - r by some protocol; nothing more is opened for it here. Move x to [0, 2^b), let u = -r, cut both
to x's modulus m and let z = (c >> b) - (u >> b), plus 2^(m - b) if u has its top bit and c has not. If x is in range, z is 0
or, by a borrow, 1, and z^2 - z is 0. The dealer draws odd weights w that nobody else knows and shares w and its products with
what it knows of u: in these the sum of w (z^2 - z) is linear, so it is local. It is 0 if all values are in range. If not, it
tells how many twos divide it, and nothing else.

What 0 proves: every value was in (low - 2^b, low + 2 * 2^b), up to multiples of 2^m. A single one outside is always reported,
and several at once but for a chance of about 2^-30. Within that margin of one width on each side a value is reported with a
chance that grows with its distance from the range: so a table must cover the margins. And x being known modulo 2^m only,
multiples of 2^m must be impossible for other reasons. What is in range is never reported.

No rounds and no bytes of its own; the client is sent 8 bytes a program. Dealer: 12 bytes an element, 4 or 8 where m - b is
32 or more (there the top bits are not needed), half of it to each party over a program. 1,000 elements take about 1 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import jax.numpy as jnp
import numpy as np

from .base import define
from .dealing import RING, Dealing, Request, Value, logical_shift
from .fixed import Fixed

STRENGTH = 32  # bits of the sum, at least: two values out of range cancel out with a chance of 2^(2 - bits)


def out_of_range(x: Fixed, low: float, width_bits: int) -> Fixed:
    """0 if all of x is in [low, low + 2^width_bits): a number for the client alone; see above for what it proves.

    It shares the opening of the protocol that x goes into. Add those of a program up and give the client nothing but the sum.
    In plaintext and on stock SPU it is the number of values out of range, with no margin.
    """
    b = x.bits + width_bits
    if not 0 <= b <= x.modulus - 2:
        raise ValueError(f"a range of 2^{b} units cannot be checked modulo 2^{x.modulus}; use 2^0 to 2^{x.modulus - 2}")
    if not x.raw.size:
        return Fixed(jnp.zeros((), jnp.int64), 0)
    return Fixed(out_of_range_p.bind(x.raw, low=round(low * (1 << x.bits)), b=b, modulus=x.modulus, kept=0), 0)


def violation(dealing: Dealing, value: Value, low: int, b: int, modulus: int, kept: int = 0) -> Generator[Request, None, Any]:
    """A share of 0 if all of a value, known modulo 2^modulus, is in [low, low + 2^b): for protocols that open it anyway.

    Add these up too, over a program. Needs b <= modulus - 2. One number for each entry of the first `kept` axes.
    """
    opened = yield from dealing.opened(value, 0, modulus)
    axes = tuple(range(kept, len(value.shape)))
    z_bits = modulus - b
    strength = max(z_bits, STRENGTH)
    half = dealing.recorder.uniform(opened.hidden.shape)
    weight = dealing.recorder.follow(lambda words: words << 1 | 1, 2 * half.share + 1, half)

    def dealt(make: Callable, bits: int = strength) -> Any:
        """What `make` gives for w, u >> b and the top bit of u."""

        def made(w: np.ndarray, r: np.ndarray) -> np.ndarray:
            u = np.asarray(_low_bits(-r, modulus))
            with np.errstate(over="ignore"):  # numpy warns of it in scalars only
                return make(w, logical_shift(u, b), logical_shift(u, modulus - 1))

        return dealing.recorder.derive(made, weight, opened.hidden, modulus=bits).share

    c = _low_bits(opened.public - low, modulus)
    top = logical_shift(c, b)
    total = (top * top - top) * weight.share - 2 * top * dealt(lambda w, u, sign: w * u)
    if z_bits < strength:
        wrap, flag = 1 << z_bits, 1 - logical_shift(c, modulus - 1)
        by_sign, by_both = dealt(lambda w, u, sign: w * sign), dealt(lambda w, u, sign: w * u * sign)
        total = total + flag * wrap * (2 * top + wrap - 1) * by_sign - flag * (2 * wrap) * by_both
    squares = dealt(lambda w, u, sign: np.sum(w * (u * u + u), axes), RING)
    return (jnp.sum(total, axes) + squares) * (1 << (RING - strength))


def _low_bits(x: Any, bits: int) -> Any:
    return x if bits == RING else x & ((1 << bits) - 1)


def _plain(x: Any, *, low: int, b: int, modulus: int, kept: int) -> Any:
    outside = (x < low).astype(jnp.int64) + (x >= low + (1 << b)).astype(jnp.int64)
    return jnp.sum(outside, tuple(range(kept, x.ndim)))


def _dealer(dealing: Dealing, x: Value, *, low: int, b: int, modulus: int, kept: int) -> Generator[Request, None, Any]:
    return (yield from violation(dealing, x, low, b, modulus, kept))


def _batch(args: tuple, axes: tuple, *, kept: int, **params: Any) -> tuple[Any, int]:
    return out_of_range_p.bind(jnp.moveaxis(args[0], axes[0], 0), kept=kept + 1, **params), 0


out_of_range_p = define("out_of_range", _plain, _plain, _dealer, _batch)
