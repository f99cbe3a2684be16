"""Performs a schedule on a backend: every operation, and a bootstrap exactly where one is placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import UserError
from ..models.config import DecoderConfig
from ..progress import Progress, silent
from .backend import Backend, Ciphertext, LevelViolation, RangeViolation, aligned, evaluate_series
from .graph import END, START, Layout, Op, Span
from .meaning import Meaning
from .schedule import Schedule, prompt_span, step_span


@dataclass
class Decoded:
    """What a run gave. `tokens` and `sums` (of the one-hot vectors: 1 unless the largest logits were too near each other) are
    what the client decrypts; bootstraps by pass, the prompt's first."""

    tokens: list[int] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    predicted: list[int] = field(default_factory=list)
    performed: list[int] = field(default_factory=list)


@dataclass
class _Stored:
    """What the server keeps between passes: rows of the residual stream's start, and each layer's keys and values."""

    start: list[Ciphertext] = field(default_factory=list)
    rows: int = 0
    cached: dict[str, list[Ciphertext]] = field(default_factory=dict)
    positions: int = 0


def decode(
    meaning: Meaning, schedule: Schedule, backend: Backend, prompt: Sequence[int], tokens: int, progress: Progress = silent
) -> Decoded:
    """Generate `tokens` tokens after a prompt: the client encrypts one-hot vectors, the server decides alone from there on.

    Raises UserError for a prompt or length that the model cannot take, and where a value leaves the range calibrated for it.
    """
    check_request(meaning.config, prompt, tokens)
    server = Server(meaning, schedule, backend)
    server.take(prompt)
    found = Decoded()
    for number in progress(range(tokens), "encrypted decoding", "token"):
        context = len(prompt) + number
        span = step_span(schedule, context) if number else prompt_span(schedule, context)
        before = backend.bootstraps
        one_hot = server.run(span)
        found.performed.append(backend.bootstraps - before)
        found.predicted.append(schedule.bootstraps(span))
        found.tokens.append(int(np.argmax(one_hot)))
        found.sums.append(float(one_hot.sum()))
    return found


def check_request(config: DecoderConfig, prompt: Sequence[int], tokens: int) -> None:
    """Raise UserError for what the model cannot decode."""
    if not len(prompt) or any(not 0 <= token < config.vocabulary for token in prompt):
        raise UserError(f"prompt {list(prompt)}: give tokens from 0 to {config.vocabulary - 1}, one at least")
    if len(prompt) + tokens - 1 > config.positions:
        raise UserError(
            f"{len(prompt)} prompt tokens and {tokens} new ones: the model has {config.positions} positions; ask for fewer tokens"
        )


def ciphertext_sizes(layout: Layout, span: Span, slots: int) -> list[int]:
    """Values in each ciphertext of a value, in the order of its array."""
    units = [1] if layout.single else span.attended(layout.last)
    if not layout.pairs:
        units = [1] * len(units)
    pieces = [unit * layout.size for unit in units for _ in range(layout.pieces)]
    runs = [sum(pieces)] if span.options.pack else pieces
    return [min(slots, run - begun) for run in runs for begun in range(0, run, slots)]


