"""Teaching a ReLU decoder to leave most of its hidden units at 0: what units pay, and how much of them may be used when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_TINY = 1e-12  # added where 0 would be divided by, or have a root of infinite slope


@dataclass(frozen=True)
class Sparsity:
    """Asks that a token use at most the part `active` of each layer's hidden units, which count `group` neighbours at a time.

    Where a token uses more, it pays `strength` x the excess (1: twice what is asked) x the norms of its groups: ProSparse's L1
    penalty, over groups (of 1: single units), which ends when enough of them are 0. So tokens come to use about equally many. A
    group pays in proportion to how often it is used, lest a few be used by all tokens and the rest by none (as in ReMoE). What is
    asked falls from everything to `active`, by equal factors, between the parts `begin` and `end` of a training's steps.

    tail: a token pays for its groups beyond those that it may use, by norm, and 1 in place of the excess. Those that it may use,
    the largest, are free, so that no unit of theirs is pressed down. Where all pay, most units of used groups come to be 0 always.
    rare: a unit that fires at less than this part of the tokens whose free groups have its own is drawn up at these tokens, by what
    it lacks; so no unit stays silent for ever, and no token comes to use more groups (of a tail only).
    """

    active: float
    strength: float
    group: int = 1
    begin: float = 0.1
    end: float = 0.6
    tail: bool = False
    rare: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for what no training can follow."""
        if not 0 < self.active <= 1 or not 0 <= self.begin < self.end <= 1:
            raise ValueError(f"active {self.active}, begin {self.begin}, end {self.end}: give parts of 1, and begin below end")
        if self.strength < 0 or self.group < 1:
            raise ValueError(f"strength {self.strength} below 0 or group {self.group} below 1")
        if not 0 <= self.rare < 1 or (self.rare and not self.tail):
            raise ValueError(f"rare {self.rare}: give a part of 1, and tail")

    def asked(self, done: float) -> float:
        """The part of a layer's units that may be used when the part `done` of the steps is behind us."""
        return float(self.active ** np.clip((done - self.begin) / (self.end - self.begin), 0, 1))


def sparsity_penalty(inputs: jax.Array, sparsity: Sparsity, asked: Any) -> jax.Array:
    """What `Sparsity` has units, ReLU of inputs [layers, batch, n, hidden], pay while the part `asked` of them may be used.

    Norms count relative to their layer's usual one, so that smaller units and a larger second kernel are no way out.
    """
    inputs = inputs.reshape(*inputs.shape[:-1], -1, sparsity.group)
    groups = jax.nn.relu(inputs)
    norms = jnp.sqrt(jnp.sum(groups**2, -1) + _TINY)
    used = jnp.any(groups != 0, -1)
    often = used.mean((1, 2))
    usual = norms.sum((1, 2, 3)) / jnp.maximum(used.sum((1, 2, 3)), 1)
    price = often / jnp.maximum(often.mean(-1, keepdims=True), _TINY) / usual[:, None]
    due = norms * jax.lax.stop_gradient(price)[:, None, None]
    if sparsity.tail:
        free = jnp.argsort(jnp.argsort(-norms)) < asked * norms.shape[-1]
        lacked = _lacked(inputs / jax.lax.stop_gradient(usual)[:, None, None, None, None], free & used, sparsity.rare)
        return sparsity.strength * ((due * ~free).mean() + lacked) / asked
    excess = jnp.maximum(used.mean(-1) / asked - 1, 0)
    return sparsity.strength * (jax.lax.stop_gradient(excess) * due.mean(-1) / asked).mean()


def _lacked(inputs: jax.Array, open_: jax.Array, rare: float) -> jax.Array:
    """What units that fire too rarely lack of firing, by inputs [layers, batch, n, groups, size], where their groups are open."""
    fires = jnp.sum((inputs > 0) & open_[..., None], (1, 2)) / jnp.maximum(open_.sum((1, 2)), 1)[..., None]
    drawn = (fires < rare)[:, None, None] & open_[..., None]
    return (jax.nn.relu(-inputs) * drawn).mean()
