"""The fewest bootstraps for a program, by a shortest path over (operation, levels): what a rule without search is measured by.

Orion (Ebel et al., ASPLOS 2025) searches a chain of layers and treats branches apart. Here a state holds the level of every value
still needed, so branches need no special case, and states that another one dominates are dropped: the result is a cheapest
placement of bootstraps before operations, for one context's costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from .graph import END, START, Program, Span
from .parameters import CkksParameters
from .schedule import Refresh, Schedule

State = tuple[int, ...]


@dataclass(frozen=True)
class _Path:
    """Cost so far, and the refreshes that led here as a linked list."""

    cost: float
    refreshes: tuple[Refresh, _Path | None] | None


def shortest(schedule: Schedule, span: Span) -> tuple[Refresh, ...]:
    """The refreshes of a cheapest placement for a pass; the cost of one is its ciphertexts, a stored value must not need one.

    The step starts where the schedule's starts, and must end at least there. Raises ValueError where no placement exists.
    """
    program, parameters = schedule.program, schedule.parameters
    last = _last_uses(program)
    live = [START]
    states: dict[State, _Path] = {(schedule.levels[START],): _Path(0, None)}
    for number, op in enumerate(program.ops):
        states = _refreshed(states, live, number, program, parameters, span)
        wanted = [value for value in [*live, op.output] if last.get(value, -1) > number or value == END]
        found: dict[State, _Path] = {}
        places = [live.index(value) for value in op.inputs]
        for state, path in states.items():
            level = min(state[place] for place in places) - op.depth
            if level < parameters.reserve * (op.depth > 0):
                continue
            levels = dict(zip(live, state, strict=True)) | {op.output: level}
            _keep(found, tuple(levels[value] for value in wanted), path)
        live, states = wanted, _undominated(found)
    ends = [path for state, path in states.items() if state[live.index(END)] >= schedule.levels[START]]
    if not ends:
        raise ValueError(f"no placement ends at level {schedule.levels[START]}")
    return _unrolled(min(ends, key=lambda path: path.cost))


def cost(program: Program, refreshes: tuple[Refresh, ...], span: Span, slots: int) -> int:
    """Ciphertexts that a placement bootstraps in a pass."""
    return sum(program.layouts[refresh.value].ciphertexts(span, slots) for refresh in refreshes)


def _last_uses(program: Program) -> dict[str, int]:
    return {value: number for number, op in enumerate(program.ops) for value in op.inputs}


def _refreshed(
    states: dict[State, _Path], live: list[str], number: int, program: Program, parameters: CkksParameters, span: Span
) -> dict[State, _Path]:
    """The states, and those after bootstrapping some of the operation's inputs."""
    for value in dict.fromkeys(program.ops[number].inputs):
        if value in program.stored:
            continue
        place, price = live.index(value), program.layouts[value].ciphertexts(span, parameters.slots)
        found = dict(states)
        for state, path in states.items():
            if state[place] < parameters.levels:
                after = (*state[:place], parameters.levels, *state[place + 1 :])
                _keep(found, after, _Path(path.cost + price, (Refresh(value, number, state[place]), path)))
        states = found
    return states


def _keep(found: dict[State, _Path], state: State, path: _Path) -> None:
    if state not in found or path.cost < found[state].cost:
        found[state] = path


def _undominated(states: dict[State, _Path]) -> dict[State, _Path]:
    """Without the states that another one equals in cost or betters, having no level lower."""
    kept: dict[State, _Path] = {}
    for state, path in sorted(states.items(), key=lambda item: (item[1].cost, [-level for level in item[0]])):
        if not any(all(a >= b for a, b in zip(other, state, strict=True)) for other in kept):
            kept[state] = path
    return kept


def _unrolled(path: _Path) -> tuple[Refresh, ...]:
    found = []
    while path.refreshes is not None:
        refresh, before = path.refreshes
        found.append(refresh)
        assert before is not None
        path = before
    return tuple(reversed(found))
