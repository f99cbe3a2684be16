"""What revealed block masks tell: attacks on the shuffle, each beside its chance (Comet, "Oblivious shuffle").

The observer is either party. It sees which positions are computed of every token and layer, under a secret shuffle of the
layer's blocks that is renewed every `period` tokens. It knows the masks of public text. The strongest observer is the model's
owner, who can compute the masks of any text that it guesses: what it lacks is the client's text, and the shuffle.

Counts, and overlaps between tokens of a period, are the same under every shuffle: attacks on them take masks in the model's order.
`identify` plays the shuffle. No attack here is the best there is: a leak that is measured is there, one that is not may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial import cKDTree

Random = np.random.Generator

_RESAMPLES = 2000  # of the bootstrap
_Z = 1.96  # of a 95% interval
_HELD_OUT = 4  # every fourth public text chooses between classifiers
_NEIGHBOURS = 16
_BALANCING = 5  # turns of rows and columns
_TINY = 1e-12  # of belief that is never lost
_OLDEST = 8  # periods: older positions count as this old
_DRAWS = 8  # times a guess's partial renewals are played, and averaged


@dataclass(frozen=True)
class Masks:
    """Texts of one length and what is computed of them.

    tokens: int [texts, tokens]. groups: bool [texts, tokens, layers, blocks] each, in the model's own order: neuron blocks, and
    heads where they are revealed too.
    """

    tokens: np.ndarray
    groups: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Renewal:
    """How the shuffle is renewed. period: tokens under one shuffle, or None for the whole request.

    partial: only the positions that were computed in the period, and as many others drawn at random, are permuted anew, among
    themselves; which they are is seen, for their weights are sent again.
    """

    period: int | None
    partial: bool = False

    def spans(self, tokens: int) -> list[slice]:
        """The tokens of each period of a text; the last may be shorter."""
        period = self.period or tokens
        return [slice(at, min(at + period, tokens)) for at in range(0, tokens, period)]


@dataclass(frozen=True)
class Rate:
    """How often an attack succeeds, and `baseline`, how often without looking at masks. low, high: 95% interval of rate - baseline.

    The interval is a bootstrap over texts, as tokens of a text are not independent; where an attack succeeds on all texts (or none)
    it is Wilson's with the number of texts.
    """

    rate: float
    baseline: float
    low: float
    high: float

    @classmethod
    def of(cls, hits: np.ndarray, baseline: np.ndarray | float, random: Random) -> Rate:
        """Of shares of success, a text each [texts], and those without masks, of each text or one for all."""
        hits, count = np.asarray(hits, float), len(hits)
        gain = hits - baseline
        means = gain[random.integers(count, size=(_RESAMPLES, count))].mean(1)
        low, high = (float(end) for end in np.percentile(means, (2.5, 97.5)))
        if gain.any() and np.ptp(hits) == 0:
            low -= hits[0] * _Z**2 / (count + _Z**2)
            high += (1 - hits[0]) * _Z**2 / (count + _Z**2)
        return cls(float(hits.mean()), float(np.mean(baseline)), low, high)


# 1: which token it is, from how many blocks are computed in each layer


def name_token(public: Masks, victims: Masks, random: Random) -> Rate:
    """How often a token is named from the counts of its active blocks, layer by layer; baseline: always the public text's most
    frequent token.

    A linear discriminant and a vote of neighbours learn from public text; the better one on a part of it that neither learned from
    is used, or the constant guess, if neither beats it there. What stands around a token is not used.
    """
    x, asked = _counts(public), _counts(victims)
    held = np.arange(len(public.tokens)) % _HELD_OUT == _HELD_OUT - 1

    def score(classifier: Classifier) -> float:
        found = classifier(_rows(x[~held]), public.tokens[~held].ravel(), _rows(x[held]))
        return float((found == public.tokens[held].ravel()).mean())

    best = max((_constant, _discriminant, _neighbours), key=score)
    constant, found = (each(_rows(x), public.tokens.ravel(), _rows(asked)) for each in (_constant, best))
    shape = victims.tokens.shape
    right, usual = ((guess.reshape(shape) == victims.tokens).mean(1) for guess in (found, constant))
    return Rate.of(right, usual, random)


Classifier = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(x [rows, features], classes [rows], asked [more, features]) -> classes [more]. The first of equals is the most frequent one."""


