"""Decoding in plaintext, fast: one compiled program for all layers, with the cache updated in place.

`PlainDecoder` is the reference; this gives the same logits up to rounding. On SmolLM2 and two cores (figures of
experiments/post_models) a pass takes as long as reading all weights once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserError
from .cache import LayerCache, Window, empty_cache, window
from .config import DecoderConfig, Params
from .decoder import Decoder

_SIZES = (1, 4, 16, 64)
"""Tokens of a pass: a program is compiled for each size that is met, and a pass is padded to the least that holds it.

All layers in one program would be no faster: scanned, it copies each layer's weights; unrolled, it takes a minute to compile.
Neither would weights in bfloat16, which XLA widens before each product.
"""

_HEAD_ROWS = 4
"""Rows for the output layer, at least: one row by a transposed table takes XLA many times as long as four."""


class FastDecoder:
    """A decoder with its cache, on this machine, in float32.

    `advance(tokens)` appends tokens and returns the logits after each of them; `roll_back` forgets the last ones. Rows past
    `length` hold leftovers, which the mask hides until they are written again.
    """

    def __init__(self, decoder: Decoder, capacity: int):
        if not 1 <= capacity <= decoder.config.positions:
            raise UserError(f"a cache of {capacity} positions: the model has {decoder.config.positions}; give from 1 to so many")
        self.decoder = decoder
        self.capacity = capacity
        self.length = 0
        self._rows = capacity + _SIZES[-1]  # a padded pass may write past the capacity
        self._params = jax.tree_util.tree_map(jnp.asarray, decoder.params)
        self._cache = jax.tree_util.tree_map(jnp.array, empty_cache(decoder.config, self._rows))

    def advance(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits [n, vocabulary] after each of n tokens. Raises UserError beyond the capacity."""
        if self.length + len(tokens) > self.capacity:
            raise UserError(f"{self.length + len(tokens)} tokens: the cache has room for {self.capacity}; give it more capacity")
        rows = [self._pass(tokens[at : at + _SIZES[-1]]) for at in range(0, len(tokens), _SIZES[-1])]
        return np.concatenate(rows) if rows else np.zeros((0, self.decoder.config.vocabulary), np.float32)

    def roll_back(self, length: int) -> None:
        """Keep the first `length` positions only."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length} of {self.length} positions")
        self.length = length

    def _pass(self, tokens: Sequence[int]) -> np.ndarray:
        size = next(size for size in _SIZES if size >= len(tokens))
        ids = np.zeros(size, np.int32)
        ids[: len(tokens)] = tokens
        config, params = self.decoder.config, self._params
        place = jax.tree_util.tree_map(jnp.asarray, window(config, self.length, size, self._rows))
        x = _embed(params["embed"], ids, place.start)
        for i, layer in enumerate(params["layers"]):
            x, self._cache[i] = _layer(config, layer, x, self._cache[i], place)
        logits = _logits(config, params["final"], params["embed" if config.tied_head else "head"]["table"], x)
        self.length += len(tokens)
        return np.asarray(logits)[: len(tokens)]


@jax.jit
def _embed(params: Params, ids: jax.Array, start: jax.Array) -> jax.Array:
    """Tokens [n] from position `start` -> x [n, width]; what pads a pass may lie past the last position."""
    x = params["table"][ids]
    if "positions" not in params:
        return x
    return x + jnp.take(params["positions"], start + jnp.arange(len(ids)), axis=0, mode="clip")


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def _layer(config: DecoderConfig, params: Params, x: jax.Array, cache: LayerCache, place: Window) -> tuple[jax.Array, LayerCache]:
    """A layer; its new cache takes the place of the given one."""
    return Decoder(config, {}).block(params, x, cache, place)


@partial(jax.jit, static_argnums=0)
def _logits(config: DecoderConfig, params: Params, table: jax.Array, x: jax.Array) -> jax.Array:
    """x [n, width] -> logits [n, vocabulary]."""
    n = len(x)
    x = jnp.pad(Decoder(config, {}).final(params, x), ((0, max(0, _HEAD_ROWS - n)), (0, 0)))
    return (x @ table.T)[:n]
