"""Pictures of results: pure functions of plain data, as JSON has it, to SVG that an HTML page takes in.

DRAW has them by the names that pages of results know them by:

- ladder: {run: metrics}, or one such mapping a network, or an experiment's metrics with its baseline and variants
- waterfall: {run: [{"name", "messages", "bytes"}, ...]}, a step after the other
- timeline: `post` of an experiment's metrics, or these metrics
- prefix: the JSON report of `spu-llm prepare soal`
- growth: {"x": [...], "x_name": ..., "panels": [{"title", "unit", "series": {name: [values or None]}}]}
- phases: {run: metrics}
"""

from collections.abc import Callable
from typing import Any

from .growth import growth
from .ladder import ladder, runs_of
from .phases import phases
from .prefix import prefix
from .timeline import timeline
from .waterfall import waterfall

DRAW: dict[str, Callable[[Any], str]] = {
    "ladder": ladder,
    "waterfall": waterfall,
    "timeline": timeline,
    "prefix": prefix,
    "growth": growth,
    "phases": phases,
}

__all__ = ["DRAW", "growth", "ladder", "phases", "prefix", "runs_of", "timeline", "waterfall"]
