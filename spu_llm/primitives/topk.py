"""Which are the k largest of a row of secret numbers: ranks by comparing all pairs at once.

Each number is opened once (8 bytes). A pair's difference is then opened, too, under a mask that the dealer knows, so that a
comparison (compare.py) costs what comes after its first opening: 2 rounds, 16 bytes a pair. Adding up a number's lost
comparisons is local and gives its rank, 0 for the largest. One more opening (8 bytes a number) looks up whether that is below k;
the table may also hold the bit times a mask that the dealer knows, so the product of the bit with an opened value is free.

4 rounds and 8 (n^2 + n) bytes a row of n; up to 30 bits 3 rounds and about half of that. For 64 (256) numbers of 39 bits: 33
(526) KB, 0.7 (11) MB of dealer bytes to both parties together, 0.04 (0.3) s online and 0.02 (0.5) s offline on two cores. With
20 bits half the time: fewer bits are worth having.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Primitive

from .base import define
from .compare import negative, pick, sign_width
from .dealing import Dealing, Opened, Request, Value
from .fixed import Fixed


def top_k_mask(x: Fixed, k: int, bits: int | None = None) -> Fixed:
    """1 for the k largest numbers along the last axis, 0 for the others; of equal numbers the first ones are taken.

    Needs differences of raw values in (-2^bits, 2^bits), by default what x's modulus allows. 4 rounds.
    """
    if not 0 <= k <= x.shape[-1]:
        raise ValueError(f"the {k} largest of {x.shape[-1]} numbers; k must be between 0 and that")
    if k in (0, x.shape[-1]) or not x.raw.size:
        return Fixed(jnp.full(x.shape, int(k > 0), jnp.int64), 0)
    return Fixed(top_k_p.bind(x.raw, k=k, width=sign_width(x, bits), modulus=x.modulus), 0)


def keep_top_k(y: Fixed, x: Fixed, k: int, bits: int | None = None) -> Fixed:
    """y where x, of the same shape, is among its row's k largest, and 0 elsewhere: the product with `top_k_mask`, without a round.

    4 rounds, 8 bytes an element of y more. x is opened as it is, so that a lookup of x, which may give y, shares its opening.
    """
    if not 0 <= k <= x.shape[-1] or x.shape != y.shape:
        raise ValueError(f"{y.shape} at the {k} largest of {x.shape} numbers; use equal shapes, and k from 0 to the row's length")
    if k in (0, x.shape[-1]) or not x.raw.size:
        return y.times_integer(int(k > 0))
    return y.with_raw(keep_top_k_p.bind(x.raw, y.raw, k=k, width=sign_width(x, bits), modulus=x.modulus))


def ranks(dealing: Dealing, x: Opened, width: int) -> Generator[Request, None, Any]:
    """Shares of how many numbers of each row [..., n] come before each: larger ones, and equal ones of lower index."""
    n = x.public.shape[-1]
    masks = dealing.recorder.follow(differences, differences(x.hidden.share), x.hidden)
    lost, _ = yield from negative(dealing, Opened(differences(x.public) - _ties(n), masks), width)
    return _ranks(lost, n)


def below(dealing: Dealing, rank: Any, k: int, carried: Sequence[Opened] = ()) -> Generator[Request, None, tuple[Any, list[Any]]]:
    """Shares of whether each of `rank` [..., n], integers from 0 to n - 1, is below k, and of that times each of `carried`."""
    value, depth = Value(rank), (rank.shape[-1] - 1).bit_length()
    c = yield from dealing.open(value)
    assert value.mask is not None
    make = partial(_below_table, depth=depth, k=k)
    table = dealing.recorder.derive(make, value.mask, *(y.hidden for y in carried))
    row = pick(table.share, c & ((1 << depth) - 1))
    return row[..., 0], [y.public * row[..., 0] + row[..., i] for i, y in enumerate(carried, 1)]


def _below_table(mask: np.ndarray, *carried: np.ndarray, depth: int, k: int) -> np.ndarray:
    """[..., 2^depth, 1 + carried] for each value of c: whether c + mask is below k; times each carried."""
    bit = (np.arange(1 << depth) + mask[..., None] & (1 << depth) - 1 < k).astype(np.int64)
    return np.stack([bit, *(bit * y[..., None] for y in carried)], -1)


def differences(x: Any) -> Any:
    """[..., n] -> [..., n (n - 1) / 2]: x_i - x_(i + s mod n) by s = 1, 2, ... and then by i, every pair once.

    Row s of the tiled numbers, cut one longer than n, is rotated by s: reshapes, as SPU is slow to gather.
    """
    lead, n, half = x.shape[:-1], x.shape[-1], x.shape[-1] // 2
    tile = np.broadcast_to if isinstance(x, np.ndarray) else jnp.broadcast_to
    tiled = tile(x[..., None, :], (*lead, half + 2, n)).reshape(*lead, (half + 2) * n)
    others = tiled[..., : (half + 1) * (n + 1)].reshape(*lead, half + 1, n + 1)[..., 1:, :n]
    return (x[..., None, :] - others).reshape(*lead, half * n)[..., : n * (n - 1) // 2]


def _ties(n: int) -> np.ndarray:
    """1 where a pair of `differences` has the higher index first, which then loses if the difference is 0."""
    s, i = np.divmod(np.arange(n * (n - 1) // 2), n)
    return (i + s + 1 >= n).astype(np.int64)


def _ranks(lost: Any, n: int) -> Any:
    """[..., n] from [..., n (n - 1) / 2]: `lost` is 1 where the first of a pair of `differences` comes after the second."""
    lead, half = [(0, 0)] * (lost.ndim - 1), n // 2
    rows = jnp.pad(lost, [*lead, (0, half * n - lost.shape[-1])]).reshape(*lost.shape[:-1], half, n)
    # Row s - 1 is moved s places up, so that each number's won pairs, too, are in one column: rows one longer are cut one shorter.
    wide = jnp.pad(rows, [*lead, (0, 0), (1, half)]).reshape(*lost.shape[:-1], half * (n + half + 1))
    moved = wide[..., : half * (n + half)].reshape(*lost.shape[:-1], half, n + half).sum(-2)
    won = moved[..., :n] + jnp.pad(moved[..., n:], [*lead, (0, n - half)])
    second = np.bincount((np.arange(lost.shape[-1]) + np.arange(lost.shape[-1]) // n + 1) % n, minlength=n)
    return rows.sum(-2) - won + second


def _batch(args: tuple, axes: tuple, **params: Any) -> tuple[Any, int]:
    return top_k_p.bind(jnp.moveaxis(args[0], axes[0], 0), **params), 0


def _batch_both(args: tuple, axes: tuple, **params: Any) -> tuple[Any, int]:
    size = next(arg.shape[axis] for arg, axis in zip(args, axes, strict=True) if axis is not None)
    moved = [
        jnp.broadcast_to(arg, (size, *arg.shape)) if axis is None else jnp.moveaxis(arg, axis, 0)
        for arg, axis in zip(args, axes, strict=True)
    ]
    return keep_top_k_p.bind(*moved, **params), 0


def _mask(x: Any, *, k: int, width: int, modulus: int) -> Any:
    n = x.shape[-1]
    return (_ranks((differences(x) < _ties(n)).astype(jnp.int64), n) < k).astype(jnp.int64)


def _dealer(dealing: Dealing, x: Value, *, k: int, width: int, modulus: int) -> Generator[Request, None, Any]:
    opened = yield from dealing.opened(x, 0, modulus)
    rank = yield from ranks(dealing, opened, width)
    mask, _ = yield from below(dealing, rank, k)
    return mask


def _kept(x: Any, y: Any, **params: Any) -> Any:
    return y * _mask(x, **params)


def _kept_dealer(dealing: Dealing, x: Value, y: Value, *, k: int, width: int, modulus: int) -> Generator[Request, None, Any]:
    dealing.request(x, y)
    opened = yield from dealing.opened(x, 0, modulus)
    rank = yield from ranks(dealing, opened, width)
    values = yield from dealing.opened(y)  # open by now: it went out with x or with the first comparison
    _, (product,) = yield from below(dealing, rank, k, [values])
    return product


top_k_p: Primitive = define("top_k", _mask, _mask, _dealer, _batch)
keep_top_k_p: Primitive = define("keep_top_k", _kept, _kept, _kept_dealer, _batch_both)
