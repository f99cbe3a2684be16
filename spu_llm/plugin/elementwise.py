"""Rules for element-wise equations. What depends on one secret value only becomes a chain, and a chain one table, however written.

So `jax.nn.gelu`, a hand-written one and `0.5 * x * (1 + erf(x / sqrt(2)))` cost the same: one opening. Nothing is looked up
before something needs it, so steps in between cost nothing; polynomials up to degree 2 are computed without a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..errors import UserError
from .attention import exponential, subtracted
from .interpret import Interpreter, rule
from .local import choose, compact, widened
from .masks import clean_parts, masked, refuse_secret_mask, split_mask, union
from .values import Centred, Chain, Masked, Peak, Secret, Shape, Value, is_public

_KINKED = ("abs", "sign", "max", "min", "clamp", "select_n", "gt", "lt", "ge", "le", "eq", "ne", "floor", "ceil", "round")
_SMOOTH = ("exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf", "erfc", "rsqrt", "sqrt", "cbrt", "sin", "cos", "tan")
_OTHER = (
    "add",
    "add_any",
    "sub",
    "mul",
    "div",
    "neg",
    "integer_pow",
    "square",
    "pow",
    "and",
    "or",
    "not",
    "asinh",
    "sinh",
    "cosh",
    "atan",
    "is_finite",
)


@rule(*_KINKED, *_SMOOTH, *_OTHER)
def _elementwise(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value]) -> Value:
    name = eqn.primitive.name
    if name == "exp" and isinstance(inputs[0], (Masked, Centred)):
        return exponential(interpreter, eqn, inputs[0])
    if name == "max" and (kept := _above_nothing(inputs)) is not None:
        return kept
    if name == "sub" and isinstance(inputs[1], Peak):
        return subtracted(interpreter, eqn, inputs[0], inputs[1])
    if name == "select_n" and is_public(inputs[0]):
        return choose(interpreter, eqn, inputs)
    if (name in ("add", "sub") and any(map(_masks, _addends(name, inputs)))) or any(isinstance(value, Masked) for value in inputs):
        return _of_masked(interpreter, eqn, inputs)
    plain = [value if is_public(value) else interpreter.plain(eqn, value) for value in inputs]
    return chained(interpreter, eqn, plain) or directly(interpreter, eqn, plain)


def _above_nothing(inputs: Sequence[Value]) -> Value | None:
    """The other input of a maximum with minus infinity, by which JAX starts some of its reductions."""
    for value, other in (tuple(inputs), tuple(reversed(inputs))):
        if is_public(value) and np.all(np.asarray(value) == -np.inf):
            return other
    return None


def _addends(name: str, inputs: Sequence[Value]) -> Sequence[Value]:
    """Inputs of a sum, a public subtrahend with its sign changed."""
    if name == "sub" and is_public(inputs[1]):
        return [inputs[0], -np.asarray(inputs[1])]
    return inputs


def _masks(value: Value) -> bool:
    return isinstance(value, Masked) or (is_public(value) and bool(np.any(split_mask(np.asarray(value))[1])))


def _of_masked(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value]) -> Value:
    """Arithmetic on scores with a mask, old or new: on the scores, with the mask carried along."""
    name, shape = eqn.primitive.name, tuple(eqn.outvars[0].aval.shape)
    if name in ("mul", "div"):
        x, y = inputs
        if isinstance(y, Masked):
            x, y = (y, x) if name == "mul" else (x, y)
        if not isinstance(x, Masked) or not is_public(y) or np.any(np.asarray(y) <= 0):
            raise UserError(
                f"{interpreter.where(eqn)}: masked scores can be scaled by public positive numbers only; scale before the mask"
            )
        return Masked(_secret(interpreter.apply(eqn, [x.clean, y])[0]), x.hidden)
    if name not in ("add", "sub") or (name == "sub" and isinstance(inputs[1], Masked)):
        interpreter.plain(eqn, next(value for value in inputs if isinstance(value, Masked)))
    parts: list[Value] = []
    masks: list[np.ndarray | None] = []
    for value in _addends(name, inputs):
        rest, hidden = split_mask(np.asarray(value)) if is_public(value) else clean_parts(value)
        parts.append(rest)
        masks.append(hidden)
    if name == "sub" and is_public(inputs[1]):
        parts[1] = -parts[1]
    return masked(_secret(interpreter.apply(eqn, parts)[0]), union(shape, *masks))


def _secret(value: Value) -> Secret:
    assert isinstance(value, Secret)
    return value


def chained(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value]) -> Secret | None:
    """The equation as a step of a chain, if all its secrets are chains of one value and its public inputs one number each."""
    found = [value.univariate for value in inputs if isinstance(value, Secret)]
    numbers = [_uniform(value) for value in inputs if is_public(value)]
    shapes = {value.shape for value in inputs if isinstance(value, Secret)}
    (chain, ones), shape = found[0], tuple(eqn.outvars[0].aval.shape)
    if any(other.base is not chain.base or at != ones for other, at in found) or None in numbers or shapes != {shape}:
        return None
    _refuse_mask(interpreter, eqn, numbers)
    inner = [value.view.source if isinstance(value, Secret) and value.view else value for value in inputs]
    steps = [value.univariate[0] if isinstance(value, Secret) else _uniform(value) for value in inputs]
    after = _step(eqn, chain.base, steps)

    def make() -> Any:
        if _is_direct(eqn, after, inner):
            return directly(interpreter, eqn, inner, chain.base.shape).array()
        return looked_up(interpreter, eqn, after)

    source = Secret(chain.base.shape, eqn.outvars[0].aval.dtype, make, chain=after)
    return source if ones is None else widened(interpreter, source, ones, shape, source.dtype)


def looked_up(interpreter: Interpreter, eqn: Any, chain: Chain) -> Any:
    """The engine's array of a chain, by one table. 1 round."""
    site = interpreter.site(eqn, chain.labels, usual=chain.base.bounds, kinked=chain.kinked)
    return interpreter.engine.table(site, chain.function, chain.base.array())


