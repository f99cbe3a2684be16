"""One decoder layer of the OPT family on SPU's own operations, of whose heads and neurons only the predicted ones are computed.

Where a product's cost is that of its inputs, and weights are opened once (SEMI2K), products are dense and what follows them is
sparse: a gather of the active outputs, and zeros for inactive inputs, are local. Where a product costs by its size (ABY3; CHEETAH:
joint_sparse.py), a pass of one token multiplies by active blocks of the weights alone. A pass of several tokens skips no heads: SPU
multiplies heads one after the other, and would for each token anew.

Which blocks are active is disclosed, in the secret order of a shuffle, as by the plugin (see fixed_sparse.py and docs/leakage.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ..models.cache import LayerCache, Window
from ..models.config import DecoderConfig
from ..models.layers import LayerNorm, softmax
from ..primitives.active import picked, spread
from ..primitives.choose import choose
from ..primitives.disclose import disclose, places
from ..primitives.fixed import Fixed
from ..primitives.stock import FRACTION_BITS, as_real, as_ring
from ..primitives.topk import top_k_mask

Params = dict[str, Any]


@dataclass(frozen=True)
class StockPlan:
    """How many heads and blocks of neurons a layer computes for each token, and how many heads the next one does.

    next_heads: None where the next layer computes all, or there is none. dense: whether products are.
    """

    heads: int
    blocks: int
    next_heads: int | None
    dense: bool


def sparse_layer(
    config: DecoderConfig,
    plan: StockPlan,
    params: Params,
    following: Params | None,
    x: Any,
    cache: LayerCache,
    active: Any,
    place: Window,
) -> tuple[Any, ...]:
    """x [n, width] -> x [n, width], the layer's cache, and the next layer's active heads where `following` predicts them.

    params: "first", "second", "heads" and "neurons" beside the norms; kernels [in, out] where products are dense, else
    [blocks, ...].
    """
    y = _norm(config, params["attention_norm"], x)
    z = y @ params["first"]["kernel"] + params["first"]["bias"]
    rank = params["second"]["kernel"].shape[0]
    scores = z[:, :rank] @ params["second"]["kernel"] + params["second"]["bias"]
    index = _disclosed(params["neurons"]["order"], chosen_blocks(scores, plan.blocks), plan.blocks)
    mixed, cache = sparse_attention(config, plan, params["heads"], y, cache, active, place)
    x = x + mixed + params["out_bias"]
    x = x + sparse_ffn(plan, params["neurons"], _norm(config, params["ffn_norm"], x), index) + params["down_bias"]
    if following is None or plan.next_heads is None:
        return x, cache
    if len(x) > 1:  # the next layer skips none of their heads, so none are disclosed
        return x, cache, jnp.zeros((len(x), plan.next_heads), jnp.int64)
    return x, cache, _best(z[:, rank:], following, plan.next_heads)


def dense_layer(
    config: DecoderConfig, plan: StockPlan, params: Params, client: Any, owner: Any, x: Any, cache: LayerCache, place: Window
) -> tuple[Any, LayerCache]:
    """A pass of several tokens where orders serve one: everything is computed, nothing disclosed."""
    mixed, cache = sparse_attention(config, plan, params["heads"], _norm(config, params["attention_norm"], x), cache, None, place)
    x = x + mixed + params["out_bias"]
    neurons = params["neurons"]
    h = nn.relu(_norm(config, params["ffn_norm"], x) @ neurons["up"] + neurons["up_bias"].reshape(-1))
    return x + h @ neurons["down"] + params["down_bias"], cache


def fresh_layer(
    config: DecoderConfig, plan: StockPlan, params: Params, client: Any, owner: Any, x: Any, cache: LayerCache, place: Window
) -> tuple[Any, LayerCache]:
    """As `sparse_layer`, for one token, with a fresh secret order of its hidden units: the product of both parties' permutations.

    client, owner [blocks, blocks]: one-hot matrices. The disclosed places are a uniform choice: they tell nothing. All heads are
    computed, and products are dense.
    """
    y = _norm(config, params["attention_norm"], x)
    neurons, order = params["neurons"], client @ owner
    blocks, size = neurons["up_bias"].shape
    z = y @ params["first"]["kernel"] + params["first"]["bias"]
    scores = z @ params["second"]["kernel"] + params["second"]["bias"]
    index = _disclosed(order, chosen_blocks(scores, plan.blocks), plan.blocks)[0]
    mixed, cache = sparse_attention(config, plan, params["heads"], y, cache, None, place)
    x = x + mixed + params["out_bias"]
    h = _norm(config, params["ffn_norm"], x) @ neurons["up"] + neurons["up_bias"].reshape(-1)
    active = jnp.take(order @ as_ring(h).reshape(blocks, size), index, axis=0)
    back = jnp.take(order, index, axis=0).T @ as_ring(nn.relu(as_real(active).astype(x.dtype)))
    return x + as_real(back).astype(x.dtype).reshape(1, -1) @ neurons["down"] + params["down_bias"], cache


def _norm(config: DecoderConfig, params: Params, x: Any) -> Any:
    return LayerNorm(config.epsilon).apply({"params": params}, x)


def chosen_blocks(scores: Any, count: int) -> Any:
    """[n, blocks] 1 for blocks that score above 0, filled up or cut to `count` in the owner's order: secret."""
    return choose(Fixed(as_ring(scores), FRACTION_BITS), count).raw


