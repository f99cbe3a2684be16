"""Draws result.json, and prints the table of docs/leakage.md.

python experiments/comet_leakage/summary.py experiments/comet_leakage
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLUMNS = {
    "token": "token from counts",
    "after": "token after {known_tokens} known ones",
    "block": "blocks of a layer found",
    "head": "heads of a layer found",
    "repeated": "equal tokens told",
    "pair": "guess, of two",
    "among": "guess, of {texts}",
    "part_among": "partly right guess, of {texts}",
    "word": "one word wrong, of two",
}
PANELS = ("token", "block", "among", "part_among", "after", "repeated")
COUNTS = ("constant", "rounded", "variable")
COLOURS = dict(zip(COUNTS, ("tab:blue", "tab:orange", "tab:red"), strict=True))

Row = dict[str, Any]


def main(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    _draw(result, folder / "plot.png")
    print(_table(result))


def _period(row: Row) -> str:
    return "request" if row["period"] is None else str(row["period"])


def _table(result: Row) -> str:
    """A row for each count and renewal; cells: heads not revealed / revealed, once if that makes no difference."""
    titles = ["count", "tokens an order", *(title.format(**result) for title in COLUMNS.values())]
    usual = {name: next((row[name]["baseline"] for row in result["rows"] if row[name]), None) for name in COLUMNS}
    guessing = ["guessing", "", *("" if value is None else f"{value:.1%}" for value in usual.values())]
    settings: dict[tuple[Any, ...], list[Row]] = {}
    for row in result["rows"]:
        settings.setdefault((row["count"], row["partial"], row["period"]), []).append(row)
    lines = [guessing]
    for (count, partial, _), rows in settings.items():
        renewal = f"{_period(rows[0])}, partial ({rows[0]['renewed_share']:.0%})" if partial else _period(rows[0])
        cells = [list(dict.fromkeys(_cell(row[name]) for row in rows if row[name])) for name in COLUMNS]
        lines.append([count, renewal, *(" / ".join(cell) for cell in cells)])
    return "\n".join("| " + " | ".join(line) + " |" for line in (titles, ["---"] * len(titles), *lines))


def _cell(rate: Row) -> str:
    """In brackets what is not told from guessing."""
    return f"{rate['rate']:.1%}" if rate["low"] > 0 else f"({rate['rate']:.1%})"


def _draw(result: Row, path: Path) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    for name, panel in zip(PANELS, axes.flat, strict=True):
        _panel(panel, result, name)
    handles, labels = axes.flat[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=80)


def _panel(axes: Axes, result: Row, name: str) -> None:
    """One attack over periods, heads not revealed, with 95% intervals."""
    periods = list(dict.fromkeys(_period(row) for row in result["rows"]))
    for count in COUNTS:
        for partial in (False, True):
            rows = [row for row in result["rows"] if (row["count"], row["partial"], row["heads"]) == (count, partial, False)]
            points = [(periods.index(_period(row)), row[name]) for row in rows if row[name]]
            rates = [rate["rate"] for _, rate in points]
            below = [max(0, rate["rate"] - rate["baseline"] - rate["low"]) for _, rate in points]
            above = [max(0, rate["high"] - rate["rate"] + rate["baseline"]) for _, rate in points]
            label = f"{count} count, {'partial' if partial else 'full'} renewal"
            style = {"color": COLOURS[count], "linestyle": "--" if partial else "-", "marker": "s" if partial else "o"}
            axes.errorbar([at for at, _ in points], rates, [below, above], label=label, markersize=4, capsize=2, **style)
    baseline = next((row[name]["baseline"] for row in result["rows"] if row[name]), None)
    if baseline is not None:
        axes.axhline(baseline, color="black", linestyle=":", linewidth=1, label="guessing")
    axes.set(title=COLUMNS[name].format(**result), xlabel="tokens under one shuffle", ylim=(0, None))
    axes.set_xticks(range(len(periods)), periods)
    axes.yaxis.set_major_formatter("{x:.0%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
