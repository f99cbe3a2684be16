"""What privacy costs in quality: perplexity, last words and multiple choice, in plaintext float32 and as a secure run has them.

The secure side is emulated (`runtime/emulation.py`): the same integers as between parties, many times as fast. The same run checks
that on a sample against parties. Both sides see the same passages, each after the model's prefix.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from math import exp, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..generation import AssistedDecoder
from ..models import Checkpoint
from ..models.calibration import Calibration
from ..models.calibration_file import calibration_for
from ..models.source import ModelConfig
from ..models.tokenizer import Tokenizer, need_tokenizer
from ..progress import Progress
from ..runtime import ProtocolConfig, Session
from ..runtime.emulation import EmulatedSession, ReplayedSupply, WitnessedSupply
from ..runtime.supply import LiveSupply
from .reading import (
    CONTEXT,
    CONTINUATION,
    LONGEST,
    OPTIONS,
    PLAIN,
    SECURE,
    Passage,
    Question,
    Record,
    Side,
    Void,
    answer_both,
    choices,
    cut_passage,
    plain_side,
    read_passage,
    read_questions,
    read_text,
    secure_side,
)

_RING = 64


@dataclass(frozen=True)
class Amounts:
    """How much is looked at: of each text tokens (at least), last words and choices; questions of each file.

    `checked` tokens are run between parties too. The seed decides choices' options and the emulated masks.
    """

    tokens: int = 2000
    words: int = 100
    choices: int = 100
    questions: int = 100
    checked: int = 6
    seed: int = 0


# Sums


def passage_sums(records: Sequence[Record]) -> Record:
    """Perplexities, the change's standard error (over passages), agreement of next tokens, last words."""
    whole = [record for record in records if not record.get("void")]
    if not whole:
        raise UserError(
            "in every passage a value left its table; calibrate on text like this one (calibration in the model's config)"
        )
    tokens = sum(record["tokens"] for record in whole)
    mean = {name: sum(record["nll"][name] for record in whole) / tokens for name in (PLAIN, SECURE)}
    change = mean[SECURE] - mean[PLAIN]
    spread = sum((record["nll"][SECURE] - record["nll"][PLAIN] - change * record["tokens"]) ** 2 for record in whole)
    words = [record["word"] for record in whole if record["word"] is not None]
    return {
        "passages": len(whole),
        "void_passages": len(records) - len(whole),
        "tokens": tokens,
        "perplexity": {**{name: exp(value) for name, value in mean.items()}, "change": exp(change) - 1},
        "perplexity_change_standard_error": sqrt(spread) / tokens,
        "top1_agreement": sum(record["same"] for record in whole) / tokens,
        "max_logit_error": max(record["logit_error"] for record in whole),
        "last_word": _accuracy([(word[PLAIN], word[SECURE]) for word in words]),
    }


def choice_sums(records: Sequence[Record]) -> Record:
    whole = [record for record in records if not record.get("void")]
    picked = [tuple(int(np.argmax(record[name])) for name in (PLAIN, SECURE)) for record in whole]
    right = [tuple(pick == record["answer"] for pick in picks) for picks, record in zip(picked, whole, strict=True)]
    return {**_accuracy(right), "same_choice": sum(a == b for a, b in picked), "void": len(records) - len(whole)}


def _accuracy(right: Sequence[tuple[bool, ...]]) -> Record:
    """`change` is relative to plaintext's accuracy, as perplexity's is; None where either cannot be told."""
    count, (plain, secure) = len(right), (sum(each[i] for each in right) for i in (0, 1))
    return {
        "items": count,
        PLAIN: plain / count if count else None,
        SECURE: secure / count if count else None,
        "change": secure / plain - 1 if plain else None,
        "lost": sum(a and not b for a, b in right),
        "won": sum(b and not a for a, b in right),
    }


# The check against parties


