"""1 / x for x in a known range, by its most significant digit (`pieces.py`)."""

from __future__ import annotations

from typing import Any

from .coefficients import chains
from .pieces import Pieces, power, steps_for


def reciprocal(x: Any, plan: Pieces) -> Any:
    """1 / x for x in [plan.low, plan.high], within `plan.error`, relative."""
    return power(x, plan)


def reciprocal_plan(ratio: float) -> Pieces:
    """A plan for a range whose ends have this ratio; where it lies is the plan's choice, so x is scaled to it.

    Raises ValueError where `ratio` is too large.
    """
    return Pieces(chains("reciprocal")[0], -1.0, steps_for(ratio))
