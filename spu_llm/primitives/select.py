"""Rows of a table at secret places: a one-hot of the index by one opening, then a contraction with the table.

c = index - mask is opened (8 bytes). The dealer shares the one-hot of the mask modulo 2^d, a power of two that holds the
rows, as a distributed point function of about 16 d bytes to each party; rotated by the public c it is the one-hot of the
index, which is local. The product with the table opens the one-hot: 8 bytes a row of the table for each index.

For a table [256, 64] that is an operand: 2 messages and 2 KB an index, 0.8 KB of dealer bytes, 1.3 ms online, 1.5 ms offline.
"""

from __future__ import annotations

from collections.abc import Generator
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .base import define
from .contract import contract
from .dealing import Dealing, Request, Value
from .fixed import Fixed

_SLICES = 64  # from this length on a row is rotated by a slice of its own, before by its bits for all rows at once (measured)


def one_hot(index: Fixed, size: int) -> Fixed:
    """Secret integers [...] in [0, size) as rows [..., size] of zeros with a 1 at that place. 1 round, 8 bytes an index."""
    if index.bits or (1 << index.modulus) < size:
        raise ValueError(f"an index with {index.bits} fraction bits, modulo 2^{index.modulus}: not one of {size} places")
    shape = (*index.shape, size)
    return Fixed(one_hot_p.bind(index.raw, size=size) if prod(shape) else jnp.zeros(shape, jnp.int64), 0)


def select(table: Fixed, index: Fixed) -> Fixed:
    """table [n, ...] at secret integers `index` in [0, n), of any shape: [*index, ...]. 2 rounds.

    8 + 8 n bytes an index, and 8 an element of the table unless it is an operand or was opened before.
    """
    letters = "abcdefg"[: len(table.shape) - 1]
    found = contract(f"in,n{letters}->i{letters}", one_hot(index.reshape(-1), table.shape[0]), table)
    return found.reshape(*index.shape, *table.shape[1:])


def embed(table: Fixed, ids: Fixed) -> Fixed:
    """Rows of a large operand `table` [blocks, b, width] at secret `ids` [n, 2], each a block and a row in it: [n, width].

    3 rounds, 16 + 8 (blocks + b + b * width) bytes an id, against 8 blocks * b with a single one-hot. Least for
    b = sqrt(rows / width): 100 KB for 50,000 rows of 768. Of the dealer 8 (b + 1) width bytes an id, mostly.
    """
    blocks, rows, _ = table.shape
    found = contract("ik,kbd->ibd", one_hot(ids[:, 0], blocks), table)
    return contract("ib,ibd->id", one_hot(ids[:, 1], rows), found)


def block_rows(rows: int, width: int) -> int:
    """Rows b a block for which `embed` sends least."""
    return max(1, round((rows / width) ** 0.5))


def in_blocks(table: np.ndarray, rows: int) -> np.ndarray:
    """A table [n, width] as `embed` takes it: [blocks, rows, width], filled up with zeros."""
    return np.pad(table, ((0, -len(table) % rows), (0, 0))).reshape(-1, rows, table.shape[1])


def split_ids(ids: np.ndarray, rows: int) -> np.ndarray:
    """Ids [n] as `embed` takes them, by whoever knows them."""
    return np.stack(np.divmod(ids, rows), -1)


def rotated_one_hot(dealing: Dealing, index: Value, size: int) -> Generator[Request, None, Any]:
    """Shares of the one-hot rows [..., size] of an index: the mask's one-hot, moved up by the opened difference."""
    opened = yield from dealing.opened(index)
    period = 1 << (size - 1).bit_length()
    rows = dealing.recorder.one_hot(lambda mask: mask & (period - 1), period, opened.hidden).share
    flat = _rotated(rows.reshape(-1, period), opened.public.reshape(-1) & (period - 1))
    return flat[:, :size].reshape(*opened.public.shape, size)


def _rotated(rows: Any, places: Any) -> Any:
    """rows [n, N], each moved up cyclically by its public place in [0, N)."""
    period = rows.shape[1]
    if period < _SLICES:
        for bit in range(period.bit_length() - 1):
            moved = jnp.roll(rows, 1 << bit, axis=1)
            rows = rows + (jnp.right_shift(places, bit) & 1)[:, None] * (moved - rows)
        return rows
    twice = jnp.concatenate([rows, rows], 1)
    start = (period - places).astype(jnp.uint64)  # unsigned: no code for negative ones
    slices = [jax.lax.dynamic_slice(twice[i], (start[i],), (period,)) for i in range(len(rows))]
    # In parts, and not of one axis, so that they stay apart: a concatenation of a hundred would not be proven local.
    return jnp.concatenate([jnp.concatenate(slices[i : i + 64]).reshape(-1, period) for i in range(0, len(slices), 64)])


def _plain(index: Any, *, size: int) -> Any:
    return (index[..., None] == np.arange(size)).astype(jnp.int64)


def _dealer(dealing: Dealing, index: Value, *, size: int) -> Generator[Request, None, Any]:
    return (yield from rotated_one_hot(dealing, index, size))


def _batch(args: tuple, axes: tuple, *, size: int) -> tuple[Any, int]:
    return one_hot_p.bind(args[0], size=size), axes[0]


one_hot_p = define("one_hot", _plain, _plain, _dealer, _batch)
