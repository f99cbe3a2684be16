"""Predictors: planted structure is recovered, and what is counted of recall is counted right."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.comet.predictor import (
    PredictorConfig,
    Split,
    bucket,
    few_sizes,
    recall_curve,
    smallest,
    threshold,
    train_predictor,
)

WIDTH, OUTPUTS, RANK, ACTIVE = 24, 12, 4, 3


def planted(seed=0, rows=(4000, 500, 500)):
    """y, and masses that are positive where a linear map of y, of rank RANK, is large."""
    random = np.random.default_rng(seed)
    hidden = random.standard_normal((WIDTH, RANK)) @ random.standard_normal((RANK, OUTPUTS))
    hidden /= np.linalg.norm(hidden, axis=0)
    y = [(1.5 * random.standard_normal((count, WIDTH)) + 0.7).astype(np.float32) for count in rows]
    masses = [np.maximum((each - 0.7) @ hidden - 1.5, 0).astype(np.float32) for each in y]
    return Split(*y), Split(*masses)


def recall(scores, masses, count=ACTIVE):
    return recall_curve(scores, masses)[count - 1]


@pytest.mark.parametrize("objective", ["shares", "best", "masses"])
def test_a_planted_map_is_recovered(objective):
    y, masses = planted()
    found = train_predictor(
        y, masses, ACTIVE, PredictorConfig(rank=RANK, objective=objective, epochs=60, patience=20, batch=256, rate=1e-2)
    )
    assert found.first.shape == (WIDTH, RANK) and found.second.shape == (RANK, OUTPUTS)
    assert all(part.dtype == np.float32 for part in found)
    oracle = recall(masses.report, masses.report)
    usual = recall(np.broadcast_to(masses.learn.mean(0), masses.report.shape), masses.report)
    assert usual < 0.7 * oracle
    assert recall(found.scores(y.report), masses.report) > 0.95 * oracle


def test_a_narrower_map_catches_less_and_the_seed_decides():
    y, masses = planted()
    config = PredictorConfig(rank=1, epochs=8)
    one, again = (train_predictor(y, masses, ACTIVE, config) for _ in range(2))
    wide = train_predictor(y, masses, ACTIVE, PredictorConfig(rank=RANK, epochs=8))
    for a, b in zip(one, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert recall(one.scores(y.report), masses.report) < recall(wide.scores(y.report), masses.report) - 0.1


def test_one_row_one_output_and_silence():
    y = Split(*(np.ones((1, 3), np.float32),) * 3)
    for masses in (np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)):
        found = train_predictor(y, Split(masses, masses, masses), 1, PredictorConfig(rank=2, epochs=2))
        assert np.isfinite(found.scores(y.report)).all()


arrays = st.integers(0, 2**32 - 1).map(np.random.default_rng)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), arrays)
def test_a_curve_counts_what_is_in_the_best(rows, outputs, random):
    scores, masses = random.standard_normal((rows, outputs)), np.maximum(random.standard_normal((rows, outputs)), 0)
    curve = recall_curve(scores, masses)
    for count in range(1, outputs + 1):
        inside = sum(masses[row, i] for row in range(rows) for i in sorted(range(outputs), key=lambda i: -scores[row, i])[:count])
        assert curve[count - 1] == pytest.approx(inside / masses.sum() if masses.sum() else 1.0)
    assert (recall_curve(masses, masses) >= curve - 1e-12).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.floats(0.05, 1), arrays)
def test_a_threshold_catches_what_is_asked_and_hardly_more(rows, outputs, share, random):
    scores = random.standard_normal((rows, outputs)).astype(np.float32)
    masses = random.random((rows, outputs)) + 1e-3
    level = threshold(scores, masses, share)
    inside = masses[scores > level].sum() / masses.sum()
    assert inside >= share - 1e-9
    last = masses[scores == scores[scores > level].min()].sum() / masses.sum()
    assert inside - last < share + 1e-9


def test_smallest_and_bucket():
    curve = np.array([0.5, 0.8, 0.9, 0.95, 1.0])
    assert [smallest(curve, share) for share in (0.1, 0.8, 0.81, 1.0)] == [1, 2, 3, 5]
    assert [smallest(curve, share, 2) for share in (0.1, 0.81, 0.96)] == [2, 4, 5]
    assert smallest(np.array([0.5, 0.9]), 0.99) == 2
    assert [bucket(blocks) for blocks in (1, 32, 33, 64, 128)] == [1, 1, 2, 2, 4]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_few_sizes_raise_as_little_as_can_be(wanted, most):
    found = few_sizes(wanted, most)
    assert len(set(found)) <= most and all(a >= b for a, b in zip(found, wanted, strict=True))
    best = min(
        sum(min(size for size in sizes if size >= each) for each in wanted)
        for sizes in product(range(1, 10), repeat=most)
        if max(sizes) >= max(wanted)
    )
    assert sum(found) == best
