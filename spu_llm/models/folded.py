"""A decoder's weights with its norms folded in: every norm becomes a plain division by the root mean square.

Layer norm: gain and bias go into the kernel and bias that follow; the mean goes into what writes the residual stream, whose
output is centred, so that the stream itself is. RMS norm: the gain goes into the kernel. Attention's 1/sqrt(head_width) goes
into the queries. All of it is the owner's work in plaintext, and exact up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .config import DecoderConfig, Params

Array = np.ndarray


@dataclass(frozen=True)
class FoldedLayer:
    """Kernels [in, out] and biases [out] (None where the family has none) in float64.

    `up` holds gates before ups where the family has gates, and after them the router where it has experts.
    """

    qkv: Array
    out: Array
    up: Array
    down: Array
    qkv_bias: Array | None = None
    out_bias: Array | None = None
    up_bias: Array | None = None
    down_bias: Array | None = None
    slopes: Array | None = None  # [2, heads] of a learned softmax reference on the position


def fold_layer(config: DecoderConfig, params: Params) -> FoldedLayer:
    """The folded form of one layer of any family."""
    p = _float64(params)
    qkv, qkv_bias = _after_norm(p["attention_norm"], p["qkv"])
    up, up_bias = _after_norm(p["ffn_norm"], _into_ffn(p))
    centred = "bias" in p["attention_norm"]
    out, out_bias = _writing(p["out"], centred)
    down, down_bias = _writing(p["down"], centred)
    queries = config.heads * config.head_width
    factor = np.ones(qkv.shape[1])
    factor[:queries] = config.head_width**-0.5
    qkv_bias = None if qkv_bias is None else qkv_bias * factor
    return FoldedLayer(qkv * factor, out, up, down, qkv_bias, out_bias, up_bias, down_bias)


def fold_head(config: DecoderConfig, params: Params, table: Array) -> tuple[Array, Array | None]:
    """The output layer [width, vocabulary] after the final norm, and its bias."""
    kernel = {"kernel": np.asarray(table, np.float64).T}
    return _after_norm(_float64(params)["norm"], kernel)


def centred_rows(config: DecoderConfig, table: Array) -> Array:
    """An embedding table [n, width] that writes the residual stream, centred where the family's norms subtract the mean."""
    table = np.asarray(table, np.float64)
    return table if config.llama_like else table - table.mean(-1, keepdims=True)


def _into_ffn(p: Params) -> Params:
    """What stands on the second norm. A router's logits lose their mean, which softmax ignores, so tables need not cover it."""
    if "router" not in p:
        return p["gate_up" if "gate_up" in p else "up"]
    router = p["router"]["kernel"]
    return {"kernel": np.concatenate([p["gate_up"]["kernel"], router - router.mean(-1, keepdims=True)], axis=1)}


def _after_norm(norm: Params, dense: Params) -> tuple[Array, Array | None]:
    kernel, bias = norm["scale"][:, None] * dense["kernel"], dense.get("bias")
    if "bias" in norm:
        bias = norm["bias"] @ dense["kernel"] + (0 if bias is None else bias)
    return kernel, bias


def _writing(dense: Params, centred: bool) -> tuple[Array, Array | None]:
    kernel, bias = dense["kernel"], dense.get("bias")
    if centred:
        kernel = kernel - kernel.mean(-1, keepdims=True)
        bias = None if bias is None else bias - bias.mean()
    return kernel, bias


def _float64(params: Params) -> Any:
    return {name: {key: np.asarray(value, np.float64) for key, value in part.items()} for name, part in params.items()}
