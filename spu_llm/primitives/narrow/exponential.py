"""exp of numbers of either sign in a known range: a chain of squarings whose last constants are near 0 (`chain.py`).

5 to 7 squarings: on SEMI2K 104 to 144 bytes an element and 11 to 15 messages, where SPU's Pade exponential takes 553 and 46. SOAL's
own way (integer and fraction parts, each party forming its factor of 2^fraction) needs local shares, which StableHLO has not; its
integer part alone, `floor`, costs 208 bytes here.
"""

from __future__ import annotations

from typing import Any

from .chain import Chain, evaluate
from .coefficients import chains, cheapest


def exponential(x: Any, plan: Chain) -> Any:
    """exp(x) for x in [plan.low, plan.high], within `plan.error`, relative to exp(x) or to 2^-6, whichever is more.

    Above the range the result grows on, ever less exactly; below it the result is wrong altogether.
    """
    return evaluate(x, plan)


def exponential_plan(low: float, high: float) -> Chain:
    """The cheapest plan for [low, high]. Raises ValueError where none reaches so far."""
    plan = cheapest("exponential", low, high)
    if plan is None:
        widest = chains("exponential")[-1]
        raise ValueError(f"exp from {low:g} to {high:g}: the widest plan reaches from {widest.low:g} to {widest.high:g}")
    return plan