def _constant(x: np.ndarray, y: np.ndarray, asked: np.ndarray) -> np.ndarray:
    names, _, _ = _classes(y)
    return np.full(len(asked), names[0])


def _discriminant(x: np.ndarray, y: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Gaussians of one covariance, a mean each; the mean of a class counts as if one row at the overall mean were among its own."""
    names, index, number = _classes(y)
    centre = np.zeros((len(names), x.shape[1]))
    np.add.at(centre, index, x - x.mean(0))
    centre /= (number + 1)[:, None]
    rest = x - x.mean(0) - centre[index]
    weights = centre @ np.linalg.pinv(rest.T @ rest / len(x), hermitian=True)
    offset = np.log(number) - (weights * centre).sum(1) / 2
    return names[((asked - x.mean(0)) @ weights.T + offset).argmax(1)]


def _neighbours(x: np.ndarray, y: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """The vote of the nearest rows."""
    names, index, _ = _classes(y)
    count = min(_NEIGHBOURS, len(x))
    _, nearest = cKDTree(x).query(asked, range(1, count + 1))
    votes = np.zeros((len(asked), len(names)), np.int16)
    np.add.at(votes, (np.arange(len(asked))[:, None], index[nearest]), 1)
    return names[votes.argmax(1)]


def _classes(y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Names, the most frequent first; each row's place among them; how many rows each has."""
    names, index, number = np.unique(y, return_inverse=True, return_counts=True)
    order = np.argsort(-number, kind="stable")
    return names[order], np.argsort(order)[index], number[order]


def _counts(masks: Masks) -> np.ndarray:
    """Active blocks [texts, tokens, layers of all groups], float64."""
    return np.concatenate([group.sum(-1) for group in masks.groups], -1).astype(float)


def _rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1])


# 2: which block it is, from how often it is computed


@dataclass(frozen=True)
class View:
    """A text as it is seen, and what is not seen of it.

    seen: bool [tokens, layers, blocks], by position. renewed: bool [periods, layers, blocks], which positions were permuted anew
    before each period. block_at: int [periods, layers, blocks], the block at each position, which nobody sees.
    """

    spans: list[slice]
    seen: np.ndarray
    renewed: np.ndarray
    block_at: np.ndarray


def watch(masks: np.ndarray, renewal: Renewal, random: Random) -> View:
    """Play the shuffle over one text's masks [tokens, layers, blocks]."""
    spans, shape = renewal.spans(len(masks)), masks.shape[1:]
    seen, renewed, block_at = np.empty_like(masks), [], []
    order = np.broadcast_to(np.arange(shape[1]), shape)
    for i, span in enumerate(spans):
        new = _renewed(seen[spans[i - 1]], random) if i and renewal.partial else np.ones(shape, bool)
        order = _permuted(order, new, random)
        seen[span] = np.take_along_axis(masks[span], order[None], -1)
        renewed.append(new)
        block_at.append(order)
    return View(spans, seen, np.stack(renewed), np.stack(block_at))


def _renewed(seen: np.ndarray, random: Random) -> np.ndarray:
    """Places [..., layers, blocks] that a partial renewal permutes after a period's masks [..., tokens, layers, blocks].

    Those that were active, and as many others, or all others if there are fewer.
    """
    touched = seen.any(-3)
    keys = np.where(touched, np.inf, random.random(touched.shape))
    rank = keys.argsort(-1).argsort(-1)
    return touched | (rank < touched.sum(-1, keepdims=True))


