"""1 / x for x in a known range, by its most significant digit (`pieces.py`)."""

from __future__ import annotations

from math import ceil, log2
from typing import Any

from .coefficients import chains
from .pieces import Pieces, power, steps_for


def reciprocal(x: Any, plan: Pieces) -> Any:
    """1 / x for x in [plan.low, plan.high], within `plan.error`, relative."""
    return power(x, plan)


def reciprocal_plan(low: float, high: float) -> Pieces:
    """A plan for [low, high]. Raises ValueError where this is too wide."""
    (base,) = chains("reciprocal")
    unit = 2.0 ** ceil(log2(base.low / low))
    return Pieces(base, -1.0, steps_for(high * unit / base.low), unit)
