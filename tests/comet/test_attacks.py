"""Attacks find leaks that were planted, and find nothing where there is nothing."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from scipy.stats import binom, binomtest, bootstrap

from spu_llm.comet.attacks import (
    Masks,
    Rate,
    Renewal,
    View,
    confirm,
    confirm_against,
    identify,
    name_after_known,
    name_token,
    renewed_share,
    same_token,
    watch,
)
from spu_llm.comet.attacks.overlaps import _overlaps
from spu_llm.comet.attacks.places import _beliefs, _identified

LAYERS, BLOCKS, ACTIVE = 3, 12, 4


def best(scores, active=ACTIVE):
    """Masks of the same number of blocks everywhere."""
    return (-scores).argsort(-1).argsort(-1) < active


def random_masks(texts=12, tokens=32, seed=0, vocabulary=20):
    """Masks that have nothing to do with anything, tokens of unequal frequency."""
    random = np.random.default_rng(seed)
    ids = (vocabulary * random.random((texts, tokens)) ** 2).astype(int)
    return Masks(ids, (best(random.random((texts, tokens, LAYERS, BLOCKS))),))


def masks_of_tokens(texts=12, tokens=32, seed=0, noise=0.3, vocabulary=20):
    """Masks that mostly depend on the token, with a constant count."""
    ids = random_masks(texts, tokens, seed, vocabulary).tokens
    table = np.random.default_rng(77).random((vocabulary, LAYERS, BLOCKS))
    random = np.random.default_rng(seed + 1)
    return Masks(ids, (best(table[ids] + noise * random.standard_normal((*ids.shape, LAYERS, BLOCKS))),))


def fresh(seed=5):
    return np.random.default_rng(seed)


# Intervals


def test_the_interval_is_scipys_bootstrap():
    hits, usual = fresh(1).random(40), fresh(2).random(40) / 2
    found = Rate.of(hits, usual, fresh())
    wanted = bootstrap((hits - usual,), np.mean, method="percentile", n_resamples=20000, random_state=fresh(3)).confidence_interval
    assert found.rate == pytest.approx(hits.mean()) and found.baseline == pytest.approx(usual.mean())
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=0.01)


@pytest.mark.parametrize("hit", [0, 1])
def test_where_all_texts_agree_the_interval_is_wilsons(hit):
    found = Rate.of(np.full(17, hit), 0.25, fresh())
    wanted = binomtest(17 * hit, 17).proportion_ci(method="wilson")
    assert (found.low + 0.25, found.high + 0.25) == pytest.approx((wanted.low, wanted.high), abs=1e-3)


# Tokens from counts


def test_a_constant_count_names_no_token():
    public, victims = masks_of_tokens(40, seed=1), masks_of_tokens(seed=2)
    found = name_token(public, victims, fresh())
    usual = np.bincount(public.tokens.ravel()).argmax()
    assert found.rate == found.baseline == pytest.approx((victims.tokens == usual).mean())
    assert found.low == found.high == 0


def test_a_count_that_has_nothing_to_do_with_tokens_names_none():
    def noisy(seed):
        masks = random_masks(40, seed=seed)
        return Masks(masks.tokens, (fresh(seed).random(masks.groups[0].shape) < 0.3,))

    found = name_token(noisy(1), noisy(2), fresh())
    assert found.low <= 0


@pytest.mark.parametrize("linear", [True, False])
def test_a_count_that_depends_on_the_token_names_it(linear):
    """Linear: it grows with the token's number. Otherwise a token has either of two counts, whose mean is that of others."""

    def planted(seed):
        masks, random = random_masks(40, seed=seed, vocabulary=6), fresh(seed)
        count = masks.tokens * 2 if linear else 6 + (masks.tokens - 3) * random.choice([-1, 1], masks.tokens.shape)
        return Masks(masks.tokens, (np.arange(BLOCKS) < np.stack([count, count, count], -1)[..., None],))

    found = name_token(planted(1), planted(2), fresh())
    assert found.low > 0.2 and found.rate > found.baseline + 0.25
    assert found.rate == 1 or not linear


# The shuffle


@pytest.mark.parametrize("period", [1, 5, 16, None])
def test_every_period_of_a_full_renewal_is_a_shuffle(period):
    masks = random_masks().groups[0][0]
    view = watch(masks, Renewal(period), fresh())
    assert [span.start for span in view.spans] == list(range(0, 32, period or 32)) and view.spans[-1].stop == 32
    assert (np.sort(view.block_at) == np.arange(BLOCKS)).all() and view.renewed.all()
    for span, blocks in zip(view.spans, view.block_at, strict=True):
        for layer in range(LAYERS):
            assert (view.seen[span, layer] == masks[span, layer][:, blocks[layer]]).all()
    if period == 1:
        assert len({tuple(row) for row in view.block_at[:, 0]}) == len(view.spans)


