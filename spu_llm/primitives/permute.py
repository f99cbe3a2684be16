"""Rows in a secret random order that neither party knows, drawn anew by the dealer on every run.

The dealer shares the permutation as one-hot rows, a distributed point function each (16 (log2 n - 2) + 32 bytes a row to
each party). For x opened as c + [r], a permuted x is [P] c + [P r]: local but for the opening, which other protocols may
share; P r is 8 bytes an element from the dealer. The same permutation serves any number of arrays, and its inverse too.

[256, 64]: 131 KB in 1 message, 197 KB of dealer bytes (66 KB for the permutation), 10 ms online and 4 ms offline on two cores.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching

from ..errors import UserError
from .base import define
from .dealing import Dealing, Request, Value
from .fixed import Fixed


def permutation(n: int, keys: Fixed | None = None) -> Fixed:
    """A secret permutation matrix [n, n] for `permute`: row i has its 1 where result i comes from. No round of its own.

    The dealer draws it and `keys` are not looked at. Without a dealer it is the order of these secret numbers [n], which must
    then be given, as stock SPU makes no randomness that no party knows: the sum of random numbers below 2^61 of each party. In
    plaintext it is their order, too, or without them the identity.
    """
    return Fixed(permutation_p.bind(*([] if keys is None else [keys.raw]), n=n), 0)


def permute(order: Fixed, x: Fixed, axis: int = 0, inverse: bool = False) -> Fixed:
    """x with its entries along `axis` in the order of a `permutation`, or back from it. 1 round, 8 bytes an element."""
    if not x.raw.size:
        return x
    rows = jnp.moveaxis(x.raw, axis, 0)
    flat = permute_p.bind(order.raw, rows.reshape(len(rows), -1), inverse=inverse, modulus=x.modulus)
    return x.with_raw(jnp.moveaxis(flat.reshape(rows.shape), 0, axis))


def shuffle(*arrays: Fixed, axis: int = 0, keys: Fixed | None = None) -> tuple[Fixed, ...]:
    """Arrays of the same length along `axis` in one and the same random order. 1 round, 8 bytes an element."""
    order = permutation(arrays[0].shape[axis], keys)
    return tuple(permute(order, x, axis) for x in arrays)


def _matrix(order: Any) -> Any:
    return (order[:, None] == np.arange(len(order))).astype(jnp.int64)


def _permutation_plain(*keys: Any, n: int) -> Any:
    return _matrix(jnp.argsort(keys[0]) if keys else jnp.arange(n))


def _permutation_stock(*keys: Any, n: int) -> Any:
    if not keys:
        raise UserError("permutation without a dealer needs secret keys: stock SPU makes no randomness that no party knows")
    return _matrix(jnp.argsort(keys[0]))


def _permutation_dealer(dealing: Dealing, *keys: Value, n: int) -> Generator[Request, None, Value]:
    yield from ()  # nothing is opened
    draws = dealing.recorder.uniform((n,))
    return Value(dealing.recorder.one_hot(_order, n, draws).share, views={"draws": draws})


def _order(draws: np.ndarray) -> np.ndarray:
    """A uniform permutation: the order of uniform words, which are all different but for a chance of n^2 / 2^65."""
    return np.argsort(draws, kind="stable")


def _permute_plain(order: Any, x: Any, *, inverse: bool, modulus: int) -> Any:
    return (order.T if inverse else order) @ x


def _permute_dealer(dealing: Dealing, order: Value, x: Value, *, inverse: bool, modulus: int) -> Generator[Request, None, Any]:
    def moved(draws: np.ndarray, rows: np.ndarray) -> np.ndarray:
        by = _order(draws)
        return rows[np.argsort(by) if inverse else by]

    if "draws" not in order.views:
        raise UserError("permute with a matrix that is not, unchanged, from permutation(): the dealer does not know its order")
    opened = yield from dealing.opened(x, 0, modulus)
    hidden = dealing.recorder.derive(moved, order.views["draws"], opened.hidden)
    matrix = order.share.T if inverse else order.share
    return matrix @ opened.public + hidden.share


def _permutation_batch(args: tuple, axes: tuple, **params: Any) -> Any:
    raise NotImplementedError("vmap over the keys of a permutation: draw one permutation a call")


def _permute_batch(args: tuple, axes: tuple, **params: Any) -> tuple[Any, int]:
    """One permutation for the whole batch: its axis becomes one of the columns'."""
    if axes[0] is not batching.not_mapped:
        raise NotImplementedError("vmap over permutations: permute with each of them")
    x = jnp.moveaxis(args[1], axes[1], 1)
    return permute_p.bind(args[0], x.reshape(len(x), -1), **params).reshape(x.shape), 1


permutation_p = define("permutation", _permutation_plain, _permutation_stock, _permutation_dealer, _permutation_batch)
permute_p = define("permute", _permute_plain, _permute_plain, _permute_dealer, _permute_batch)
