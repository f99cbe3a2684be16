"""Layers in plaintext over passages laid side by side, with everything on the way that has a range.

Passages after one prefix share a sequence: each sees the prefix and itself, at the positions it would have alone. So many
short passages, down to single tokens, cost one product with each weight, and all sequences have one shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .config import DecoderConfig
from .decoder import Decoder
from .folded import FoldedLayer, centred_rows, fold_layer
from .mixtral import routing

MASKED = -1e30
ROWS = 512
"""Rows of a sequence beside the prefix: enough for products to run at full speed, few enough that scores cost little."""
_STEP = 32
_PREFIX, _PADDING = -1, -2


class Places(NamedTuple):
    """Where rows stand. positions [n]: within their own passage after the prefix; mask [n, n]: True where row i sees row j."""

    positions: Any
    mask: Any


@dataclass(frozen=True)
class Sequenced:
    """Passages in one sequence. passage [n]: the number of each row's passage; below 0 for prefix and padding."""

    tokens: np.ndarray
    positions: np.ndarray
    passage: np.ndarray

    @property
    def kept(self) -> np.ndarray:
        """[n] bool: rows of passages."""
        return self.passage >= 0

    @property
    def places(self) -> Places:
        same = self.passage[:, None] == self.passage[None, :]
        before = np.tri(len(self.tokens), dtype=bool)
        return Places(self.positions.astype(np.int32), before & (same | (self.passage == _PREFIX)[None, :]))


class Trace(NamedTuple):
    """What a layer computes for n rows. `scores` are q k / sqrt(head width), masked or not; squares are means, plus epsilon."""

    attention_input: jax.Array  # [n, width] residual stream before the first norm
    attention_squares: jax.Array  # [n]
    normed: jax.Array  # [n, width]
    scores: jax.Array  # [n, heads, n]
    ffn_input: jax.Array  # [n, width] residual stream before the second norm
    ffn_squares: jax.Array  # [n]
    hidden: jax.Array  # [n, columns of `FoldedLayer.up`] its first `config.hidden` are what the activation is applied to


def sequences(prefix: Sequence[int], passages: Sequence[Sequence[int]]) -> Iterator[Sequenced]:
    """Passages in their order, as many in each sequence as fit; all sequences have the same length."""
    rows = max([min(ROWS, sum(map(len, passages))), *map(len, passages)])
    rows += -rows % _STEP  # few different lengths, as each is compiled
    waiting: list[Sequence[int]] = []
    for passage in passages:
        if sum(map(len, waiting)) + len(passage) > rows:
            yield _sequence(prefix, waiting, rows)
            waiting = []
        waiting.append(passage)
    if waiting:
        yield _sequence(prefix, waiting, rows)


def _sequence(prefix: Sequence[int], passages: Sequence[Sequence[int]], rows: int) -> Sequenced:
    start, padding = len(prefix), rows - sum(map(len, passages))
    tokens = [*prefix, *(token for passage in passages for token in passage), *[0] * padding]
    places = [np.arange(start), *(start + np.arange(len(passage)) for passage in passages), np.full(padding, start)]
    numbers = [np.full(start, _PREFIX), *(np.full(len(p), i) for i, p in enumerate(passages)), np.full(padding, _PADDING)]
    return Sequenced(np.asarray(tokens, np.int64), np.concatenate(places), np.concatenate(numbers))


def embedded(decoder: Decoder, sequence: Sequenced) -> jax.Array:
    """[n, width] residual stream before the first layer, centred where the family's norms subtract the mean."""
    embed = decoder.params["embed"]
    x = centred_rows(decoder.config, embed["table"][sequence.tokens])
    if "positions" in embed:
        x = x + centred_rows(decoder.config, embed["positions"][sequence.positions])
    return jnp.asarray(x, jnp.float32)


def traced_params(config: DecoderConfig, params: Any) -> dict[str, Any]:
    """One layer's folded weights as `trace_layer` takes them: float32, on the device."""
    folded = vars(fold_layer(config, params))
    return {name: None if value is None else jnp.asarray(value, jnp.float32) for name, value in folded.items()}


def trace_layer(config: DecoderConfig, layer: dict[str, Any], x: jax.Array, places: Places) -> tuple[jax.Array, Trace]:
    """One folded layer over a sequence x [n, width]; under jit, what the caller does not use of the trace costs nothing."""
    n, width, groups = x.shape[0], config.head_width, config.kv_heads
    weights = FoldedLayer(**layer)
    before, first = x, jnp.mean(x * x, -1, keepdims=True) + config.epsilon
    normed = x * jax.lax.rsqrt(first)
    h = _dense(normed, weights.qkv, weights.qkv_bias)
    q, k, v = jnp.split(h, [config.heads * width, (config.heads + groups) * width], axis=-1)
    q, k, v = q.reshape(n, groups, -1, width), k.reshape(n, groups, width), v.reshape(n, groups, width)
    if config.rope_base is not None:
        half = np.arange(0, width, 2) / width
        angles = places.positions[:, None] * jnp.asarray(config.rope_base**-half, jnp.float32)
        q, k = _rotated(q, angles), _rotated(k, angles)
    scores = jnp.einsum("ngqd,tgd->ngqt", q, k)
    shares = jax.nn.softmax(jnp.where(places.mask[:, None, None], scores, MASKED), -1)
    x = x + _dense(jnp.einsum("ngqt,tgd->ngqd", shares, v).reshape(n, -1), weights.out, weights.out_bias)
    between, second = x, jnp.mean(x * x, -1, keepdims=True) + config.epsilon
    h = _dense(x * jax.lax.rsqrt(second), weights.up, weights.up_bias)
    x = x + _dense(_activated(config, h), weights.down, weights.down_bias)
    scores = scores.reshape(n, config.heads, n)
    return x, Trace(before, first[:, 0], normed, scores, between, second[:, 0], h)


def _dense(x: jax.Array, kernel: Any, bias: Any) -> jax.Array:
    y = x @ jnp.asarray(kernel, x.dtype)
    return y if bias is None else y + jnp.asarray(bias, x.dtype)


def _rotated(x: jax.Array, angles: jax.Array) -> jax.Array:
    a, b = jnp.split(x, 2, axis=-1)
    shape = (len(angles), *[1] * (x.ndim - 2), -1)
    cos, sin = jnp.cos(angles).reshape(shape), jnp.sin(angles).reshape(shape)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _activated(config: DecoderConfig, h: jax.Array) -> jax.Array:
    """[n, hidden] what the feed-forward part's second kernel is applied to."""
    if not config.llama_like:
        return jax.nn.gelu(h, approximate=True) if config.family == "gpt2" else jax.nn.relu(h)
    gate, up, router = jnp.split(h, [config.hidden, 2 * config.hidden], axis=-1)
    units = jax.nn.silu(gate) * up
    if config.experts is None or config.experts_per_token is None:
        return units
    shares = jnp.repeat(routing(router, config.experts_per_token), config.ffn, axis=1)
    return units * shares
