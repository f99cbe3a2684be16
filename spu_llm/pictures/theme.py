"""How all pictures look: SVG that takes the page's colours, in light and in dark.

Text, axes and grid are drawn in a colour that becomes `currentColor`; nothing is drawn behind them. The colours of bars and lines
stand out (WCAG: 3 to 1) against a white and against a nearly black page, and are told apart by colour-blind readers.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

INK = "#010203"
"""What is drawn in it has the page's text colour."""
COLOURS = ("#2a78d6", "#d9640a", "#2c9a5b", "#b8479e", "#7d7d7d")
"""Blue, orange, green, purple, grey. The last is for what others are held against."""
MARKERS = ("o", "s", "^", "D", "v", "P")
"""A second mark of a series, beside its colour."""

_STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.facecolor": "white",
    "axes.axisbelow": True,
    "grid.alpha": 0.2,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.12,  # for fonts that are wider than the one that is measured
    "hatch.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "text.parse_math": False,  # names are names, dollars and all
    **{f"{key}.color": INK for key in ("text", "grid", "hatch", "xtick", "ytick")},
    **{f"axes.{key}": INK for key in ("edgecolor", "labelcolor", "titlecolor")},
}
_FONTS = re.compile(r"font-family: [^;\"]*")
_SERIFLESS = "font-family: system-ui, sans-serif"
_NAMES = re.compile(r'(\bid="|url\(#|xlink:href="#)')
_HEAD = re.compile(r"^.*?<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>\s*<defs>\s*<style.*?</defs>", re.DOTALL)


@contextmanager
def themed(width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches; whatever is drawn on it while the context lasts has the theme's style."""
    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(width, height))


def svg(figure: Figure, label: str) -> str:
    """The figure as an element for an HTML page, `label` being what it shows, in words. Its ids are its own on any page."""
    out = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": label}):
        figure.savefig(out, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = _FONTS.sub(_SERIFLESS, out.getvalue()).replace(INK, "currentColor")
    own = hashlib.sha256(text.encode()).hexdigest()[:8]
    root = (
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" fill="currentColor" '
        f'style="stroke-linejoin: round; stroke-linecap: butt" aria-label="{escape(label)}"'
    )
    return _HEAD.sub(lambda head: f"<svg {head[1]} {root}>", _NAMES.sub(rf"\g<1>p{own}-", text), count=1)


def short(value: float) -> str:
    """Three digits and a letter for thousands: 0.07, 6.51, 558, 4.36 M."""
    for factor, letter in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= factor:
            return f"{_digits(value / (1e3 if letter == ' k' else factor))}{letter}"
    return _digits(value)


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def plain_ticks(axes: Axes, which: str, logarithmic: bool = False) -> None:
    """Numbers of an axis (`x` or `y`) as `short` has them, and powers of ten where it is logarithmic."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    if logarithmic:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
        axis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0)))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