def test_a_partial_renewal_moves_active_blocks_and_as_many_others():
    masks = best(fresh().random((20, LAYERS, 40)), 3)
    view = watch(masks, Renewal(2, partial=True), fresh())
    moved = 0
    for i in range(1, len(view.spans)):
        touched, new = view.seen[view.spans[i - 1]].any(0), view.renewed[i]
        assert (new >= touched).all() and (new.sum(-1) == 2 * touched.sum(-1)).all()
        before, after = view.block_at[i - 1], view.block_at[i]
        assert (before == after)[~new].all() and (np.sort(after) == np.arange(40)).all()
        moved += (before != after)[touched].mean() / (len(view.spans) - 1)
    assert moved > 0.8
    share = renewed_share((masks[None],), Renewal(2, partial=True), fresh())
    assert share == pytest.approx(view.renewed[1:].mean(), abs=0.01) and renewed_share((masks[None],), Renewal(2), fresh()) == 1


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 6), st.booleans(), st.integers(0, 1000))
def test_overlaps_are_the_same_under_every_shuffle(tokens, period, partial, seed):
    masks = fresh(seed).random((tokens, LAYERS, 7)) < 0.4
    view = watch(masks, Renewal(period, partial), fresh(seed))
    for span in view.spans:
        plain = masks[span].astype(int)
        wanted = np.einsum("tlb,ulb->ltu", plain, plain)
        assert (_overlaps(view.seen[None, span])[0] == wanted).all()


# Blocks from how often they fire


def firing(often, texts, tokens, seed):
    return fresh(seed).random((texts, tokens, *often.shape)) < often


def test_blocks_that_differ_in_frequency_are_found_and_equal_ones_are_not():
    often = np.tile(np.linspace(0.02, 0.98, 8), (LAYERS, 1))
    rates = [
        identify(firing(often, 20, 500, 1), firing(often, 8, 512, 2), Renewal(period), fresh()) for period in (1, 16, 64, None)
    ]
    assert [rate.rate for rate in rates] == sorted(rate.rate for rate in rates)
    assert rates[-1].rate > 0.95 and rates[-1].baseline == 1 / 8 and rates[-1].low > 0.5
    equal = np.full((LAYERS, 8), 0.3)
    found = identify(firing(equal, 20, 500, 1), firing(equal, 40, 512, 2), Renewal(None), fresh())
    assert found.low < 0 < found.high


def test_the_matching_is_the_likeliest_of_all():
    often = fresh(4).uniform(0.1, 0.9, (1, 5))
    view = watch(firing(often, 1, 12, 3)[0], Renewal(None), fresh())
    number = view.seen.sum(0)[0]
    wanted = max(permutations(range(5)), key=lambda order: binom.logpmf(number, 12, often[0, list(order)]).sum())
    assert _identified(view, often, 1) == pytest.approx(np.mean(view.block_at[0, 0] == wanted))


def test_beliefs_after_a_partial_renewal_are_those_of_bayes():
    """Two periods of three blocks, all orders and renewals counted: beliefs are nearly those, and lead to the same choice."""
    often = np.array([[0.9, 0.5, 0.05]])
    seen = np.array([[[1, 0, 0]], [[0, 1, 0]]], bool)
    renewed = np.array([[[1, 1, 1]], [[1, 1, 0]]], bool)
    view = View([slice(0, 1), slice(1, 2)], seen, renewed, np.zeros((2, 1, 3), int))
    _, (_, belief) = _beliefs(view, often)
    found = np.exp(belief[0] - belief[0].max())
    for _ in range(50):
        found /= found.sum(0, keepdims=True)
        found /= found.sum(1, keepdims=True)
    wanted = np.zeros((3, 3))
    for order in permutations(range(3)):
        for after in (order, (order[1], order[0], order[2])):
            chance = binom.pmf(seen[0, 0], 1, often[0, list(order)]).prod() * binom.pmf(seen[1, 0], 1, often[0, list(after)]).prod()
            wanted[np.arange(3), after] += chance
    wanted /= wanted.sum(1, keepdims=True)
    assert np.abs(found - wanted).max() < 0.2
    assert (linear_sum_assignment(found, maximize=True)[1] == linear_sum_assignment(wanted, maximize=True)[1]).all()


