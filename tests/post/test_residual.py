"""The client's rule: what comes of a draft follows the target's distribution, exactly in law and in draws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from spu_llm.post.residual import draw, residual, verdict

DRAWS = 20000
LEAST_P = 1e-4  # of a chi-square test with a fixed seed


def distribution(random, size, zeros=0):
    """Random probabilities, some of them 0."""
    p = random.dirichlet(np.full(size, 0.7))
    p[random.permutation(size)[:zeros]] = 0
    return p / p.sum()


class Fixed:
    """Gives the one uniform number it was made of; `rest` draws by numpy after it."""

    def __init__(self, first):
        self._first, self._rest = first, np.random.default_rng(0)

    def random(self):
        return self._first

    def choice(self, *args, **kwargs):
        return self._rest.choice(*args, **kwargs)


@settings(max_examples=100, deadline=None)
@given(size=st.sampled_from([1, 2, 3, 33]), zeros=st.integers(0, 2), seed=st.integers(0, 999))
def test_law(size, zeros, seed):
    """q(y) min(1, p(y) / q(y)) plus the chance of a rejection times the residual is p(y)."""
    random = np.random.default_rng(seed)
    p, q = (distribution(random, size, min(zeros, size - 1)) for _ in range(2))
    accepted = np.minimum(p, q)
    law = accepted + (1 - accepted.sum()) * residual(q, p)
    np.testing.assert_allclose(law, p, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(size=st.sampled_from([2, 3, 33]), seed=st.integers(0, 999), r=st.floats(0, 1, exclude_max=True))
def test_accepts_where_r_is_below_the_ratio(size, seed, r):
    random = np.random.default_rng(seed)
    p, q = distribution(random, size, 1), distribution(random, size)
    for token in range(size):
        found = verdict(Fixed(r), token, q, p)
        assert (found is None) == (r < p[token] / q[token])
        assert found is None or p[found] > q[found]


def test_equal_distributions_and_rounding():
    p = np.array([0.25, 0.75])
    assert verdict(Fixed(1 - 2**-53), 0, p, p) is None
    np.testing.assert_array_equal(residual(p, p), p)
    assert verdict(Fixed(0.0), 0, np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 1


def test_draws_follow_the_distribution():
    random = np.random.default_rng(0)
    p = distribution(random, 9, 2)
    counts = np.bincount([draw(random, 3 * p) for _ in range(DRAWS)], minlength=9)
    assert (counts[p == 0] == 0).all()
    assert stats.chisquare(counts[p > 0], DRAWS * p[p > 0]).pvalue > LEAST_P


@pytest.mark.parametrize("drafted", ["drawn", "looked up"])
def test_tokens_follow_the_target(drafted):
    random = np.random.default_rng(1)
    p, q = distribution(random, 7), distribution(random, 7)
    if drafted == "looked up":
        q = np.eye(7)[3]
    found = []
    for _ in range(DRAWS):
        token = draw(random, q)
        instead = verdict(random, token, q, p)
        found.append(token if instead is None else instead)
    assert stats.chisquare(np.bincount(found, minlength=7), DRAWS * p).pvalue > LEAST_P
