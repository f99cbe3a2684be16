"""A constant number of blocks by a threshold: what is filled up and cut, and that the best threshold beats others."""

import numpy as np
import pytest

from spu_llm.comet.gate import best_threshold, chosen, recall, smallest_gate

RANDOM = np.random.default_rng(0)
SCORES = RANDOM.normal(size=(200, 8))
MASSES = np.maximum(SCORES + 0.3 * RANDOM.normal(size=SCORES.shape), 0)


def test_filled_up_and_cut_in_order():
    scores = np.array([[0.0, 2.0, 0.0, 3.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert chosen(scores, 0.5, 3).tolist() == [[1, 3, 0], [0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("count", [1, 3, 7])
def test_best_threshold(count):
    found = recall(SCORES, MASSES, best_threshold(SCORES, MASSES, count), count)
    assert found >= max(recall(SCORES, MASSES, threshold, count) for threshold in (-9, 0, 9))
    best = np.sort(MASSES, 1)[:, -count:].sum() / MASSES.sum()
    assert count / 8 < found <= best


def test_smallest_gate():
    count, threshold = smallest_gate(SCORES, MASSES, 0.9, 2)
    assert count % 2 == 0 and recall(SCORES, MASSES, threshold, count) >= 0.9
    assert recall(SCORES, MASSES, best_threshold(SCORES, MASSES, count - 2), count - 2) < 0.9
    assert smallest_gate(SCORES, MASSES, 1.1, 2)[0] == 8
