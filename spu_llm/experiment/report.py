"""A self-contained HTML page of an experiment's metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from ..pictures import ladder, phases, runs_of, timeline
from ..pictures.page import STYLE
from ..pictures.timeline import words

_TEMPLATE = Path(__file__).with_name("report.html")
_PHASES = ("setup", "prefill", "decode")


def render_report(metrics: dict[str, Any]) -> str:
    """The page: text, costs, pictures and accuracy of the run and what stands beside it. Needs nothing from outside itself."""
    runs = runs_of(metrics)
    drafted = {name: run for name, run in runs.items() if run.get("post") and run["post"]["rounds"]}
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_TEMPLATE.read_text())
    return page.render(
        main=metrics,
        runs=runs,
        style=STYLE,
        rows=[_row(name, run, phase) for name, run in runs.items() for phase in _PHASES],
        ladder=ladder(runs) if len(runs) > 1 and all(run["decode"]["seconds_per_token"] for run in runs.values()) else "",
        phases=phases(runs),
        sparse={name: run for name, run in runs.items() if run.get("comet")},
        drafted=drafted,
        timelines={name: timeline({**run, "baseline": _undrafted(run, runs)}) for name, run in drafted.items()},
        passes={name: words(run["post"]["rounds"]) for name, run in drafted.items()},
        operations=list(metrics["operations"]["decode"].items())[:8],
    )


def _undrafted(run: dict[str, Any], runs: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The run that decodes token by token as this one does with drafts, if there is one."""

    def kind(each: dict[str, Any]) -> tuple[Any, ...]:
        return each["ops"], each["protocol"], bool(each.get("comet"))

    return next((other for other in runs.values() if not other.get("post") and kind(other) == kind(run)), None)


def _row(name: str, run: dict[str, Any], phase: str) -> dict[str, Any]:
    cost = run[phase]
    suffix = "_per_token" if phase == "decode" else ""
    return {
        "run": name,
        "phase": f"{phase}, a token" if suffix else phase,
        "passes": (len(run["post"]["rounds"]) if run.get("post") else cost["tokens"]) if suffix else 1,
        "compute": cost["compute_seconds" + suffix],
        "seconds": cost["seconds" + suffix],
        "bytes": cost["bytes" + suffix],
        "messages": cost["messages" + suffix],
    }
