"""Where every bootstrap stands, by one rule and before any run; how many there are is a closed form in the context's length.

The rule. A program is cut into blocks (`graph.Op.block`) at its narrowest values. Before a block, a value it takes is refreshed if,
and only if, it has fewer levels than its longest path through the block spends. A block that is deeper than a bootstrap's levels
falls apart into its parts, these into operations. Levels do not depend on the context, so neither does the place of any bootstrap:
only how many ciphertexts stand there does, ceil(values / slots), with values linear in new positions, or in pairs of a new and an
attended one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ..errors import UserError
from .graph import END, START, Op, Program, Span
from .parameters import CkksParameters


@dataclass(frozen=True)
class Refresh:
    """`value` is bootstrapped before operation number `before`, having `level` levels left."""

    value: str
    before: int
    level: int


@dataclass(frozen=True)
class Schedule:
    """A program with its bootstraps. `levels`: of each value when it is made. Every step, the prompt's too, starts at level
    `levels[START]`, which is what a step leaves its result at: so all steps have the same places."""

    program: Program
    parameters: CkksParameters
    refreshes: tuple[Refresh, ...]
    levels: dict[str, int]

    def bootstraps(self, span: Span) -> int:
        """Ciphertexts bootstrapped in a pass."""
        return sum(self.counts(span).values())

    def counts(self, span: Span) -> dict[str, int]:
        """Ciphertexts bootstrapped in a pass, by the part of the model (a layer, the final norm, the argmax) they fall in."""
        found: dict[str, int] = {}
        for refresh in self.refreshes:
            part = part_of(self.program.ops[refresh.before])
            layout = self.program.layouts[refresh.value]
            found[part] = found.get(part, 0) + layout.ciphertexts(span, self.parameters.slots)
        return found

    def slots(self, span: Span) -> int:
        """Slots filled with values among those refreshed in a pass."""
        return sum(self.program.layouts[refresh.value].values(span) for refresh in self.refreshes)

    def formula(self) -> str:
        """The count as text: `new` rows, `pairs` of a new row and a position that it attends to, `context` positions in all."""
        terms = Counter(self._term(refresh.value) for refresh in self.refreshes)
        return " + ".join(f"{count} {term}" for term, count in terms.items())

    def _term(self, value: str) -> str:
        """The ciphertexts of a value."""
        layout, slots, options = self.program.layouts[value], self.parameters.slots, self.program.options
        alone = layout.single or (layout.last and options.skip)
        if not options.pack:
            each = f"ceil({layout.size}{' attended' if layout.pairs else ''} / {slots})"
            return f"{layout.pieces} {each}" if alone else f"{layout.pieces} sum over new of {each}"
        rows = ("context" if alone else "pairs") if layout.pairs else ("" if alone else "new")
        return f"ceil({layout.pieces * layout.size}{rows and ' '}{rows} / {slots})"


def part_of(op: Op) -> str:
    """The part of the model that an operation belongs to."""
    part = op.name.split(".")[0]
    return part if part.startswith("layer") or part == "final" else "argmax"


def step_span(schedule: Schedule, context: int) -> Span:
    """The pass for one token that attends to `context` positions, itself among them."""
    options = schedule.program.options
    return Span(1, context - 1, options) if options.cache else Span(context, 0, options)


def prompt_span(schedule: Schedule, tokens: int) -> Span:
    """The pass over a prompt."""
    return Span(tokens, 0, schedule.program.options)


def place(program: Program, parameters: CkksParameters) -> Schedule:
    """Place every bootstrap. Raises UserError where a single operation is deeper than a bootstrap's levels."""
    for op in program.ops:
        if op.depth > parameters.usable:
            raise UserError(
                f"{op.name} takes {op.depth} levels where a bootstrap leaves {parameters.usable} to spend; "
                "lower its degree, or give more levels"
            )
    blocks = _blocks(program, parameters.usable)
    for start in range(parameters.levels, parameters.reserve - 1, -1):
        refreshes, levels = _walk(program, parameters, blocks, start)
        if levels[END] >= start:
            return Schedule(program, parameters, tuple(refreshes), levels)
    raise AssertionError("no step ends below the reserve, so one that starts there can be repeated")


Block = tuple[int, int, dict[str, int]]
"""Numbers of its first operation and of the one after its last; the levels spent on the way of each value that it takes."""


def _blocks(program: Program, usable: int) -> list[Block]:
    """The program's blocks, last first examined: what a stored value must be left with is known from where it is used."""
    stored = dict.fromkeys(program.stored, 0)
    blocks: list[Block] = []
    for first, end in reversed(_runs(program.ops, 0, len(program.ops), "whole")):
        for block in reversed(_fitting(program.ops, first, end, stored, usable)):
            for value in stored.keys() & block[2].keys():
                stored[value] = max(stored[value], block[2][value])
            blocks.append(block)
    return blocks[::-1]


Cut = Literal["whole", "parts", "single"]
"""Which operations stay together: of one block, of one part of a block, none."""
_FINER: dict[Cut, Cut] = {"whole": "parts", "parts": "single"}


def _runs(ops: list[Op], first: int, end: int, cut: Cut) -> list[tuple[int, int]]:
    """Operations first to end in runs that stay together."""

    def name(number: int) -> object:
        block = ops[number].block
        return {"whole": block.split("/")[0], "parts": block, "single": number}[cut]

    cuts = [i for i in range(first, end) if i == first or name(i) != name(i - 1)]
    return list(pairwise([*cuts, end]))


def _fitting(ops: list[Op], first: int, end: int, stored: dict[str, int], usable: int, cut: Cut = "whole") -> list[Block]:
    """A run as one block, or cut finer where it spends more levels than there are."""
    needs = _needs(ops[first:end], stored)
    if max(needs.values()) <= usable or cut == "single":
        return [(first, end, needs)]
    return [block for run in _runs(ops, first, end, _FINER[cut]) for block in _fitting(ops, *run, stored, usable, _FINER[cut])]


def _needs(ops: list[Op], stored: dict[str, int]) -> dict[str, int]:
    """Of each value that a run of operations takes: its longest path to the run's end, or through what is stored on the way."""
    path = dict(stored)
    for op in reversed(ops):
        below = path.get(op.output, 0) + op.depth
        for value in op.inputs:
            path[value] = max(path.get(value, 0), below)
    made, taken = {op.output for op in ops}, {value for op in ops for value in op.inputs}
    return {value: path[value] for value in taken - made}


def _walk(program: Program, parameters: CkksParameters, blocks: list[Block], start: int) -> tuple[list[Refresh], dict[str, int]]:
    """Levels and refreshes of a step that starts at level `start`."""
    current, made = {START: start}, {START: start}
    refreshes = []
    for first, end, needs in blocks:
        for value, need in needs.items():
            if current[value] < need + parameters.reserve * (need > 0):
                refreshes.append(Refresh(value, first, current[value]))
                current[value] = parameters.levels
        for op in program.ops[first:end]:
            current[op.output] = made[op.output] = min(current[value] for value in op.inputs) - op.depth
    return refreshes, made
