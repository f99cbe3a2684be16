"""One decoder layer in plain JAX with narrowed functions, for stock SPU without a dealer: every family alike.

It runs on folded weights (`folded.py`), so a norm is a division by the root mean square and nothing else. Compared with the Flax
blocks it computes the same up to the functions' errors; in SPU it takes a third of the messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..primitives.narrow.activation import ActivationPlan, activation
from ..primitives.narrow.chain import Chain
from ..primitives.narrow.inverse_root import inverse_root
from ..primitives.narrow.pieces import Pieces
from ..primitives.narrow.softmax import SoftmaxPlan, conformant_maximum, inverse_sum, softmax_weights
from .cache import LayerCache, Window
from .config import DecoderConfig
from .layers import rotate
from .mixtral import largest

PHI_BITS = 18
"""A norm's factor is held times 2 to this, and the product divided by it: mean squares span more than one format's bits."""


class Dense(NamedTuple):
    """kernel [in, out]; bias [out] or None."""

    kernel: Any
    bias: Any = None


class NormParams(NamedTuple):
    """Secret numbers of a norm. phi [] brings the sum of squares into the inverse root's range, times 2^PHI_BITS; weights [m] are
    that function's last weights times the factor that takes phi out again."""

    phi: Any
    weights: Any


class LayerParams(NamedTuple):
    """Folded weights of a layer; offsets [capacity, heads] of learned references by position."""

    attention_norm: NormParams
    qkv: Dense
    out: Dense
    ffn_norm: NormParams
    up: Dense
    down: Dense
    offsets: Any = None


@dataclass(frozen=True)
class LayerPlan:
    """The functions of a layer.

    activation: None is ReLU. leading: how many first columns are compared for a conformant maximum, with the last two; 0: the
    reference is learned, or where `params.offsets` is None the score of position 0. routing: the softmax of experts' logits, whose
    mean is 0, over the largest of them.
    """

    norm: Chain | Pieces
    softmax: SoftmaxPlan
    activation: ActivationPlan | None
    leading: int = 0
    routing: SoftmaxPlan | None = None


def block(
    config: DecoderConfig, plan: LayerPlan, params: LayerParams, x: jax.Array, cache: LayerCache, window: Window
) -> tuple[jax.Array, LayerCache]:
    """x [n, width], centred where the family's norms subtract the mean -> the same after the layer, and the layer's cache."""
    n, width = x.shape[0], config.head_width
    h = _dense(params.qkv, norm(config, plan.norm, params.attention_norm, x))
    ends = np.cumsum([config.heads * width, config.kv_heads * width, config.kv_heads * width])
    q, k, v, reference = jnp.split(h, ends, axis=-1)
    q, k, v = q.reshape(n, config.heads, width), k.reshape(n, -1, width), v.reshape(n, -1, width)
    if config.rope_base is not None:
        q, k = rotate(q, window.cos, window.sin), rotate(k, window.cos, window.sin)
    if params.offsets is not None:
        reference = reference + jax.lax.dynamic_slice(params.offsets, (window.start, jnp.int32(0)), reference.shape)
    mixed, cache = _attend(plan, q, k, v, reference, cache, window)
    x = x + _dense(params.out, mixed)
    h = _dense(params.up, norm(config, plan.norm, params.ffn_norm, x))
    return x + _dense(params.down, _activate(config, plan, h)), cache


