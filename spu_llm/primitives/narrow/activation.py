"""SiLU and GELU in a known range, by a chain of squarings (`chain.py`). Ours.

Within a moderate range f(x) - x / 2 is an even function, which a chain gives with no comparison at all: k squarings, 20 k + 8
bytes and 2 k + 2 messages on SEMI2K. Far out f(x) = relu(x) - tail(|x|): one comparison gives relu and |x|, 72 bytes and 8
messages, and a chain the tail, x sigmoid(-x) or x Phi(-x), which dies out. SPU's own SiLU takes 1078 bytes and 84 messages, its
GELU by tanh 396 and 45.

SOAL's base-2 form takes an integer part, which costs 208 bytes here, a table, and a division by its start and a Newton step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from .chain import Chain, evaluate
from .coefficients import chains, cheapest


@dataclass(frozen=True)
class ActivationPlan:
    """`chain` is the function itself, or its `tail`."""

    chain: Chain
    tail: bool

    @property
    def largest(self) -> float:
        """|x| may be so large."""
        return self.chain.high


def activation(x: Any, plan: ActivationPlan) -> Any:
    """The function that the plan is for, |x| <= plan.largest, within `plan.chain.error`."""
    if not plan.tail:
        return evaluate(x, plan.chain)
    negative = jnp.where(x < 0, x, 0.0)
    relu = x - negative
    return relu - evaluate(relu - negative, plan.chain)


def activation_plan(name: str, largest: float) -> ActivationPlan:
    """The cheapest plan for "silu", "gelu" or "gelu_tanh" up to |x| = largest. Raises ValueError where none reaches so far."""
    plain = cheapest(name, -largest, largest)
    if plain is not None:
        return ActivationPlan(plain, tail=False)
    chain = cheapest(f"{name}_tail", 0.0, largest)
    if chain is None:
        widest = max(chain.high for chain in chains(f"{name}_tail"))
        raise ValueError(f"{name} up to {largest:g}: the widest plan reaches {widest:g}")
    return ActivationPlan(chain, tail=True)
