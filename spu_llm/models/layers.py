"""Pieces that the decoder families share. They are traced for SPU as they are run in plaintext."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from .cache import LayerCache, Window

MASKED = -1e4
"""Score of a masked position: finite, so that no fixed-point format wraps; exp gives 0 there in every format."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale, over the last axis of x [n, width]."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon) * scale


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, over the last axis of x [n, width].

    The variance is the mean square of the centred input: mean(x^2) - mean(x)^2 would cancel in fixed point.
    """

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon) * scale + bias


def softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax over the last axis where `mask` is True; the division is one reciprocal a row."""
    scores = jnp.where(mask, scores, MASKED)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    return weights * (1.0 / jnp.sum(weights, axis=-1, keepdims=True))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary position embedding of x [n, heads, head_width]: the two halves of a head are a complex number's parts."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: LayerCache,
    window: Window,
    probabilities: Callable[[jax.Array, jax.Array], jax.Array] = softmax,
) -> tuple[jax.Array, LayerCache]:
    """Causal attention of n new tokens over the cache, which first takes their keys and values.

    q [n, heads, head_width]; k, v [n, kv_heads, head_width]; returns [n, heads * head_width] and the new cache.
    `probabilities` takes scores [..., n, length] and the window's mask.
    Query heads that share a key head are rows of one product, so a product is paid for each key head only.
    """
    n, heads, width = q.shape
    groups = k.shape[1]
    origin = (window.start, jnp.int32(0), jnp.int32(0))
    cache = LayerCache(
        jax.lax.dynamic_update_slice(cache.keys, k, origin),
        jax.lax.dynamic_update_slice(cache.values, v, origin),
    )
    length = window.mask.shape[1]
    q = (q * width**-0.5).reshape(n, groups, heads // groups, width)
    q = q.transpose(1, 2, 0, 3).reshape(groups, heads // groups * n, width)
    keys = cache.keys[:length].transpose(1, 2, 0)
    scores = (q @ keys).reshape(groups, heads // groups, n, length)
    weights = probabilities(scores, window.mask).reshape(groups, heads // groups * n, length)
    mixed = weights @ cache.values[:length].transpose(1, 0, 2)
    mixed = mixed.reshape(groups, heads // groups, n, width).transpose(2, 0, 1, 3)
    return mixed.reshape(n, heads * width), cache
