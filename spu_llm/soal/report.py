"""What the offline step found, as lines, JSON, a picture and a self-contained HTML page. All of it is for the owner's eyes."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib.axes import Axes

from ..errors import UserError
from ..pictures import prefix
from ..pictures.page import STYLE
from ..pictures.prefix import draw_positions
from ..pictures.theme import COLOURS, MARKERS, svg, themed
from .maxima import ScoreReference
from .prefix import Trial
from .prepared import Prepared
from .special import KINDS

_TEMPLATE = Path(__file__).with_name("report.html")


def summary(prepared: Prepared) -> dict[str, Any]:
    """Everything but the arrays that a run needs, as JSON takes it."""
    facts, special, maxima = prepared.facts, prepared.facts.special, prepared.facts.maxima
    return {
        "model": facts.model,
        "checkpoint_sha256": facts.checkpoint,
        "text_sha256": facts.text,
        "text_tokens": facts.tokens,
        "eta": special.eta,
        "prefix": list(facts.prefix),
        "prefix_text": facts.prefix_text,
        "prefix_maxima": [_named(pair) for pair in special.prefix_maxima],
        "frees_text": special.chosen.frees_text,
        "frees_vocabulary": special.chosen.frees,
        "trials": [_trial(trial) for trial in special.trials],
        "positions": {
            kind: {"before": [pair[i] for pair in special.before], "after": [pair[i] for pair in special.after]}
            for i, kind in enumerate(KINDS)
        },
        "rows": maxima.rows,
        "conformant": {"positions": maxima.positions, **_score(maxima.maxima)},
        "sink": _score(maxima.sink),
        "learned": {
            "relative": _span(maxima.learned_relative),
            "log_sum": _span(maxima.learned_log_sum),
        },
        "reference": prepared.reference,
        "messages_a_pass": maxima.choice.messages,
        "refused": maxima.choice.refused,
        "ranges": {**vars(facts.ranges), "outside_share_at_most": facts.ranges.bound},
        "phi": [float(prepared.phi.min()), float(prepared.phi.max())],
        "seconds": facts.seconds,
        "cpu_seconds": facts.cpu_seconds,
    }


def lines(prepared: Prepared) -> str:
    """The table that the command prints."""
    found, special = summary(prepared), prepared.facts.special
    rows = [["after", "median", "largest in text", "outliers", "largest in vocabulary", "ratio", "special tokens", "worst"]]
    rows += [_cells(trial) for trial in special.trials]
    own = ", ".join(f"{pair[0]:,.0f}" for pair in special.prefix_maxima) or "none"
    conformant, sink = found["conformant"], found["sink"]
    messages = ", ".join(f"{name} {count}" for name, count in found["messages_a_pass"].items())
    return "\n".join(
        [
            f"model      {found['model']}, {found['text_tokens']:,} tokens of text",
            f"prefix     {found['prefix_text']!r}, ids {found['prefix']}; its own activations: {own}",
            *_aligned(rows),
            verdict(special.chosen),
            f"maxima     of {conformant['positions']} scores: the exact one in {conformant['coverage']:.1%} of rows, least head "
            f"{conformant['least_coverage']:.1%}, largest miss {conformant['largest_miss']:.1f}; position 0 alone "
            f"{sink['coverage']:.1%}, {sink['largest_miss']:.1f}",
            f"log sums   learned {_text(found['learned']['log_sum'])}, maxima {_text(conformant['log_sum'])}, "
            f"sink {_text(sink['log_sum'])}",
            f"reference  {found['reference']} (messages added to a pass: {messages})",
            f"seconds    {found['seconds']:.0f}, of processors {found['cpu_seconds']:.0f}",
        ]
    )


def _aligned(rows: list[list[str]]) -> list[str]:
    """Columns of one width, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    placed = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return ["  ".join(cells).rstrip() for cells in placed]


def verdict(chosen: Trial) -> str:
    """What the chosen prefix frees, in one line."""
    if chosen.frees:
        return "result     no position of the text and no token right after the prefix is an outlier"
    left = chosen.vocabulary
    if not chosen.frees_text:
        return f"result     no prefix tried frees the text: {chosen.outliers} of {chosen.positions} positions are outliers after it"
    assert left is not None  # a text without outliers is followed by the vocabulary
    names = ", ".join(f"{token.text!r} ({token.ratio:.1f})" for token in left.worst)
    return f"result     no position of the text is an outlier; right after the prefix {left.special} tokens are: {names}"


def write_report(prepared: Prepared, path: Path) -> None:
    """Write .html, .json or .png. Raises UserError for another ending, or where the file cannot be written."""
    make = writer(path)
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(make(prepared))
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another --report") from None


