"""The key/value cache: fixed capacity, one pair of arrays a layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .config import DecoderConfig


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [capacity, kv_heads, head_width].

    The leaves are arrays in plaintext and while a program is traced, and names of secret variables in a session.
    """

    keys: Any
    values: Any


def cache_shape(config: DecoderConfig, capacity: int) -> tuple[int, int, int]:
    return capacity, config.kv_heads, config.head_width


def empty_cache(config: DecoderConfig, capacity: int) -> list[LayerCache]:
    """A plaintext cache of zeros; rows are written by position, so nothing has to be cleared."""
    shape = cache_shape(config, capacity)
    return [LayerCache(np.zeros(shape, np.float32), np.zeros(shape, np.float32)) for _ in range(config.layers)]


class Window(NamedTuple):
    """Where a pass over n new tokens stands in the sequence: everything here is public.

    start: [] int32, the position of the first new token, which is also its cache row;
    mask: [n, length] bool, True where new token i may attend to cache row j; `length` rows of the cache are looked at;
    cos, sin: [n, head_width / 2] float32, rotary angles (empty in the last axis for learned positions).
    """

    start: Any
    mask: Any
    cos: Any
    sin: Any


def window(config: DecoderConfig, start: int, count: int, length: int) -> Window:
    """The window of `count` new tokens from position `start`, attending to the first `length` cache rows."""
    positions = start + np.arange(count)
    mask = np.arange(length)[None, :] <= positions[:, None]
    if config.rope_base is None:
        angles = np.zeros((count, 0))
    else:
        half = np.arange(0, config.head_width, 2) / config.head_width
        angles = positions[:, None] * config.rope_base**-half
    return Window(np.int32(start), mask, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
