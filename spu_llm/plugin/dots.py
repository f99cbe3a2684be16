"""Dots of secrets: one opening of both operands. A factor that a dot does not sum over is applied after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .elementwise import product
from .interpret import Interpreter, rule
from .values import Secret, Shape, Value, View, is_public


@rule("dot_general")
def _dot(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value]) -> Value:
    x, y = (value if is_public(value) else interpreter.plain(eqn, value) for value in inputs)
    left, right, out = _letters(eqn.params["dimension_numbers"], len(x.shape), len(y.shape))
    return dotted(interpreter, eqn, (x, left), (y, right), out)


def dotted(interpreter: Interpreter, eqn: Any, x: tuple[Value, str], y: tuple[Value, str], out: str) -> Secret:
    """einsum of two values with their letters. 1 round if both are secret, else local."""
    shape = tuple(eqn.outvars[0].aval.shape)
    for (value, letters), other in ((x, y), (y, x)):
        if (factor := _outside(value, letters, out)) is not None:
            rest = dotted(interpreter, eqn, (value.product[0], letters), other, out)
            return product(interpreter, rest, factor, shape)
    engine = interpreter.engine
    if is_public(x[0]) or is_public(y[0]):
        (secret, a), (public, b) = (y, x) if is_public(x[0]) else (x, y)
        return interpreter.secret(eqn, lambda: engine.dot_public(f"{a},{b}->{out}", secret.array(), np.asarray(public)))
    return interpreter.secret(eqn, lambda: engine.dot(f"{x[1]},{y[1]}->{out}", x[0].array(), y[0].array()))


def _outside(value: Value, letters: str, out: str) -> Secret | None:
    """The waiting factor of an operand as a factor of the result, if the dot does not sum over an axis that it varies on."""
    if not isinstance(value, Secret) or value.product is None or value.made is not None:
        return None
    factor = value.product[1]
    ones = factor.view.ones if factor.view else factor.shape
    source = factor.view.source if factor.view else factor
    sizes = dict(zip(letters, ones, strict=True))
    varies = [letter for letter in letters if sizes[letter] != 1]
    if any(letter not in out for letter in varies) or varies != [letter for letter in out if letter in varies]:
        return None
    spread: Shape = tuple(sizes.get(letter, 1) for letter in out)
    return Secret(spread, factor.dtype, lambda: None, view=View(source, spread))


def _letters(numbers: Any, left: int, right: int) -> tuple[str, str, str]:
    """einsum letters of dot_general: batch axes, then those of each side that are not summed over."""
    (summed, summed_right), (batch, batch_right) = numbers
    names = iter("abcdefghijklmnopqrstuvwxyz")
    x, y = [""] * left, [""] * right
    for i, j in (*zip(batch, batch_right, strict=True), *zip(summed, summed_right, strict=True)):
        x[i] = y[j] = next(names)
    for side in (x, y):
        for i, letter in enumerate(side):
            side[i] = letter or next(names)
    free = [x[i] for i in range(left) if i not in (*batch, *summed)] + [
        y[j] for j in range(right) if j not in (*batch_right, *summed_right)
    ]
    return "".join(x), "".join(y), "".join([x[i] for i in batch] + free)
