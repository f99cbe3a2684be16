"""A secret that both parties are meant to see, opened as it is: what may be, and what it tells, stands in docs/leakage.md.

It goes out in the same message as whatever else is opened then: 8 bytes an element, no dealer bytes.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jax.numpy as jnp
import numpy as np
from spu.experimental import reveal

from .base import define
from .dealing import Dealing, Request, Value, share_of
from .fixed import Fixed

_FITS = (1 << 62) - 1


def disclose(x: Fixed) -> Any:
    """The integers of x, which are at least 0 and below 2^62, as a public int64 array. 1 round."""
    return disclose_p.bind(x.raw)


def places(mask: Any, count: int) -> Any:
    """Where the `count` ones of each row of a public mask [n, blocks] of 0 and 1 stand, in order: int64 [n, count]. Local."""
    blocks = mask.shape[-1]
    rank = mask @ np.triu(np.ones((blocks, blocks), np.int64))
    held = (rank[..., None] == np.arange(1, count + 1)).astype(jnp.int64) * mask[..., None]
    return jnp.einsum("nbk,b->nk", held, np.arange(blocks))


def _plain(x: Any) -> Any:
    return x


def _stock(x: Any) -> Any:
    return reveal(x)


def _dealer(dealing: Dealing, x: Value) -> Generator[Request, None, Any]:
    request = Request(share_of(x))
    dealing.pending.append(request)
    yield request
    return request.result & _FITS  # in FM128 what is above 64 bits is random


disclose_p = define("disclose", _plain, _stock, _dealer)
