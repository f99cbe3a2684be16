"""A growing operand: rows of a cache that are opened once, each under a mask of its own, and then serve every later dot.

The opened rows stay public, the shares of their masks stay with the parties. A row's mask comes from the run that wrote it,
never from its position: a rolled-back position gets a new one. Writing opens the new rows only (8 bytes an element).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from .base import define
from .dealing import Dealing, Opened, Request, Value
from .fixed import Fixed, dropped
from .stock import shifted

START = "start"
"""The public number that the dealer takes from a run: the position of its first new row."""


def append(cache: Fixed, rows: Fixed, start: jax.Array) -> Fixed:
    """`cache` [capacity, ...] with `rows` [n, ...] from position `start` (public) on, rounded down to the cache's bits. 1 round."""
    shift = dropped(rows, cache.bits)
    raw = append_p.bind(cache.raw, rows.raw, start, shift=shift, modulus=rows.modulus)
    return Fixed(raw, cache.bits, min(cache.modulus, rows.modulus - shift))


def seal(x: Fixed) -> Fixed:
    """x as an operand that later programs find opened, under a mask that only they and the dealer know. 1 round."""
    return x.with_raw(seal_p.bind(x.raw, modulus=x.modulus))


def first_rows(cache: Fixed, count: int) -> Fixed:
    """The first `count` rows of an operand, still opened. Local."""
    return cache.with_raw(first_rows_p.bind(cache.raw, count=count))


def _append_plain(cache: Any, rows: Any, start: Any, *, shift: int, modulus: int) -> Any:
    return jax.lax.dynamic_update_slice_in_dim(cache, rows >> shift, start, axis=0)


def _append_stock(cache: Any, rows: Any, start: Any, *, shift: int, modulus: int) -> Any:
    return jax.lax.dynamic_update_slice_in_dim(cache, shifted(rows, shift), start, axis=0)


def _append_dealer(
    dealing: Dealing, cache: Value, rows: Value, start: Value, *, shift: int, modulus: int
) -> Generator[Request, None, Value]:
    kept = yield from dealing.opened(cache)
    new = yield from dealing.opened(rows, shift, modulus)

    def write(old: Any, part: Any) -> Any:
        return jax.lax.dynamic_update_slice_in_dim(old, part, start.share, axis=0)

    hidden = dealing.recorder.follow(_write, write(kept.hidden.share, new.hidden.share), kept.hidden, new.hidden, publics=(START,))
    return Value.operand(Opened(write(kept.public, new.public), hidden))


def _write(cache: np.ndarray, rows: np.ndarray, start: int) -> np.ndarray:
    cache = cache.copy()
    cache[start : start + len(rows)] = rows
    return cache


def _seal_plain(x: Any, *, modulus: int) -> Any:
    return x


def _seal_dealer(dealing: Dealing, x: Value, *, modulus: int) -> Generator[Request, None, Value]:
    opened = yield from dealing.opened(x, 0, modulus)
    return Value.operand(opened)


def _first_plain(cache: Any, *, count: int) -> Any:
    return cache[:count]


def _first_dealer(dealing: Dealing, cache: Value, *, count: int) -> Generator[Request, None, Value]:
    kept = yield from dealing.opened(cache)
    hidden = dealing.recorder.follow(lambda rows: rows[:count], kept.hidden.share[:count], kept.hidden)
    return Value.operand(Opened(kept.public[:count], hidden))


def _refuse(args: tuple, axes: tuple, **params: Any) -> Any:
    raise NotImplementedError("vmap over a cache: put the batch among the row's own axes")


append_p = define("append", _append_plain, _append_stock, _append_dealer, _refuse)
first_rows_p = define("first_rows", _first_plain, _first_plain, _first_dealer, _refuse)
seal_p = define("seal", _seal_plain, _seal_plain, _seal_dealer)
