"""The choice of a prefix: the shortest one after which no position is an outlier (SOAL; PrefixQuant chooses by frequency alone).

A causal model whose first position takes the outliers keeps them there for good. After a prefix that holds them no later
position of the text has one, and, which is more, no token of the vocabulary placed right after it: nobody knows what a client
will write first. A prefix begins with the token that texts begin with, if the model has one, as the model was trained to see
it there. Each further token is chosen among candidates by how many of the tokens that are still outliers it calms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .special import Activations, ratios, special

_SUITE = 256  # cases that candidates are tried on
_CANDIDATES = 12  # of each kind: control tokens, frequent ones, special ones
_TRIALS = 3  # prefixes of one length that are measured in full
_FROM_TEXT = 8  # cases taken from text, which are longer than one token
_LISTED = 20

Case = tuple[int, ...]
"""Tokens of which the last, right after a prefix and the others, is an outlier."""


@dataclass(frozen=True)
class Outlier:
    """A special token: its id and text, its M of norms and of activations, and the larger ratio to the median."""

    token: int
    text: str
    norm: float
    activation: float
    ratio: float


@dataclass(frozen=True)
class Scan:
    """All of the vocabulary, each token right after a prefix. Pairs are of norms and activations."""

    median: tuple[float, float]
    largest: tuple[float, float]
    special: int
    worst: tuple[Outlier, ...]


@dataclass(frozen=True)
class Trial:
    """How a prefix fares: on the text (`median`, `largest` of M over its positions), and over the vocabulary where measured."""

    prefix: tuple[int, ...]
    median: tuple[float, float]
    largest: tuple[float, float]
    outliers: int
    positions: int
    vocabulary: Scan | None

    @property
    def frees_text(self) -> bool:
        return not self.outliers

    @property
    def frees(self) -> bool:
        """Whether neither the text nor any token right after the prefix has an outlier."""
        return self.frees_text and self.vocabulary is not None and not self.vocabulary.special

    @property
    def order(self) -> tuple[float, ...]:
        """Better prefixes first: text without outliers, few special tokens, short."""
        return self.outliers, float("inf") if self.vocabulary is None else self.vocabulary.special, len(self.prefix)


@dataclass
class Search:
    """What a choice goes by. texts: token ids; control, frequent: tokens to try; text_of: a token's text; eta: the ratio that makes
    an outlier; longest: tokens of a prefix at most; given: a prefix to hold the others against, and to keep if none is better.
    """

    activations: Activations
    texts: Sequence[Sequence[int]]
    control: Sequence[int]
    frequent: Sequence[int]
    text_of: Callable[[int], str]
    eta: float
    longest: int
    given: tuple[int, ...] = ()
    trials: list[Trial] = field(default_factory=list)

    def run(self) -> Trial:
        """The shortest prefix that frees text and vocabulary; if none does, the best of those tried (`Trial.order`).

        `trials` then holds all that were measured, in their order.
        """
        if self.given:
            self._try(self.given, everything=True)
        trial, cases = self._try(())
        start = self.activations.decoder.config.start_token
        if not trial.frees and start is not None and self.longest:
            trial, cases = self._try((start,))
        while not trial.frees and len(trial.prefix) < self.longest:
            if trial.vocabulary is None:
                trial, cases = self._try(trial.prefix, everything=True)
            better = self._extended(trial, cases)
            if better is None:
                break
            trial, cases = better
        return min(self.trials, key=lambda each: each.order)

    def _extended(self, base: Trial, cases: list[Case]) -> tuple[Trial, list[Case]] | None:
        """The best prefix of one token more, and what is left after it; None where no candidate calms anything.

        What is left after a trial joins the cases, and its tokens the candidates: a token that no other calms may be what calms
        the others.
        """
        suite, candidates = _spread(cases, _SUITE), self._candidates(cases)
        best: tuple[Trial, list[Case]] | None = None
        tried: set[int] = set()
        while candidates and len(tried) < _TRIALS:
            remaining, token = self._screened(base, suite, candidates)
            if remaining >= min(len(suite), len(suite if best is None else best[1])):
                break
            found = self._try((*base.prefix, token), everything=True)
            tried.add(token)
            if best is None or found[0].order < best[0].order:
                best = found
            if found[0].frees:
                break
            left = {case[-1]: 2 for case in found[1][:_CANDIDATES]}
            candidates = {other: kind for other, kind in (left | candidates).items() if other not in tried}
            suite = [*dict.fromkeys([*found[1], *suite])][:_SUITE]
        return best

    def _candidates(self, cases: list[Case]) -> dict[int, int]:
        """Tokens to try, and of which kind each is: 0 control, 1 frequent, 2 special (the worst, and those seen most in text)."""
        seen = Counter(token for text in self.texts for token in text)
        worst = list(dict.fromkeys(case[-1] for case in cases))
        often = sorted(worst, key=lambda token: -seen[token])
        kinds = ((self.control, 0), (self.frequent, 1), (worst, 2), (often, 2))
        found: dict[int, int] = {}
        for tokens, kind in kinds:
            for token in tokens[:_CANDIDATES]:
                found.setdefault(int(token), kind)
        return found

    def _screened(self, base: Trial, suite: list[Case], candidates: dict[int, int]) -> tuple[int, int]:
        """How many cases are left after the best candidate, and this.

        Of equals the one whose kind says least comes first: the text is generated after the prefix, and a word would colour it.
        """
        median = np.asarray(base.median if base.vocabulary is None else base.vocabulary.median)
        ends = np.cumsum([len(case) for case in suite]) - 1
        found = []
        tried = list(candidates.items())
        for token, kind in self.activations.progress(tried, f"candidates after {list(base.prefix)}", "token"):
            worst = ratios(self.activations.of((*base.prefix, token), suite)[ends], median)
            found.append((int(np.sum(worst > self.eta)), kind, float(worst.max()), token))
        remaining, _, _, token = min(found)
        return remaining, token

    def _try(self, prefix: tuple[int, ...], everything: bool = False) -> tuple[Trial, list[Case]]:
        """Measure a prefix on the text, and over the vocabulary if the text has no outlier or `everything` is wanted.

        The median is that of the text's positions; over the vocabulary the smaller of that and its own, since in the first
        position nearly every token is an outlier and its median means nothing.
        """
        text = self.activations.of(prefix, self.texts, "the text")
        median = np.median(text, axis=0)
        outliers = special(text, median, self.eta)
        cases, scan = self._in_text(outliers), None
        if everything or not outliers:
            scan, left = self._scan(prefix, median)
            cases += [(token,) for token in left]
        trial = Trial(prefix, _pair(median), _pair(text.max(0)), len(outliers), len(text), scan)
        self.trials = [*(other for other in self.trials if other.prefix != prefix), trial]
        return trial, cases

    def _in_text(self, rows: list[int]) -> list[Case]:
        """The shortest beginnings of passages that end in an outlier."""
        ends = np.cumsum([0, *map(len, self.texts)])
        places = [(int(np.searchsorted(ends, row, "right")) - 1, row) for row in rows]
        found = [tuple(self.texts[i][: row - ends[i] + 1]) for i, row in places]
        return sorted(dict.fromkeys(found), key=len)[:_FROM_TEXT]

    def _scan(self, prefix: tuple[int, ...], ordinary: np.ndarray) -> tuple[Scan, list[int]]:
        maxima = self.activations.of_vocabulary(prefix)
        median = np.minimum(np.median(maxima, axis=0), ordinary)
        left, worst = special(maxima, median, self.eta), ratios(maxima, median)
        listed = [Outlier(i, self.text_of(i), *_pair(maxima[i]), float(worst[i])) for i in left[:_LISTED]]
        return Scan(_pair(median), _pair(maxima.max(0)), len(left), tuple(listed)), left


def _spread(cases: list[Case], count: int) -> list[Case]:
    """The first of the cases and others evenly from the rest, `count` at most."""
    return [cases[i] for i in np.unique(np.linspace(0, len(cases) - 1, min(count, len(cases))).astype(int))]


def _pair(values: np.ndarray) -> tuple[float, float]:
    return float(values[0]), float(values[1])
