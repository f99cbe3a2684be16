"""The generation loop: the same for a plaintext and a secure decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..models.tokenizer import Tokenizer


class Advances(Protocol):
    """A decoder that takes tokens and gives the client logits, the last row after the last token."""

    def advance(self, tokens: Sequence[int]) -> np.ndarray: ...


@dataclass(frozen=True)
class Step:
    """One generated token and the logits [vocabulary] it was drawn from, where the client got them."""

    token: int
    logits: np.ndarray | None


def generate(
    decoder: Advances,
    prompt: Sequence[int],
    new_tokens: int,
    pick: Callable[[np.ndarray], int],
    end_tokens: Sequence[int] = (),
    phase: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
) -> Iterator[Step]:
    """Yield up to `new_tokens` tokens after the ids of `prompt`, ending early after one of `end_tokens`.

    `decoder` is set up; prompt, logits and tokens are the client's secret. `pick` takes logits [vocabulary] and gives a token id,
    as a `Sampler` does. `phase` books costs, as `Session.phase` does. Raises `UserError` where the text outgrows the cache.

    The pass over the prompt is booked to phase "prefill", every later one-token pass to "decode".
    """
    with phase("prefill"):
        logits = decoder.advance(prompt)[-1]
    for count in range(1, new_tokens + 1):
        token = pick(logits)
        yield Step(token, logits)
        if token in end_tokens or count == new_tokens:
            return
        with phase("decode"):
            logits = decoder.advance([token])[-1]


class TextStream:
    """Turns tokens into text as they come; a character that spans tokens appears when it is whole."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self.text = ""

    def push(self, token: int) -> str:
        """The text that this token completes."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        if text.endswith("\ufffd"):
            return ""
        added, self.text = text[len(self.text) :], text
        return added

    def finish(self) -> str:
        """What is left of a character that the last token did not complete."""
        text = self._tokenizer.decode(self._tokens)
        added, self.text = text[len(self.text) :], text
        return added
