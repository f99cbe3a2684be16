"""A fresh secret order for every token: rows are moved into it and active ones back, so that their places tell nothing.

As permute.py, with one permutation a token, which the dealer draws and shares as one-hot rows: 16 (log2 n - 2) + 32 bytes a row to
each party. Ours: with an order that serves one token, disclosed places of active blocks are uniform whatever the token.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jax.numpy as jnp
import numpy as np

from .active import picked, spread
from .base import define
from .dealing import Dealing, Request, Value, share_of
from .fixed import Fixed


def fresh_orders(count: int, n: int) -> Fixed:
    """A secret permutation matrix [n, n] for each of `count` tokens: row i has its 1 where result i comes from. No round.

    The identity in plaintext and on stock SPU, which makes no randomness that no party knows: there nothing is hidden by it.
    """
    return Fixed(orders_p.bind(count=count, n=n), 0)


def into_order(orders: Fixed, x: Fixed) -> Fixed:
    """x [count, n, m], or [n, m] for every token, with each token's rows in its order: [count, n, m]. 1 round.

    8 bytes an element of x, none of an operand. Dealer: 8 an element of the result.
    """
    return x.with_raw(into_p.bind(orders.raw, x.raw, modulus=x.modulus))


def out_of_order(orders: Fixed, x: Fixed, index: Any) -> Fixed:
    """Active rows x [count, k, m], at places `index` [count, k] (public) of the orders, moved back: [count, n, m], else zeros.

    1 round, 8 bytes an element of x. Dealer: 8 n an element of the result, as it does not know which rows are active.
    """
    return x.with_raw(out_p.bind(orders.raw, x.raw, index))


def _orders_plain(*, count: int, n: int) -> Any:
    return jnp.broadcast_to(jnp.eye(n, dtype=jnp.int64), (count, n, n))


def _orders_dealer(dealing: Dealing, *, count: int, n: int) -> Generator[Request, None, Value]:
    yield from ()  # nothing is opened
    draws = dealing.recorder.uniform((count, n))
    return Value(dealing.recorder.one_hot(_order, n, draws).share, views={"draws": draws})


def _order(draws: np.ndarray) -> np.ndarray:
    """A uniform permutation a row: the order of uniform words, which are all different but for a chance of n^2 / 2^65."""
    return np.argsort(draws, axis=-1, kind="stable")


def _product(orders: Any, x: Any) -> Any:
    return jnp.einsum("tij,tjm->tim" if x.ndim == 3 else "tij,jm->tim", orders, x)


def _into_plain(orders: Any, x: Any, *, modulus: int) -> Any:
    return _product(orders, x)


def _into_dealer(dealing: Dealing, orders: Value, x: Value, *, modulus: int) -> Generator[Request, None, Any]:
    def moved(draws: np.ndarray, rows: np.ndarray) -> np.ndarray:
        every = np.broadcast_to(rows, (len(draws), *rows.shape[-2:]))
        return np.take_along_axis(every, _order(draws)[..., None], 1)

    opened = yield from dealing.opened(x, 0, modulus)
    hidden = dealing.recorder.derive(moved, orders.views["draws"], opened.hidden)
    return _product(orders.share, opened.public) + hidden.share


def _out_plain(orders: Any, x: Any, index: Any) -> Any:
    return jnp.einsum("tij,tim->tjm", orders, spread(x, index, orders.shape[-1]))


def _out_dealer(dealing: Dealing, orders: Value, x: Value, index: Value) -> Generator[Request, None, Any]:
    """x = c + r of its place: the sum over active places i of P[i] c_i, and of P[i] r_i, which is dealt for every place."""
    count, n, _ = orders.shape
    mask = dealing.recorder.uniform((count, n, x.shape[-1]))
    request = Request(share_of(x) - picked(mask.share, index.share))
    dealing.pending.append(request)

    def placed(draws: np.ndarray, r: np.ndarray) -> np.ndarray:
        """[count, place, row, m]: the mask of each place in the row that it belongs to, zeros in the others."""
        return np.eye(n, dtype=np.int64)[_order(draws)][..., None] * r[:, :, None]

    hidden = dealing.recorder.derive(placed, orders.views["draws"], mask)
    yield request
    public = jnp.einsum("tkj,tkm->tjm", picked(orders.share, index.share), request.result)
    return public + jnp.sum(picked(hidden.share, index.share), 1)


def _refuse(args: tuple, axes: tuple, **params: Any) -> Any:
    raise NotImplementedError("vmap over orders: put the batch among the tokens")


orders_p = define("orders", _orders_plain, _orders_plain, _orders_dealer, _refuse)
into_p = define("into_order", _into_plain, _into_plain, _into_dealer, _refuse)
out_p = define("out_of_order", _out_plain, _out_plain, _out_dealer, _refuse)
