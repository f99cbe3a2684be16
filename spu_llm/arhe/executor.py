"""Performs a schedule on a backend: every operation, and a bootstrap exactly where one is placed.

A client encrypts one-hot vectors of the prompt (`encrypted`), a `Server` gives ciphertexts of each token's one-hot vector and keeps
what it needs for the next, the client decrypts them (`decrypted`). `decode` does all of it in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np

from ..errors import UserError
from ..models.config import DecoderConfig
from ..progress import Progress, silent
from .backend import Backend, Ciphertext, LevelViolation, RangeViolation, aligned, evaluate_series, repeated
from .graph import END, START, Layout, Op, Span
from .meaning import Meaning
from .schedule import Schedule, prompt_span, step_span
from .slots import Places, SlotMap, copies, joined, places


@dataclass
class Decoded:
    """What a run gave. `tokens` and `sums` (of the one-hot vectors' squares: 1 unless the largest logits were too near) are
    what the client decrypts; bootstraps and the server's seconds by pass, the prompt's first."""

    tokens: list[int] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    predicted: list[int] = field(default_factory=list)
    performed: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass
class State:
    """What the server keeps between passes: all that is needed to go on in another process.

    `start`: the rows that the next pass begins with; `cached`: each layer's keys and values, of `positions` positions. Without a
    cache `one_hots` instead: the prompt's and the tokens', from which all rows are embedded again. `prompt`: its tokens' number.
    """

    start: list[Ciphertext] = field(default_factory=list)
    positions: int = 0
    cached: dict[str, list[Ciphertext]] = field(default_factory=dict)
    one_hots: list[list[Ciphertext]] = field(default_factory=list)
    prompt: int = 0


_TIE = 0.1

Watch = Callable[[Op, list[Ciphertext]], None]
"""Told of every operation when it is done, and of its result."""


def decode(
    meaning: Meaning,
    schedule: Schedule,
    backend: Backend,
    prompt: Sequence[int],
    tokens: int,
    progress: Progress = silent,
    watch: Watch | None = None,
) -> Decoded:
    """Generate `tokens` tokens after a prompt: the client encrypts one-hot vectors, the server decides alone from there on.

    Raises UserError for a prompt or length that the model cannot take, and where a value leaves the range calibrated for it.
    """
    check_request(meaning.config, prompt, tokens)
    server = Server(meaning, schedule, backend)
    server.watch = watch
    server.take(encrypted(backend, meaning.config, prompt), len(prompt))
    found, results = Decoded(), []
    for _ in progress(range(tokens), "encrypted decoding", "token"):
        before, began = backend.bootstraps, time.perf_counter()
        found.predicted.append(schedule.bootstraps(server.next_span()))
        results.append(server.step(progress))
        found.performed.append(backend.bootstraps - before)
        found.seconds.append(time.perf_counter() - began)
    for result in results:
        token, total = decrypted(backend, meaning.config, result)
        found.tokens.append(token)
        found.sums.append(total)
    return found


def check_request(config: DecoderConfig, prompt: Sequence[int], tokens: int) -> None:
    """Raise UserError for what the model cannot decode."""
    if not len(prompt) or any(not 0 <= token < config.vocabulary for token in prompt):
        raise UserError(f"prompt {list(prompt)}: give tokens from 0 to {config.vocabulary - 1}, one at least")
    if len(prompt) + tokens - 1 > config.positions:
        raise UserError(
            f"{len(prompt)} prompt tokens and {tokens} new ones: the model has {config.positions} positions; ask for fewer tokens"
        )


def encrypted(backend: Backend, config: DecoderConfig, prompt: Sequence[int]) -> list[Ciphertext]:
    """The client's: one-hot vectors of a prompt's tokens, one after the other, the last token's first."""
    flat = np.eye(config.vocabulary)[np.asarray(prompt)[::-1]].reshape(-1)
    slots = backend.parameters.slots
    return [backend.encrypt(flat[begun : begun + slots]) for begun in range(0, len(flat), slots)]


def decrypted(backend: Backend, config: DecoderConfig, one_hot: Sequence[Ciphertext]) -> tuple[int, float]:
    """The client's: a token, and its one-hot vector's sum of squares, which is not 1 where logits nearly tied."""
    found = np.concatenate([backend.decrypt(x) for x in one_hot])[: config.vocabulary]
    return int(np.argmax(found)), float((found**2).sum())


def near_tie(total: float) -> bool:
    """Whether a one-hot vector's sum of squares says that a second logit was within reach of the largest."""
    return not abs(total - 1) <= _TIE


class Server:
    """Computes on ciphertexts alone; needs no secret key. `state` is what it goes on from; `watch`, if set, sees every result."""

    def __init__(self, meaning: Meaning, schedule: Schedule, backend: Backend):
        self.meaning, self.schedule, self.backend = meaning, schedule, backend
        self.program = schedule.program
        self.slots = schedule.parameters.slots
        self.state = State()
        self.watch: Watch | None = None
        self.values: dict[str, list[Ciphertext]] = {}
        self.done = 0
        """Operations of the pass that are done: with `state` and `values`, where another process goes on within a pass."""
        self.span = prompt_span(schedule, 1)
        self._due: dict[int, list[str]] = {}
        for refresh in schedule.refreshes:
            self._due.setdefault(refresh.before, []).append(refresh.value)

    def take(self, one_hots: list[Ciphertext], length: int) -> None:
        """The client's one-hot vectors of a prompt of `length` tokens (`encrypted`), and their embeddings."""
        self.state = State(prompt=length)
        if not self.program.options.cache:
            self.state.one_hots = [one_hots]
        self._start_with(self._embedded(one_hots, self._prompt_places(), 0))

    def next_span(self) -> Span:
        """The pass that the next token takes."""
        positions = self.state.positions
        return step_span(self.schedule, positions + 1) if positions else prompt_span(self.schedule, self.state.prompt)

    def step(self, progress: Progress = silent) -> list[Ciphertext]:
        """One pass; returns what the client decrypts: the one-hot vector of the token that follows. Leaves `state` for the next."""
        self.begin()
        positions = self.span.past + self.span.new
        for _ in progress(range(self.done, len(self.program.ops)), f"token at position {positions}", "operation"):
            self.perform()
        self.state.positions, self.done = positions, 0
        return self.values[self.program.ops[-1].inputs[0]]

    def begin(self) -> None:
        """Begin the next token's pass, or go on with it."""
        self.span = self.next_span()
        if not self.done:
            self.values = {START: self.state.start}

    def perform(self) -> None:
        """The pass' next operation, after the bootstraps that stand before it."""
        for value in self._due.get(self.done, ()):
            self.values[value] = [self.backend.bootstrap(x) for x in self.values[value]]
        op = self.program.ops[self.done]
        self._run(op)
        self.done += 1
        if self.watch is not None:
            self.watch(op, self.values[op.output])

    def _start_with(self, rows: list[Ciphertext]) -> None:
        self.state.start = [self.backend.lower(x, self.schedule.levels[START]) for x in rows]

    def _prompt_places(self) -> Places:
        """Of the prompt's one-hot vectors."""
        span = replace(prompt_span(self.schedule, self.state.prompt), options=replace(self.program.options, pack=True))
        return places(Layout(1, self.meaning.config.vocabulary), span, self.slots)

    def _embedded(self, one_hots: list[Ciphertext], source: Places, place: int) -> list[Ciphertext]:
        """Rows of the residual stream, of one-hot vectors; the first row's position is `place`."""
        rows = len(source.index)
        target = places(self.program.layouts[START], Span(rows, 0, self.program.options), self.slots)
        embed = SlotMap(lambda x: self.meaning.embedded(x[:, 0], place), source, target)
        return self.backend.linear(aligned(self.backend, one_hots), embed)

    def _run(self, op: Op) -> None:
        before = min(self.backend.level(x) for value in op.inputs for x in self.values[value])
        try:
            found = self._next(op) if op.output == END else getattr(self, f"_{op.kind}")(op)
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
        self.values[op.output] = self._appended(op, found) if op.output in self.program.stored else found

    def _next(self, op: Op) -> list[Ciphertext]:
        """The chosen token's row; without a cache all rows anew, as they have other slots in a longer pass."""
        token, vocabulary = self.values[op.inputs[0]], self.meaning.config.vocabulary
        source = self._places(op.inputs[0])
        parts = [Places(source.index[..., :vocabulary], source.count)]
        place, one_hots = self.span.past + self.span.new, token
        if not self.program.options.cache:
            self.state.one_hots.append(token)
            parts = [self._prompt_places(), *parts * (len(self.state.one_hots) - 1)]
            place, one_hots = 0, [x for vectors in self.state.one_hots for x in vectors]
        rows = self._embedded(one_hots, joined(parts, self.slots), place)
        self._start_with(rows)
        return rows

    def _series(self, op: Op) -> list[Ciphertext]:
        found = []
        for x in self.values[op.inputs[0]]:
            self.backend.within(x, 1.0)
            found.append(evaluate_series(self.backend, x, self.meaning.coefficients(op)))
        return found

    def _linear(self, op: Op) -> list[Ciphertext]:
        target = self._places(op.output)
        if op.output in self.program.stored:
            target = self._newest(target)
        return self._mapped(op, lambda x: self.meaning.linear(op, x, self.span), target)

    def _mapped(self, op: Op, function: Callable[[np.ndarray], np.ndarray], target: Places) -> list[Ciphertext]:
        return self.backend.linear(self.values[op.inputs[0]], SlotMap(function, self._places(op.inputs[0]), target))

    def _newest(self, whole: Places) -> Places:
        """The slots [new, heads, size] of a stored value's new rows, in the ciphertexts that hold any of them."""
        index = whole.index[0, :, self.span.past :].transpose(1, 0, 2)
        held, number = np.unique(index // self.slots, return_inverse=True)
        return Places(number.reshape(index.shape) * self.slots + index % self.slots, len(held))

    def _appended(self, op: Op, rows: list[Ciphertext]) -> list[Ciphertext]:
        """Added to what is stored of earlier positions, whose slots for these are 0. Returned for each row that attends to them."""
        whole = self._places(op.output)
        held = np.unique(whole.index[0, :, self.span.past :] // self.slots)
        found = self._earlier(op, whole.count) if self.span.past else {}
        for number, x in zip(held, rows, strict=True):
            found[number] = self.backend.add(found[number], x) if number in found else x
        stored = [found[number] for number in sorted(found)]
        if self.program.options.cache:
            self.state.cached[op.output] = stored
        taker = next(other for other in self.program.ops if op.output in other.inputs)
        target = self._places(taker.output)
        if len(target.index) == 1:
            return stored
        level = self.backend.level(rows[0])
        wide = self._mapped(op, lambda x: self.meaning.linear(op, x, self.span).transpose(1, 0, 2), target)
        return [self.backend.lower(x, level) for x in wide]

    def _earlier(self, op: Op, count: int) -> dict[int, Ciphertext]:
        """What is stored, by its number among the `count` ciphertexts that now hold the value: each stack's stay its first."""
        stored = self.state.cached[op.output]
        stacks = len(copies(self.program.layouts[op.output], self.span, self.slots))
        before, now = len(stored) // stacks, count // stacks
        return {number // before * now + number % before: x for number, x in enumerate(stored)}

    def _product(self, op: Op) -> list[Ciphertext]:
        """Both operands where the result is to be, then ciphertext by ciphertext."""
        x, y = (self.values[value] for value in op.inputs)
        kind = op.name.split(".")[-1]
        if kind == "dot":
            x = self._copied(x, self.program.layouts[op.output])
        elif kind.startswith("wins"):
            y = [self.backend.rotate(x[0], self.program.layouts[op.output].size)]
        elif kind == "scaled":
            y = y * len(x)
        return [self.backend.multiply(*aligned(self.backend, pair)) for pair in self._paired(op, x, y)]

    def _fold(self, op: Op) -> list[Ciphertext]:
        kind = op.name.split(".")[-1]
        x, layout = self.values[op.inputs[0]], self.program.layouts[op.output]
        if kind == "mix":
            return self._summed(x, self.program.layouts[op.inputs[0]])
        if kind == "difference":
            return self._halved(x, layout.size)
        if kind == "sum":
            return [repeated(self.backend, reduce(self.backend.add, x), 1, self.slots)]
        if len(op.inputs) == 1:  # a league's best: one member of each group is not 0
            return [repeated(self.backend, x[0], layout.size, self.program.layouts[op.inputs[0]].size // layout.size)]
        join = self.backend.subtract if kind == "gap" else self.backend.add
        return [join(*aligned(self.backend, pair)) for pair in self._paired(op, x, self.values[op.inputs[1]])]

    def _shift(self, op: Op) -> list[Ciphertext]:
        return [self.backend.add_constant(x, self.meaning.offset(op)) for x in self.values[op.inputs[0]]]

    def _paired(self, op: Op, x: list[Ciphertext], y: list[Ciphertext]) -> list[tuple[Ciphertext, Ciphertext]]:
        """Ciphertexts that meet: where only the last row of a value is needed, it begins the first ones."""
        count = self._places(op.output).count
        return list(zip(x[:count], y[:count], strict=True))

    def _copied(self, x: list[Ciphertext], layout: Layout) -> list[Ciphertext]:
        """Rows, once for each position of a stacked layout."""
        found, begun = [], 0
        for positions, size, each in copies(layout, self.span, self.slots):
            taken = -(-size // self.slots)
            part, begun = x[begun : begun + taken], begun + taken
            if each:
                found += [repeated(self.backend, part[0], -size, min(each, positions))] * -(-positions // each)
            else:
                found += part * positions
        return found

    def _summed(self, x: list[Ciphertext], layout: Layout) -> list[Ciphertext]:
        """A stacked value added over positions."""
        found, begun = [], 0
        for positions, size, each in copies(layout, self.span, self.slots):
            taken = -(-positions // each) if each else positions * -(-size // self.slots)
            part, begun = x[begun : begun + taken], begun + taken
            rows = 1 if each else -(-size // self.slots)
            for number in range(rows):
                total = reduce(self.backend.add, part[number::rows])
                found.append(repeated(self.backend, total, size, min(each, positions)) if each else total)
        return found

    def _halved(self, x: list[Ciphertext], half: int) -> list[Ciphertext]:
        """The first half of a value's slots less the second."""
        if 2 * half <= self.slots:
            return [self.backend.subtract(x[0], self.backend.rotate(x[0], half))]
        count = half // self.slots
        return [self.backend.subtract(a, b) for a, b in zip(x[:count], x[count : 2 * count], strict=True)]

    def _places(self, value: str) -> Places:
        return places(self.program.layouts[value], self.span, self.slots)
