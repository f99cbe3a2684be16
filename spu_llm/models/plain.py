"""Decoding in plaintext: the reference for secure runs, and where prefix rows come from."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .cache import LayerCache, empty_cache, window
from .decoder import Decoder


class PlainDecoder:
    """A decoder with its cache, on this machine, in float32.

    `advance(tokens)` appends tokens and returns the logits at each of them.
    """

    def __init__(self, decoder: Decoder, capacity: int):
        self.decoder = decoder
        self.capacity = capacity
        self.length = 0
        self.cache = empty_cache(decoder.config, capacity)
        self._params = jax.tree_util.tree_map(jnp.asarray, decoder.params)
        self._block = jax.jit(decoder.block)
        self._logits = jax.jit(lambda final, table, x: decoder.final(final, x) @ table.T)

    def advance(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits [n, vocabulary] after each of n tokens."""
        params, ids = self._params, np.asarray(tokens)
        x = params["embed"]["table"][ids]
        if "positions" in params["embed"]:
            x = x + params["embed"]["positions"][self.length : self.length + len(ids)]
        place = window(self.decoder.config, self.length, len(ids), self.capacity)
        for i, layer in enumerate(params["layers"]):
            x, self.cache[i] = self._block(layer, x, self.cache[i], place)
        self.length += len(ids)
        table = params["embed" if self.decoder.config.tied_head else "head"]["table"]
        return np.asarray(self._logits(params["final"], table, x))


def prefix_cache(
    decoder: Decoder, prefix: Sequence[int], capacity: int, rows: Sequence[LayerCache] | None = None
) -> list[LayerCache]:
    """A cache of `capacity` rows a layer that begins with a prefix: its rows [prefix, ...] if they are there, else computed."""
    if rows is None:
        plain = PlainDecoder(decoder, capacity)
        if prefix:
            plain.advance(prefix)
        return plain.cache
    cache = empty_cache(decoder.config, capacity)
    for layer, found in zip(cache, rows, strict=True):
        layer.keys[: len(prefix)], layer.values[: len(prefix)] = found.keys, found.values
    return cache
