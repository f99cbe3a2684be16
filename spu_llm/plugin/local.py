"""Rules that need no opening: rearrangements, sums, choices by a public condition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserError
from .gather import at_secret_places
from .interpret import Interpreter, rule
from .masks import HIDES, masked, rearranged
from .values import Masked, Peak, Secret, Shape, Value, View, is_public


@rule("copy", "copy_p", "stop_gradient", "reduce_precision", "optimization_barrier")
def _same(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value]) -> Value:
    value = inputs[0]
    if isinstance(value, Peak) and eqn.primitive.name == "stop_gradient":
        return Peak(value.scores, value.axes, value.shape, True)
    return value


@rule("convert_element_type")
def _convert(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value]) -> Value:
    """Nothing to do among floating types or from integers to them; a fraction cannot be dropped locally."""
    value, target = inputs[0], eqn.params["new_dtype"]
    if not isinstance(value, Secret):
        return value
    if jnp.issubdtype(value.dtype, jnp.floating) and not jnp.issubdtype(target, jnp.floating):
        if interpreter.engine.general:
            return interpreter.general(eqn, inputs)[0]
        raise UserError(
            f"{interpreter.where(eqn)}: a secret real cannot become {np.dtype(target).name}; round it outside the enabled function"
        )
    return Secret(value.shape, target, value.array, value.chain, value.view, value.product, value.bounds)


@rule("broadcast_in_dim")
def _broadcast(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value]) -> Value:
    value, shape = inputs[0], tuple(eqn.params["shape"])
    dimensions = eqn.params["broadcast_dimensions"]
    if isinstance(value, Peak):
        return Peak(value.scores, value.axes, shape, value.steady)
    if isinstance(value, Masked):
        return rearranged(interpreter, eqn, [value])
    secret = interpreter.plain(eqn, value)
    source, inner = (secret, secret.shape) if secret.view is None else (secret.view.source, secret.view.ones)
    ones = [1] * len(shape)
    for size, at in zip(inner, dimensions, strict=True):
        ones[at] = size
    return widened(interpreter, source, tuple(ones), shape, secret.dtype)


@rule("reshape", "squeeze", "expand_dims")
def _reshape(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value]) -> Value:
    value, shape = inputs[0], tuple(eqn.outvars[0].aval.shape)
    if isinstance(value, Peak):
        return Peak(value.scores, value.axes, shape, value.steady)
    if isinstance(value, Masked):
        return rearranged(interpreter, eqn, [value])
    secret = interpreter.plain(eqn, value)
    lazy = secret.view is not None or (secret.chain is not None and secret.made is None)
    ones = _same_but_ones(secret, shape) if lazy else None
    if ones is None:
        return moved(interpreter, eqn, [secret])
    return widened(interpreter, secret.view.source if secret.view else secret, ones, shape, secret.dtype)


def _same_but_ones(secret: Secret, shape: Shape) -> Shape | None:
    """Where a reshape only adds or drops axes of length 1: the shape of the view's source afterwards."""
    inner = secret.view.ones if secret.view else secret.shape
    kept = [small for size, small in zip(secret.shape, inner, strict=True) if size != 1]
    if [size for size in shape if size != 1] != [size for size in secret.shape if size != 1]:
        return None
    rest = iter(kept)
    return tuple(1 if size == 1 else next(rest) for size in shape)


def widened(interpreter: Interpreter, source: Secret, ones: Shape, shape: Shape, dtype: Any) -> Secret:
    """`source` reshaped to `ones` and broadcast to `shape`, as a view."""

    def make() -> Any:
        return interpreter.engine.moved(lambda raw: jnp.broadcast_to(raw.reshape(ones), shape), source.array())

    return Secret(shape, dtype, make, view=View(source, ones), bounds=source.bounds)


def compact(interpreter: Interpreter, secret: Secret) -> tuple[Any, Shape]:
    """The array of a secret, with axes of length 1 where it is only broadcast."""
    if secret.view is None:
        return secret.array(), secret.shape
    source, ones = secret.view.source, secret.view.ones
    return interpreter.engine.moved(lambda raw: raw.reshape(ones), source.array()), ones


