"""Neurons in blocks of equal size, so that few blocks hold most of what a token needs (Comet: "clustered by co-activation").

Two steps, both by balanced assignment: neurons that fire together are gathered around centres (spherical k-means with equal sizes);
then blocks and choices of blocks are improved in turns. Given the blocks, each token chooses those that have most mass; given the
choices, what a block catches of a neuron does not depend on the other neurons, so the best blocks of equal size are an assignment
problem. Neither turn lowers the mass caught, which is what a sparse run keeps. The checkpoint's own order is improved likewise, and
the better of the two is taken: a model may have been trained so that neighbours fire together.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from ..errors import UserError

_ROWS = 4096  # of the text, spread over it: more change blocks little
_STARTS = 4  # of k-means, which can end at a poor place
_CENTRES = 8  # turns of k-means at most
_TURNS = 24  # of improvement at most
_GAIN = 1e-5  # share of the mass that a turn must add, or it was the last


def cluster(masses: np.ndarray, blocks: int, active: int, seed: int = 0) -> np.ndarray:
    """An order [ffn] int32 of neurons with masses [rows, ffn], in which block b is order[b * size : (b + 1) * size].

    active: how many blocks a token will have computed, which the improvement is for. Decided by the seed; blocks with most mass
    come first. Raises UserError where blocks cannot be of equal size.
    """
    ffn = masses.shape[1]
    check_blocks(ffn, blocks)
    rows = masses[:: max(1, len(masses) // _ROWS)].astype(np.float32)
    starts = [np.arange(ffn) // (ffn // blocks), *(together(rows, blocks, seed + i) for i in range(_STARTS))]
    labels = max(
        (improved(rows, start, blocks, active) for start in starts), key=lambda labels: caught(rows, labels, blocks, active)
    )
    heaviest = np.argsort(-block_sums(masses.sum(0, keepdims=True), labels, blocks)[0], kind="stable")
    rank = np.empty(blocks, int)
    rank[heaviest] = np.arange(blocks)
    return np.argsort(rank[labels], kind="stable").astype(np.int32)


def check_blocks(ffn: int, blocks: int) -> None:
    """Raise UserError where `ffn` neurons cannot be cut into equal blocks."""
    if not 1 <= blocks <= ffn or ffn % blocks:
        fits = [count for count in range(1, ffn + 1) if ffn % count == 0]
        nearest = min(fits, key=lambda count: abs(count - blocks))
        raise UserError(f"--blocks {blocks}: the model's {ffn} neurons a layer make no blocks of equal size; give {nearest}, say")


def together(masses: np.ndarray, blocks: int, seed: int) -> np.ndarray:
    """[ffn] the block of each neuron, neurons of like firing in one: k-means on directions, with blocks of equal size."""
    patterns = np.sqrt(masses).T  # roots: a few large values would decide otherwise
    patterns = patterns / np.maximum(np.linalg.norm(patterns, axis=1, keepdims=True), 1e-12)
    centres = patterns[_spread(patterns, blocks, np.random.default_rng(seed))]
    labels = balanced(patterns @ centres.T)
    for _ in range(_CENTRES):
        centres = block_sums(patterns.T, labels, blocks).T
        centres = centres / np.maximum(np.linalg.norm(centres, axis=1, keepdims=True), 1e-12)
        before, labels = labels, balanced(patterns @ centres.T)
        if np.array_equal(labels, before):
            break
    return labels


def improved(masses: np.ndarray, labels: np.ndarray, blocks: int, active: int) -> np.ndarray:
    """Blocks whose `active` best a row catch at least as much of the masses [rows, ffn]: choosing and assigning in turns."""
    best, most = labels, caught(masses, labels, blocks, active)
    for _ in range(_TURNS):
        chosen = best_of(block_sums(masses, best, blocks), active)
        labels = balanced(masses.T @ chosen.astype(masses.dtype))
        found = caught(masses, labels, blocks, active)
        if found <= most * (1 + _GAIN):
            break
        best, most = labels, found
    return best


def caught(masses: np.ndarray, labels: np.ndarray, blocks: int, active: int) -> float:
    """The mass in the `active` heaviest blocks of each row."""
    sums = block_sums(masses, labels, blocks)
    return float(np.partition(sums, blocks - active, axis=1)[:, blocks - active :].sum(dtype=np.float64))


def balanced(affinity: np.ndarray) -> np.ndarray:
    """[n] the column of each row of affinity [n, blocks] with the largest sum, all columns taken equally often."""
    size = len(affinity) // affinity.shape[1]
    places = linear_sum_assignment(np.repeat(affinity, size, axis=1), maximize=True)[1]
    return places // size


def block_sums(values: np.ndarray, labels: np.ndarray, blocks: int) -> np.ndarray:
    """[rows, blocks] sums over the neurons of each block, of values [rows, ffn]."""
    return values @ (labels[:, None] == np.arange(blocks)).astype(values.dtype)


def in_blocks(values: np.ndarray, order: np.ndarray, blocks: int) -> np.ndarray:
    """[rows, blocks] sums over the neurons of each block of an order [ffn], of values [rows, ffn]."""
    return values[:, order].reshape(len(values), blocks, -1).sum(-1)


def best_of(scores: np.ndarray, count: int) -> np.ndarray:
    """[rows, n] bool: the `count` largest of each row of scores [rows, n]; of equal ones the first."""
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, np.argsort(-scores, axis=1, kind="stable")[:, :count], True, axis=1)
    return chosen


def _spread(patterns: np.ndarray, count: int, random: np.random.Generator) -> list[int]:
    """Rows to begin from, each drawn by its distance from those before (k-means++)."""
    chosen = [int(random.integers(len(patterns)))]
    nearest, silent = np.ones(len(patterns)), ~patterns.any(1)
    while len(chosen) < count:
        nearest = np.minimum(nearest, np.maximum(1 - patterns @ patterns[chosen[-1]], 0))
        weights = np.where(silent, 0, np.square(nearest)) + 1e-12
        weights[chosen] = 0
        chosen.append(int(random.choice(len(patterns), p=weights / weights.sum())))
    return chosen