def _uniform(value: Value) -> np.ndarray | None:
    """The number that all elements of a public value are."""
    array = np.asarray(value)
    return array.reshape(-1)[0] if array.size and (array == array.reshape(-1)[0]).all() else None


def _refuse_mask(interpreter: Interpreter, eqn: Any, numbers: Sequence[Any]) -> None:
    """A secret that chooses, or is multiplied by, a number that hides."""
    if eqn.primitive.name in ("select_n", "mul", "div") and any(split_mask(-np.abs(number))[1] for number in numbers):
        raise refuse_secret_mask(interpreter, eqn)


def _step(eqn: Any, base: Secret, steps: Sequence[Any]) -> Chain:
    """The chain with an equation after `steps`: chains, and numbers."""
    name = eqn.primitive.name
    chains = [step for step in steps if isinstance(step, Chain)]
    degree = _degree(eqn, [step.degree if isinstance(step, Chain) else 0 for step in steps])
    labels = tuple(dict.fromkeys(label for chain in chains for label in chain.labels))
    if degree is None or name in _KINKED:
        own = {"div": "reciprocal", "integer_pow": "power", "pow": "power"}.get(name, name)
        by_number = name == "div" and not isinstance(steps[1], Chain)
        if name not in ("add", "sub", "mul", "neg", "and", "or", "not") and not by_number:
            labels = tuple(dict.fromkeys((*labels, own)))
    kinked = name in _KINKED or any(chain.kinked for chain in chains)
    return Chain(base, lambda t: _applied(eqn, steps, t), degree, labels, kinked)


def _applied(eqn: Any, steps: Sequence[Any], t: Any) -> Any:
    """Evaluate a step of a chain in the precision of `t`."""
    values = [step.function(t) if isinstance(step, Chain) else step for step in steps]
    if eqn.primitive.name == "convert_element_type":
        return values[0]
    cases = values[1:] if eqn.primitive.name == "select_n" else values
    kinds = [value.dtype for value in cases if getattr(value, "shape", ()) == t.shape] or [t.dtype]
    cases = [jnp.broadcast_to(jnp.asarray(value, jnp.result_type(*kinds)), t.shape) for value in cases]
    return eqn.primitive.bind(*values[: len(values) - len(cases)], *cases, **eqn.params)


