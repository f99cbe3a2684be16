"""The place of the largest of a row of secret numbers, as a one-hot.

Few numbers: all pairs are compared (topk.py) and the one of rank 0 is looked up: 4 rounds. More are cut into groups. In each
the winner goes on, with its index: the lookup of rank 0 also gives it times what the dealer knows, the masks of number and
index, so no product costs a message. At the end the index is made a one-hot (select.py), 1 round more.

For n = 16 (64, 256, 1,000) numbers of 39 bits: 4 (9, 9, 13) messages, 2 (5, 37, 79) KB, 0.04 (0.08, 0.7, 1.3) MB of dealer
bytes to both parties together, 6 (7, 21, 36) ms online and 2 (4, 8, 13) ms offline on two cores.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Primitive

from .base import define
from .compare import sign_width
from .dealing import Dealing, Request, Value, share_of
from .fixed import Fixed
from .select import rotated_one_hot
from .topk import below, ranks

_FEW = 16  # numbers of which all pairs are compared
_MANY = 256  # numbers above which groups of 4 save work, at the price of more rounds


def argmax(x: Fixed, axis: int = -1, bits: int | None = None) -> Fixed:
    """1 at the largest number along `axis`, the first of equal ones, and 0 elsewhere; x's shape.

    Needs differences of raw values in (-2^bits, 2^bits), by default what x's modulus allows. 4 rounds for up to 16 numbers, 9
    for up to 256.
    """
    if x.shape[axis] == 1 or not x.raw.size:
        return Fixed(jnp.ones(x.shape, jnp.int64), 0)
    rows = jnp.moveaxis(x.raw, axis, -1)
    return Fixed(jnp.moveaxis(argmax_p.bind(rows, width=sign_width(x, bits), modulus=x.modulus), -1, axis), 0)


def _plain(x: Any, *, width: int, modulus: int) -> Any:
    return jax.nn.one_hot(jnp.argmax(x, -1), x.shape[-1], dtype=jnp.int64)


def _stock(x: Any, *, width: int, modulus: int) -> Any:
    return (jnp.argmax(x, -1)[..., None] == jnp.arange(x.shape[-1])).astype(jnp.int64)


def _dealer(dealing: Dealing, x: Value, *, width: int, modulus: int) -> Generator[Request, None, Any]:
    n = x.shape[-1]
    if n <= _FEW:
        opened = yield from dealing.opened(x, 0, modulus)
        rank = yield from ranks(dealing, opened, width)
        winner, _ = yield from below(dealing, rank, 1)
        return winner
    numbers, places, first = share_of(x), jnp.arange(n), True
    while numbers.shape[-1] > 1:
        size = group_size(numbers.shape[-1])
        numbers, places = yield from _winners(dealing, _grouped(numbers, size), _grouped(places, size), first, width, modulus)
        first = False
    return (yield from rotated_one_hot(dealing, Value(places[..., 0]), n))


def _winners(
    dealing: Dealing, numbers: Any, places: Any, public: bool, width: int, modulus: int
) -> Generator[Request, None, tuple[Any, Any]]:
    """Shares of the largest number of each group [..., groups, size] and of its place; `public`: everyone knows the places."""
    values = [Value(numbers)] if public else [Value(numbers), Value(places)]
    dealing.request(*values)
    opened = []
    for value in values:
        opened.append((yield from dealing.opened(value, 0, modulus)))
    rank = yield from ranks(dealing, opened[0], width)
    winner, products = yield from below(dealing, rank, 1, opened)
    best, place = (*products, winner * places) if public else products
    return best.sum(-1), place.sum(-1)


def _grouped(row: Any, size: int) -> Any:
    """[..., n] -> [..., groups, size], filled up with the last entry: where it wins, its first copy does."""
    n = row.shape[-1]
    missing = -n % size
    filled = jnp.concatenate([row, *[row[..., -1:]] * missing], -1)
    return filled.reshape(*row.shape[:-1], -1, size)


def group_size(n: int) -> int:
    """How many numbers are compared with one another: so that few pairs are, and few winners are left."""
    if n <= _FEW:
        return n
    if n > _MANY:
        return 4

    def pairs(size: int) -> int:
        groups = -(-n // size)
        return groups * size * (size - 1) + groups * (groups - 1)

    return min(range(-(-n // _FEW), _FEW + 1), key=pairs)


def _batch(args: tuple, axes: tuple, **params: Any) -> tuple[Any, int]:
    return argmax_p.bind(jnp.moveaxis(args[0], axes[0], 0), **params), 0


argmax_p: Primitive = define("argmax", _plain, _stock, _dealer, _batch)
