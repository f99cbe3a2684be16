"""A constant number of blocks by a threshold: those that score above it, filled up or cut in order (primitives/choose.py).

Comparing scores with a threshold takes n comparisons, picking the k best n^2 / 2. Blocks stand in order of how much they matter in
the mean, so that what is filled up are those that are most often needed, and what is cut those that are least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..models.config import Params
from ..models.decoder import Decoder
from .prepared import LayerSparsity, LowRank

LARGEST = 200.0
"""No score exceeds it, so that scores and their differences are smaller than 2^9 (fixed_sparse.py)."""
_TRIED = 64  # thresholds


def above(sparsity: LayerSparsity) -> LowRank:
    """The predictor of a layer's blocks with its threshold taken away: blocks to compute score above 0."""
    neurons = sparsity.neurons
    return neurons._replace(second_bias=neurons.second_bias - np.float32(sparsity.threshold or 0.0))


def chosen(scores: np.ndarray, threshold: float, count: int) -> np.ndarray:
    """[rows, count] the blocks computed by scores [rows, blocks]: the first ones above the threshold, then the first others."""
    return np.argsort(scores <= threshold, axis=1, kind="stable")[:, :count]


def gate_curve(scores: np.ndarray, masses: np.ndarray, threshold: float) -> np.ndarray:
    """[blocks] the share of the masses [rows, blocks] that is in 1, 2, ... chosen blocks."""
    inside = scores > threshold
    ranks = np.where(inside, np.cumsum(inside, 1), inside.sum(1, keepdims=True) + np.cumsum(~inside, 1)) - 1
    caught = np.cumsum(np.bincount(ranks.reshape(-1), masses.reshape(-1), scores.shape[1]))
    return caught / caught[-1] if caught[-1] > 0 else np.ones(len(caught))


def best_thresholds(scores: np.ndarray, masses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[blocks] the thresholds by which 1, 2, ... chosen blocks hold most of the masses, and [blocks] what share they hold."""
    tried = np.quantile(scores, (np.arange(_TRIED) + 0.5) / _TRIED)
    curves = np.stack([gate_curve(scores, masses, threshold) for threshold in tried])
    return tried[curves.argmax(0)], curves.max(0)


def gate_recalls(scores: np.ndarray, masses: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """[blocks] the share of the masses [rows, blocks] that is in 1, 2, ... chosen blocks, each number by its own threshold."""
    return np.array([gate_curve(scores, masses, level)[count] for count, level in enumerate(thresholds)])


def in_format(decoder: Decoder, layers: Sequence[LayerSparsity]) -> tuple[LayerSparsity, ...]:
    """The same choices by scores of which none exceeds LARGEST, whatever the input: what fixed point asks, and gains precision by.

    y = scale * n + bias with |n| = sqrt(width), so a score is at most sqrt(width) |scale * first @ second_b| and its constant part.
    """
    norms = [params["attention_norm"] for params in decoder.params["layers"]]
    found = []
    for i, layer in enumerate(layers):
        size = LARGEST / _bound(norms[i], above(layer))
        heads = None if layer.heads is None else _scaled(layer.heads, LARGEST / _bound(norms[i - 1], layer.heads))
        threshold = None if layer.threshold is None else layer.threshold * size
        found.append(replace(layer, neurons=_scaled(layer.neurons, size), heads=heads, threshold=threshold))
    return tuple(found)


def _bound(norm: Params, predictor: LowRank) -> float:
    """The largest score that a predictor can give, at least a tiny one."""
    scale, bias = (np.asarray(norm[name], np.float64) for name in ("scale", "bias"))
    weights = predictor.first @ predictor.second
    constant = (bias @ predictor.first + predictor.first_bias) @ predictor.second + predictor.second_bias
    turned = np.linalg.norm(scale[:, None] * weights, axis=0) * len(scale) ** 0.5
    return max(float((turned + np.abs(constant)).max()), 1e-9)


def _scaled(predictor: LowRank, size: float) -> LowRank:
    return predictor._replace(
        second=(predictor.second * size).astype(np.float32), second_bias=(predictor.second_bias * size).astype(np.float32)
    )
