"""How many tokens to draft: fixed, or chosen before each pass by what it should bring and what it should cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

DRAFT_LENGTHS = (2, 4, 8, 16)
"""Among which is chosen."""

_TRIED, _TAKEN = 4.0, 3.0  # what stands for experience before there is any: three of four accepted
_MEMORY = 0.95  # weight of experience after each round, as texts change
_RECENT = 8  # rounds of a length whose seconds count
_LEAST_FIXED = 0.1  # of a round's seconds, which do not grow with a draft


@dataclass(frozen=True)
class Round:
    """One pass: tokens `drafted`, of which `tested` were looked at and `accepted` of these; `steps` tokens came of it.

    seconds: of drafting, the pass and sampling, on the network they are given for.
    """

    drafted: int
    tested: int
    accepted: int
    steps: int
    seconds: float


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens of a round, where each drafted one is accepted with the same chance: (1 - a^(length + 1)) / (1 - a)."""
    return float(sum(acceptance**i for i in range(length + 1)))


class Lengths(Protocol):
    """Chooses draft lengths among `sizes`: each size of a pass has to be compiled. A draft that falls short is cut to one."""

    @property
    def sizes(self) -> Sequence[int]: ...

    def choose(self) -> int:
        """Tokens to draft next."""

    def learn(self, made: Round) -> None:
        """Take account of a round."""


@dataclass(frozen=True)
class FixedLength:
    """Always the same length."""

    length: int
    sizes: Sequence[int]

    def choose(self) -> int:
        return self.length

    def learn(self, made: Round) -> None:
        """Nothing to be learnt."""


class AutoLength:
    """The length that promises most tokens a second.

    Tokens follow from the running estimate of acceptance, seconds from a line in the drafted tokens through the rounds made so far:
    the cost model's, as messages hardly grow with a pass and bytes and computing do in proportion. Two lengths are tried first.
    """

    def __init__(self, lengths: Sequence[int] = DRAFT_LENGTHS):
        self.sizes = lengths
        self._to_try = list(lengths[1:3])
        self._tried, self._taken = _TRIED, _TAKEN
        self._points: list[tuple[int, float]] = []

    @property
    def acceptance(self) -> float:
        """Estimated chance that a drafted token is accepted."""
        return self._taken / self._tried

    def choose(self) -> int:
        if self._to_try:
            return self._to_try.pop()
        fixed, each = self._line()
        return max(self.sizes, key=lambda n: expected_tokens(self.acceptance, n) / (fixed + each * n))

    def learn(self, made: Round) -> None:
        self._tried = self._tried * _MEMORY + made.tested
        self._taken = self._taken * _MEMORY + made.accepted
        self._points.append((made.drafted, made.seconds))

    def _line(self) -> tuple[float, float]:
        """Seconds of a round without drafted tokens, and of each of these; flat where all had one length.

        Through the medians of each length's last rounds, as one that was disturbed must not decide.
        """
        seconds: dict[int, list[float]] = {}
        for drafted, taken in self._points:
            seconds.setdefault(drafted, []).append(taken)
        medians = {drafted: float(np.median(taken[-_RECENT:])) for drafted, taken in seconds.items()}
        least = min(medians.values())
        if len(medians) == 1:
            return least, 0.0
        each, fixed = np.polyfit(list(medians), list(medians.values()), 1)
        return max(fixed, _LEAST_FIXED * least), max(each, 0.0)
