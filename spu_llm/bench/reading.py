"""Reading text with two decoders, plaintext and emulated secure: what each passage and question gives (see `quality.py`)."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..generation import AssistedDecoder
from ..models import Checkpoint, PlainDecoder
from ..models.calibration import Calibration
from ..models.tokenizer import Tokenizer
from ..progress import Progress
from ..runtime.emulation import EmulatedSession, SeededSupply

CONTEXT, CONTINUATION, OPTIONS = 32, 16, 4
"""Tokens of a choice's context and of each of its options, and how many options there are."""
LONGEST = 256
"""Tokens of a passage; longer ones are cut."""
PLAIN, SECURE = "plain", "secure"
_LONGEST_PASS = 64  # others are smaller powers of two, so that few programs are traced
_VOID = "range check"  # how the error begins of a pass in which a value left its table

Record = dict[str, Any]


@dataclass(frozen=True)
class Passage:
    """A text as tokens. `word`: which of those after the first make up its last word, if they begin and end with it."""

    ids: list[int]
    word: slice | None


@dataclass(frozen=True)
class Question:
    """Options (context, continuation) as tokens, of which the `answer`-th is right. Contexts may be the same."""

    options: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    answer: int


class Void(Exception):
    """A secure pass gave nothing, as a value left its table."""


class Side:
    """A decoder that is read from: `start` tokens of prefix, then one text after the other."""

    def __init__(self, advance: Callable[[Sequence[int]], np.ndarray], rewind: Callable[[int], Any], start: int):
        self._advance, self._rewind, self._start = advance, rewind, start
        self.length = start
        self.seconds, self.tokens = 0.0, 0

    def back(self, length: int | None = None) -> None:
        """To a position read before, by default to the end of the prefix."""
        self.length = self._start if length is None else length
        self._rewind(self.length)

    def read(self, ids: Sequence[int]) -> np.ndarray:
        """Logits [len(ids), vocabulary] after each token. Raises Void."""
        begun, rows, at = time.perf_counter(), [], 0
        try:
            for count in pass_lengths(len(ids)):
                rows.append(self._advance(ids[at : at + count]))
                at += count
                self.length += count
        except UserError as error:
            if str(error).startswith(_VOID):
                raise Void from error
            raise
        finally:
            self.seconds += time.perf_counter() - begun
            self.tokens += at
        return np.concatenate(rows)


def pass_lengths(count: int) -> Iterator[int]:
    """Powers of two, the largest first, that add up to `count`."""
    size = _LONGEST_PASS
    while count:
        while size > count:
            size //= 2
        yield size
        count -= size


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Log of softmax over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def plain_side(checkpoint: Checkpoint, prefix: Sequence[int], capacity: int) -> Side:
    decoder = PlainDecoder(checkpoint.decoder, capacity)
    if prefix:
        decoder.advance(prefix)
    return Side(decoder.advance, lambda length: setattr(decoder, "length", length), len(prefix))


def secure_side(
    checkpoint: Checkpoint, calibration: Calibration, prefix: Sequence[int], capacity: int, seed: int, progress: Progress
) -> Side:
    """The emulated decoder, with masks of a seed."""
    supply = SeededSupply(seed)
    decoder = AssistedDecoder(EmulatedSession(supply), checkpoint.decoder, calibration, capacity, prefix, supply=supply)
    decoder.set_up(1, progress)
    return Side(lambda ids: decoder.advance(ids, last_only=False), decoder.roll_back, len(prefix))


# What is measured


