"""A schedule in figures: counts by part and pass, what each optimisation saves, and the cheapest placement beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import Any

from ..errors import UserError
from ..models.config import DecoderConfig
from . import orion
from .graph import END, START, Options, Program, Span, build_program
from .parameters import CkksParameters
from .polynomials import Degrees
from .schedule import Schedule, place, prompt_span, step_span


def planned(
    config: DecoderConfig,
    parameters: CkksParameters,
    degrees: Degrees,
    options: Options,
    context: int,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Counts of the step whose token attends to `context` positions, and of a prompt of so many; the cost at `seconds` a bootstrap.

    Raises UserError for a context that the model has no positions for, or parameters that an operation does not fit.
    """
    if not 1 <= context <= config.positions:
        raise UserError(f"context {context}: the model has positions 1 to {config.positions}; choose one of them")
    began = time.perf_counter()
    schedule = schedule_of(config, parameters, degrees, options)
    taken = time.perf_counter() - began
    step, prompt = step_span(schedule, context), prompt_span(schedule, context)
    found: dict[str, Any] = {
        "context": context,
        "ciphertext": asdict(parameters) | {"modulus_bits": parameters.modulus_bits},
        "degrees": asdict(degrees),
        "options": asdict(options),
        "bootstraps_step": schedule.bootstraps(step),
        "bootstraps_prompt": schedule.bootstraps(prompt),
        "slots_refreshed_step": schedule.slots(step),
        "slots_refreshed_prompt": schedule.slots(prompt),
        "step_by_part": schedule.counts(step),
        "prompt_by_part": schedule.counts(prompt),
        "levels_step": depth(schedule.program),
        "start_level": schedule.levels[START],
        "formula": schedule.formula(),
        "argmax": schedule.program.argmax,
        "argmax_groups": schedule.program.groups,
        "places": len(schedule.refreshes),
        "planning_seconds": taken,
        "ladder": dict(_ladder(config, parameters, degrees, options, context)),
        "shortest_path": _shortest(schedule, step, prompt),
    }
    if seconds is not None:
        for name in ("step", "prompt"):
            found[f"seconds_{name}"] = seconds * found[f"bootstraps_{name}"]
    return found


def schedule_of(config: DecoderConfig, parameters: CkksParameters, degrees: Degrees, options: Options) -> Schedule:
    """The schedule of a model's step."""
    return place(build_program(config, degrees, options, parameters.slots), parameters)


def depth(program: Program) -> int:
    """Levels on a step's longest path, which is the same in every context."""
    spent = {START: 0}
    for op in program.ops:
        spent[op.output] = max(spent[value] for value in op.inputs) + op.depth
    return spent[END]


def _ladder(
    config: DecoderConfig, parameters: CkksParameters, degrees: Degrees, options: Options, context: int
) -> Iterator[tuple[str, dict[str, int]]]:
    """Counts with none of the options, adding one after the other, with each argmax, and of the given ones without each."""
    names = [field.name for field in fields(Options) if field.name != "argmax"]
    chosen: dict[str, Any] = dict.fromkeys(names, False)
    rungs = {"none": Options(**chosen, argmax="tournament")}
    for number, name in enumerate(names, 1):
        chosen |= {name: True}
        rungs["+".join(names[:number])] = Options(**chosen, argmax="tournament")
        without: dict[str, Any] = {name: False}
        rungs[f"without {name}"] = replace(options, **without)
    every = "+".join(names)
    rungs |= {f"{every}+league": Options(**chosen, argmax="league"), f"{every}+cutmax": Options(**chosen, argmax="cutmax")}
    rungs["without league"] = replace(options, argmax="tournament")
    for rung, with_these in rungs.items():
        schedule = schedule_of(config, parameters, degrees, with_these)
        step, prompt = step_span(schedule, context), prompt_span(schedule, context)
        yield rung, {"bootstraps_step": schedule.bootstraps(step), "bootstraps_prompt": schedule.bootstraps(prompt)}


def _shortest(schedule: Schedule, step: Span, prompt: Span) -> dict[str, Any]:
    """Orion's manner: a placement searched for each pass by itself."""
    found: dict[str, Any] = {}
    began = time.perf_counter()
    for name, span in (("step", step), ("prompt", prompt)):
        refreshes = orion.shortest(schedule, span)
        found[f"bootstraps_{name}"] = orion.cost(schedule.program, refreshes, span, schedule.parameters.slots)
        found[f"places_{name}"] = len(refreshes)
    return found | {"planning_seconds": time.perf_counter() - began}
