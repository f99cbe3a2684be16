"""Drafts: tokens that the client proposes in the clear, with the distributions it drew them from.

Everything here happens on the client's machine: the draft model is public, no byte is sent, and nobody learns what was drafted
but by the verification that follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import UserError
from ..generation.sampling import Sampler, SamplingConfig
from ..models.decoder import Decoder
from ..models.fast import FastDecoder
from .residual import draw

_STREAM = 2
"""The stream of the draft's random numbers; acceptance has its own, as the proof of speculative sampling asks."""


@dataclass(frozen=True)
class Draft:
    """Proposed tokens and what they were drawn from: probabilities, float64 [tokens, vocabulary], a row of which adds up to 1.

    A row is one-hot where the token was not drawn: greedy, or looked up.
    """

    tokens: list[int]
    probabilities: np.ndarray


class Drafter(Protocol):
    """Proposes what may follow; stateless to its caller. `vocabulary` is the length of a row of probabilities."""

    vocabulary: int

    def propose(self, tokens: Sequence[int], length: int) -> Draft:
        """At most `length` tokens after `tokens`, which are prefix, prompt and all generated ones; there may be fewer, or none."""


class ModelDraft:
    """Drafts by a model in plaintext, one compiled pass a token.

    `capacity`: positions of the longest sequence, drafted tokens included. `sampling` must be the target's, so that q is cut as
    p is. Draws depend on the seed and the position alone: a generation that goes on elsewhere drafts the same.
    """

    def __init__(self, decoder: Decoder, capacity: int, sampling: SamplingConfig):
        self.vocabulary = decoder.config.vocabulary
        self._decoder = FastDecoder(decoder, capacity)
        self._sampler, self._seed = Sampler(sampling), sampling.drawn_seed
        self._fed: list[int] = []  # whose keys and values are in the cache

    def propose(self, tokens: Sequence[int], length: int) -> Draft:
        """`length` tokens after `tokens`, fewer where the capacity ends. Raises UserError where it has no room for `tokens`."""
        if not tokens:
            raise UserError("a draft needs a token to begin after; give a prompt, or a prefix in the model's config")
        length = min(length, self._decoder.capacity - len(tokens))
        if length < 0:
            raise UserError(f"the draft's cache has room for {self._decoder.capacity} positions, not for {len(tokens)} tokens")
        drafted: list[int] = []
        rows = np.zeros((length, self.vocabulary))
        for i in range(length):
            rows[i] = self._sampler.probabilities(self._after([*tokens, *drafted]))
            random = np.random.default_rng([self._seed, _STREAM, len(tokens) + i])
            drafted.append(draw(random, rows[i]))
        return Draft(drafted, rows)

    def _after(self, tokens: list[int]) -> np.ndarray:
        """Logits [vocabulary] after a sequence, of which only what differs from the last one is computed."""
        kept = min(shared_prefix(self._fed, tokens), len(tokens) - 1)
        self._decoder.roll_back(kept)
        logits = self._decoder.advance(tokens[kept:])[-1]
        self._fed = tokens
        return logits


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    for i, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return i
    return min(len(a), len(b))
