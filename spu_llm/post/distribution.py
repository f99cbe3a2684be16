"""The `distribution` disclosure: the client gets the logits it would see under ordinary secure decoding, and decides alone.

Position by position, and no further than the first rejection: nothing after it is ever opened or computed on, and any sampling
rule and vocabulary will do. k accepted tokens cost 2k + 1 messages one after the other: each row of logits (4 bytes a word of the
vocabulary), and the client's word in between whether it wants another.

What each party learns: the client the target's logits at the accepted positions and the one after them, which are those it would
get token by token; both parties how many tokens came of the pass; nobody anything of the positions behind.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..generation.generate import Step
from ..generation.sampling import Sampler, SamplingConfig
from .draft import Draft
from .residual import draw, target_random, verdict
from .scores import Scores

_MORE, _ENOUGH = b"1", b"0"


class Distribution:
    """Verifies drafts on the rows of `decoder`'s last pass."""

    def __init__(self, decoder: Scores, sampling: SamplingConfig):
        self._decoder = decoder
        self._sampler = Sampler(sampling)
        self._seed = sampling.drawn_seed

    def first(self, logits: np.ndarray, position: int) -> Step:
        """The token after a prompt."""
        return Step(draw(target_random(self._seed, position), self._sampler.probabilities(logits)), logits)

    def verify(self, draft: Draft, position: int, most: int, ends: Collection[int]) -> list[Step]:
        """What follows a pass over a token and the drafted ones after it; the first step has `position` in the sequence.

        The accepted tokens and one more: in place of the first rejected, or after all. At most `most`, none after one of `ends`.
        """
        steps: list[Step] = []
        while True:
            steps.append(self._step(draft, len(steps), position))
            if len(steps) > len(draft.tokens):
                return steps
            drafted = draft.tokens[len(steps) - 1]
            more = steps[-1].token == drafted and len(steps) < most and drafted not in ends
            self._say(_MORE if more else _ENOUGH)
            if not more:
                return steps

    def follow(self, drafted: int) -> int:
        """The part of a party that is not the client; gives the number of steps."""
        for i in range(drafted):
            self._decoder.row(i)
            if self._say(b"") == _ENOUGH:
                return i + 1
        self._decoder.row(drafted)
        return drafted + 1

    def _step(self, draft: Draft, i: int, position: int) -> Step:
        logits, random = self._decoder.row(i), target_random(self._seed, position + i)
        probabilities = self._sampler.probabilities(logits)
        if i == len(draft.tokens):
            return Step(draw(random, probabilities), logits)
        instead = verdict(random, draft.tokens[i], draft.probabilities[i], probabilities)
        return Step(draft.tokens[i] if instead is None else instead, logits)

    def _say(self, what: bytes) -> bytes:
        return self._decoder.session.broadcast(what, "client")