def check_emulation(
    model: ModelConfig, checkpoint: Checkpoint, calibration: Calibration, ids: Sequence[int], progress: Progress
) -> Record:
    """Run tokens between parties (all but two in one pass), and emulated under the same masks.

    equal_bits: how many low bits of every logit agree. The client's logits are the ring's, cut: where all do, the emulation is
    the secure run.
    """
    passes = [ids[:-2], ids[-2:-1], ids[-1:]] if len(ids) > 2 else [[token] for token in ids]
    witnessed = WitnessedSupply(LiveSupply())
    capacity = len(model.prefix) + len(ids)
    with Session(ProtocolConfig()) as session:
        decoder = AssistedDecoder(session, checkpoint.decoder, calibration, capacity, model.prefix, supply=witnessed)
        decoder.set_up(len(passes[0]), progress)
        begun = time.perf_counter()
        secure = _ring_logits(decoder, session, progress(passes, "running between parties", "pass"))
        seconds = time.perf_counter() - begun
    del decoder, session
    supply = ReplayedSupply(witnessed)
    with EmulatedSession(supply) as session:
        decoder = AssistedDecoder(session, checkpoint.decoder, calibration, capacity, model.prefix, supply=supply)
        decoder.set_up(len(passes[0]), progress)
        emulated = _ring_logits(decoder, session, passes)
    different = int(np.bitwise_or.reduce(secure ^ emulated, axis=None)) % (1 << _RING)
    equal = (different & -different).bit_length() - 1 if different else _RING
    return {
        "tokens": len(ids),
        "logits": secure.size,
        "equal_bits": equal,
        "ring_bits": _RING,
        "secure_seconds_per_token": seconds / len(ids),
    }


def _ring_logits(decoder: AssistedDecoder, session: Session, passes: Iterable[Sequence[int]]) -> np.ndarray:
    found = []
    for ids in passes:
        decoder.advance(ids, last_only=False)
        found.append(np.sum(session.words("logits"), axis=0, dtype=np.int64).reshape(-1))
    return np.concatenate(found)


# The whole


def bench_quality(
    model: ModelConfig,
    checkpoint: Checkpoint,
    texts: Sequence[Path],
    questions: Sequence[Path],
    amounts: Amounts,
    out: Path,
    progress: Progress,
) -> Record:
    """Measure, and write the result to `out`. What is finished is kept beside it, so that a run that broke off goes on.

    UserError where texts or questions cannot be read or are too short.
    """
    tokenizer, room = need_tokenizer(checkpoint.tokenizer, model), checkpoint.decoder.config.positions - len(model.prefix)
    tasks = {path.stem: text_task(path, tokenizer, min(LONGEST, room), amounts) for path in texts}
    asked = {path.stem: read_questions(path, tokenizer, amounts.questions) for path in questions}
    calibration, ranges = calibration_for(model, checkpoint, progress)
    identity = [model.name, model.prefix, checkpoint.decoder.config, calibration.layers, asdict(amounts), tasks, asked]
    work = _Work({}, _Kept(out, identity), progress)
    sample = next(iter(tasks.values())).passages[0].ids[: amounts.checked]
    checked = work.kept.get("check", lambda: check_emulation(model, checkpoint, calibration, sample, progress))
    capacity = len(model.prefix) + min(room, _capacity(asked))
    work.sides[PLAIN] = plain_side(checkpoint, model.prefix, capacity)
    work.sides[SECURE] = secure_side(checkpoint, calibration, model.prefix, capacity, amounts.seed, progress)
    result = {
        "model": model.name,
        "prefix": list(model.prefix),
        "amounts": asdict(amounts),
        "version": version("spu_llm"),
        "emulation_equals_secure": checked,
        "texts": {name: work.read(name, task) for name, task in tasks.items()},
        "questions": {name: work.ask(name, items) for name, items in asked.items()},
        "emulated_seconds_per_token": work.kept.seconds_per_token,
        "ranges": asdict(ranges),
    }
    result["largest_change"] = max(abs(change) for change in _changes(result) if change is not None)
    work.kept.finish(json.dumps(result, indent=1) + "\n")
    return result


@dataclass(frozen=True)
class TextTask:
    """What is read of a text."""

    passages: list[Passage]
    choices: list[Question]


def text_task(path: Path, tokenizer: Tokenizer, longest: int, amounts: Amounts) -> TextTask:
    """Passages (lines) until there are tokens and last words enough, and choices from all. UserError where there are too few."""
    found = [cut_passage(tokenizer, line, longest) for line in read_text(path).splitlines()]
    everything = [passage for passage in found if len(passage.ids) > 1]
    asked = choices([passage.ids for passage in everything], amounts.choices, amounts.seed)
    if amounts.choices and not asked:
        raise UserError(
            f"{path}: has fewer than {OPTIONS} passages of {CONTEXT + CONTINUATION} tokens; give longer ones, or --choices 0"
        )
    tokens = words = 0
    for count, passage in enumerate(everything, 1):
        tokens, words = tokens + len(passage.ids) - 1, words + (passage.word is not None)
        if tokens >= amounts.tokens and words >= amounts.words:
            return TextTask(everything[:count], asked)
    raise UserError(
        f"{path}: has {tokens} tokens and {words} last words, not {amounts.tokens} and {amounts.words}; "
        "give a longer text, or lower --tokens and --words"
    )


