"""One number of a row at a secret place, where the row is opened for something else in the same message anyway.

The row is c = x - r for public c, and the place i = d + m for public d and the dealer's r and m. x_i is c_i + r_i: of c the
shared one-hot of i takes its part, which is local as c is public; of r the dealer shares the row turned by m, so that its entry
at the public d is r_i. So the place itself is all that is sent: 8 bytes, where a product with a one-hot that the client shares
takes 16 an element of the row. 1 round, exact.

Dealer: 8 bytes an element of the row (the next power of two), and the key of a one-hot, 2 x (16.125 (log2 n - 2) + 32) bytes.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from .base import define
from .compare import pick
from .dealing import Dealing, Request, Value
from .fixed import Fixed
from .select import rotated_one_hot


def entry(x: Fixed, place: Fixed) -> Fixed:
    """x [..., n] at secret integers `place` [...] in [0, n): [...]. 1 round, which opens x and `place`: 8 bytes an element."""
    if place.bits or (1 << place.modulus) < x.shape[-1] or place.shape != x.shape[:-1]:
        raise ValueError(f"places {place.shape} with {place.bits} fraction bits in rows {x.shape}; give one whole number a row")
    return x.with_raw(entry_p.bind(x.raw, place.raw))


def _plain(x: Any, place: Any) -> Any:
    return jnp.take_along_axis(x, place[..., None], axis=-1, mode="clip")[..., 0]


def _stock(x: Any, place: Any) -> Any:
    return jnp.sum(x * (place[..., None] == jnp.arange(x.shape[-1])).astype(jnp.int64), -1)


def _dealer(dealing: Dealing, x: Value, place: Value) -> Generator[Request, None, Any]:
    dealing.request(x, place)
    row = yield from dealing.opened(x)
    at = yield from dealing.opened(place)
    n = row.public.shape[-1]
    period = 1 << (n - 1).bit_length()
    hot = yield from rotated_one_hot(dealing, place, n)
    turned = dealing.recorder.derive(partial(_turned, period=period), row.hidden, at.hidden)
    hidden = pick(turned.share[..., None], at.public & (period - 1))[..., 0]
    return jnp.sum(row.public * hot, -1) + hidden


def _turned(row: np.ndarray, place: np.ndarray, period: int) -> np.ndarray:
    """row [..., n] filled up to [..., period] and turned so that its entry k comes to k - place."""
    filled = np.zeros((*row.shape[:-1], period), np.int64)
    filled[..., : row.shape[-1]] = row
    return np.take_along_axis(filled, np.arange(period) + place[..., None] & (period - 1), -1)


def _batch(args: tuple, axes: tuple) -> tuple[Any, int]:
    size = next(arg.shape[axis] for arg, axis in zip(args, axes, strict=True) if axis is not None)
    rows = (
        jnp.broadcast_to(arg, (size, *arg.shape)) if axis is None else jnp.moveaxis(arg, axis, 0)
        for arg, axis in zip(args, axes, strict=True)
    )
    return entry_p.bind(*rows), 0


entry_p = define("entry", _plain, _stock, _dealer, _batch, eager=True)
