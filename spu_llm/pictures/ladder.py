"""The ladder: what each step of an experiment makes of a token's seconds, from the baseline down to the run itself."""

from __future__ import annotations

from math import floor, log10
from typing import Any

from matplotlib.axes import Axes

from .theme import COLOURS, plain_ticks, short, svg, themed

Runs = dict[str, dict[str, Any]]
"""Metrics of runs by name, as metrics.json has them. Others are held against the first."""

_COLUMNS = (("times as fast", 75), ("messages", 135), ("MB", 180))  # what is written beside the bars, and how many points off


def runs_of(metrics: dict[str, Any]) -> Runs:
    """An experiment's runs in order: its baseline, its variants, itself."""
    baseline = {"baseline": metrics["baseline"]} if "baseline" in metrics else {}
    return {**baseline, **metrics.get("variants", {}), "this run": metrics}


def ladder(data: dict[str, Any]) -> str:
    """Bars of seconds a token on a logarithmic axis, a panel for each network that is given, as SVG."""
    panels = _panels(data)
    rows = sum(len(runs) + 2 for runs in panels.values())
    with themed(9.5, 0.3 * rows + 0.3) as figure:
        grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[len(runs) + 1 for runs in panels.values()])
        for axes, (network, runs) in zip(grid[:, 0], panels.items(), strict=True):
            _draw(axes, network, runs)
        return svg(figure, "; ".join(_words(network, runs) for network, runs in panels.items()))


def _panels(data: dict[str, Any]) -> dict[str, Runs]:
    if "decode" in data:
        return _panels(runs_of(data))
    if all("decode" in run for run in data.values()):
        return {str(next(iter(data.values())).get("network", {}).get("name", "")): data}
    return data


def _draw(axes: Axes, network: str, runs: Runs) -> None:
    seconds = [_seconds(run) for run in runs.values()]
    low = 10.0 ** floor(log10(min(seconds) / 1.5))
    places = range(len(runs))
    colours = [COLOURS[-1], *[COLOURS[0]] * (len(runs) - 1)]
    bars = axes.barh(places, [each - low for each in seconds], left=low, color=colours, height=0.66)
    axes.bar_label(bars, [f"{short(each)} s" for each in seconds], padding=4)
    axes.set_yticks(places, list(runs))
    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.set_xlim(low, 3 * max(seconds))
    plain_ticks(axes, "x", logarithmic=True)
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"Seconds a token on {network}" if network else "Seconds a token")
    _write_columns(axes, runs)


def _write_columns(axes: Axes, runs: Runs) -> None:
    first = _seconds(next(iter(runs.values())))
    decodes = [run["decode"] for run in runs.values()]
    columns = (
        [f"{first / _seconds(run):.3g}x" for run in runs.values()],
        [f"{decode['messages_per_token']:,.0f}" for decode in decodes],
        [f"{decode['bytes_per_token'] / 1e6:,.3g}" for decode in decodes],
    )
    place = axes.get_yaxis_transform()
    for (name, x), cells in zip(_COLUMNS, columns, strict=True):
        for row, text in ((-0.75, name), *enumerate(cells)):
            axes.annotate(text, (1, row), xycoords=place, xytext=(x, 0), textcoords="offset points", ha="right", va="center")


def _seconds(run: dict[str, Any]) -> float:
    return float(run["decode"]["seconds_per_token"])


def _words(network: str, runs: Runs) -> str:
    where = f" on {network}" if network else ""
    return f"Seconds a token{where}: " + ", ".join(f"{name} {short(_seconds(run))}" for name, run in runs.items())