@dataclass(frozen=True)
class _Work:
    """Runs items that were not finished before, on both sides."""

    sides: dict[str, Side]
    kept: _Kept
    progress: Progress

    def read(self, name: str, task: TextTask) -> Record:
        records = self._measured(name, "passage", task.passages, read_passage)
        return {**passage_sums(records), "choice": self.ask(f"{name}, choices", task.choices)}

    def ask(self, name: str, questions: Sequence[Question]) -> Record:
        return choice_sums(self._measured(name, "question", questions, answer_both))

    def _measured(self, name: str, unit: str, items: Sequence[Any], measure: Callable[..., Record]) -> list[Record]:
        numbered = self.progress(list(enumerate(items)), name, unit)
        return [self.kept.get(f"{name} {i}", partial(self._timed, measure, item)) for i, item in numbered]

    def _timed(self, measure: Callable[..., Record], item: Any) -> Record:
        """Its record, with the seconds and tokens of the secure side; nothing else where a pass was void."""
        side = self.sides[SECURE]
        seconds, tokens = side.seconds, side.tokens
        try:
            found = measure(self.sides, item)
        except Void:
            found = {"void": True}
        return {**found, "seconds": side.seconds - seconds, "run": side.tokens - tokens}


class _Kept:
    """Finished items, a JSON line each in a file beside the result; those of other settings are dropped."""

    def __init__(self, out: Path, identity: Sequence[Any]):
        self._out, self._path = out, out.with_name(out.name + ".items")
        digest = hashlib.sha256(repr([version("spu_llm"), *identity]).encode()).hexdigest()
        lines = self._lines()
        self._items = dict(lines[1:]) if lines and lines[0] == [digest] else {}
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("".join(json.dumps(line) + "\n" for line in ([digest], *self._items.items())))
        except OSError as error:
            raise UserError(f"{out}: cannot be written ({error.strerror}); choose another --out") from None

    def get(self, key: str, make: Callable[[], Record]) -> Record:
        if key not in self._items:
            self._items[key] = make()
            with self._path.open("a") as file:
                file.write(json.dumps([key, self._items[key]]) + "\n")
        return self._items[key]

    @property
    def seconds_per_token(self) -> float:
        items = [item for item in self._items.values() if "run" in item]
        return sum(item["seconds"] for item in items) / max(1, sum(item["run"] for item in items))

    def finish(self, text: str) -> None:
        part = self._out.with_name(self._out.name + ".part")
        part.write_text(text)
        os.replace(part, self._out)
        self._path.unlink()

    def _lines(self) -> list[Any]:
        """Whole lines of an earlier run."""
        try:
            lines = self._path.read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:  # the line at which a run broke off
                break
        return found


def _capacity(asked: dict[str, list[Question]]) -> int:
    """Cache rows beside the prefix's: for the longest passage or option, in whole passes."""
    options = [len(before) + len(after) for items in asked.values() for item in items for before, after in item.options]
    return max(LONGEST, CONTEXT + CONTINUATION, *options)


def _changes(result: Record) -> Iterator[float | None]:
    for text in result["texts"].values():
        yield from (text["perplexity"]["change"], text["last_word"]["change"], text["choice"]["change"])
    yield from (asked["change"] for asked in result["questions"].values())


def summary(result: Record) -> str:
    """The result in lines: plaintext, secure, change."""
    lines = [f"{'':32}{'plain':>10}{'secure':>10}{'change':>10}   items"]

    def line(name: str, found: Record, count: int) -> None:
        values = "".join("         -" if found[key] is None else f"{found[key]:10.4f}" for key in (PLAIN, SECURE))
        change = "         -" if found["change"] is None else f"{100 * found['change']:+9.3f}%"
        lines.append(f"{name:32}{values}{change}   {count}")

    for name, text in result["texts"].items():
        line(f"{name}: perplexity", text["perplexity"], text["tokens"])
        line(f"{name}: last word", text["last_word"], text["last_word"]["items"])
        line(f"{name}: choice of {OPTIONS}", text["choice"], text["choice"]["items"])
    for name, asked in result["questions"].items():
        line(name, asked, asked["items"])
    check = result["emulation_equals_secure"]
    seconds = result["emulated_seconds_per_token"], check["secure_seconds_per_token"]
    lines.append(
        f"emulated: {seconds[0]:.3f} s a token; between parties: {seconds[1]:.1f} s; over {check['tokens']} tokens run both ways, "
        f"{check['equal_bits']} of {check['ring_bits']} bits of every logit are equal"
    )
    return "\n".join(lines)
