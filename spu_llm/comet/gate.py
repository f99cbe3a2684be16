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


def recall(scores: np.ndarray, masses: np.ndarray, threshold: float, count: int) -> float:
    """The share of the masses [rows, blocks] that is in the chosen blocks."""
    found = np.take_along_axis(masses, chosen(scores, threshold, count), axis=1)
    return float(found.sum() / masses.sum())


def best_threshold(scores: np.ndarray, masses: np.ndarray, count: int) -> float:
    """The threshold by which `count` blocks hold most of the masses."""
    tried = np.quantile(scores, (np.arange(_TRIED) + 0.5) / _TRIED)
    return float(max(tried, key=lambda threshold: recall(scores, masses, threshold, count)))


def smallest_gate(scores: np.ndarray, masses: np.ndarray, wanted: float, step: int) -> tuple[int, float]:
    """The smallest multiple of `step` of blocks that hold the wanted share of masses, and the threshold by which they do."""
    blocks = scores.shape[1]
    for count in range(step, blocks, step):
        threshold = best_threshold(scores, masses, count)
        if recall(scores, masses, threshold, count) >= wanted:
            return count, threshold
    return blocks, float(np.min(scores)) - 1
