"""Tables for a function on a range: the cheapest degree, width and number of segments that keep an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, log2
from typing import Any

import numpy as np

from ..dealer.table import Table
from ..errors import UserError

MOST_SEGMENTS = 1024
"""More would take the dealer's linear map and the parties' expansion out of proportion."""

_RING = 64
_DEGREES = (1, 2, 3)
_WIDTHS = range(-20, 4)


@dataclass(frozen=True, eq=False)
class FullTable(Table):
    """A table whose result is right in the whole ring: the next product then needs no truncation before it."""

    @property
    def modulus(self) -> int:
        return _RING


def fit_table(
    function: Callable[[np.ndarray], np.ndarray],
    stock: Callable[[Any], Any],
    span: tuple[float, float],
    tolerance: float,
    where: str,
    worst: float | None = None,
) -> Table:
    """The table of least words that is off by no more than `tolerance` on `span`; if there is none, the best within `worst`.

    Raises UserError, naming `where`, if none of up to MOST_SEGMENTS segments is.
    """
    choices = sorted(_choices(span), key=lambda choice: choice[1] * (choice[2] + 1))
    best: tuple[float, Table | None] = (np.inf, None)
    for width_bits, segments, degree in choices:
        low = floor(span[0] / 2.0**width_bits) * 2.0**width_bits
        smooth = _continued(function, span, 2.0**width_bits)
        table = FullTable(smooth, stock, low, segments, width_bits, degree)
        error = _error(table, function, span)
        if error <= tolerance:
            return table
        best = min(best, (error, table), key=lambda found: found[0])
    if worst is not None and best[1] is not None and best[0] <= worst:
        return best[1]
    raise UserError(
        f"{where}: no table of up to {MOST_SEGMENTS} segments on [{span[0]:g}, {span[1]:g}] is within {tolerance:g} (best: "
        f"{best[0]:.2g}); narrow its range with spu_llm.calibrate or enable(ranges=...)"
    )


def _choices(span: tuple[float, float]) -> list[tuple[int, int, int]]:
    """(width_bits, segments, degree) that cover the span. The last segment cannot be used, and the low edge is rounded down."""
    found = []
    for width_bits in _WIDTHS:
        needed = ceil((span[1] - floor(span[0] / 2.0**width_bits) * 2.0**width_bits) / 2.0**width_bits) + 1
        segments = max(2, 1 << ceil(log2(max(needed, 2))))
        if segments <= MOST_SEGMENTS:
            found += [(width_bits, segments, degree) for degree in _DEGREES]
    return found


def _continued(function: Callable, span: tuple[float, float], width: float) -> Callable[[np.ndarray], np.ndarray]:
    """The function on the span, and beyond it the cubic that its nearest values make: a pole outside cannot spoil a segment."""
    reach = min(width, span[1] - span[0]) or width
    ends = [span[0] + reach * np.linspace(0, 1, 4), span[1] - reach * np.linspace(0, 1, 4)]
    cubics = [np.polynomial.Polynomial.fit(end, function(end), 3) for end in ends]

    def continued(x: np.ndarray) -> np.ndarray:
        inside = np.clip(x, *span)
        steps = np.clip(x, span[0] - 2 * width, span[1] + 2 * width)
        return np.where(x < span[0], cubics[0](steps), np.where(x > span[1], cubics[1](steps), function(inside)))

    return continued


def _error(table: Table, function: Callable, span: tuple[float, float]) -> float:
    """The largest error on the span, by either of the two segments that may serve a place."""
    x = np.linspace(*span, 16 * table.segments + 1)
    position = (x - table.low) / 2.0**table.width_bits
    wanted, worst = function(x), 0.0
    for edge in (np.floor(position), np.ceil(position)):
        row = table.coefficients[edge.astype(np.int64) & (table.segments - 1)]
        powers = (position - edge)[..., None] ** np.arange(table.degree + 1)
        worst = max(worst, float(np.abs(np.sum(row * powers, -1) / 2.0**table.bits - wanted).max()))
    return worst
