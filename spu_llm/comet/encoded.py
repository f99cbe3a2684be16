"""A layer's weights in the ring as sparse decoders take them: in parts that belong to heads and to blocks of neurons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..models.config import Params
from ..models.fixed_block import BITS, NORM_KERNEL_BITS, STREAM_BITS, BlockParams
from ..primitives.fixed import Fixed, encode
from .fixed_sparse import SCORE_BITS
from .gate import above
from .prepared import LayerSparsity, LowRank


class Part(NamedTuple):
    """Something that is shuffled: ring integers, their fraction bits, and the axis of heads or blocks."""

    raw: np.ndarray
    bits: int
    axis: int = 0


@dataclass(frozen=True)
class EncodedLayer:
    """A layer in the ring, in its owner's order."""

    heads: dict[str, Part]
    neurons: dict[str, Part]
    rest: dict[str, Fixed]


def with_predictors(params: Params, sparsity: LayerSparsity, following: LowRank | None) -> Params:
    """A layer's parameters with the predictors' first products beside q, k and v, each scaled by `_sizes`."""
    predictors = [sparsity.neurons, *([] if following is None else [following])]
    sizes = [_sizes(each) for each in predictors]
    kernel = np.concatenate(
        [params["qkv"]["kernel"], *(each.first * size for each, size in zip(predictors, sizes, strict=True))], 1
    )
    bias = np.concatenate([params["qkv"]["bias"], *(each.first_bias * size for each, size in zip(predictors, sizes, strict=True))])
    return {**params, "qkv": {"kernel": kernel, "bias": bias}}


def _sizes(predictor: LowRank) -> np.ndarray:
    """[rank] the largest weight that each of the numbers in between has in a score: moved from the second product to the first."""
    return np.maximum(np.abs(predictor.second).max(1), 1e-12)


def score_parts(predictor: LowRank) -> dict[str, Part]:
    second = predictor.second / _sizes(predictor)[:, None]
    return {
        "second": Part(encode(second, SCORE_BITS), SCORE_BITS, axis=1),
        "second_bias": Part(encode(predictor.second_bias, 2 * SCORE_BITS), 2 * SCORE_BITS),
    }


def encoded_layer(width: int, layer: BlockParams, sparsity: LayerSparsity, learned: bool) -> EncodedLayer:
    """The layer's parts; `layer` has q, k, v, the predictors' first products and the references if any side by side."""
    heads = layer.out.shape[0] // width
    end, ranks = 3 * heads * width, layer.qkv.shape[1] - 3 * heads * width - (heads if learned else 0)

    def by_head(columns: np.ndarray) -> list[np.ndarray]:
        """[..., columns] -> q (and reference), and k and v, [heads, per head, ...] each."""
        q, k, v = (part.reshape(heads, width, -1) for part in np.split(columns[..., :end].T.reshape(end, -1), 3))
        reference = columns[..., end + ranks :].T.reshape(heads, -1, q.shape[-1]) if learned else q[:, :0]
        return [np.concatenate([q, reference], 1), np.concatenate([k, v], 1)]

    query, key_value = by_head(layer.qkv.raw)
    query_bias, key_value_bias = (each[..., 0] for each in by_head(layer.qkv_bias.raw[None]))
    out = layer.out.raw.T.reshape(-1, heads, width)
    parts = {
        "query": Part(query, NORM_KERNEL_BITS),
        "key_value": Part(key_value, NORM_KERNEL_BITS),
        "out": Part(out, BITS, axis=1),
        "query_bias": Part(query_bias, STREAM_BITS),
        "key_value_bias": Part(key_value_bias, STREAM_BITS),
    }
    if learned:
        parts["slopes"] = Part(layer.slopes.raw.T, BITS)
    if sparsity.heads is not None:
        parts |= score_parts(sparsity.heads)
    scores = score_parts(above(sparsity))
    first = layer.qkv.with_raw(layer.qkv.raw[:, end : end + ranks])
    rest = {
        "first": first,
        "second": Fixed(scores["second"].raw, SCORE_BITS),
        "second_bias": Fixed(scores["second_bias"].raw, 2 * SCORE_BITS),
        "attention_phi": layer.attention_phi,
        "ffn_phi": layer.ffn_phi,
        "first_bias": layer.qkv_bias.with_raw(layer.qkv_bias.raw[end : end + ranks]),
        "out_bias": layer.out_bias,
        "down_bias": layer.down_bias,
    }
    return EncodedLayer(parts, _neurons(layer, sparsity), rest)


def _neurons(layer: BlockParams, sparsity: LayerSparsity) -> dict[str, Part]:
    blocks, order = sparsity.blocks, sparsity.order
    size = len(order) // blocks
    return {
        "up": Part(layer.up.raw.T[order].reshape(blocks, size, -1), NORM_KERNEL_BITS),
        "down": Part(layer.down.raw[order].T.reshape(-1, blocks, size), BITS, axis=1),
        "up_bias": Part(layer.up_bias.raw[order].reshape(blocks, size), STREAM_BITS),
        "order": Part(np.eye(blocks, dtype=np.int64), 0),
    }


def in_order(layer: BlockParams, order: np.ndarray) -> BlockParams:
    """Neurons block by block."""
    up, down, bias = layer.up, layer.down, layer.up_bias
    return layer._replace(
        up=up.with_raw(up.raw[:, order]), down=down.with_raw(down.raw[order]), up_bias=bias.with_raw(bias.raw[order])
    )
