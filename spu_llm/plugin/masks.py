"""Masks of attention, recognised above the addition that Flax models apply them by.

A table is periodic: scores minus 1e9 would come round to any place of it. So very negative public addends are taken off the scores
and remembered, and become a product with zeros and ones after the exponential. Local, and exact: hidden scores count for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..errors import UserError
from .interpret import Interpreter
from .values import Masked, Secret, Value, is_public

HIDES = -9e3
"""A public addend of this or less hides a score. Models use -1e4, -1e9 and the least number of their type."""


def masked(secret: Secret, hidden: np.ndarray) -> Secret | Masked:
    """`secret` with entries hidden, if any are."""
    return Masked(secret, hidden) if hidden.any() else secret


def split_mask(addend: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A public addend as (what it adds to scores that count, which scores it hides)."""
    hidden = addend <= HIDES
    return np.where(hidden, 0, addend), hidden


def clean_parts(value: Value) -> tuple[Value, np.ndarray | None]:
    """A value without its mask, and the mask."""
    return (value.clean, value.hidden) if isinstance(value, Masked) else (value, None)


def union(shape: tuple[int, ...], *masks: np.ndarray | None) -> np.ndarray:
    """Hidden by any of the masks."""
    hidden = np.zeros(shape, bool)
    for mask in masks:
        if mask is not None:
            hidden = hidden | mask
    return hidden


def rearranged(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value]) -> Masked:
    """A rearrangement of values of which some are masked scores: done to scores and mask alike."""
    clean = interpreter.apply(eqn, [clean_parts(value)[0] for value in inputs])[0]
    return Masked(clean, np.asarray(interpreter.public(eqn, [_hidden_of(interpreter, eqn, value) for value in inputs])[0]))


def _hidden_of(interpreter: Interpreter, eqn: Any, value: Value) -> Value:
    """The mask of scores at their shape; an index as it is."""
    if isinstance(value, Masked):
        return np.broadcast_to(value.hidden, value.shape)
    if not is_public(value):
        return np.zeros(interpreter.plain(eqn, value).shape, bool)
    return np.zeros(np.shape(value), bool) if jnp.issubdtype(value.dtype, jnp.floating) else value


def refuse_secret_mask(interpreter: Interpreter, eqn: Any) -> UserError:
    """A mask that only a secret decides."""
    return UserError(
        f"{interpreter.where(eqn)}: an attention mask depends on a secret argument and cannot be applied as a public product; if "
        "all parties may know the mask, give its value: enable(public={'attention_mask': mask})"
    )
