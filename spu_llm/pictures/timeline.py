"""How a generation by POST went: a column a pass, as wide as it took, and the tokens that there were by then."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from .theme import COLOURS, INK, plain_ticks, short, svg, themed

_PARTS = (
    ("drafted, accepted", {"facecolor": COLOURS[0]}),
    ("the model's own", {"facecolor": COLOURS[2]}),
    ("drafted, rejected", {"facecolor": COLOURS[1]}),
    ("drafted, not looked at", {"facecolor": "none", "edgecolor": COLOURS[4], "hatch": "..."}),
)
_NUMBERED = 40  # passes at most, or numbers would meet


def timeline(data: dict[str, Any]) -> str:
    """Passes in the order of time, as SVG: what became of drafted tokens, and above it how the text grew.

    `data` has `rounds`, or is an experiment's metrics with `post`; of those a baseline without drafts is drawn beside it.
    """
    rounds = data.get("post", data)["rounds"]
    beside = data.get("baseline") or {}
    pace = beside["decode"]["seconds_per_token"] if "decode" in beside and not beside.get("post") else None
    ends = list(accumulate(each["seconds"] for each in rounds))
    with themed(9.5, 4.2) as figure:
        text, passes = figure.subplots(2, 1, sharex=True)
        _draw_text(text, rounds, ends, pace)
        _draw_passes(passes, rounds, ends)
        return svg(figure, words(rounds))


def words(rounds: list[dict[str, Any]]) -> str:
    """The passes in words."""
    each = ", ".join(f"{made['steps']} of {made['drafted'] + 1}" for made in rounds)
    return f"Tokens that came of each pass, of those it could have given: {each}"


def _draw_text(axes: Axes, rounds: list[dict[str, Any]], ends: list[float], pace: float | None) -> None:
    """Tokens after the first, which prefill gives."""
    tokens = list(accumulate(made["steps"] for made in rounds))
    axes.step([0, *ends], [0, *tokens], where="post", color=COLOURS[0], marker="o", label="with drafts")
    if pace is not None:
        axes.plot([0, ends[-1]], [0, ends[-1] / pace], color=COLOURS[4], linestyle="--", label="token by token")
        axes.legend(loc="upper left")
    axes.set_title(f"Tokens so far: {tokens[-1]} in {short(ends[-1])} s and {len(rounds)} passes")
    axes.set_ylim(0, 1.1 * tokens[-1])
    axes.grid()
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _draw_passes(axes: Axes, rounds: list[dict[str, Any]], ends: list[float]) -> None:
    starts, widths = [0.0, *ends[:-1]], [made["seconds"] for made in rounds]
    below = [0] * len(rounds)
    for (name, style), amounts in zip(_PARTS, zip(*map(_parts, rounds), strict=True), strict=True):
        axes.bar(starts, amounts, widths, bottom=below, align="edge", linewidth=0, label=name, **style)
        below = [low + amount for low, amount in zip(below, amounts, strict=True)]
    for start, width, made in zip(starts, widths, rounds, strict=True):
        if len(rounds) <= _NUMBERED:
            axes.text(start + width / 2, made["drafted"] + 1.15, f"{made['steps']}", ha="center", va="bottom", fontsize=8)
    axes.vlines(ends[:-1], 0, [made["drafted"] + 1 for made in rounds[:-1]], color=INK, linewidth=0.8)
    axes.set_ylim(0, 1.2 * max(below))
    axes.set_title("Tokens of each pass")
    axes.set_xlabel("seconds after the first token")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=len(_PARTS))
    axes.grid(axis="y")
    plain_ticks(axes, "x")
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _parts(made: dict[str, Any]) -> tuple[int, int, int, int]:
    """Accepted tokens that the text took, the model's own, rejected ones and those behind them, one for each of `_PARTS`."""
    own = made["steps"] - made["accepted"]
    rejected = made["tested"] - made["accepted"]
    return made["accepted"], own, rejected, made["drafted"] - made["tested"]
