"""What the owner measures on text before a model is used: the ranges its tables must cover, and each head's reference.

The reference of a head predicts the log of its softmax's sum from the layer's normalised input, by least squares. It stands
for the maximum in softmax, which would cost comparisons: what is left of the scores is small for nearly every token, and the
tables cover the rest (see `plan.py`). Like everything here it is the owner's secret, part of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..progress import Progress, silent
from .config import DecoderConfig
from .decoder import Decoder
from .folded import FoldedLayer, centred_rows, fold_layer

_RIDGE = 3.0
MASKED = -1e30


@dataclass(frozen=True)
class LayerRanges:
    """Least and largest of each quantity over the text, prefix positions left out.

    attention_squares, ffn_squares: mean square before the two norms; relative: score - reference; log_sum: log of the sum of
    exp(relative); activation: the activation's input.
    """

    attention_squares: tuple[float, float]
    ffn_squares: tuple[float, float]
    relative: tuple[float, float]
    log_sum: tuple[float, float]
    activation: tuple[float, float]


@dataclass(frozen=True)
class Calibration:
    """The result, one entry a layer. A reference [width + 1 + 2, heads] holds weights, bias, and slopes of `place_features`."""

    layers: tuple[LayerRanges, ...]
    references: tuple[np.ndarray, ...]
    final_squares: tuple[float, float]
    tokens: int


def calibrate(
    decoder: Decoder,
    texts: Sequence[Sequence[int]],
    prefix: Sequence[int] = (),
    progress: Progress = silent,
) -> Calibration:
    """Run texts (token ids) through the model in plaintext, layer by layer, each after `prefix`."""
    config = decoder.config
    states = [_embedded(decoder, [*prefix, *text]) for text in texts]
    skip = len(prefix)
    layers, references = [], []
    step = jax.jit(lambda layer, x: _forward(config, layer, x))
    for params in progress(decoder.params["layers"], "calibrating", "layer"):
        folded = jax.tree_util.tree_map(jnp.asarray, vars(fold_layer(config, params)))
        seen, after = [], []
        for x in states:
            x, found = step(folded, x)
            after.append(x)
            seen.append({name: np.asarray(value)[skip:] for name, value in found.items()})
        states = after
        reference = _fit_reference(seen)
        references.append(reference)
        layers.append(_ranges(seen, reference))
    squares = np.concatenate([np.mean(np.square(np.asarray(x)[skip:]), -1) for x in states])
    return Calibration(tuple(layers), tuple(references), _range(squares), sum(map(len, texts)))


def _embedded(decoder: Decoder, tokens: Sequence[int]) -> jax.Array:
    embed = decoder.params["embed"]
    x = centred_rows(decoder.config, embed["table"])[np.asarray(tokens)]
    if "positions" in embed:
        x = x + centred_rows(decoder.config, embed["positions"])[: len(tokens)]
    return jnp.asarray(x, jnp.float32)


def _forward(config: DecoderConfig, layer: dict[str, Any], x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One folded layer over a whole text, and everything about it that has a range; all of it [positions, ...]."""
    n, width, groups = x.shape[0], config.head_width, config.kv_heads
    weights = FoldedLayer(**layer)
    first = jnp.mean(x * x, -1, keepdims=True) + config.epsilon
    normed = x * jax.lax.rsqrt(first)
    h = _dense(normed, weights.qkv, weights.qkv_bias)
    q, k, v = jnp.split(h, [config.heads * width, (config.heads + groups) * width], axis=-1)
    q, k, v = q.reshape(n, groups, -1, width), k.reshape(n, groups, width), v.reshape(n, groups, width)
    if config.rope_base is not None:
        angles = np.arange(n)[:, None] * config.rope_base ** -(np.arange(0, width, 2) / width)
        q, k = _rotated(q, angles), _rotated(k, angles)
    scores = jnp.einsum("ngqd,tgd->ngqt", q, k).reshape(n, config.heads, n)
    causal = np.tril(np.ones((n, n), bool))[:, None]
    log_sum = jax.nn.logsumexp(jnp.where(causal, scores, MASKED), -1)
    weighted = jnp.where(causal, jnp.exp(scores - log_sum[..., None]), 0).reshape(n, groups, -1, n)
    mixed = jnp.einsum("ngqt,tgd->ngqd", weighted, v).reshape(n, -1)
    x = x + _dense(mixed, weights.out, weights.out_bias)
    second = jnp.mean(x * x, -1, keepdims=True) + config.epsilon
    h = _dense(x * jax.lax.rsqrt(second), weights.up, weights.up_bias)
    gate = h[:, : config.ffn]
    x = x + _dense(_activated(config, h), weights.down, weights.down_bias)
    least = jnp.min(jnp.where(causal, scores, -MASKED), -1)
    found = {
        "normed": normed, "log_sum": log_sum, "least": least, "most": jnp.max(jnp.where(causal, scores, MASKED), -1),
        "first": first[:, 0], "second": second[:, 0], "gate": gate, "position": jnp.arange(n),
    }  # fmt: skip
    return x, found


def _dense(x: jax.Array, kernel: Any, bias: Any) -> jax.Array:
    y = x @ jnp.asarray(kernel, x.dtype)
    return y if bias is None else y + jnp.asarray(bias, x.dtype)


def _rotated(x: jax.Array, angles: np.ndarray) -> jax.Array:
    a, b = jnp.split(x, 2, axis=-1)
    shape = (len(angles), *[1] * (x.ndim - 2), -1)
    cos, sin = np.cos(angles).reshape(shape).astype(np.float32), np.sin(angles).reshape(shape).astype(np.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _activated(config: DecoderConfig, h: jax.Array) -> jax.Array:
    if config.family == "llama":
        return jax.nn.silu(h[:, : config.ffn]) * h[:, config.ffn :]
    return jax.nn.gelu(h, approximate=True) if config.family == "gpt2" else jax.nn.relu(h)


def _fit_reference(seen: list[dict[str, np.ndarray]]) -> np.ndarray:
    """Ridge regression of the log of each head's sum on the normalised input and the position: [width + 1 + 2, heads]."""
    features = np.concatenate([_features(part) for part in seen])
    target = np.concatenate([part["log_sum"] for part in seen]).astype(np.float64)
    gram = features.T @ features + _RIDGE * np.eye(features.shape[1])
    return np.linalg.solve(gram, features.T @ target)


def _features(part: dict[str, np.ndarray]) -> np.ndarray:
    rows = part["normed"].astype(np.float64)
    return np.concatenate([rows, np.ones((len(rows), 1)), place_features(part["position"])], axis=1)


def place_features(positions: np.ndarray) -> np.ndarray:
    """[n, 2] what a reference takes from public positions: a sum grows with the number of its terms."""
    count = np.asarray(positions, np.float64) + 1
    return np.stack([np.log(count), 1 / count], axis=1)


def _ranges(seen: list[dict[str, np.ndarray]], reference: np.ndarray) -> LayerRanges:
    joined = {name: np.concatenate([part[name] for part in seen]) for name in seen[0]}
    predicted = np.concatenate([_features(part) for part in seen]) @ reference
    relative = np.concatenate([joined["least"] - predicted, joined["most"] - predicted])
    return LayerRanges(
        _range(joined["first"]),
        _range(joined["second"]),
        _range(relative),
        _range(joined["log_sum"] - predicted),
        _range(joined["gate"]),
    )


def _range(values: np.ndarray) -> tuple[float, float]:
    return float(np.min(values)), float(np.max(values))
