"""How costs grow: lines over the context or the prompt's length, a panel for each cost."""

from __future__ import annotations

from math import ceil, nan
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from .theme import COLOURS, MARKERS, plain_ticks, short, svg, themed

_COLUMNS = 3
_WIDE = 20.0  # largest value over least, from which an axis is logarithmic


def growth(data: dict[str, Any]) -> str:
    """`x` are the lengths, a value of each series for each (None where it was not run), as SVG."""
    panels = data["panels"]
    columns = min(_COLUMNS, len(panels))
    lines = ceil(len(panels) / columns)
    names = list(dict.fromkeys(name for panel in panels for name in panel["series"]))
    with themed(9.5, 2.9 * lines + 0.4) as figure:
        grid = figure.subplots(lines, columns, squeeze=False).ravel()
        for axes, panel in zip(grid, panels, strict=False):
            _draw(axes, data, panel, names)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        shown = {text: line for axes in grid for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=min(4, len(shown)))
        return svg(figure, "; ".join(_words(data, panel) for panel in panels))


def _draw(axes: Axes, data: dict[str, Any], panel: dict[str, Any], names: list[str]) -> None:
    x = data["x"]
    for name, values in panel["series"].items():
        i = names.index(name)
        numbers = [nan if value is None else value for value in values]
        axes.plot(x, numbers, color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], label=name)
    known = [value for values in panel["series"].values() for value in values if value]
    wide = bool(known) and max(known) > _WIDE * min(known)
    if not wide:
        axes.set_ylim(bottom=0)
    plain_ticks(axes, "y", logarithmic=wide)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [short(each) for each in x])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid()
    axes.set_xlabel(data["x_name"])
    axes.set_title(f"{panel['title']}, {panel['unit']}" if panel["unit"] else panel["title"])


def _words(data: dict[str, Any], panel: dict[str, Any]) -> str:
    def text(values: list[Any]) -> str:
        return ", ".join("not run" if value is None else short(value) for value in values)

    each = "; ".join(f"{name} {text(values)}" for name, values in panel["series"].items())
    return f"{panel['title']} at {data['x_name']} {', '.join(map(str, data['x']))}: {each}"
