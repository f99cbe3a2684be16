"""A layer's waterfall: its steps from top to bottom, each bar starting where the sum of those before it ends."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from .theme import COLOURS, INK, plain_ticks, short, svg, themed

Steps = list[dict[str, Any]]
"""name, messages and bytes of each, in the order in which they are taken."""

_KINDS = ("messages", "bytes")


def waterfall(data: dict[str, Steps]) -> str:
    """Messages and bytes of each run's steps, a row of two panels a run, as SVG.

    Every panel has a scale of its own; a dashed line says where the cheapest run would end on it.
    """
    rows = [len(steps) for steps in data.values()]
    with themed(9.5, 0.22 * sum(rows) + 0.8 * len(rows)) as figure:
        grid = figure.subplots(len(data), len(_KINDS), squeeze=False, height_ratios=[row + 2 for row in rows])
        for line, (name, steps) in zip(grid, data.items(), strict=True):
            for axes, kind, colour in zip(line, _KINDS, COLOURS, strict=False):
                _draw(axes, kind, steps, colour)
                axes.set_title(f"{name}: {short(_total(steps, kind))} {kind}")
                _compare(axes, kind, name, data)
            line[1].set_yticklabels([])
        return svg(figure, "Steps of a layer. " + "; ".join(_words(name, steps) for name, steps in data.items()))


def _draw(axes: Axes, kind: str, steps: Steps, colour: str) -> None:
    amounts = [step[kind] for step in steps]
    ends = list(accumulate(amounts))
    bars = axes.barh(range(len(steps)), amounts, left=[0, *ends[:-1]], color=colour, height=0.7)
    axes.bar_label(bars, [short(amount) if amount else "" for amount in amounts], padding=3, fontsize=8)
    for i, end in enumerate(ends[:-1]):
        axes.plot([end, end], [i - 0.35, i + 1.35], color=INK, alpha=0.4, linewidth=0.7)
    axes.set_yticks(range(len(steps)), [step["name"] for step in steps])
    axes.set_ylim(len(steps) - 0.4, -0.6)
    axes.set_xlim(0, 1.14 * ends[-1])
    axes.tick_params(axis="y", length=0)
    plain_ticks(axes, "x")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="x")


def _compare(axes: Axes, kind: str, name: str, data: dict[str, Steps]) -> None:
    """Mark the cheapest run's total in the panels of the others."""
    totals = {other: _total(steps, kind) for other, steps in data.items()}
    least = min(totals, key=lambda other: totals[other])
    if least == name:
        return
    axes.axvline(totals[least], color=INK, linestyle="--", linewidth=1)
    axes.annotate(
        f"all of {least}", (totals[least], len(data[name]) - 1), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9
    )


def _total(steps: Steps, kind: str) -> float:
    return float(sum(step[kind] for step in steps))


def _words(name: str, steps: Steps) -> str:
    each = ", ".join(f"{step['name']} {step['messages']} messages {step['bytes']:,} bytes" for step in steps)
    return f"{name}, {short(_total(steps, 'messages'))} messages and {short(_total(steps, 'bytes'))} bytes in all: {each}"
