"""A constant number of blocks by a threshold: those that score above it, filled up or cut in order (primitives/choose.py).

Comparing scores with a threshold takes n comparisons, picking the k best n^2 / 2. Blocks stand in order of how much they matter in
the mean, so that what is filled up are those that are most often needed, and what is cut those that are least.
"""

from __future__ import annotations

import numpy as np

from .prepared import LayerSparsity, LowRank

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
