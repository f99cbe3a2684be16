"""Softmax: exponentials of scores minus a reference near their maximum, with hidden scores multiplied by zero."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from .engine import SLACK, levels
from .interpret import Interpreter
from .masks import clean_parts
from .maximum import exact_maximum
from .values import Centred, Masked, Peak, Secret, Value

_REACH = -32.0
"""The least score below the reference that the usual table knows; exp of it is below every precision used."""


def subtracted(interpreter: Interpreter, eqn: Any, value: Value, peak: Peak) -> Value:
    """value - peak. The scores' own steadying maximum needs only be near the maximum: it cancels in the quotient."""
    if value is not peak.scores or not peak.steady or len(peak.axes) != 1:
        top = exact_maximum(interpreter.engine, interpreter.where(eqn), peak)
        return interpreter.apply(eqn, [value, top])[0]
    axis = peak.axes[0]
    clean, hidden = clean_parts(value)
    if hidden is not None:
        clean, hidden = _without_empty_rows(interpreter, clean, hidden, axis)
    reference = Secret(_without(clean.shape, axis), clean.dtype, lambda: _reference(interpreter, eqn, clean, hidden, axis))

    def make() -> Any:
        top = interpreter.engine.moved(lambda raw: jnp.broadcast_to(jnp.expand_dims(raw, axis), clean.shape), reference.array())
        return interpreter.engine.minus(clean.array(), top)

    centred = Secret(clean.shape, clean.dtype, make, bounds=(_REACH, SLACK * levels(clean.shape[axis])))
    return Centred(centred, hidden)


def exponential(interpreter: Interpreter, eqn: Any, value: Masked | Centred) -> Secret:
    """exp of scores: what is hidden becomes 0 exactly, whatever the table gives for it. 1 round."""
    scores = value.clean if isinstance(value, Masked) else value.value
    bounds = scores.bounds if isinstance(value, Centred) else None
    label = "softmax" if isinstance(value, Centred) else "exp"

    def make() -> Any:
        shown = None if value.hidden is None else np.broadcast_to(~value.hidden, value.shape)
        out = interpreter.engine.table(interpreter.site(eqn, [label], usual=bounds, shown=shown), jnp.exp, scores.array())
        return out if shown is None else interpreter.engine.times_public(out, shown.astype(np.int64))

    top = float(np.exp(bounds[1])) if bounds else None
    return Secret(scores.shape, scores.dtype, make, bounds=None if top is None else (0.0, top))


def _reference(interpreter: Interpreter, eqn: Any, clean: Secret, hidden: np.ndarray | None, axis: int) -> Any:
    engine = interpreter.engine
    shown = None if hidden is None else ~np.broadcast_to(hidden, clean.shape)
    first = None if shown is None else np.argmax(shown, axis=axis, keepdims=True)
    scores = clean.array()
    if interpreter.softmax_reference == "first":
        place = np.zeros((*_ones(clean.shape, axis),), np.int64) if first is None else first
        return engine.moved(lambda raw: jnp.squeeze(_taken(raw, place, axis), axis), scores)
    if shown is not None and first is not None:
        place = np.where(shown, np.indices(clean.shape)[axis], first)
        scores = engine.moved(lambda raw: _taken(raw, place, axis), scores)
    return engine.reference(interpreter.site(eqn, ["reference"]), scores, axis)


def _taken(raw: Any, place: np.ndarray, axis: int) -> Any:
    """raw at public places along an axis. Local."""
    place = np.broadcast_to(place, tuple(place.shape[i] if i == axis else n for i, n in enumerate(raw.shape)))
    return jnp.take_along_axis(raw, jnp.asarray(place), axis=axis, mode="promise_in_bounds")


def _without_empty_rows(interpreter: Interpreter, clean: Secret, hidden: np.ndarray, axis: int) -> tuple[Secret, np.ndarray]:
    """Rows that hide every score attend equally to all, as they do in floating point where every score is the same -1e9."""
    hidden = np.broadcast_to(hidden, clean.shape)
    empty = np.all(hidden, axis=axis, keepdims=True)
    if not empty.any():
        return clean, hidden
    shown = np.broadcast_to(~empty, clean.shape).astype(np.int64)
    rest = Secret(clean.shape, clean.dtype, lambda: interpreter.engine.times_public(clean.array(), shown))
    return rest, hidden & ~empty


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _ones(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], 1, *shape[axis + 1 :])
