"""POST's loop (arXiv 2505.15252): the client drafts in the clear, one secure pass scores the draft, sampling accepts a part of it.

A round's pass takes the last token and the drafted ones; the tokens that come of it are the accepted ones and one more. Rows of the
cache past the accepted ones are discarded. What the parties learn beside the length of each draft is told by the disclosure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..generation.generate import Step
from .draft import Draft, Drafter
from .draft_length import Lengths, Round
from .scores import Scores

PHASES = ("draft", "decode", "sampling")
"""Of a session, to which a round is booked: the client's own model, the secure pass, what makes tokens of it."""


class Disclosure(Protocol):
    """What is opened of a pass, and to whom: see `distribution.py` and `flags.py`."""

    def first(self, logits: np.ndarray, position: int) -> Step: ...

    def verify(self, draft: Draft, position: int, most: int, ends: Collection[int]) -> list[Step]: ...

    def follow(self, drafted: int) -> int: ...


@dataclass
class PostDecoder:
    """The client's end. `clock` gives the seconds of all rounds so far, on the network they are given for.

    `rounds` grows by one a pass. The decoder's capacity must leave room for the longest draft behind the last token.
    """

    decoder: Scores
    drafter: Drafter
    disclosure: Disclosure
    lengths: Lengths
    clock: Callable[[], float] = lambda: 0.0
    rounds: list[Round] = field(default_factory=list)

    def warm_up(self, prompt: Sequence[int], before: Sequence[int] = ()) -> None:
        """Let the draft model compile what rounds will need, on a text of the prompt's length that is not the prompt."""
        for end in (1, 3, len(before) + len(prompt)):
            self.drafter.propose([0] * end, 2)

    def generate(
        self, prompt: Sequence[int], new_tokens: int, ends: Collection[int] = (), before: Sequence[int] = ()
    ) -> Iterator[Step]:
        """Yield up to `new_tokens` tokens after `prompt`, ending after one of `ends`. `before`: what the cache holds already."""
        session, sequence = self.decoder.session, [*before, *prompt]
        with session.phase("prefill"):
            self._announce(len(prompt))
            steps = [self.disclosure.first(self.decoder.advance(prompt)[-1], len(sequence))]
        while True:
            for step in steps:
                yield step
                sequence.append(step.token)
                new_tokens -= 1
            if new_tokens == 0 or sequence[-1] in ends:
                return
            steps = self._round(sequence, new_tokens, ends)

    def _round(self, sequence: Sequence[int], most: int, ends: Collection[int]) -> list[Step]:
        session, start, began = self.decoder.session, self.decoder.length, self.clock()
        draft = self._draft(sequence, most)
        with session.phase("decode"):
            self._announce(1 + len(draft.tokens))
            self.decoder.score([sequence[-1], *draft.tokens])
        with session.phase("sampling") as phase:
            booked, since = phase.seconds, time.perf_counter()
            steps = self.disclosure.verify(draft, len(sequence), most, ends)
            phase.seconds = booked + time.perf_counter() - since  # with what the client does alone
        self.decoder.roll_back(start + len(steps))
        accepted = [step.token for step in steps[: len(draft.tokens)]] == draft.tokens[: len(steps)]
        tested = min(len(steps), len(draft.tokens))
        made = Round(len(draft.tokens), tested, tested if accepted else tested - 1, len(steps), self.clock() - began)
        self.rounds.append(made)
        self.lengths.learn(made)
        return steps

    def _draft(self, sequence: Sequence[int], most: int) -> Draft:
        """The client's own work, of one of the lengths that passes have, or empty; no longer than `most` tokens need."""
        began, sizes = time.perf_counter(), self.lengths.sizes
        enough = min((size for size in sizes if size >= most - 1), default=max(sizes))
        draft = self.drafter.propose(sequence, min(enough, self.lengths.choose()))
        length = max((size for size in sizes if size <= len(draft.tokens)), default=0)
        self.decoder.session.phases["draft"].seconds += time.perf_counter() - began
        return Draft(draft.tokens[:length], draft.probabilities[:length])

    def _announce(self, count: int) -> None:
        self.decoder.session.broadcast(str(count).encode(), "client")


def follow(decoder: Scores, disclosure: Disclosure) -> None:
    """The part of every party but the client, until the client announces a pass of no tokens."""
    session, phase = decoder.session, "prefill"
    while True:
        with session.phase(phase):
            count, start = int(session.broadcast(b"", "client")), decoder.length
            if count == 0:
                return
            if phase == "prefill":
                decoder.advance([0] * count)
            else:
                decoder.score([0] * count)
        if phase == "decode":
            with session.phase("sampling"):
                decoder.roll_back(start + disclosure.follow(count - 1))
        phase = "decode"
