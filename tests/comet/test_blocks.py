"""Blocks: what was planted is found again, nothing is lost, no turn makes it worse."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.comet.blocks import balanced, best_of, block_sums, caught, cluster, improved, in_blocks, together
from spu_llm.errors import UserError


def planted(groups, size, seed, rows=400, noise=0.1, active=2):
    """Masses [rows, groups * size] of neurons that fire by groups, `active` groups a row, and each neuron's group, mixed up."""
    random = np.random.default_rng(seed)
    on = np.argsort(random.random((rows, groups)), axis=1) < active
    group = random.permutation(np.repeat(np.arange(groups), size))
    values = (0.5 + random.random((rows, groups * size))) * on[:, group]
    return (values * (random.random(values.shape) > noise)).astype(np.float32), group


@settings(max_examples=25, deadline=None)
@given(st.integers(3, 9), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_planted_groups_are_found(groups, size, seed):
    masses, group = planted(groups, size, seed)
    order = cluster(masses, groups, 2, seed % 7)
    assert order.dtype == np.int32 and sorted(order) == list(range(groups * size))
    assert all(len(set(block)) == 1 for block in group[order].reshape(groups, size))


def test_found_blocks_catch_more_than_the_checkpoints_order():
    masses, _ = planted(16, 8, 0, noise=0.3)
    order = cluster(masses[:300], 16, 2)
    unseen = masses[300:]
    clustered, plain = (in_blocks(unseen, each, 16) for each in (order, np.arange(128)))
    share = [float(np.sort(sums, 1)[:, -2:].sum() / sums.sum()) for sums in (clustered, plain)]
    assert share[0] == pytest.approx(1.0) and share[1] < 0.5


def test_an_order_that_is_good_already_is_kept():
    masses, group = planted(8, 4, 1)
    ordered = masses[:, np.argsort(group, kind="stable")]
    order = cluster(ordered, 8, 2)
    assert all(len(set(block // 4)) == 1 for block in order.reshape(8, 4))


def test_heavy_blocks_come_first_and_the_seed_decides():
    masses, _ = planted(6, 5, 2)
    masses = masses * np.linspace(0.2, 2, 30, dtype=np.float32)
    order = cluster(masses, 6, 2, seed=3)
    sums = in_blocks(masses, order, 6).sum(0)
    assert (np.diff(sums) <= 0).all()
    np.testing.assert_array_equal(order, cluster(masses, 6, 2, seed=3))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 30), st.integers(0, 2**32 - 1), st.data())
def test_improving_never_loses(blocks, size, rows, seed, data):
    random = np.random.default_rng(seed)
    masses = (random.random((rows, blocks * size)) ** 4 * (random.random((rows, blocks * size)) > 0.6)).astype(np.float32)
    active = data.draw(st.integers(1, blocks))
    start = together(masses, blocks, seed % 5)
    better = improved(masses, start, blocks, active)
    for labels in (start, better):
        assert (np.bincount(labels, minlength=blocks) == size).all()
    assert caught(masses, better, blocks, active) >= caught(masses, start, blocks, active) * (1 - 1e-6)


def test_silent_neurons_and_silent_text():
    masses = np.zeros((10, 12), np.float32)
    assert sorted(cluster(masses, 4, 1)) == list(range(12))
    masses[:, 3] = 1
    assert 3 in cluster(masses, 4, 1)[:3]


def test_balanced_is_the_best_of_all_assignments():
    affinity = np.random.default_rng(4).random((6, 3))
    best = max(sum(affinity[i, column] for i, column in enumerate(each)) for each in set(permutations([0, 0, 1, 1, 2, 2])))
    labels = balanced(affinity)
    assert affinity[np.arange(6), labels].sum() == pytest.approx(best)


def test_sums_and_best():
    values = np.array([[1.0, 2.0, 4.0, 8.0]])
    np.testing.assert_array_equal(block_sums(values, np.array([0, 1, 0, 1]), 2), [[5, 10]])
    np.testing.assert_array_equal(in_blocks(values, np.array([0, 3, 1, 2]), 2), [[9, 6]])
    np.testing.assert_array_equal(
        best_of(np.array([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0]]), 1), [[False, True, False], [True, False, False]]
    )


@pytest.mark.parametrize(
    ("ffn", "blocks", "say"), [(40, 7, "give 8, say"), (40, 0, "give 1, say"), (40, 41, "give 40, say"), (7, 2, "")]
)
def test_unequal_blocks_are_refused(ffn, blocks, say):
    with pytest.raises(UserError, match=f"--blocks {blocks}: the model's {ffn} neurons .*{say}"):
        cluster(np.ones((3, ffn), np.float32), blocks, 1)
