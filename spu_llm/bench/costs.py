"""Costs of several runs in one session, taken in turns, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from ..network import NetworkProfile
from ..progress import Progress, silent
from ..runtime import Session
from ..runtime.assisted import offline

Cost = dict[str, Any]
"""`seconds` of compute, `messages` and `bytes` that one party sends; `dealer_bytes` to the party that gets more, `dealer_seconds`
with what needs no input, both 0 without a dealer; `modelled`: seconds on each network."""
_SUMS = ("seconds", "messages", "bytes", "dealer_bytes", "dealer_seconds")


def measured(
    session: Session,
    runs: Mapping[str, Callable[[], None]],
    networks: Sequence[NetworkProfile] = (),
    repeats: int = 3,
    progress: Progress = silent,
) -> dict[str, Cost]:
    """The cost of each run after one that warms it up: median seconds, mean traffic, which is the same every time on SEMI2K.

    (On ABY3 it varies a little, on CHEETAH oblivious transfers are made many at a time by whichever run finds none left.)
    All are run before any is repeated, so that a machine that slows down does so for all.
    """
    passes: dict[str, list[Cost]] = {name: [] for name in runs}
    for i in progress(range(repeats + 1), "measuring", "pass"):
        for name, run in runs.items():
            with session.phase(f"{name} {i}") as phase:
                run()
            dealt = session.phases[offline(f"{name} {i}")]
            figures = (phase.seconds, phase.messages, phase.bytes, dealt.bytes, dealt.seconds)
            passes[name].append(dict(zip(_SUMS, figures, strict=True)))
    return {name: _modelled(_typical(found), networks) for name, found in passes.items()}


def added(*costs: Cost) -> Cost:
    """The sum of costs."""
    return _each(lambda *values: sum(values), *costs)


def less(cost: Cost, other: Cost) -> Cost:
    """What is left of a cost without the other. Negative where that costs more."""
    return _each(lambda a, b: a - b, cost, other)


def ratios(cost: Cost, other: Cost) -> dict[str, float | None]:
    """How many times the other a cost is, by seconds, messages, bytes and each network's seconds; None where the other is 0."""
    pairs = {key: (cost[key], other[key]) for key in ("seconds", "messages", "bytes")}
    pairs |= {name: (cost["modelled"][name], seconds) for name, seconds in other["modelled"].items()}
    return {key: a / b if b else None for key, (a, b) in pairs.items()}


def _typical(passes: Sequence[Cost]) -> Cost:
    """Of the passes past the first: medians of seconds, means of counts."""
    kept = passes[1:]
    return {
        key: median(found[key] for found in kept) if key.endswith("seconds") else round(fmean(found[key] for found in kept))
        for key in _SUMS
    }


def _modelled(cost: Cost, networks: Sequence[NetworkProfile]) -> Cost:
    figures = cost["seconds"], cost["messages"], cost["bytes"]
    return cost | {"modelled": {each.name: each.seconds(*figures) for each in networks}}


def _each(combine: Callable[..., Any], *costs: Cost) -> Cost:
    found = {key: combine(*(cost[key] for cost in costs)) for key in _SUMS}
    names = costs[0]["modelled"]
    return found | {"modelled": {name: combine(*(cost["modelled"][name] for cost in costs)) for name in names}}
