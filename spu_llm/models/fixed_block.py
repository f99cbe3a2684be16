"""One decoder layer on the plugin's primitives, in fixed point with explicit scales: all families alike.

Openings follow each other in this order, everything named together in one message: x; squares; inverse root and x @ W_qkv; q, k
and v; scores; exponentials and their sums; mixed values and inverse sums; the attention's output twice (truncated, then
opened); the same of the second half. 15 messages for GPT-2, 16 for Llama, 17 for OPT, whatever the number of tokens; 2 more
where softmax sums are brought near 1 by a power of two, 4 more where their reference is refined (`SoftmaxPlan`). For a mixture
of experts see fixed_experts.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..dealer.table import Table
from ..primitives.attention import Place, RowCache, SoftmaxPlan, attend
from ..primitives.compare import relu
from ..primitives.contract import contract
from ..primitives.fixed import Fixed, encode
from ..primitives.lookup import lookup
from ..primitives.norm import NormPlan, encode_phi, norm_dot, rounded_phi
from ..primitives.truncate import truncate
from .calibration import place_features
from .config import DecoderConfig
from .fixed_experts import RoutingPlan, mix
from .folded import FoldedLayer

ANGLE_BITS = 12
"""Fraction bits of rotary cosines and sines."""
STREAM_BITS = 28
"""Fraction bits of the residual stream, which is never truncated: two times BITS, so that outputs add to it as they are."""
BITS = 14
"""Fraction bits of activations, and of the weights that write the residual stream."""
NORM_KERNEL_BITS = 22
"""Fraction bits of weights that follow a norm: they hold phi W, and 8 bits more make up for phi down to 2^-6 and small W."""


@dataclass(frozen=True)
class BlockPlan:
    """Tables and scales of a layer. Layers with equal plans are served by one program."""

    norm: NormPlan
    softmax: SoftmaxPlan
    activation: Table | None  # None: ReLU, by comparison
    routing: RoutingPlan | None = None  # None: no experts


class BlockParams(NamedTuple):
    """Weights in the ring. Kernels and each norm's phi^2 are masked operands; biases are plain shares or None."""

    qkv: Any
    out: Any
    up: Any
    down: Any
    attention_phi: Any
    ffn_phi: Any
    qkv_bias: Any = None
    out_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None
    slopes: Any = None


class Angles(NamedTuple):
    """What n new tokens' positions give, as public integers.

    cos, sin: rotary angles with ANGLE_BITS fraction bits, [n, head_width / 2] each; features: `place_features` with BITS
    fraction bits, [n, 2].
    """

    cos: Any
    sin: Any
    features: Any


def encode_angles(cos: np.ndarray, sin: np.ndarray, start: int) -> Angles:
    """The public integers of tokens from position `start` on, from real rotary angles."""
    features = place_features(start + np.arange(len(cos)))
    return Angles(encode(cos, ANGLE_BITS), encode(sin, ANGLE_BITS), encode(features, BITS))


def encode_layer(layer: FoldedLayer, plan: NormPlan, phis: tuple[float, float]) -> BlockParams:
    """A folded layer in the ring; `phis` bring the mean square before each norm near 1."""

    def bias(value: np.ndarray | None) -> Fixed | None:
        return None if value is None else Fixed(encode(value, STREAM_BITS), STREAM_BITS)

    def after_norm(kernel: np.ndarray, phi: float) -> Fixed:
        return Fixed(encode(kernel * rounded_phi(phi, bits), NORM_KERNEL_BITS), NORM_KERNEL_BITS)

    bits = plan.weight_bits(STREAM_BITS)
    return BlockParams(
        after_norm(layer.qkv, phis[0]),
        Fixed(encode(layer.out, BITS), BITS),
        after_norm(layer.up, phis[1]),
        Fixed(encode(layer.down, BITS), BITS),
        Fixed(encode_phi(phis[0], bits), bits),
        Fixed(encode_phi(phis[1], bits), bits),
        bias(layer.qkv_bias),
        bias(layer.out_bias),
        bias(layer.up_bias),
        bias(layer.down_bias),
        None if layer.slopes is None else Fixed(encode(layer.slopes, BITS), BITS),
    )


