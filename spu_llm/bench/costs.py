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
"""`seconds` of compute, `messages` and `bytes` that one party sends; `irregular_bytes`: what some passes send more, in the mean of
all; `dealer_bytes` to the party that gets more, `dealer_seconds` with what needs no input, both 0 without a dealer; `modelled`:
seconds on each network."""
_SUMS = ("seconds", "messages", "bytes", "irregular_bytes", "dealer_bytes", "dealer_seconds")


def measured(
    session: Session,
    runs: Mapping[str, Callable[[], None]],
    networks: Sequence[NetworkProfile] = (),
    repeats: int = 3,
    progress: Progress = silent,
) -> dict[str, Cost]:
    """The cost of each run after one that warms it up: medians of seconds, of counts the least.

    On SEMI2K every pass sends the same. On ABY3 passes differ a little; on CHEETAH one that finds no triples or oblivious
    transfers left makes many, which later ones use up: `irregular_bytes` are these, and neither seconds nor `modelled` has them.

    All are run before any is repeated, so that a machine that slows down does so for all.
    """
    passes: dict[str, list[Cost]] = {name: [] for name in runs}
    for i in progress(range(repeats + 1), "measuring", "pass"):
        for name, run in runs.items():
            with session.phase(f"{name} {i}") as phase:
                run()
            dealt = session.phases[offline(f"{name} {i}")]
            found = {"seconds": phase.seconds, "messages": phase.messages, "bytes": phase.bytes}
            passes[name].append(found | {"dealer_bytes": dealt.bytes, "dealer_seconds": dealt.seconds})
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
    """Past the first pass."""
    kept = passes[1:]
    found = {key: (median if key.endswith("seconds") else min)(each[key] for each in kept) for key in kept[0]}
    return found | {"irregular_bytes": round(fmean(each["bytes"] for each in kept)) - found["bytes"]}


def _modelled(cost: Cost, networks: Sequence[NetworkProfile]) -> Cost:
    figures = cost["seconds"], cost["messages"], cost["bytes"]
    return cost | {"modelled": {each.name: each.seconds(*figures) for each in networks}}


def _each(combine: Callable[..., Any], *costs: Cost) -> Cost:
    found = {key: combine(*(cost[key] for cost in costs)) for key in _SUMS}
    names = costs[0]["modelled"]
    return found | {"modelled": {name: combine(*(cost["modelled"][name] for cost in costs)) for name in names}}
