"""A constant number k of a row's secret numbers: those above 0, filled up or cut down to k in the order in which they stand.

Each number's rank counts those above 0 before it, or all of these and then those that are not. Ranks below k are chosen. So numbers
are compared with 0 and never with each other: n comparisons instead of n^2 / 2. Where the result is disclosed it must be moved into
a secret order first: in the order of the numbers it tells something of how many are above 0. Ours: top-k's constant count at a
threshold's cost.

The bit is opened once; ranks are products of it with sums of the same bits, which are open, too. 5 rounds, 40 bytes a number; 4
and 32 for less than 2^19. Dealer: as of a comparison, and 8 (1 + 2^depth) bytes more a number, depth = log2 n.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jax.numpy as jnp
import numpy as np

from .base import define
from .compare import negative, sign_width
from .dealing import Dealing, Opened, Request, Value
from .fixed import Fixed
from .topk import below


def choose(x: Fixed, k: int, bits: int | None = None) -> Fixed:
    """1 for k numbers along the last axis of x [..., n]: the first k above 0 and, where there are fewer, the first others.

    Needs raw values in [-2^bits, 2^bits), by default what x's modulus allows.
    """
    if not 0 <= k <= x.shape[-1]:
        raise ValueError(f"{k} of {x.shape[-1]} numbers; k must be between 0 and that")
    if k in (0, x.shape[-1]) or not x.raw.size:
        return Fixed(jnp.full(x.shape, int(k > 0), jnp.int64), 0)
    return Fixed(choose_p.bind(x.raw, k=k, width=sign_width(x, bits)), 0)


def _factor(out: Any) -> Any:
    """[..., n] what `out`, 1 where a number is not above 0, is multiplied by in a rank, but for the constant n - place.

    A rank is the count of those above 0 before, and for the others as much more as makes it all of these and the others before:
    (place - out @ U) + out (out @ (2 U - 1) + n - place), U being the matrix that adds up those before.
    """
    return out @ (2 * _before(out.shape[-1]) - 1)


def _before(n: int) -> np.ndarray:
    return np.triu(np.ones((n, n), np.int64), 1)


def _ranks(out: Any, product: Any) -> Any:
    n = out.shape[-1]
    return np.arange(n) - out @ _before(n) + product


def _mask(x: Any, *, k: int, width: int) -> Any:
    out, n = (x <= 0).astype(jnp.int64), x.shape[-1]
    return (_ranks(out, out * (_factor(out) + n - np.arange(n))) < k).astype(jnp.int64)


def _dealer(dealing: Dealing, x: Value, *, k: int, width: int) -> Generator[Request, None, Any]:
    n = x.shape[-1]
    opened = yield from dealing.opened(x)
    out, _ = yield from negative(dealing, Opened(opened.public - 1, opened.hidden), width)
    value = Value(out)
    c = yield from dealing.open(value)
    mask = value.mask
    assert mask is not None
    public = _factor(c) + n - np.arange(n)
    hidden = dealing.recorder.follow(_factor, _factor(mask.share), mask)
    both = dealing.recorder.derive(lambda r: r * _factor(r), mask)
    product = c * (public + hidden.share) + mask.share * public + both.share
    chosen, _ = yield from below(dealing, _ranks(out, product), k)
    return chosen


def _batch(args: tuple, axes: tuple, **params: Any) -> tuple[Any, int]:
    return choose_p.bind(jnp.moveaxis(args[0], axes[0], 0), **params), 0


choose_p = define("choose", _mask, _mask, _dealer, _batch)
