"""1 / sqrt(x) for x whose range is known, as a norm needs of its mean square.

Where the ends of the range have a ratio up to 27.5, that of SOAL's [0.1, 2.75], one chain of 5 squarings: 11 messages on SEMI2K and
0.04% error. SOAL has a cubic start and two Newton steps: 14 messages and 0.34%, or 0.07% with the start fitted again
(experiments/soal_fit). SPU's own takes 26 messages. A wider range is cut by comparisons first (`pieces.py`).
"""

from __future__ import annotations

from typing import Any

from .chain import Chain, weighted
from .coefficients import chains
from .pieces import BASE, Pieces, factors, last_weights, steps_for

_ABOVE = 2  # steps of the range above 1, where products could overflow; the others are below, where bits are fewer


def inverse_root(x: Any, plan: Chain | Pieces, weights: Any = None) -> Any:
    """x^(-1/2) for x in [plan.low, plan.high], within `plan.error`, relative.

    weights: `last_weights(plan)` times a factor, which may be secret, so that the result is multiplied by it for one message more.
    """
    return weighted(factors(x, plan), last_weights(plan) if weights is None else weights)


def inverse_root_plan(ratio: float) -> Chain | Pieces:
    """A plan for a range whose ends have this ratio; where it lies is the plan's choice, so x is scaled to it.

    Raises ValueError where `ratio` is too large.
    """
    base, wide = sorted(chains("inverse_root"), key=lambda chain: chain.high / chain.low)
    if base.high / base.low < ratio <= wide.high / wide.low:
        return wide
    steps = steps_for(ratio)
    return Pieces(base, -0.5, steps, BASE ** max(0, steps - _ABOVE))