def writer(path: Path) -> Callable[[Prepared], bytes]:
    """What makes a report of a path's kind. Raises UserError for a kind that there is not."""
    kinds: dict[str, Callable[[Prepared], bytes]] = {
        ".html": lambda prepared: render(prepared).encode(),
        ".json": lambda prepared: json.dumps(summary(prepared), indent=1).encode(),
        ".png": lambda prepared: _png(summary(prepared)),
    }
    if path.suffix not in kinds:
        raise UserError(f"--report {path}: of no known kind; end it in {', '.join(kinds)}")
    return kinds[path.suffix]


def render(prepared: Prepared) -> str:
    """The page. Needs nothing from outside itself."""
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_TEMPLATE.read_text())
    found = summary(prepared)
    return page.render(
        found=found,
        style=STYLE,
        verdict=verdict(prepared.facts.special.chosen).removeprefix("result").strip(),
        positions=prefix(found),
        coverage=_coverage(found),
    )


def _coverage(found: dict[str, Any]) -> str:
    with themed(9.5, 2.8) as figure:
        _draw_coverage(figure.subplots(), found)
        return svg(figure, "Share of rows, by layer, whose maximum is found by " + _references(found))


def _png(found: dict[str, Any]) -> bytes:
    """Both pictures of the page in one, on white."""
    with themed(12, 3.6) as figure:
        *panels, last = figure.subplots(1, len(KINDS) + 1)
        draw_positions(panels, found)
        _draw_coverage(last, found)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=150)
        return out.getvalue()


def _draw_coverage(axes: Axes, found: dict[str, Any]) -> None:
    """Share of rows, by layer, in which a reference is the exact maximum."""
    names = (f"the largest of {found['conformant']['positions']} scores", "conformant"), ("the score of position 0", "sink")
    for i, (label, reference) in enumerate(names):
        axes.plot(found[reference]["coverage_by_layer"], label=label, color=COLOURS[i], marker=MARKERS[i])
    axes.set_ylim(0, 1.02)
    axes.set_title("Rows whose maximum is found")
    axes.set_xlabel("layer")
    axes.grid()
    axes.legend()


def _references(found: dict[str, Any]) -> str:
    conformant, sink = found["conformant"], found["sink"]
    return (
        f"the largest of {conformant['positions']} scores ({conformant['coverage']:.0%} in all) and by the score of position 0 "
        f"({sink['coverage']:.0%})"
    )


def _trial(trial: Trial) -> dict[str, Any]:
    text = {
        "median": _named(trial.median),
        "largest": _named(trial.largest),
        "ratio": _ratio(trial.largest, trial.median),
        "outliers": trial.outliers,
        "positions": trial.positions,
    }
    scan = trial.vocabulary
    vocabulary = scan and {
        "median": _named(scan.median),
        "largest": _named(scan.largest),
        "ratio": _ratio(scan.largest, scan.median),
        "special": scan.special,
        "worst": [vars(token) for token in scan.worst],
    }
    return {"prefix": list(trial.prefix), "text": text, "vocabulary": vocabulary}


def _cells(trial: Trial) -> list[str]:
    name = " ".join(map(str, trial.prefix)) or "nothing"
    seen = [name, f"{trial.median[0]:,.0f}", f"{trial.largest[0]:,.0f}", f"{trial.outliers} of {trial.positions:,}"]
    scan = trial.vocabulary
    if scan is None:
        return [*seen, "not measured", "", "", ""]
    worst = " ".join(repr(token.text) for token in scan.worst[:4])
    return [*seen, f"{scan.largest[0]:,.0f}", f"{_ratio(scan.largest, scan.median):.1f}", f"{scan.special:,}", worst]


def _ratio(largest: tuple[float, float], median: tuple[float, float]) -> float:
    return max(high / middle for high, middle in zip(largest, median, strict=True))


def _named(pair: tuple[float, float]) -> dict[str, float]:
    return dict(zip(KINDS, pair, strict=True))


def _score(reference: ScoreReference) -> dict[str, Any]:
    return {
        "coverage": reference.mean_coverage,
        "least_coverage": float(np.min(reference.coverage)),
        "coverage_by_layer": np.mean(np.asarray(reference.coverage), axis=1).tolist(),
        "largest_miss": reference.largest_miss,
        "relative": _span(reference.relative),
        "log_sum": _span(reference.log_sum),
    }


def _span(pairs: Any) -> list[float]:
    return [min(low for low, _ in pairs), max(high for _, high in pairs)]


def _text(span: list[float]) -> str:
    return f"{span[0]:.1f} to {span[1]:.1f}"
