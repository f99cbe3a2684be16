"""One decoder layer of the OPT family on SPU's own operations as in stock_sparse.py, where products of matrices send ciphertexts.

On CHEETAH a product sends as much for some columns as for many, and half where one side is a party's own. So
- the owner multiplies its predictor out, and its scores are columns of the product that makes q, k and v;
- no heads are skipped: moved to secret places, their weights would be shared, which costs more than it saves;
- a pass of several tokens computes all neurons, by weights that are the owner's own, and discloses nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from ..models.cache import LayerCache, Window
from ..models.config import DecoderConfig
from ..models.layers import attend, softmax
from ..primitives.disclose import disclose, places
from ..primitives.fixed import Fixed
from .activity import dense, normed
from .stock_sparse import Params, StockPlan, chosen_blocks, sparse_ffn


def joint_layer(
    config: DecoderConfig,
    plan: StockPlan,
    params: Params,
    following: None,
    x: Any,
    cache: LayerCache,
    active: Any,
    place: Window,
) -> tuple[Any, LayerCache]:
    """x [n, width] -> x [n, width], and the layer's cache; arguments are those of `sparse_layer`, of which two serve nothing.

    params: of a dense layer, with the scores of blocks beside q, k and v, and "neurons" in blocks and in secret order.
    """
    mixed, cache, scores = joint_attention(config, params, normed(config, params["attention_norm"], x), cache, place)
    index = None
    if len(x) == 1:
        index = _disclosed(params["neurons"]["order"], chosen_blocks(scores, plan.blocks), plan.blocks)
    x = x + mixed
    return x + joint_ffn(plan, params, normed(config, params["ffn_norm"], x), index), cache


def joint_attention(
    config: DecoderConfig, params: Params, y: Any, cache: LayerCache, place: Window, weigh: Callable = softmax
) -> tuple[Any, LayerCache, Any]:
    """What all heads add to the stream, the cache with their keys and values, and the scores of blocks [n, blocks]."""
    made = dense(params["qkv"], y)
    q, k, v, scores = jnp.split(made, [config.width, 2 * config.width, 3 * config.width], axis=-1)
    shape = len(y), config.heads, config.head_width
    mixed, cache = attend(q.reshape(shape), k.reshape(shape), v.reshape(shape), cache, place, weigh)
    return dense(params["out"], mixed), cache, scores


def joint_ffn(plan: StockPlan, params: Params, y: Any, index: Any, activation: Callable = nn.relu) -> Any:
    """What a token's active blocks `index` [1, k] add to the stream, or all neurons where y [n, width] is of several tokens."""
    if len(y) > 1:
        return dense(params["down"], activation(dense(params["up"], y)))
    return sparse_ffn(plan, params["neurons"], y, index, activation) + params["down"]["bias"]


def _disclosed(order: Any, chosen: Any, count: int) -> Any:
    """Places [1, count] of a token's chosen blocks [1, blocks] in a secret order [places, blocks], which all parties learn.

    By products of elements: each has a single bit on one side, for which an oblivious transfer of 8 bytes does.
    """
    return places(disclose(Fixed(jnp.sum(order * chosen, axis=1)[None], 0)), count)
