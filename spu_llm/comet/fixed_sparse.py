"""One decoder layer of the OPT family on the plugin's primitives, of whose heads and neurons only the predicted ones are computed.

As `models/fixed_block.py` otherwise. Scores of blocks of neurons, and of the next layer's heads, come out of the product that makes
q, k and v: half a layer and a whole one ahead, so that their openings travel in messages that attention sends anyway. The numbers
of the best ones, in the secret order of the last shuffle, are disclosed to both parties (docs/leakage.md). Only these are scaled,
compared, truncated and opened. Keys and values are of all heads, so that the cache has no gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..models.config import DecoderConfig
from ..models.fixed_block import BITS, STREAM_BITS, Angles, BlockPlan, biased
from ..primitives.active import active_contract
from ..primitives.attention import Place, RowCache, attend_active
from ..primitives.choose import choose
from ..primitives.compare import less, relu
from ..primitives.contract import contract
from ..primitives.disclose import disclose, places
from ..primitives.fixed import Fixed
from ..primitives.norm import inverse_root
from ..primitives.scale import scale
from ..primitives.topk import top_k_mask
from ..primitives.truncate import truncate

SCORE_BITS = 10
"""Fraction bits of both factors of a score."""
SIZE_BITS = 29
"""Scores, and their differences, are smaller than 2^9."""


class Heads(NamedTuple):
    """What is shuffled together with a layer's heads.

    query [heads, head_width (+ 1: its softmax's reference), width], key_value [heads, 2 head_width, width], out [width, heads,
    head_width] and second [rank, heads] are masked operands; query_bias and key_value_bias [heads, ...], slopes [heads, 2] of the
    reference on the position (None without one) and second_bias [heads] are plain shares. second: scores out of the layer before.
    """

    query: Any
    key_value: Any
    out: Any
    second: Any
    query_bias: Any
    key_value_bias: Any
    slopes: Any
    second_bias: Any


class Neurons(NamedTuple):
    """What is shuffled together with a layer's blocks of neurons.

    up [blocks, size, width], down [width, blocks, size] and order [places, blocks] are masked operands, up_bias [blocks, size]
    plain shares. order: one-hot rows, which block of the owner's stands at each place.
    """

    up: Any
    down: Any
    order: Any
    up_bias: Any


class SparseParams(NamedTuple):
    """A layer's weights. first [width, ranks] makes what scores of blocks are made of, and of the next layer's heads behind.

    second [rank, blocks], an operand, and second_bias [blocks]: scores of blocks in the owner's order.
    """

    heads: Heads
    neurons: Neurons
    first: Any
    second: Any
    attention_phi: Any
    ffn_phi: Any
    first_bias: Any
    second_bias: Any
    out_bias: Any
    down_bias: Any


@dataclass(frozen=True)
class SparsePlan:
    """Tables of a layer; how many heads and blocks it computes for each token, and how many heads the next one does.

    next_heads: None where the next layer computes all, or there is none.
    """

    tables: BlockPlan
    heads: int
    blocks: int
    next_heads: int | None


def sparse_block(
    config: DecoderConfig,
    plan: SparsePlan,
    params: SparseParams,
    following: tuple[Fixed, Fixed] | None,
    x: Fixed,
    cache: RowCache,
    active: Any,
    place: Place,
    angles: Angles,
) -> tuple[Any, ...]:
    """x [n, width] with STREAM_BITS fraction bits -> the same after the layer, and the cache with n more rows.

    active [n, heads]: the heads to compute, public. `following`: second and its bias of the next layer's heads, whose best ones
    are a third result then.
    """
    x, cache, z = sparse_attention(plan, params, x, cache, active, place, angles)
    rank = params.second.shape[0]
    chosen = chosen_blocks(z[:, :rank], params.second, params.second_bias, plan.blocks)
    index = places(disclose(contract("nb,pb->np", chosen, params.neurons.order)), plan.blocks)
    x = sparse_ffn(plan, params, x, index)
    return x, cache, *_next_heads(plan, z[:, rank:], following)


def gated_attention(
    plan: SparsePlan,
    params: SparseParams,
    following: tuple[Fixed, Fixed] | None,
    x: Fixed,
    cache: RowCache,
    active: Any,
    place: Place,
    angles: Angles,
) -> tuple[Any, ...]:
    """The layer's first half where the count of blocks varies: x, the cache, and 1 where a block scores above 0: int64 [n, places].

    The third is public, in the secret order. A fourth: the next layer's heads, where `following` predicts them.
    """
    x, cache, z = sparse_attention(plan, params, x, cache, active, place, angles)
    rank = params.second.shape[0]
    scores = _scores(z[:, :rank], params.second, params.second_bias)
    above = less(scores.with_raw(jnp.zeros_like(scores.raw)), scores, SIZE_BITS)
    mask = disclose(contract("nb,pb->np", above, params.neurons.order))
    return x, cache, mask, *_next_heads(plan, z[:, rank:], following)


def sparse_attention(
    plan: SparsePlan, params: SparseParams, x: Fixed, cache: RowCache, active: Any, place: Place, angles: Angles
) -> tuple[Fixed, RowCache, Any]:
    """The layer's first half: x after it, the cache, and z [n, ranks] that scores are made of, None where params.first is."""
    z, q, k, v, reference = _enter(plan, params, x, active, angles)
    mixed, cache = attend_active(q, active, k, v, cache, place, plan.tables.softmax, reference)
    x = x + active_contract("nbs,dbs->nd", truncate(mixed, BITS), params.heads.out, active)
    return biased(x, params.out_bias), cache, z


def sparse_ffn(plan: SparsePlan, params: SparseParams, x: Fixed, index: Any) -> Fixed:
    """The layer's second half, of the blocks `index` [n, active], public: x after it."""
    return biased(x + _ffn(plan.tables, params, x, index), params.down_bias)


def _enter(
    plan: SparsePlan, params: SparseParams, x: Fixed, active: Any, angles: Angles
) -> tuple[Fixed | None, Fixed, Fixed, Fixed, Fixed | None]:
    """z [n, ranks] if any; q [n, active heads, head_width]; k and v [n, heads, head_width]; the active heads' references if any."""
    heads, norm, n = params.heads, plan.tables.norm, x.shape[0]
    parts = [] if params.first is None else [contract("nd,dr->nr", x, params.first, norm.activation_bits)]
    parts += [
        contract("nd,bsd->nbs", x, heads.key_value, norm.activation_bits),
        active_contract("nd,bsd->nbs", x, heads.query, active, norm.activation_bits),
    ]
    together = parts[0].with_raw(jnp.concatenate([part.raw.reshape(n, -1) for part in parts], -1))
    scaled = scale(together, inverse_root(x, norm, params.attention_phi), norm.output_bits, norm.root_bits)
    ends = np.cumsum([prod(part.shape[1:]) for part in parts])
    *first, rows, query = (
        scaled[:, end - prod(part.shape[1:]) : end].reshape(*part.shape) for end, part in zip(ends, parts, strict=True)
    )
    rows = rows + heads.key_value_bias
    query = query + _at(heads.query_bias, active)
    width = rows.shape[-1] // 2
    reference = None
    if heads.slopes is not None:
        slopes = _at(heads.slopes, active)
        position = slopes.with_raw(jnp.sum(slopes.raw * angles.features[:, None], -1))
        reference = query[..., width] + Fixed(position.raw, STREAM_BITS)
    z = first[0] + params.first_bias if first else None
    return z, query[..., :width], rows[..., :width], rows[..., width:], reference


def _ffn(tables: BlockPlan, params: SparseParams, x: Fixed, index: Any) -> Fixed:
    """What the active blocks of neurons add to x."""
    up = active_contract("nd,bsd->nbs", x, params.neurons.up, index, tables.norm.activation_bits)
    root = inverse_root(x, tables.norm, params.ffn_phi)[..., None]
    h = scale(up, root, tables.norm.output_bits, tables.norm.root_bits) + _at(params.neurons.up_bias, index)
    return active_contract("nbs,dbs->nd", truncate(relu(h), BITS), params.neurons.down, index)


def chosen_blocks(z: Fixed, second: Fixed, bias: Fixed, count: int) -> Fixed:
    """[n, blocks] 1 for blocks that score above 0, filled up or cut to `count` in the owner's order: secret."""
    return choose(_scores(z, second, bias), count, SIZE_BITS)


def _next_heads(plan: SparsePlan, z: Fixed, following: tuple[Fixed, Fixed] | None) -> tuple[Any, ...]:
    """Places [n, count] of the next layer's best-scoring heads, where they are predicted; they are few: all pairs are compared."""
    if following is None or plan.next_heads is None:
        return ()
    return (places(disclose(top_k_mask(_scores(z, *following), plan.next_heads, SIZE_BITS)), plan.next_heads),)


def _scores(z: Fixed, second: Fixed, bias: Fixed) -> Fixed:
    return contract("nr,rb->nb", z, second, SCORE_BITS) + bias


def _at(x: Fixed, index: Any) -> Fixed:
    """x [blocks, ...] of the active ones of each token: [n, active, ...]."""
    return x.with_raw(jnp.take(x.raw, index, axis=0, mode="clip"))