def norm(config: DecoderConfig, plan: Chain | Pieces, params: NormParams, x: jax.Array) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon). On SEMI2K 2 k + 9 messages for a chain of k squarings, 40 bytes an element."""
    squares = jnp.sum(x * x, axis=-1, keepdims=True) + config.width * config.epsilon
    return x * inverse_root(squares * params.phi * 2.0**-PHI_BITS, plan, params.weights)


def _dense(params: Dense, x: jax.Array) -> jax.Array:
    y = x @ params.kernel
    return y if params.bias is None else y + params.bias


def _attend(
    plan: LayerPlan, q: jax.Array, k: jax.Array, v: jax.Array, reference: jax.Array, cache: LayerCache, window: Window
) -> tuple[jax.Array, LayerCache]:
    """[n, heads * head_width] from q [n, heads, head_width], k and v [n, groups, head_width], reference [n, heads] or
    [n, 0]; and the cache with k and v."""
    n, length = q.shape[0], window.mask.shape[1]
    origin = (window.start, jnp.int32(0), jnp.int32(0))
    cache = LayerCache(*(jax.lax.dynamic_update_slice(old, new, origin) for old, new in zip(cache, (k, v), strict=True)))
    keys, values = cache.keys[:length], cache.values[:length]
    scores = _joint_scores(q, keys) if n == 1 else _scores(q, keys)  # [heads, n, length]
    relative = scores - (reference.T[..., None] if reference.size else _score_reference(plan, scores, window))
    weights = softmax_weights(relative, window.mask, plan.softmax)
    mixed = _joint_mixed(weights, values) if n == 1 else _mixed(weights, values)  # [heads, n, head_width]
    mixed = mixed * inverse_sum(weights, plan.softmax)
    return mixed.transpose(1, 0, 2).reshape(n, -1), cache


def _score_reference(plan: LayerPlan, scores: jax.Array, window: Window) -> jax.Array:
    """[heads, n, 1] the score of position 0, or the largest of the leading columns and the last two."""
    if not plan.leading:
        return scores[..., :1]
    n = scores.shape[1]
    own = window.start + jnp.arange(n, dtype=jnp.int32)[:, None]
    leading = jnp.broadcast_to(jnp.arange(plan.leading, dtype=jnp.int32), (n, plan.leading))
    columns = jnp.concatenate([jnp.minimum(leading, own), jnp.maximum(own - 1, 0), own], axis=1)
    return conformant_maximum(scores, columns)


def _scores(q: jax.Array, keys: jax.Array) -> jax.Array:
    """Query heads that share a key head are rows of one product."""
    (n, heads, width), groups = q.shape, keys.shape[1]
    q = q.reshape(n, groups, -1, width).transpose(1, 2, 0, 3).reshape(groups, -1, width)
    return (q @ keys.transpose(1, 2, 0)).reshape(heads, n, -1)


def _mixed(weights: jax.Array, values: jax.Array) -> jax.Array:
    (heads, n, length), groups = weights.shape, values.shape[1]
    return (weights.reshape(groups, -1, length) @ values.transpose(1, 0, 2)).reshape(heads, n, -1)


def _joint_scores(q: jax.Array, keys: jax.Array) -> jax.Array:
    """One product for all heads of one token, 2 messages and not 2 a key head: a query stands in its group's columns, 0 beside."""
    heads, groups = q.shape[1], keys.shape[1]
    wide = jnp.where(_own_group(heads, groups), q[0][:, None], 0.0).reshape(heads, -1)
    return (wide @ keys.reshape(len(keys), -1).T)[:, None]


def _joint_mixed(weights: jax.Array, values: jax.Array) -> jax.Array:
    """One product of all heads with all groups, of which each head's own is kept."""
    heads, groups = weights.shape[0], values.shape[1]
    every = (weights[:, 0] @ values.reshape(len(values), -1)).reshape(heads, groups, -1)
    return jnp.sum(jnp.where(_own_group(heads, groups), every, 0.0), axis=1)[:, None]


def _own_group(heads: int, groups: int) -> np.ndarray:
    """[heads, groups, 1] public: True where a head belongs to a group."""
    return np.repeat(np.eye(groups, dtype=bool), heads // groups, axis=0)[..., None]


def _activate(config: DecoderConfig, plan: LayerPlan, h: jax.Array) -> jax.Array:
    """[n, hidden] the activation, gated where the family has gates, weighted where it has experts."""
    if not config.llama_like:
        return jax.nn.relu(h) if plan.activation is None else activation(h, plan.activation)
    assert plan.activation is not None
    gate, up, router = jnp.split(h, [config.hidden, 2 * config.hidden], axis=-1)
    units = activation(gate, plan.activation) * up
    if config.experts_per_token is None:
        return units
    assert plan.routing is not None
    chosen = softmax_weights(router, largest(router, config.experts_per_token), plan.routing)
    return units * jnp.repeat(chosen * inverse_sum(chosen, plan.routing), config.ffn, axis=1)