def conformant_columns(prefix: int, start: int, count: int) -> np.ndarray:
    """[count, prefix + 3] the positions among whose scores a token's reference is the largest: prefix, first, last two."""
    rows = start + np.arange(count)
    constant = np.broadcast_to(np.arange(prefix + 1), (count, prefix + 1))
    return np.concatenate([np.minimum(constant, rows[:, None]), np.maximum(rows - 1, 0)[:, None], rows[:, None]], axis=1)


def with_reference(layer: FoldedLayer, reference: np.ndarray) -> FoldedLayer:
    """The layer with each head's reference (see `Calibration`) as more outputs beside q, k and v, and slopes of the position."""
    width = len(layer.qkv)
    qkv = np.concatenate([layer.qkv, reference[:width]], axis=1)
    bias = np.zeros(layer.qkv.shape[1]) if layer.qkv_bias is None else layer.qkv_bias
    return replace(layer, qkv=qkv, qkv_bias=np.concatenate([bias, reference[width]]), slopes=reference[width + 1 :])


def block(
    config: DecoderConfig, plan: BlockPlan, params: BlockParams, x: Fixed, cache: RowCache, place: Place, angles: Angles
) -> tuple[Fixed, RowCache]:
    """x [n, width] with STREAM_BITS fraction bits -> the same after the layer, and the cache with n more rows."""
    h = biased(norm_dot(x, params.qkv, plan.norm, params.attention_phi), params.qkv_bias)
    q, k, v, reference = split_heads(config, h, params.slopes, angles)
    if config.rope_base is not None:
        q, k = _rotate(q, angles), _rotate(k, angles)
    mixed, cache = attend(q, k, v, cache, place, plan.softmax, reference)
    n = x.shape[0]
    x = add_product(x, mixed.reshape(n, config.heads * config.head_width), params.out, params.out_bias)
    h = biased(norm_dot(x, params.up, plan.norm, params.ffn_phi), params.up_bias)
    if plan.routing is not None and plan.activation is not None:
        return x + mix(config, plan.routing, plan.activation, h, params.down), cache
    return add_product(x, _activate(config, plan, h), params.down, params.down_bias), cache


def biased(x: Fixed, bias: Fixed | None) -> Fixed:
    """x + bias, where there is one."""
    return x if bias is None else x + bias


def add_product(x: Fixed, h: Fixed, kernel: Fixed, bias: Fixed | None) -> Fixed:
    """x + h @ kernel + bias, h truncated before."""
    return biased(x + contract("nk,km->nm", truncate(h, BITS), kernel), bias)


def split_heads(config: DecoderConfig, h: Fixed, slopes: Fixed | None, angles: Angles) -> tuple[Fixed, Fixed, Fixed, Fixed | None]:
    """q [n, groups, queries, head_width], k, v [n, groups, head_width], and the learned reference [n, groups, queries] if any."""
    n, groups, width = h.shape[0], config.kv_heads, config.head_width
    per = config.heads // groups
    q_end, k_end, v_end = np.cumsum([config.heads * width, groups * width, groups * width])
    q = h[:, :q_end].reshape(n, groups, per, width)
    k = h[:, q_end:k_end].reshape(n, groups, width)
    v = h[:, k_end:v_end].reshape(n, groups, width)
    if slopes is None:
        return q, k, v, None
    reference = h[:, v_end:] + Fixed(angles.features @ slopes.raw, STREAM_BITS)
    return q, k, v, reference.reshape(n, groups, per)


def _rotate(x: Fixed, angles: Angles) -> Fixed:
    """Rotary embedding by public integers: local, ANGLE_BITS more fraction bits."""
    a, b = jnp.split(x.raw, 2, axis=-1)
    shape = (x.shape[0], *[1] * (len(x.shape) - 2), -1)
    cos, sin = angles.cos.reshape(shape), angles.sin.reshape(shape)
    return Fixed(jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1), x.bits + ANGLE_BITS, x.modulus)


def _activate(config: DecoderConfig, plan: BlockPlan, h: Fixed) -> Fixed:
    """The activation, gated in the Llama family."""
    if plan.activation is None:
        return relu(h)
    if not config.llama_like:
        return lookup(h, plan.activation)
    gate, up = h[:, : config.ffn], h[:, config.ffn :]
    return contract("nf,nf->nf", lookup(gate, plan.activation, modulus=64), up, BITS, BITS)