def _disclosed(order: Any, chosen: Any, count: int) -> Any:
    """Their places [n, count] in a secret order [places, blocks], which all parties learn, and nothing else."""
    return places(disclose(Fixed((order @ chosen.T).T, 0)), count)


def _best(z: Any, predictor: Params, count: int) -> Any:
    """Numbers [n, count] of the best scores of z [n, rank], which all parties learn, and nothing else of the scores."""
    scores = z @ predictor["second"] + predictor["second_bias"]
    return places(disclose(top_k_mask(Fixed(as_ring(scores), FRACTION_BITS), count)), count)


def sparse_attention(
    config: DecoderConfig,
    plan: StockPlan,
    heads: Params,
    y: Any,
    cache: LayerCache,
    active: Any,
    place: Window,
    weigh: Callable = softmax,
) -> tuple[Any, LayerCache]:
    """What the active heads add to the stream, but for the bias, and the cache with the keys and values of all heads.

    weigh: makes the weights of scores and mask.
    """
    n, width = len(y), config.head_width
    rows = _product(y, heads["key_value"], plan.dense).reshape(n, config.heads, 2 * width) + heads["key_value_bias"]
    origin = (place.start, jnp.int32(0), jnp.int32(0))
    cache = LayerCache(
        jax.lax.dynamic_update_slice(cache.keys, rows[..., :width], origin),
        jax.lax.dynamic_update_slice(cache.values, rows[..., width:], origin),
    )
    length = place.mask.shape[1]
    keys, values = cache.keys[:length], cache.values[:length]
    if n > 1 or plan.heads == config.heads:
        q = _product(y, heads["query"], plan.dense).reshape(n, config.heads, width) + heads["query_bias"]
    else:
        q = active_outputs(y, heads["query"], active, plan.dense, width) + jnp.take(heads["query_bias"], active, axis=0)
        keys, values = (_taken(each, active[0], axis=1) for each in (keys, values))
    scores = (q * width**-0.5).transpose(1, 0, 2) @ keys.transpose(1, 2, 0)
    mixed = (weigh(scores, place.mask) @ values.transpose(1, 0, 2)).transpose(1, 0, 2)
    every = np.broadcast_to(np.arange(config.heads), (n, config.heads))
    return _inputs(mixed, heads["out"], every if mixed.shape[1] == config.heads else active, plan.dense, config.heads), cache


def sparse_ffn(plan: StockPlan, neurons: Params, y: Any, index: Any, activation: Callable = nn.relu) -> Any:
    """What the active blocks of neurons add to the stream, but for the bias."""
    blocks, size = neurons["up_bias"].shape
    h = active_outputs(y, neurons["up"], index, plan.dense, size) + jnp.take(neurons["up_bias"], index, axis=0)
    return _inputs(activation(h), neurons["down"], index, plan.dense, blocks)


def _product(y: Any, kernel: Any, dense: bool) -> Any:
    """y [n, width] times all blocks: [n, blocks * size]."""
    return y @ (kernel if dense else kernel.reshape(-1, kernel.shape[-1]).T)


def active_outputs(y: Any, kernel: Any, index: Any, dense: bool, size: int) -> Any:
    """y [n, width] times the active blocks, [n, k, size]: kernel [width, blocks * size], or [blocks, size, width]."""
    n, k = index.shape
    if dense or n > 1:
        return picked(_product(y, kernel, dense).reshape(n, -1, size), index)
    return (y @ _taken(kernel, index[0]).reshape(k * size, -1).T).reshape(n, k, size)


def _inputs(h: Any, kernel: Any, index: Any, dense: bool, blocks: int) -> Any:
    """Active inputs h [n, k, size] times their blocks, [n, width]: kernel [blocks * size, width], or [blocks, size, width]."""
    n, k, size = h.shape
    if dense or n > 1:
        return spread(h, index, blocks).reshape(n, blocks * size) @ kernel.reshape(blocks * size, -1)
    return h.reshape(n, k * size) @ _taken(kernel, index[0]).reshape(k * size, -1)


def _taken(x: Any, index: Any, axis: int = 0) -> Any:
    """x at the places `index` [k] (public) along an axis. By slices, as SPU's gather goes number by number: ten times as long."""
    places = index.astype(jnp.uint32)  # unsigned: no code for negative ones
    return jnp.concatenate([jax.lax.dynamic_slice_in_dim(x, places[j], 1, axis) for j in range(len(index))], axis)
