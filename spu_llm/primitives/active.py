"""Products that compute only the active blocks of an operand, which are public: Comet's sparse matrix products (S&P 2025).

One protocol serves all of them: `b` is the axis of blocks of an operand y, of which each token n computes k.
- Active outputs (SOMM): "nd,bsd->nbs", all inputs, columns of active blocks only.
- Active inputs (SIMM): "nbs,dbs->nd", the sum over active blocks.
- Attention of active heads: "nbd,tbd->nbt" and "nbt,tbd->nbd".

x y = P_x [y] + [R_x] P_y + [R_x R_y] for opened x = P_x + R_x and y = P_y + R_y, as in contract.py. The dealer does not know which
blocks will be active. So where x has blocks of its own, its masks belong to blocks, not to places among the active ones, and those
of blocks that stay inactive are thrown away unused; the last two terms are made of all blocks, before the input is known
(runtime/ahead.py). Online, openings and bytes are those of active blocks alone.

Parties multiply by all blocks, those that are not active by zeros: a product costs SPU less than gathering what it needs of y.

1 round; 8 bytes an element of x, which has active blocks only, and nothing for y, an operand opened before. Dealer: 8 bytes for
each output of each block, active or not (of a sum over blocks: for each block's summand), and 8 an element of all of x's blocks
where x is truncated.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jax.numpy as jnp
import numpy as np

from .base import define
from .contract import integer_einsum
from .dealing import Dealing, Request, Value, logical_shift, raised, share_of
from .fixed import Fixed, dropped
from .stock import shifted

_BLOCKS = "blocks"


def active_contract(subscripts: str, x: Fixed, y: Fixed, index: Any, x_bits: int | None = None) -> Fixed:
    """`jnp.einsum(subscripts, x, y)` over the blocks `index` [n, k] of y (public, int64, each row's all different).

    n is the first letter of x and of the result; b, a letter of y, is the second one of x and of the result where they have it,
    with k entries there instead of all blocks. x is rounded down to `x_bits` fraction bits as it is opened; the result is right
    modulo 2^min(modulus_x - shift, modulus_y).
    """
    shift = dropped(x, x.bits if x_bits is None else x_bits)
    left, right, _ = _parts(subscripts)
    opened = x.raw
    if "b" in left:  # a step of its own, so that it need not wait for y
        blocks = y.shape[right.index("b")]
        opened = open_active_p.bind(x.raw, index, blocks=blocks, shift=shift, modulus=x.modulus)
    raw = active_p.bind(opened, y.raw, index, subscripts=subscripts, shift=0 if "b" in left else shift, modulus=x.modulus)
    return Fixed(raw, x.bits - shift + y.bits, min(x.modulus - shift, y.modulus))


def picked(x: Any, index: Any) -> Any:
    """x [n, blocks, ...] at `index` [n, k]: [n, k, ...]. Local.

    SPU gathers at a microsecond an element, so for one token of integers a product with one-hots is faster.
    """
    n, blocks, *rest = x.shape
    if n == 1 and jnp.issubdtype(x.dtype, jnp.integer):
        return (_one_hots(index, blocks)[0] @ x.reshape(blocks, -1)).reshape(1, -1, *rest)
    rows = index + blocks * np.arange(n)[:, None]
    return jnp.take(x.reshape(n * blocks, *rest), rows, axis=0, mode="clip")


def spread(x: Any, index: Any, blocks: int) -> Any:
    """x [n, k, ...] at the places `index` [n, k] of [n, blocks, ...], zeros elsewhere. Local, as `picked`."""
    n, k, *rest = x.shape
    held = _one_hots(index, blocks)
    if n == 1 and jnp.issubdtype(x.dtype, jnp.integer):
        return (held[0].T @ x.reshape(k, -1)).reshape(1, blocks, *rest)
    where = jnp.sum(held * np.arange(k)[:, None], 1) + k * (1 - jnp.sum(held, 1))
    return picked(jnp.concatenate([x, jnp.zeros((n, 1, *rest), x.dtype)], 1), where)


def _one_hots(index: Any, blocks: int) -> Any:
    """[n, k, blocks]"""
    return (index[:, :, None] == np.arange(blocks)).astype(jnp.int64)


def _parts(subscripts: str) -> tuple[str, str, str]:
    left, right, out = subscripts.replace("->", ",").split(",")
    return left, right, out


def _chosen(subscripts: str, y: Any, index: Any) -> tuple[str, Any]:
    """The einsum with y's active blocks for each token, and these: [n, k, ...]."""
    left, right, out = _parts(subscripts)
    axis = right.index("b")
    rest = right.replace("b", "")
    return f"{left},nb{rest}->{out}", jnp.take(jnp.moveaxis(y, axis, 0), index, axis=0, mode="clip")


def _open_plain(x: Any, index: Any, *, blocks: int, shift: int, modulus: int) -> Any:
    return x >> shift


def _open_stock(x: Any, index: Any, *, blocks: int, shift: int, modulus: int) -> Any:
    return shifted(x, shift)


def _open_dealer(
    dealing: Dealing, x: Value, index: Value, *, blocks: int, shift: int, modulus: int
) -> Generator[Request, None, Value]:
    """x [n, k, ...] opened under the masks of its blocks: the public part has active blocks, the hidden one all of them."""
    n, _, *rest = x.shape
    mask = dealing.recorder.uniform((n, blocks, *rest))
    request = Request(share_of(x) - picked(mask.share, index.share))
    dealing.pending.append(request)
    yield request
    hidden = dealing.recorder.derive(lambda r: raised(r, shift), mask) if shift else mask
    return Value(None, views={_BLOCKS: (logical_shift(request.result, shift), hidden)})


def _plain(x: Any, y: Any, index: Any, *, subscripts: str, shift: int, modulus: int) -> Any:
    product, chosen = _chosen(subscripts, y, index)
    return jnp.einsum(product, x >> shift, chosen)


def _stock(x: Any, y: Any, index: Any, *, subscripts: str, shift: int, modulus: int) -> Any:
    product, chosen = _chosen(subscripts, y, index)
    return jnp.einsum(product, shifted(x, shift), chosen)


def _dealer(
    dealing: Dealing, x: Value, y: Value, index: Value, *, subscripts: str, shift: int, modulus: int
) -> Generator[Request, None, Any]:
    left, right, out = _parts(subscripts)
    operand = yield from dealing.opened(y)
    at = index.share
    if _BLOCKS in x.views:
        public, hidden = x.views[_BLOCKS]
    else:
        opened = yield from dealing.opened(x, shift, modulus)
        public, hidden = opened.public, opened.hidden
    blocks = operand.public.shape[right.index("b")]
    every = f"{left},{right}->{out if 'b' in out else 'nb' + out[1:]}"
    product = dealing.recorder.derive(lambda r, s: integer_einsum(every, r, s), hidden, operand.hidden)
    ahead = jnp.einsum(every, hidden.share, operand.public) + product.share
    online = jnp.einsum(subscripts, spread(public, at, blocks) if "b" in left else public, operand.share)
    if "b" in out:
        return picked(ahead + online, at)
    active = jnp.sum(_one_hots(at, blocks), 1)
    return jnp.sum(ahead * active.reshape(*active.shape, *[1] * (ahead.ndim - 2)), 1) + online


def _refuse(args: tuple, axes: tuple, **params: Any) -> Any:
    raise NotImplementedError("vmap over products of active blocks: put the batch among the tokens")


open_active_p = define("open_active", _open_plain, _open_stock, _open_dealer, _refuse)
active_p = define("active", _plain, _stock, _dealer, _refuse)