def _permuted(order: np.ndarray, new: np.ndarray, random: Random) -> np.ndarray:
    """What lies at each place [layers, blocks] after the places of `new` were permuted among themselves."""
    if new.all():
        return random.permuted(order, axis=-1)
    order = order.copy()
    for row, places in zip(order, new, strict=True):
        row[places] = random.permutation(row[places])
    return order


def identify(public: np.ndarray, victims: np.ndarray, renewal: Renewal, random: Random, samples: int = 8) -> Rate:
    """Share of a layer's blocks whose identity is found at the end of a period; baseline: a random matching's, 1 / blocks.

    public, victims: masks [texts, tokens, layers, blocks]. Blocks are taken as firing independently, as often as in public text;
    positions and blocks are matched by the largest likelihood. With partial renewal what was believed of a position is kept until
    it is renewed, and averaged among those it is permuted with. At most `samples` periods of a text are looked at.
    """
    often = (public.sum((0, 1)) + 0.5) / (public.shape[0] * public.shape[1] + 1)
    shares = [_identified(watch(masks, renewal, random), often, samples) for masks in victims]
    return Rate.of(np.array(shares), 1 / often.shape[-1], random)


def _identified(view: View, often: np.ndarray, samples: int) -> float:
    """Share of positions whose block is named, mean of layers and sampled periods."""
    chosen = set(np.linspace(0, len(view.spans) - 1, samples).round().astype(int))
    hits = [
        linear_sum_assignment(belief[layer], maximize=True)[1] == view.block_at[i, layer]
        for i, belief in _beliefs(view, often)
        if i in chosen
        for layer in range(len(often))
    ]
    return float(np.mean(hits))


def _beliefs(view: View, often: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """At the end of each period its number and the log of what is believed [layers, positions, blocks], up to a constant."""
    belief = np.zeros((*often.shape, often.shape[-1]))
    fires, rests = np.log(often)[:, None], np.log1p(-often)[:, None]
    for i, span in enumerate(view.spans):
        if i:
            belief = _mixed(belief, view.renewed[i])
        seen = view.seen[span]
        number = seen.sum(0)[..., None]
        belief = belief + number * fires + (len(seen) - number) * rests
        yield i, belief


def _mixed(belief: np.ndarray, renewed: np.ndarray) -> np.ndarray:
    """What is believed after the renewed positions [layers, positions] were permuted among themselves: the mean of theirs."""
    if renewed.all():
        return np.zeros_like(belief)
    share, new = np.exp(belief - belief.max(2, keepdims=True)) + _TINY, renewed[..., None]
    for axis in (1, 2) * _BALANCING:  # until each position and each block has about 1 in all (Sinkhorn)
        share /= share.sum(axis, keepdims=True)
    mean = (share * new).sum(1, keepdims=True) / np.maximum(new.sum(1, keepdims=True), 1)
    return np.log(np.where(new, mean, share))


# 3: whether a guessed text is the text, from overlaps between tokens


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
    usual = victims.tokens[:, known:] == _constant(names[:, None], names, names[:1])
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
    return _discriminant(x, public.tokens.ravel(), asked) == victims.tokens[text, known:]


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
            age = np.where(_renewed(group[:, before], random), 0, age + 1)
        for i, limit in enumerate(limits):
            found[:, span, :, i] = (group[:, span] & (age >= limit)[:, None]).sum(-1)
        before = span
    return found


def _distances(seen: np.ndarray, guesses: np.ndarray) -> np.ndarray:
    """Squared distances [seen, guesses]."""
    squares = (seen**2).sum(1)[:, None] + (guesses**2).sum(1)
    return squares - 2 * seen @ guesses.T


def renewed_share(groups: Sequence[np.ndarray], renewal: Renewal, random: Random) -> float:
    """Blocks that one renewal permutes, as a share of a layer's, mean over texts, layers and the renewals within a text (of the
    first group: neuron blocks, whose weights are what a renewal costs)."""
    if not renewal.partial:
        return 1.0
    spans = renewal.spans(groups[0].shape[1])[:-1]
    return float(np.mean([_renewed(groups[0][:, span], random).mean() for span in spans]))
