"""Whether a guessed text is the text, and what else overlaps between tokens tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .classifiers import constant, discriminant
from .rate import Random, Rate
from .shuffle import Masks, Renewal, renewed_places

_OLDEST = 8  # periods: older positions count as this old
_DRAWS = 8  # times a guess's partial renewals are played, and averaged


@dataclass(frozen=True)
class Confirmed:
    """pair: how often a text is told from one other guess (baseline 1/2); among: from all others (baseline 1 / texts)."""

    pair: Rate
    among: Rate


def confirm(victims: Masks, guesses: Masks, renewal: Renewal, random: Random) -> Confirmed:
    """Which of the guesses a text is; guess i is text i, or what the observer takes for it. Ties are guessed.

    Compared are, of each period, the overlaps of tokens' masks, a token's with itself among them, which is its count; with partial
    renewal also how long ago active positions were renewed.
    """
    distance = _distances(_features(victims, renewal, random, 1), _features(guesses, renewal, random, _DRAWS))
    own, count = np.diag(distance)[:, None], len(distance)
    others = distance[~np.eye(count, dtype=bool)].reshape(count, count - 1)
    nearer, same = (others > own).mean(1), (others == own).sum(1)
    first = np.where((others >= own).all(1), 1 / (1 + same), 0)
    return Confirmed(Rate.of(nearer + same / (count - 1) / 2, 1 / 2, random), Rate.of(first, 1 / count, random))


def confirm_against(victims: Masks, right: Masks, wrong: Masks, renewal: Renewal, random: Random) -> Rate:
    """How often text i is told from wrong guess i when right guess i is the other (baseline 1/2)."""
    seen = _features(victims, renewal, random, 1)
    near, far = (((seen - _features(each, renewal, random, _DRAWS)) ** 2).sum(1) for each in (right, wrong))
    return Rate.of((near < far) + (near == far) / 2, 1 / 2, random)


def name_after_known(
    public: Masks, victims: Masks, known: int, periods: Sequence[int | None], random: Random
) -> dict[int | None, Rate]:
    """How often a token is named that shares its shuffle with `known` first tokens which the observer knows, as of a template; for
    each period of more tokens. Baseline: always the public text's most frequent token.

    Overlaps with known masks are linear measurements of a token's mask: what public text's masks would give under the same ones is
    learned by a linear discriminant, for each text anew.
    """
    tokens, names = victims.tokens.shape[1], public.tokens.ravel()
    ends = {period: period or tokens for period in periods if known < (period or tokens) <= tokens}
    if not ends:
        return {}
    hits = np.array([_named_after(public, victims, text, known) for text in range(len(victims.tokens))])
    usual = victims.tokens[:, known:] == constant(names[:, None], names, names[:1])
    return {
        period: Rate.of(hits[:, : end - known].mean(1), usual[:, : end - known].mean(1), random) for period, end in ends.items()
    }


def _named_after(public: Masks, victims: Masks, text: int, known: int) -> np.ndarray:
    """Which of a text's tokens after the known ones are named, bool."""

    def measured(group: np.ndarray, ours: np.ndarray) -> np.ndarray:
        by_layer = group.astype(np.float32).reshape(-1, *group.shape[-2:]).swapaxes(0, 1)
        found = by_layer @ ours[:known].astype(np.float32).transpose(1, 2, 0)
        return found.transpose(1, 0, 2).reshape(found.shape[1], -1)

    pairs = [(group, theirs[text]) for group, theirs in zip(public.groups, victims.groups, strict=True)]
    x = np.concatenate([measured(group, ours) for group, ours in pairs], -1)
    asked = np.concatenate([measured(ours[known:], ours) for _, ours in pairs], -1)
    return discriminant(x, public.tokens.ravel(), asked) == victims.tokens[text, known:]


def same_token(victims: Masks, renewal: Renewal, random: Random) -> Rate | None:
    """How often, of two equal tokens and two different ones within a period, the equal ones overlap more (baseline 1/2).

    It needs no guess, nor the model: it tells where words of a text are repeated. None where no period has two equal tokens.
    """
    shares = []
    for text, tokens in enumerate(victims.tokens):
        own = Masks(tokens[None], tuple(group[text : text + 1] for group in victims.groups))
        scores, equal = [], []
        for span in renewal.spans(len(tokens)):
            row, column = np.triu_indices(span.stop - span.start, 1)
            scores.append(sum(_overlaps(group[:, span])[0].sum(0)[row, column] for group in own.groups))
            equal.append((tokens[span][:, None] == tokens[span])[row, column])
        score, same = np.concatenate(scores), np.concatenate(equal)
        if same.any() and not same.all():
            shares.append(_larger(score[same], score[~same]))
    return Rate.of(np.array(shares), 1 / 2, random) if shares else None


def _larger(some: np.ndarray, others: np.ndarray) -> float:
    """Share of pairs in which the first is the larger, equals for a half."""
    ordered = np.sort(others)
    below, up_to = (np.searchsorted(ordered, some, side) for side in ("left", "right"))
    return float((below + up_to).mean() / 2 / len(ordered))


def _features(masks: Masks, renewal: Renewal, random: Random, draws: int) -> np.ndarray:
    """What no shuffle changes, [texts, features]: overlaps within periods and, with partial renewal, mean ages over `draws`.

    All are multiples of 1 / draws and their squares' sums exact in float64, so that ties are ties.
    """
    texts, tokens = masks.tokens.shape
    parts = []
    for group in masks.groups:
        for span in renewal.spans(tokens):
            row, column = np.triu_indices(span.stop - span.start)
            parts.append(_overlaps(group[:, span])[..., row, column].reshape(texts, -1))
        if renewal.partial:
            parts.append(np.mean([_ages(group, renewal, random) for _ in range(draws)], 0).reshape(texts, -1))
    return np.concatenate(parts, 1).astype(float)


def _overlaps(group: np.ndarray) -> np.ndarray:
    """[texts, layers, tokens, tokens] common active blocks of masks [texts, tokens, layers, blocks]; exact in float32."""
    by_layer = group.astype(np.float32).swapaxes(1, 2)
    return by_layer @ by_layer.swapaxes(2, 3)


def _ages(group: np.ndarray, renewal: Renewal, random: Random) -> np.ndarray:
    """[texts, tokens, layers, ages] active blocks at positions that were renewed at least 1, 2, ... periods ago.

    A block has its position's age, wherever the shuffle puts it, so that none need be played; what is drawn is which untouched
    blocks are renewed.
    """
    texts, tokens, layers, blocks = group.shape
    age, found = np.zeros((texts, layers, blocks), int), np.empty((texts, tokens, layers, _OLDEST), np.int32)
    limits, before = np.arange(1, _OLDEST + 1), None
    for span in renewal.spans(tokens):
        if before is not None:
            age = np.where(renewed_places(group[:, before], random), 0, age + 1)
        for i, limit in enumerate(limits):
            found[:, span, :, i] = (group[:, span] & (age >= limit)[:, None]).sum(-1)
        before = span
    return found


def _distances(seen: np.ndarray, guesses: np.ndarray) -> np.ndarray:
    """Squared distances [seen, guesses]."""
    squares = (seen**2).sum(1)[:, None] + (guesses**2).sum(1)
    return squares - 2 * seen @ guesses.T