def test_partial_renewals_tell_more_of_blocks_than_full_ones():
    """One block fires at a time, each half as often as the one before; what is silent keeps its place."""

    def planted(texts, seed):
        masks = np.zeros((texts, 64, LAYERS, 6), bool)
        chosen = np.minimum(fresh(seed).geometric(0.5, (texts, 64, LAYERS, 1)) - 1, 5)
        np.put_along_axis(masks, chosen, True, -1)
        return masks

    full, part = (identify(planted(30, 1), planted(60, 2), Renewal(1, partial), fresh()) for partial in (False, True))
    assert part.low > full.high > 0


# Prompts from overlaps


def test_a_fresh_shuffle_for_every_token_confirms_nothing():
    victims = masks_of_tokens()
    found = confirm(victims, victims, Renewal(1), fresh())
    assert (found.pair.rate, found.pair.low, found.pair.high) == (0.5, 0, 0)
    assert (found.among.rate, found.among.low, found.among.high) == pytest.approx((1 / 12, 0, 0))
    assert confirm_against(victims, victims, random_masks(seed=3), Renewal(1), fresh()).rate == 0.5
    assert same_token(victims, Renewal(1), fresh()) is None


@pytest.mark.parametrize("period", [2, 16, None])
def test_overlaps_confirm_a_guess(period):
    victims = masks_of_tokens()
    found = confirm(victims, victims, Renewal(period), fresh())
    assert found.pair.rate == found.among.rate == 1 and found.pair.low > 0.2 and found.among.low > 0.5
    assert confirm_against(victims, victims, random_masks(seed=3), Renewal(period), fresh()).rate == 1


def test_a_guess_from_the_models_neighbourhood_is_confirmed_too():
    """Masks of the same tokens, computed otherwise: not equal, but nearer than those of other texts."""
    victims, near = masks_of_tokens(noise=0.1), masks_of_tokens(noise=0.12)
    assert (victims.groups[0] != near.groups[0]).any()
    assert confirm(victims, near, Renewal(4), fresh()).among.rate > 0.9


def test_masks_without_relation_to_the_guess_confirm_nothing():
    found = confirm(random_masks(40, seed=1), random_masks(40, seed=2), Renewal(8), fresh())
    assert found.pair.low < 0 < found.pair.high and found.among.low <= 0


def test_a_variable_count_confirms_under_any_shuffle():
    victims = Masks(random_masks().tokens, (fresh().random((12, 32, LAYERS, BLOCKS)) < 0.3,))
    assert confirm(victims, victims, Renewal(1), fresh()).among.rate == 1


def test_a_partial_renewal_confirms_where_a_full_one_does_not():
    """Each text has a half of the blocks to itself, so that what fires is what fired before; counts are constant."""
    random = fresh()
    scores = random.random((12, 32, LAYERS, 24)) + (random.random((12, 1, LAYERS, 24)) < 0.5)
    victims = Masks(random_masks().tokens, (best(scores, 3),))
    full, part = (confirm(victims, victims, Renewal(1, partial), fresh()) for partial in (False, True))
    assert full.pair.rate == 0.5 and part.pair.low > 0.1


def test_known_tokens_name_those_that_share_their_shuffle():
    found = name_after_known(masks_of_tokens(60, seed=1), masks_of_tokens(seed=2), 8, (4, 16, None), fresh())
    assert list(found) == [16, None]
    assert all(rate.rate > 0.5 and rate.low > 0.3 for rate in found.values())
    nothing = name_after_known(random_masks(60, seed=1), random_masks(40, seed=2), 8, (None,), fresh())
    assert nothing[None].low <= 0


def test_repeated_tokens_show_within_a_period():
    planted, unrelated = masks_of_tokens(40), random_masks(40)
    found = same_token(planted, Renewal(16), fresh())
    assert found.rate > 0.9 and found.low > 0.35 and found.baseline == 0.5
    nothing = same_token(unrelated, Renewal(16), fresh())
    assert nothing.low < 0 < nothing.high


def test_heads_that_are_revealed_tell_what_neurons_do_not():
    nothing, heads = random_masks(40, seed=1), masks_of_tokens(40, seed=1)
    both = Masks(nothing.tokens, (nothing.groups[0], heads.groups[0][..., :2, :]))
    assert same_token(both, Renewal(None), fresh()).low > 0.2
