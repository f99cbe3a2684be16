"""Sums of squares times a secret weight, on one opening of each: what a norm needs whose scale is secret too.

For x = E + R and the weight w = e + b, E and e public, E and R of one row summed over its elements:
w sum(x^2) = w sum(E^2) + 2 sum(E (e R + b R)) + e sum(R^2) + b sum(R^2), where the dealer shares b R, sum(R^2) and b sum(R^2).
1 round; 8 bytes an element of x that was not opened before, none for a weight that was; dealer: 8 bytes an element of x, as many
again where x is truncated as it is opened, and 16 a row.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jax.numpy as jnp
import numpy as np

from .base import define
from .dealing import Dealing, Request, Value
from .fixed import Fixed, dropped
from .stock import shifted


def weighted_squares(x: Fixed, weight: Fixed, bits: int, added: float = 0.0) -> Fixed:
    """weight * (sum of x^2 over the last axis + added): x [..., width], weight a scalar, `added` public -> [...].

    x is rounded down to `bits` fraction bits as it is opened; the result has 2 * bits + weight.bits of them. 1 round.
    """
    shift = dropped(x, bits)
    raw = squares_p.bind(x.raw, weight.raw, shift=shift, modulus=x.modulus, added=round(added * 4.0**bits))
    return Fixed(raw, 2 * bits + weight.bits, x.modulus - shift)


def _plain(x: Any, weight: Any, *, shift: int, modulus: int, added: int) -> Any:
    return weight * (jnp.sum(jnp.square(x >> shift), -1) + added)


def _stock(x: Any, weight: Any, *, shift: int, modulus: int, added: int) -> Any:
    return weight * (jnp.sum(jnp.square(shifted(x, shift)), -1) + added)


def _dealer(dealing: Dealing, x: Value, weight: Value, *, shift: int, modulus: int, added: int) -> Generator[Request, None, Any]:
    dealing.request(x, weight)
    a = yield from dealing.opened(x, shift, modulus)
    w = yield from dealing.opened(weight)
    derive = dealing.recorder.derive
    crossed = derive(np.multiply, a.hidden, w.hidden)
    squares = derive(lambda r: np.sum(np.square(r), -1), a.hidden)
    weighted = derive(lambda r, b: b * np.sum(np.square(r), -1), a.hidden, w.hidden)
    mixed = jnp.sum(a.public * (w.public * a.hidden.share + crossed.share), -1)
    return w.share * (jnp.sum(jnp.square(a.public), -1) + added) + 2 * mixed + w.public * squares.share + weighted.share


def _batch(args: tuple, axes: tuple, **params: Any) -> tuple[Any, int]:
    """Rows are independent: a batch of them is one more leading axis. One weight serves all."""
    if axes[1] is not None:
        raise ValueError("weighted_squares takes one weight for a whole batch; loop over weights")
    return squares_p.bind(jnp.moveaxis(args[0], axes[0], 0), args[1], **params), 0


squares_p = define("squares", _plain, _stock, _dealer, _batch, eager=True)
