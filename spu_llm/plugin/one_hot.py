"""The one-hot vector of a secret integer by one opening: what reads a row of a secret table at a secret place.

The dealer shares the one-hot of minus the mask's low bits; rotated by the opened value it is the one of the integer. 1 round,
8 bytes an integer; dealer: 8 bytes a place.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..primitives.base import define
from ..primitives.dealing import Dealing, Request, Value


def one_hot(x: Any, places: int) -> Any:
    """int64 [..., places] of 0 and 1 for secret int64 [...] in [0, places). An integer outside gives zeros or another place's."""
    return one_hot_p.bind(x, places=places)


def _plain(x: Any, *, places: int) -> Any:
    return (x[..., None] == jnp.arange(places)).astype(jnp.int64)


def _dealer(dealing: Dealing, x: Value, *, places: int) -> Generator[Request, None, Any]:
    size = 1 << max(1, (places - 1).bit_length())
    c = yield from dealing.open(x)
    assert x.mask is not None
    turned = dealing.recorder.derive(lambda mask: _unit(mask, size), x.mask).share
    place = jnp.bitwise_and(jnp.arange(places) - c[..., None], size - 1)
    return jnp.take_along_axis(turned, place, axis=-1, mode="promise_in_bounds")


def _unit(mask: np.ndarray, size: int) -> np.ndarray:
    return ((mask & (size - 1))[..., None] == np.arange(size)).astype(np.int64)


one_hot_p = define("one_hot", _plain, _plain, _dealer)