def _degree(eqn: Any, degrees: Sequence[int | None]) -> int | None:
    """The degree of a polynomial, or None."""
    name = eqn.primitive.name
    if any(degree is None for degree in degrees):
        return None
    known = [degree for degree in degrees if degree is not None]
    if name in ("add", "sub", "neg"):
        return max(known)
    if name == "mul":
        return sum(known)
    if name == "div" and known[1] == 0:
        return known[0]
    if name == "square" or (name == "integer_pow" and eqn.params["y"] >= 0):
        return known[0] * (2 if name == "square" else eqn.params["y"])
    return None


def _is_direct(eqn: Any, after: Chain, inputs: Sequence[Value]) -> bool:
    """Whether arithmetic on the inputs is at least as cheap as a table of the whole chain."""
    name = eqn.primitive.name
    secrets = [value for value in inputs if isinstance(value, Secret)]
    if after.degree is not None:
        return after.degree <= 2
    if name in ("max", "min"):  # exact where it is no part of something longer
        return all(secret.univariate[0].degree == 1 for secret in secrets)
    free = name in ("add", "sub", "neg") or (name in ("mul", "div") and len(secrets) == 1 and is_public(inputs[-1]))
    return free and all(secret.made is not None for secret in secrets)


def directly(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value], shape: Shape | None = None) -> Secret:
    """The equation by arithmetic on its inputs."""
    shape = tuple(eqn.outvars[0].aval.shape) if shape is None else shape
    name = eqn.primitive.name
    if name not in ARITHMETIC:
        if interpreter.engine.general:
            return interpreter.general(eqn, inputs)[0]
        decides = inputs[:1] if name == "select_n" else inputs
        if all(np.dtype(value.dtype).kind in "biu" for value in decides if isinstance(value, Secret)):
            raise refuse_secret_mask(interpreter, eqn)
        raise UserError(
            f"{interpreter.where(eqn)}: {name} of different secrets has no rule; rewrite it with sums, products and functions of "
            "one value"
        )
    return ARITHMETIC[name](interpreter, eqn, inputs, shape)


def _add(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value], shape: Shape) -> Secret:
    engine, (x, y) = interpreter.engine, inputs
    dtype = eqn.outvars[0].aval.dtype
    if not is_public(x) and not is_public(y):
        return Secret(shape, dtype, lambda: engine.plus(_full(interpreter, x, shape), _full(interpreter, y, shape)))
    secret, public = (y, np.asarray(x)) if is_public(x) else (x, np.asarray(y))
    return Secret(shape, dtype, lambda: engine.plus_public(_full(interpreter, secret, shape), np.broadcast_to(public, shape)))


def _subtract(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value], shape: Shape) -> Secret:
    return _add(interpreter, eqn, [inputs[0], _negative(interpreter, inputs[1])], shape)


def _negate(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value], shape: Shape) -> Secret:
    return _negative(interpreter, inputs[0])


def _negative(interpreter: Interpreter, value: Value) -> Value:
    if is_public(value):
        return -np.asarray(value)
    source = value.view.source if value.view else value
    minus = Secret(source.shape, source.dtype, lambda: interpreter.engine.times_public(source.array(), np.asarray(-1)))
    return widened(interpreter, minus, value.view.ones, value.shape, value.dtype) if value.view else minus