def read_passage(sides: dict[str, Side], passage: Passage) -> Record:
    """Perplexity's sums over a passage's tokens but the first, and whether its last word was predicted, token by token.

    nll: sum of negative log probabilities; same: next tokens on which the sides agree; word: None where there is none.
    """
    ids, word = passage.ids, passage.word
    logits = {}
    for name, side in sides.items():
        side.back()
        logits[name] = side.read(ids[:-1])
    targets, top = np.asarray(ids[1:]), {name: rows.argmax(-1) for name, rows in logits.items()}
    hits = {name: found == targets for name, found in top.items()}
    nll = {name: -log_probabilities(rows)[np.arange(len(targets)), targets] for name, rows in logits.items()}
    return {
        "tokens": len(targets),
        "nll": {name: float(values.sum()) for name, values in nll.items()},
        "same": int((top[PLAIN] == top[SECURE]).sum()),
        "word": None if word is None else {name: bool(hit[word].all()) for name, hit in hits.items()},
        "logit_error": float(np.abs(logits[PLAIN] - logits[SECURE]).max()),
    }


def cut_passage(tokenizer: Tokenizer, text: str, longest: int) -> Passage:
    """The first `longest` tokens of a text; its last word is looked for where all of it is among them."""
    ids = tokenizer.encode(text)[:longest]
    found = re.search(r"\s([^\W\d_]+)\W*$", text)
    if found is None:
        return Passage(ids, None)
    context, whole = tokenizer.encode(text[: found.start()]), tokenizer.encode(text[: found.end(1)])
    if not context or ids[: len(whole)] != whole or whole[: len(context)] != context:
        return Passage(ids, None)
    return Passage(ids, slice(len(context) - 1, len(whole) - 1))


def answer(side: Side, question: Question) -> list[float]:
    """For each option the mean log probability of its continuation's tokens (lm-eval's acc_norm, by tokens)."""
    scores, before = [], None
    for context, continuation in question.options:
        if context != before:
            side.back()
            last, at, before = side.read(context)[-1:], side.length, context
        else:
            side.back(at)
        rows = np.concatenate([last, side.read(continuation)[:-1]])
        scores.append(float(log_probabilities(rows)[np.arange(len(continuation)), list(continuation)].mean()))
    return scores


def answer_both(sides: dict[str, Side], question: Question) -> Record:
    return {"answer": question.answer, **{name: answer(side, question) for name, side in sides.items()}}


# Where questions come from


def choices(passages: Sequence[Sequence[int]], count: int, seed: int) -> list[Question]:
    """The first `count` passages that are long enough: each one's own continuation among those of three others."""
    long = [tuple(ids[: CONTEXT + CONTINUATION]) for ids in passages if len(ids) >= CONTEXT + CONTINUATION]
    if len(long) < OPTIONS:
        return []
    random, questions = np.random.default_rng(seed), []
    for i, ids in enumerate(long[:count]):
        others = random.choice([j for j in range(len(long)) if j != i], OPTIONS - 1, replace=False)
        order = random.permutation(OPTIONS)
        ends = [(ids if j == 0 else long[others[j - 1]])[CONTEXT:] for j in order]
        questions.append(Question(tuple((ids[:CONTEXT], end) for end in ends), int(np.argmin(order))))
    return questions


def read_questions(path: Path, tokenizer: Tokenizer, count: int) -> list[Question]:
    """A JSON object a line: `options`, a list of [context, continuation], and `answer`, the right one's number.

    UserError where a line is another thing, or has no token.
    """
    questions = []
    for number, line in enumerate(read_text(path).splitlines()[:count], 1):
        try:
            found = json.loads(line)
            options = tuple(_split(tokenizer, *option) for option in found["options"])
            questions.append(Question(options, range(len(options))[found["answer"]]))
        except (ValueError, KeyError, TypeError, IndexError):
            raise UserError(
                f'{path}: line {number} is no question; write {{"options": [["context", " continuation"], ...], "answer": 0}}'
            ) from None
    return questions


def _split(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    before, whole = tokenizer.encode(context), tokenizer.encode(context + continuation)
    after = whole[len(before) :] if whole[: len(before)] == before else tokenizer.encode(continuation)
    if not before or not after:
        raise ValueError("an option without tokens")
    return tuple(before), tuple(after)


def read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a text file") from None