@rule("transpose", "slice", "rev", "dynamic_slice", "dynamic_update_slice", "gather", "concatenate")
def _move(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value]) -> Value:
    if any(isinstance(value, Masked) for value in inputs):
        return rearranged(interpreter, eqn, inputs)
    places = {"dynamic_slice": 1, "dynamic_update_slice": 2, "gather": 1}.get(eqn.primitive.name, len(inputs))
    if eqn.primitive.name == "gather" and not is_public(inputs[1]):
        return at_secret_places(interpreter, eqn, inputs)
    if not all(is_public(index) for index in inputs[places:]):
        raise UserError(f"{interpreter.where(eqn)}: {eqn.primitive.name} at a secret place; only a lookup of whole rows can be")
    return moved(interpreter, eqn, inputs[:places], inputs[places:])


def moved(interpreter: Interpreter, eqn: Any, values: Sequence[Value], indices: Sequence[Value] = ()) -> Secret:
    """An equation that only rearranges `values`, as it stands, on ring elements."""
    parts = [interpreter.entered(eqn, value) for value in values]
    fixed = [np.asarray(index) for index in indices]
    params = dict(eqn.params)
    if "mode" in params:  # the places are known, so nothing has to be filled in by a comparison
        params["mode"] = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS

    def make() -> Any:
        return interpreter.engine.moved(
            lambda *raws: eqn.primitive.bind(*raws, *map(jnp.asarray, fixed), **params), *_arrays(parts)
        )

    return interpreter.secret(eqn, make)


def _arrays(parts: Sequence[Secret]) -> list[Any]:
    return [part.array() for part in parts]


@rule("pad")
def _pad(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value]) -> Value:
    if not is_public(inputs[1]) or np.any(np.asarray(inputs[1]) != 0):
        raise UserError(f"{interpreter.where(eqn)}: a secret can be padded with zeros only; use concatenate for other values")
    secret = interpreter.plain(eqn, inputs[0])
    config = eqn.params["padding_config"]

    def make() -> Any:
        return interpreter.engine.moved(lambda raw: jax.lax.pad(raw, jnp.zeros((), raw.dtype), config), secret.array())

    return interpreter.secret(eqn, make)


@rule("reduce_sum")
def _sum(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value]) -> Value:
    secret = interpreter.plain(eqn, inputs[0])
    axes = tuple(eqn.params["axes"])
    bounds = None
    if secret.bounds is not None:  # of exponentials, the largest of which is about 1
        count = int(np.prod([secret.shape[axis] for axis in axes]))
        bounds = (1 / secret.bounds[1], secret.bounds[1] * count)
    return interpreter.secret(eqn, lambda: interpreter.engine.summed(secret.array(), axes), bounds=bounds)


@rule("reduce_max")
def _max(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value]) -> Value:
    value = inputs[0] if isinstance(inputs[0], Masked) else interpreter.plain(eqn, inputs[0])
    return Peak(value, tuple(eqn.params["axes"]), tuple(eqn.outvars[0].aval.shape))


def choose(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value]) -> Value:
    """select_n by a public condition: case i where it is i. A case of very negative numbers is a mask."""
    which, cases = np.asarray(inputs[0]).astype(np.int64), list(inputs[1:])
    shape = tuple(eqn.outvars[0].aval.shape)
    which = np.broadcast_to(which, shape)
    hidden = np.zeros(shape, bool)
    parts: list[Secret] = []
    for i, case in enumerate(cases):
        if is_public(case):
            array = np.broadcast_to(np.asarray(case), shape)
            hides = (array <= HIDES) & (which == i)
            hidden |= hides
            case = np.where(hides | (which != i), 0, array)
        elif isinstance(case, Masked):
            hidden |= np.broadcast_to(case.hidden, shape) & (which == i)
            case = case.clean
        parts.append(interpreter.entered(eqn, case))

    def make() -> Any:
        def chosen(*raws: Any) -> Any:
            return sum(raw * jnp.asarray(which == i, raw.dtype) for i, raw in enumerate(raws))

        return interpreter.engine.moved(chosen, *_arrays(parts))

    return masked(interpreter.secret(eqn, make), hidden)
