"""One decoder layer of the OPT family on the plugin's primitives, with a fresh secret order of neurons for every token.

As fixed_sparse.py, but what is shuffled are a token's scores and hidden units, not the weights: the product with `up` is made of
all blocks (it sends nothing but the stream's opening), moved into the token's order, and only the active blocks are scaled,
compared and truncated; these are moved back for the product with `down`. The disclosed places are a uniform choice of `active` of
the blocks, whatever the token: they tell nothing. 16 bytes a neuron and what active ones take, against 48 a neuron of a dense
layer, and one message more. All heads are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..models.config import DecoderConfig
from ..models.fixed_block import BITS, Angles, BlockParams, BlockPlan, add_product, biased, split_heads
from ..primitives.active import picked
from ..primitives.attention import Place, RowCache, attend
from ..primitives.compare import relu
from ..primitives.contract import contract
from ..primitives.disclose import disclose, places
from ..primitives.fixed import Fixed
from ..primitives.fresh_order import fresh_orders, into_order, out_of_order
from ..primitives.norm import inverse_root, norm_dot
from ..primitives.scale import scale
from ..primitives.truncate import truncate
from .fixed_sparse import chosen_blocks


class FreshParams(NamedTuple):
    """dense: a dense layer's, neurons block by block, the predictor's first product beside q, k and v, and up_bias an operand.

    second [rank, blocks], an operand, and second_bias [blocks].
    """

    dense: BlockParams
    second: Any
    second_bias: Any


@dataclass(frozen=True)
class FreshPlan:
    """Tables of a layer, and how many of its blocks of neurons are computed for each token."""

    tables: BlockPlan
    active: int


def fresh_block(
    config: DecoderConfig, plan: FreshPlan, params: FreshParams, x: Fixed, cache: RowCache, place: Place, angles: Angles
) -> tuple[Fixed, RowCache]:
    """x [n, width] with STREAM_BITS fraction bits -> the same after the layer, and the cache with n more rows."""
    dense, tables, n = params.dense, plan.tables, x.shape[0]
    h = biased(norm_dot(x, dense.qkv, tables.norm, dense.attention_phi), dense.qkv_bias)
    end, (rank, blocks) = (config.heads + 2 * config.kv_heads) * config.head_width, params.second.shape
    orders = fresh_orders(n, blocks)
    chosen = chosen_blocks(h[:, end : end + rank], params.second, params.second_bias, plan.active)
    moved = into_order(orders, chosen.reshape(n, blocks, 1)).reshape(n, blocks)
    index = places(disclose(moved), plan.active)
    h = h.with_raw(jnp.concatenate([h.raw[:, :end], h.raw[:, end + rank :]], -1))
    q, k, v, reference = split_heads(config, h, dense.slopes, angles)
    mixed, cache = attend(q, k, v, cache, place, tables.softmax, reference)
    x = add_product(x, mixed.reshape(n, config.heads * config.head_width), dense.out, dense.out_bias)
    hidden = out_of_order(orders, _active(tables, dense, x, orders, index), index).reshape(n, config.ffn)
    return biased(x + contract("nk,km->nm", hidden, dense.down), dense.down_bias), cache


def _active(tables: BlockPlan, dense: BlockParams, x: Fixed, orders: Fixed, index: Any) -> Fixed:
    """Hidden units of the active blocks, in their places' order: [n, active, size] with BITS fraction bits."""
    norm, (n, blocks, _) = tables.norm, orders.shape
    up = contract("nk,km->nm", x, dense.up, norm.activation_bits).reshape(n, blocks, -1)
    bias = into_order(orders, dense.up_bias.reshape(blocks, -1))
    up, bias = (each.with_raw(picked(each.raw, index)) for each in (into_order(orders, up), bias))
    root = inverse_root(x, norm, dense.ffn_phi)[..., None]
    return truncate(relu(scale(up, root, norm.output_bits, norm.root_bits) + bias), BITS)
