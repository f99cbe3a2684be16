"""The range of every looked-up function: measured on samples, given by hand, or the usual one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..errors import UserError

Span = tuple[float, float]

USUAL: dict[str, Span] = {
    "exp": (-16.0, 4.0),
    "exp2": (-16.0, 4.0),
    "expm1": (-16.0, 4.0),
    "log": (0.125, 16.0),
    "log1p": (-0.5, 16.0),
    "rsqrt": (0.0625, 8.0),
    "sqrt": (0.0625, 8.0),
    "reciprocal": (0.25, 16.0),
    "sin": (-8.0, 8.0),
    "cos": (-8.0, 8.0),
}
"""For functions that are not finite and below LARGEST on all of WIDE, by a function in them; others (gelu, softplus) get WIDE."""

WIDE: Span = (-16.0, 16.0)
LARGEST = 256.0
_MARGIN = 0.25


def usual(label: str, function: Callable[[np.ndarray], np.ndarray]) -> Span:
    """The range of a site that was not calibrated."""
    values = function(np.linspace(*WIDE, 129))
    if np.all(np.isfinite(values)) and np.abs(values).max() <= LARGEST:
        return WIDE
    return next((span for name, span in USUAL.items() if name in label.split("+")), WIDE)


@dataclass(frozen=True)
class Ranges:
    """Ranges by site. A site is a function with a number, `rsqrt[2]`: they are counted in the order of the traced function.

    A value outside its range gives a wrong result without a sign of it, so measure them: `spu_llm.calibrate`.
    """

    spans: Mapping[str, Span] = field(default_factory=dict)
    largest: float = 0.0
    """The largest value anywhere in the function, if it was measured."""

    def at(self, site: str, where: str) -> Span | None:
        """The range of a site, or None if none were given at all."""
        if self.spans and site not in self.spans:
            raise UserError(f"{where}: the ranges given do not have {site}; calibrate with the same function and keyword arguments")
        return self.spans.get(site)

    def widened(self) -> Ranges:
        """With a quarter more on both sides for values that no sample showed; a positive range stays positive."""
        return Ranges({site: _widen(span) for site, span in self.spans.items()}, self.largest)


def _widen(span: Span) -> Span:
    low, high = span
    more = _MARGIN * max(high - low, 0.25 * max(abs(low), abs(high)), 2.0**-6)
    return (low - more if low <= 0 else max(low - more, low / 2), high + more if high >= 0 else min(high + more, high / 2))
