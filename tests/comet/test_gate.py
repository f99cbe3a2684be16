"""A constant number of blocks by a threshold: what is filled up and cut, and that the best threshold beats others."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.comet.gate import best_thresholds, chosen, gate_curve, gate_recalls

RANDOM = np.random.default_rng(0)
SCORES = RANDOM.normal(size=(200, 8))
MASSES = np.maximum(SCORES + 0.3 * RANDOM.normal(size=SCORES.shape), 0)


def test_filled_up_and_cut_in_order():
    scores = np.array([[0.0, 2.0, 0.0, 3.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert chosen(scores, 0.5, 3).tolist() == [[1, 3, 0], [0, 1, 2], [0, 1, 2]]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.floats(-2, 2), st.integers(0, 2**32 - 1))
def test_a_curve_counts_what_is_chosen(rows, blocks, threshold, seed):
    random = np.random.default_rng(seed)
    scores, masses = random.normal(size=(rows, blocks)), np.maximum(random.normal(size=(rows, blocks)), 0)
    curve = gate_curve(scores, masses, threshold)
    for count in range(1, blocks + 1):
        inside = np.take_along_axis(masses, chosen(scores, threshold, count), axis=1).sum()
        assert curve[count - 1] == pytest.approx(inside / masses.sum() if masses.sum() else 1.0)


def test_the_best_threshold_beats_others():
    thresholds, recalls = best_thresholds(SCORES, MASSES)
    np.testing.assert_allclose(gate_recalls(SCORES, MASSES, thresholds), recalls)
    for count in range(1, 9):
        assert recalls[count - 1] == pytest.approx(gate_curve(SCORES, MASSES, thresholds[count - 1])[count - 1])
        assert recalls[count - 1] >= max(gate_curve(SCORES, MASSES, threshold)[count - 1] for threshold in (-9, 0, 9))
        best = np.sort(MASSES, 1)[:, -count:].sum() / MASSES.sum()
        assert count / 8 < recalls[count - 1] <= best + 1e-12 or count == 8
