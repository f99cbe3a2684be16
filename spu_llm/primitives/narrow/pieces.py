"""Powers of a positive secret number in a wide range: its most significant digit in base 4 by comparisons, then a chain.

All comparisons with low * 4^j are made at once, their bits times x bring it into [low, 4 low), where few squarings do, and the same
bits times the result take the power of 4 out again. SOAL's reciprocal by most significant bit is of this kind, with base 2, a
quadratic start and two Newton steps. Everything that multiplies is a power of 2 and exact.

For j steps and k squarings on SEMI2K: 2 k + 13 messages, 89 j + 20 k + 12 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log
from typing import Any

import jax.numpy as jnp

from .chain import Chain, evaluate, squares, weighted

BASE = 4.0
_MOST_STEPS = 8  # 4^-9 is no multiple of 2^-17
_EDGE = 1.02  # a threshold lies so far above the chain's least x, and 4 times it below its largest


@dataclass(frozen=True)
class Pieces:
    """x^degree for x in [low, high], degree -1/2 or -1; `chain` is for x * unit in [chain.low, chain.high].

    The result comes multiplied by `gain`; unit and gain are powers of 2.
    """

    chain: Chain
    degree: float
    steps: int
    unit: float = 1.0
    gain: float = 1.0

    @property
    def low(self) -> float:
        return self.chain.low / self.unit

    @property
    def high(self) -> float:
        return self.low * _EDGE * BASE ** (self.steps + 1)

    @property
    def error(self) -> float:
        """Relative, as the chain's."""
        return self.chain.error


def power(x: Any, plan: Chain | Pieces) -> Any:
    """x^degree. A chain takes its own range only, for 2 k + 1 messages and 20 k + 4 bytes: its scale is 1."""
    return weighted(factors(x, plan), last_weights(plan))


def factors(x: Any, plan: Chain | Pieces) -> list[Any]:
    """The numbers whose sum, weighted by `last_weights`, is the power: whoever multiplies it by a secret number can multiply these
    public weights by it ahead of time."""
    if isinstance(plan, Chain):
        values = list(squares(x, plan))
        return [*values, jnp.ones_like(x)]
    if not plan.steps:
        return [evaluate(x * plan.unit if plan.unit != 1 else x, plan.chain)]
    edges = jnp.asarray([plan.low * _EDGE * BASE**j for j in range(1, plan.steps + 1)], x.dtype)
    below = x < edges.reshape(-1, *[1] * x.ndim)
    near = weighted(_kept(x, below), _powers(1 / BASE, plan.steps, plan.unit))
    return _kept(evaluate(near, plan.chain), below)


def last_weights(plan: Chain | Pieces) -> tuple[float, ...]:
    if isinstance(plan, Chain):
        return (*plan.weights, plan.offset)
    return _powers(BASE**plan.degree, plan.steps, plan.gain * plan.unit**-plan.degree)


def _kept(x: Any, below: Any) -> list[Any]:
    """x, and x where it is not below each edge."""
    return [x, *jnp.where(below, 0.0, x[None])]


def _powers(factor: float, steps: int, first: float) -> tuple[float, ...]:
    """Weights under which what `_kept` gives of x adds up to x * first * factor^j, j edges being at or below x."""
    powers = [first * factor**j for j in range(steps + 1)]
    return (first, *(powers[j + 1] - powers[j] for j in range(steps)))


def steps_for(ratio: float) -> int:
    """Comparisons for a range whose ends have this ratio. Raises ValueError where so many are not held exactly."""
    steps = max(0, ceil(log(ratio / _EDGE, BASE) - 1e-9) - 1)
    if steps > _MOST_STEPS:
        raise ValueError(f"a range of ratio {ratio:g} takes {steps} comparisons; at most {_MOST_STEPS} are held exactly")
    return steps
