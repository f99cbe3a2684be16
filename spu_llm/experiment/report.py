"""A self-contained HTML page of an experiment's metrics."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

_TEMPLATE = Path(__file__).with_name("report.html")
_PHASES = ("setup", "prefill", "decode")


def render_report(metrics: dict[str, Any]) -> str:
    """The page: text, cost table, a plot of bytes, messages and time by phase, accuracy. Needs nothing from outside itself."""
    runs = {"this run": metrics}
    if "baseline" in metrics:
        runs["baseline"] = metrics["baseline"]
    rows = [_row(name, run, phase) for name, run in runs.items() for phase in _PHASES]
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_TEMPLATE.read_text())
    return page.render(
        main={"speedup": None, "post": None, **metrics},
        runs=runs,
        rows=rows,
        plot=_plot(rows, list(runs)),
        operations=list(metrics["operations"]["decode"].items())[:8],
    )


def _row(name: str, run: dict[str, Any], phase: str) -> dict[str, Any]:
    cost = run[phase]
    suffix = "_per_token" if phase == "decode" else ""
    return {
        "run": name,
        "phase": f"{phase}, a token" if suffix else phase,
        "passes": (len(run["post"]["rounds"]) if "post" in run else cost["tokens"]) if suffix else 1,
        "compute": cost["compute_seconds" + suffix],
        "seconds": cost["seconds" + suffix],
        "bytes": cost["bytes" + suffix],
        "messages": cost["messages" + suffix],
    }


def _plot(rows: list[dict[str, Any]], runs: list[str]) -> str:
    """Three bar charts from zero, each bar labelled, as inline SVG."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    for axes, (key, title) in zip(
        figure.subplots(1, 3), (("bytes", "bytes sent"), ("messages", "messages sent"), ("seconds", "seconds")), strict=True
    ):
        for i, run in enumerate(runs):
            mine = [row for row in rows if row["run"] == run]
            places = [p + i * 0.38 for p in range(len(mine))]
            bars = axes.bar(places, [row[key] for row in mine], width=0.36, label=run)
            axes.bar_label(bars, [EngFormatter(places=1, sep="")(row[key]) for row in mine], fontsize=7)
        axes.set_xticks([p + 0.19 * (len(runs) - 1) for p in range(len(_PHASES))], ["set-up", "prefill", "a token"])
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_title(title)
    if len(runs) > 1:
        figure.axes[0].legend()
    out = io.StringIO()
    figure.savefig(out, format="svg")
    text = out.getvalue()
    return text[text.index("<svg") :]