class Server:
    """The values of a run, as ciphertexts."""

    def __init__(self, meaning: Meaning, schedule: Schedule, backend: Backend):
        self.meaning, self.schedule, self.backend = meaning, schedule, backend
        self.program = schedule.program
        self.slots = schedule.parameters.slots
        self.stored = _Stored()
        self.values: dict[str, list[Ciphertext]] = {}
        self.span = prompt_span(schedule, 1)
        self._due: dict[int, list[str]] = {}
        for refresh in schedule.refreshes:
            self._due.setdefault(refresh.before, []).append(refresh.value)

    def take(self, prompt: Sequence[int]) -> None:
        """The client's one-hot vectors, a row each, and their embeddings."""
        vocabulary, layout = self.meaning.config.vocabulary, self.program.layouts[START]
        self.span = prompt_span(self.schedule, len(prompt))
        one_hot = np.eye(vocabulary)[np.asarray(prompt)].reshape(-1)
        inputs = [self.backend.encrypt(part) for part in np.split(one_hot, range(self.slots, len(one_hot), self.slots))]
        embed = lambda flat: self.meaning.embedded(flat.reshape(-1, vocabulary), 0).reshape(-1)  # noqa: E731
        self._keep_start(self.backend.linear(inputs, embed, ciphertext_sizes(layout, self.span, self.slots)), len(prompt))

    def run(self, span: Span) -> np.ndarray:
        """One pass; returns what the client decrypts of the token: its one-hot vector [vocabulary]."""
        self.span = span
        level = self.schedule.levels[START]
        self.values = {START: [self.backend.lower(x, level) for x in self.stored.start]}
        for number, op in enumerate(self.program.ops):
            for value in self._due.get(number, ()):
                self.values[value] = [self.backend.bootstrap(x) for x in self.values[value]]
            self._run(op)
        self.stored.positions = span.past + span.new
        token = self.values[self.program.ops[-1].inputs[0]]
        self._keep_start(self.values[END], 1)
        return np.concatenate([self.backend.decrypt(x) for x in token])[: self.meaning.config.vocabulary]

    def _keep_start(self, rows: list[Ciphertext], number: int) -> None:
        """Rows for the next pass: with a cache, the newest alone; else they join those before."""
        options = self.program.options
        rows = [self.backend.lower(x, min(self.backend.level(x), self.schedule.levels[START])) for x in rows]
        if not self.stored.start or options.cache:
            self.stored.start, self.stored.rows = rows, number
            return
        self.stored.rows += number
        span = Span(self.stored.rows, 0, options)
        sizes = ciphertext_sizes(self.program.layouts[START], span, self.slots)
        self.stored.start = self.backend.fold(aligned(self.backend, [*self.stored.start, *rows]), lambda flat: flat, sizes)

    def _run(self, op: Op) -> None:
        before = min(self.backend.level(x) for value in op.inputs for x in self.values[value])
        try:
            found = getattr(self, f"_{op.kind}")(op)
        except RangeViolation as error:
            raise UserError(
                f"{op.name}: a value of {error.value:.4g} where {error.bound:.4g} is the most it was calibrated for; "
                "calibrate on text more like this, or with a wider margin"
            ) from None
        found = [self.backend.lower(x, min(self.backend.level(x), before - op.depth)) for x in found]
        if any(self.backend.level(x) != self.schedule.levels[op.output] for x in found):
            raise LevelViolation(
                f"{op.name} left level {self.backend.level(found[0])} where {self.schedule.levels[op.output]} was scheduled"
            )
        if op.output in self.program.stored:
            found = self._appended(op, found)
        self.values[op.output] = found

    def _appended(self, op: Op, rows: list[Ciphertext]) -> list[Ciphertext]:
        """With what is stored of earlier positions, as [positions, pieces, size]."""
        layout = self.program.layouts[op.output]
        if self.span.past:
            both = aligned(self.backend, [*self.stored.cached[op.output], *rows])
            sizes = ciphertext_sizes(layout, Span(self.span.past + self.span.new, 0, self.span.options), self.slots)
            rows = self.backend.fold(both, lambda flat: flat, sizes)
        self.stored.cached[op.output] = rows
        return rows

    def _series(self, op: Op) -> list[Ciphertext]:
        found = []
        for x in self.values[op.inputs[0]]:
            self.backend.within(x, 1.0)
            found.append(evaluate_series(self.backend, x, self.meaning.coefficients(op)))
        return found

    def _linear(self, op: Op) -> list[Ciphertext]:
        inputs = self.values[op.inputs[0]]
        function = lambda flat: self._flat(op.output, self.meaning.linear(op, self._arrays(op, flat)[0], self.span))  # noqa: E731
        return self.backend.linear(inputs, function, self._sizes(op.output))

    def _fold(self, op: Op) -> list[Ciphertext]:
        inputs = aligned(self.backend, [x for value in op.inputs for x in self.values[value]])
        function = lambda flat: self._flat(op.output, self.meaning.fold(op, self._arrays(op, flat), self.span))  # noqa: E731
        return self.backend.fold(inputs, function, self._sizes(op.output))

    def _product(self, op: Op) -> list[Ciphertext]:
        """Both operands laid out as the result is, then ciphertext by ciphertext."""
        inputs = aligned(self.backend, [x for value in op.inputs for x in self.values[value]])

        def laid(which: int) -> list[Ciphertext]:
            function = lambda flat: self._flat(  # noqa: E731
                op.output, self.meaning.operands(op, self._arrays(op, flat), self.span)[which]
            )
            return self.backend.fold(inputs, function, self._sizes(op.output))

        return [self.backend.multiply(x, y) for x, y in zip(laid(0), laid(1), strict=True)]

    def _sizes(self, value: str) -> list[int]:
        return ciphertext_sizes(self.program.layouts[value], self.span, self.slots)

    def _arrays(self, op: Op, flat: np.ndarray) -> list[np.ndarray]:
        """An operation's inputs, end to end in `flat`, as arrays."""
        shapes = [self._shape(value) for value in op.inputs]
        lengths = [int(present.sum()) if present is not None else int(np.prod(shape)) for shape, present in shapes]
        parts = np.split(flat, np.cumsum(lengths)[:-1])
        return [_placed(part, shape, present) for part, (shape, present) in zip(parts, shapes, strict=True)]

    def _flat(self, value: str, array: np.ndarray) -> np.ndarray:
        _, present = self._shape(value, made=True)
        return array.reshape(-1) if present is None else array[present]

    def _shape(self, value: str, made: bool = False) -> tuple[tuple[int, ...], np.ndarray | None]:
        """An array's shape and, for pairs, which of it has slots; a stored value that is taken has all positions."""
        layout, end = self.program.layouts[value], self.span.past + self.span.new
        if layout.single:
            return (1, layout.pieces, layout.size), None
        attended = self.span.attended(layout.last)
        if value in self.program.stored and not made:
            return (end, layout.pieces, layout.size), None
        if not layout.pairs:
            return (len(attended), layout.pieces, layout.size), None
        shape = (len(attended), layout.pieces, end, layout.size)
        present = np.arange(end) < np.asarray(attended)[:, None]
        return shape, np.broadcast_to(present[:, None, :, None], shape)


def _placed(part: np.ndarray, shape: tuple[int, ...], present: np.ndarray | None) -> np.ndarray:
    if present is None:
        return part.reshape(shape)
    found = np.zeros(shape)
    found[present] = part
    return found