def _multiply(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value], shape: Shape) -> Secret:
    """A factor that is the same along an axis waits outside: the rest may go through a dot before it is applied."""
    x, y = inputs
    if is_public(x):
        x, y = y, x
    if y is not x and isinstance(x, Secret) and x.product and x.made is None:
        rest = _multiply(interpreter, eqn, [x.product[0], y], shape)
        return product(interpreter, rest, x.product[1], shape)
    if is_public(y):
        factor = np.asarray(y)
        return Secret(shape, x.dtype, lambda: interpreter.engine.times_public(_full(interpreter, x, shape), factor))
    if isinstance(y, Secret) and y.product and y.made is None:
        rest = _multiply(interpreter, eqn, [x, y.product[0]], shape)
        return product(interpreter, rest, y.product[1], shape)
    if is_narrow(x, shape) and not is_narrow(y, shape):
        x, y = y, x
    return product(interpreter, x, y, shape)


def is_narrow(value: Secret, shape: Shape) -> bool:
    """Whether a factor is the same along an axis of the product."""
    inner = value.view.ones if value.view else value.shape
    return inner != shape


def product(interpreter: Interpreter, x: Secret, y: Secret, shape: Shape) -> Secret:
    """x * y, with broadcasting; opened at the operands' small sizes."""

    def make() -> Any:
        left, ones = compact(interpreter, x)
        right, other = (left, ones) if x is y else compact(interpreter, y)
        small = interpreter.engine.multiply(left, right)
        if np.broadcast_shapes(ones, other) == shape:
            return small
        return interpreter.engine.moved(lambda raw: jnp.broadcast_to(raw, shape), small)

    waits = is_narrow(y, shape) and not is_narrow(x, shape)
    return Secret(shape, x.dtype, make, product=(x, y) if waits else None)


def _divide(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value], shape: Shape) -> Secret:
    x, y = inputs
    if is_public(y):
        return _multiply(interpreter, eqn, [x, 1.0 / np.asarray(y, np.float64)], shape)
    return _multiply(interpreter, eqn, [x, reciprocal(interpreter, eqn, y)], shape)


def reciprocal(interpreter: Interpreter, eqn: Any, value: Secret) -> Secret:
    """1 / value, looked up at the size the value has before it is broadcast."""
    chain, ones = value.univariate
    function = _inverse_of(chain.function)
    after = Chain(chain.base, function, None, tuple(dict.fromkeys((*chain.labels, "reciprocal"))), chain.kinked)

    def make() -> Any:
        return looked_up(interpreter, eqn, after)

    source = Secret(chain.base.shape, value.dtype, make, chain=after)
    return source if ones is None else widened(interpreter, source, ones, value.shape, value.dtype)


def _inverse_of(function: Callable) -> Callable:
    return lambda t: 1.0 / function(t)


def _power(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value], shape: Shape) -> Secret:
    return product(interpreter, inputs[0], inputs[0], shape)


def _maximum(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value], shape: Shape) -> Secret:
    """max(x, y) = y + relu(x - y), and min(x, y) = y - relu(y - x). 3 rounds."""
    x, y = inputs
    if is_public(x):
        x, y = y, x
    sign = 1 if eqn.primitive.name == "max" else -1
    if is_public(y) and not np.any(np.asarray(y)) and sign > 0:
        return Secret(shape, x.dtype, lambda: interpreter.engine.relu(_full(interpreter, x, shape)))
    rest = _subtract(interpreter, eqn, [x, y] if sign > 0 else [y, x], shape)
    above = Secret(shape, x.dtype, lambda: interpreter.engine.relu(rest.array()))
    return _add(interpreter, eqn, [above if sign > 0 else _negative(interpreter, above), y], shape)


def _full(interpreter: Interpreter, secret: Secret, shape: Shape) -> Any:
    """The array at `shape`, which lax equations may leave to broadcasting."""
    array = secret.array()
    return array if secret.shape == shape else interpreter.engine.moved(lambda raw: jnp.broadcast_to(raw, shape), array)


ARITHMETIC: dict[str, Callable[[Interpreter, Any, Sequence[Value], Shape], Secret]] = {
    "add": _add,
    "add_any": _add,
    "sub": _subtract,
    "neg": _negate,
    "mul": _multiply,
    "div": _divide,
    "integer_pow": _power,
    "square": _power,
    "max": _maximum,
    "min": _maximum,
}
