"""Activations before and after the prefix: what the public first tokens take from all later positions (SOAL)."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from .theme import COLOURS, INK, plain_ticks, short, svg, themed

_KINDS = ("norm", "activation")
_NEAR = 4  # positions up to which the axis is linear
_TICKS = (0, 2, 4, 10, 30, 100, 300, 1000)


def prefix(found: dict[str, Any]) -> str:
    """The largest |input| of norms and of activations at each position, with no prefix and after it, as SVG."""
    with themed(9.5, 3.4) as figure:
        panels = figure.subplots(1, len(_KINDS))
        draw_positions(list(panels), found)
        return svg(figure, words(found))


def words(found: dict[str, Any]) -> str:
    """What the picture shows."""
    largest = {kind: [max(found["positions"][kind][when]) for when in ("before", "after")] for kind in _KINDS}
    each = "; ".join(f"{kind} {short(before)} without, {short(after)} with it" for kind, (before, after) in largest.items())
    return f"Largest inputs by position, without and with the prefix {found['prefix_text']!r}: {each}"


def draw_positions(panels: list[Axes], found: dict[str, Any]) -> None:
    """One panel for norms, one for activations. Positions below 0 are the prefix's own."""
    median = next(trial for trial in found["trials"] if trial["prefix"] == found["prefix"])["text"]["median"]
    for axes, kind in zip(panels, _KINDS, strict=True):
        before, after = (found["positions"][kind][when] for when in ("before", "after"))
        own = [pair[kind] for pair in found["prefix_maxima"]]
        axes.plot(range(len(before)), before, color=COLOURS[1], marker="o", markevery=[0], label="no prefix", linewidth=1.2)
        axes.plot(range(len(after)), after, color=COLOURS[0], marker="s", markevery=[0], label="after the prefix", linewidth=1.2)
        axes.plot(range(-len(own), 0), own, color=COLOURS[2], marker="D", linestyle=":", label="the prefix itself")
        axes.axhline(found["eta"] * median[kind], color=INK, linestyle="--", linewidth=1, label=f"{found['eta']:g} medians")
        axes.set_xscale("symlog", linthresh=_NEAR)  # the prefix and what comes right after it are what is to be seen
        axes.set_xticks([-len(own), *(p for p in _TICKS if p < len(before))])
        axes.set_xlim(-len(own) - 0.5, 1.1 * len(before))
        axes.xaxis.set_minor_locator(NullLocator())
        plain_ticks(axes, "x")
        plain_ticks(axes, "y", logarithmic=True)
        axes.grid()
        axes.set_title(f"Largest |input| of a{'n' if kind == 'activation' else ''} {kind}")
        axes.set_xlabel("position in a passage")
    panels[0].legend(loc="upper right")
