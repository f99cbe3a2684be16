"""What set-up, prefill and each token cost: bytes, messages and seconds of every run beside each other."""

from __future__ import annotations

from typing import Any

from .ladder import Runs
from .theme import COLOURS, plain_ticks, short, svg, themed

_KINDS = (("bytes", "Bytes sent"), ("messages", "Messages sent"), ("seconds", "Seconds"))
_PHASES = (("setup", "set-up", ""), ("prefill", "prefill", ""), ("decode", "a token", "_per_token"))
_LABELLED = 4  # runs at most, or labels would meet


def phases(runs: Runs) -> str:
    """Three bar charts from zero, of few runs with numbers, as SVG."""
    with themed(9.5, 3.1) as figure:
        for axes, (key, title) in zip(figure.subplots(1, len(_KINDS)), _KINDS, strict=True):
            width = 0.8 / len(runs)
            for i, (name, run) in enumerate(runs.items()):
                values = [_value(run, phase, key + suffix) for phase, _, suffix in _PHASES]
                places = [p + (i + 0.5) * width - 0.4 for p in range(len(values))]
                bars = axes.bar(places, values, width=0.94 * width, label=name, **_style(i, len(runs)))
                if len(runs) <= _LABELLED:
                    axes.bar_label(bars, [short(value) for value in values], padding=2, fontsize=7, rotation=90 * (len(runs) > 1))
            axes.set_xticks(range(len(_PHASES)), [name for _, name, _ in _PHASES])
            axes.tick_params(axis="x", length=0)
            axes.margins(y=0.25)
            plain_ticks(axes, "y")
            axes.grid(axis="y")
            axes.set_title(title)
        if len(runs) > 1:
            figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(len(runs), 4))
        return svg(figure, f"Bytes, messages and seconds of set-up, prefill and a token, of these runs: {', '.join(runs)}")


def _value(run: dict[str, Any], phase: str, key: str) -> float:
    return float(run[phase][key])


def _style(i: int, count: int) -> dict[str, Any]:
    """Grey for what others are held against; hatched where colours come round again."""
    if i == 0 and count > 1:
        return {"color": COLOURS[-1]}
    turn, place = divmod(i - (count > 1), len(COLOURS) - 1)
    return {"facecolor": COLOURS[place], "hatch": "////" * turn}
