"""The argmax without comparisons, performed on the simulator, against numpy's; beside the other two."""

from dataclasses import replace

import numpy as np
import pytest
from arhe_cases import argmax_of, scheduled
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.arhe import PAPER, Degrees, Options, Simulator
from spu_llm.arhe.backend import RangeViolation
from spu_llm.arhe.calibrate import with_argmax
from spu_llm.arhe.meaning import Ranges
from spu_llm.arhe.schedule import prompt_span
from spu_llm.errors import UserError
from spu_llm.models import DecoderConfig

SMALL = replace(PAPER, log_ring=9, slots=0)


def fitted(vocabulary, options=None, parameters=SMALL, rows=160, degrees=None, seed=0):
    """A schedule, ranges fitted to random logits of mean 0, and other such logits."""
    config = DecoderConfig("gpt2", vocabulary, 8, 1, 2, 2, 8, 16, 1e-5, True)
    schedule = scheduled(config, parameters, degrees or Degrees(), options or Options(argmax="cutmax"))
    logits = np.random.default_rng(seed).standard_normal((rows + 8, vocabulary)) * 3
    logits -= logits.mean(1, keepdims=True)
    return schedule, with_argmax(Ranges(), schedule.program, logits[:rows], 1.5), logits[rows:]


def second_below(logits, gap):
    """The second largest moved to `gap` below the largest."""
    found = logits.copy()
    second, first = np.argsort(logits)[-2:]
    found[second] = found[first] - gap
    return found


@settings(max_examples=12, deadline=None)
@given(st.integers(8, 700), st.integers(0, 2**32 - 1))
def test_cutmax_is_numpys_argmax_where_it_says_that_it_tells_logits_apart(vocabulary, seed):
    schedule, ranges, others = fitted(vocabulary, seed=seed)
    assert np.isfinite(ranges.resolved)
    for row in others[:2]:
        row = second_below(row, 4 * ranges.resolved)  # 5% of rows need more than what is told apart on 95%
        found, performed = argmax_of(schedule, ranges, Simulator(SMALL), row)
        assert performed == schedule.counts(prompt_span(schedule, 1))["argmax"]
        np.testing.assert_allclose(found, np.eye(vocabulary)[np.argmax(row)], atol=0.01)


@pytest.mark.parametrize("vocabulary", [97, 13])  # all pairs of 16 fit the slots: one round, whose wins are the one-hot vector
@pytest.mark.parametrize("argmax", ["tournament", "league", "cutmax"])
def test_every_argmax_performs_what_is_predicted_and_shows_a_tie(argmax, vocabulary):
    schedule, ranges, others = fitted(vocabulary, Options(argmax=argmax))
    for gap, clear in ((2 * ranges.resolved, True), (0.0, False)):
        found, performed = argmax_of(schedule, ranges, Simulator(SMALL), second_below(others[0], gap))
        assert performed == schedule.counts(prompt_span(schedule, 1))["argmax"]
        assert (np.abs(found - np.eye(vocabulary)[np.argmax(others[0])]).max() <= 0.011) == clear
        assert (abs((found**2).sum() - 1) < 0.1) == clear


def test_cutmax_tells_more_apart_than_a_league_with_fewer_levels():
    """On a ring whose slots hold no vocabulary's pairs."""
    (league, by_league, _), (cutmax, by_cutmax, _) = (fitted(701, Options(argmax=name)) for name in ("league", "cutmax"))
    counts = [schedule.counts(prompt_span(schedule, 1))["argmax"] for schedule in (league, cutmax)]
    assert by_cutmax.resolved < by_league.resolved and counts[1] < counts[0]


@pytest.mark.parametrize("vocabulary, chosen", [(13, "league"), (16, "league"), (17, "cutmax")])
def test_auto_takes_a_league_where_all_pairs_fit(vocabulary, chosen):
    assert fitted(vocabulary, Options())[0].program.argmax == chosen


def test_logits_beyond_what_was_fitted_are_refused():
    schedule, ranges, others = fitted(97)
    with pytest.raises(UserError, match=r"cut0\.factor: a value of .* calibrate"):
        argmax_of(schedule, ranges, Simulator(SMALL), 3 * others[0])
    with pytest.raises(RangeViolation):
        argmax_of(schedule, ranges, Simulator(SMALL), 1e9 * others[0])


@pytest.mark.parametrize("wrong", [{"shares": ()}, {"cuts": (0,)}, {"share_factor": 1000}, {"cut_steep": 0, "cut_flat": 0}])
def test_impossible_rounds_are_refused(wrong):
    with pytest.raises(UserError):
        Degrees(**wrong)
