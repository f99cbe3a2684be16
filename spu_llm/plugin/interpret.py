"""Run the equations of a traced function with public values known and secret values in an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util
from jax.core import Literal

from ..errors import UserError
from .engine import Engine, Site
from .maximum import exact_maximum
from .values import Centred, Masked, Peak, Secret, Value, is_public

CALLS = {
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""Calls that are simply entered, with the parameter that holds what they call."""

Rule = Callable[["Interpreter", Any, Sequence[Value]], Value]
RULES: dict[str, Rule] = {}
"""What to do with an equation of which an input is secret, by the name of its primitive. Filled by the modules of rules."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function (interpreter, equation, inputs) -> output for primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


@dataclass
class Interpreter:
    """One pass over a function. Public equations are evaluated on the spot; sites are numbered in the order they are met."""

    engine: Engine
    softmax_reference: str = "max"
    counts: Counter = field(default_factory=Counter)

    def run(self, closed: Any, inputs: Sequence[Value]) -> list[Value]:
        """Values of the outputs of a closed jaxpr."""
        values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values |= dict(zip(closed.jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Value:
            return np.asarray(atom.val, getattr(atom.aval, "dtype", None)) if isinstance(atom, Literal) else values[atom]

        for eqn in closed.jaxpr.eqns:
            outputs = self.apply(eqn, [read(atom) for atom in eqn.invars])
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in closed.jaxpr.outvars]

    def apply(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        """Outputs of one equation."""
        name = eqn.primitive.name
        if name in CALLS:
            return self.run(_closed(eqn.params[CALLS[name]]), inputs)
        if all(is_public(value) for value in inputs):
            return self.public(eqn, inputs)
        if name in CONTROL:
            return CONTROL[name](self, eqn, inputs)
        if name not in RULES:
            if self.engine.general:
                return self.general(eqn, inputs)
            raise UserError(
                f"{self.where(eqn)}: {name} of a secret has no rule; rewrite it, or compute it outside the enabled function"
            )
        return [RULES[name](self, eqn, inputs)]

    def public(self, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
        """Evaluate an equation that all parties can."""
        subfuns, params = eqn.primitive.get_bind_params(eqn.params)
        with jax.ensure_compile_time_eval():
            out = eqn.primitive.bind(*subfuns, *(jnp.asarray(value) for value in inputs), **params)
        return list(out) if eqn.primitive.multiple_results else [out]

    def general(self, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
        """An equation as it stands, for SPU to find a way."""
        arrays = [jnp.asarray(value) if is_public(value) else self.plain(eqn, value).array() for value in inputs]
        subfuns, params = eqn.primitive.get_bind_params(eqn.params)
        out = eqn.primitive.bind(*subfuns, *arrays, **params)
        outs = out if eqn.primitive.multiple_results else [out]
        return [Secret(tuple(each.shape), each.dtype, partial(_itself, each)) for each in outs]

    def where(self, eqn: Any) -> str:
        """An equation in the user's terms: where in the source it is, and what it computes. Or what was said instead of one."""
        if isinstance(eqn, str):
            return eqn
        shape = "x".join(map(str, eqn.outvars[0].aval.shape)) or "scalar"
        return f"{source_info_util.summarize(eqn.source_info)}, {eqn.primitive.name} -> {shape}"

    def secret(self, eqn: Any, make: Callable[[], Any], **more: Any) -> Secret:
        """A secret output of an equation, computed when it is needed."""
        aval = eqn.outvars[0].aval
        return Secret(tuple(aval.shape), aval.dtype, make, **more)

    def plain(self, eqn: Any, value: Value) -> Secret:
        """The secret itself, where an equation needs all of it."""
        if isinstance(value, Masked):
            raise UserError(
                f"{self.where(eqn)}: scores with masked entries may go only through additions, products with positive numbers, "
                "rearrangements and a softmax; apply the mask just before the softmax"
            )
        if isinstance(value, Centred):
            if value.hidden is not None:
                raise UserError(
                    f"{self.where(eqn)}: masked scores minus their maximum may only be exponentiated; use jax.nn.softmax"
                )
            return value.value
        return exact_maximum(self.engine, self.where(eqn), value) if isinstance(value, Peak) else value

    def entered(self, eqn: Any, value: Value) -> Secret:
        """A value as a secret; a public one as shares that everyone knows."""
        if not is_public(value):
            return self.plain(eqn, value)
        array = np.asarray(value)
        return Secret(array.shape, array.dtype, lambda: self.engine.constant(array))

    def site(self, eqn: Any, labels: Sequence[str], **more: Any) -> Site:
        """The next site with these labels."""
        label = "+".join(labels)
        name = f"{label}[{self.counts[label]}]"
        self.counts[label] += 1
        return Site(name, f"{self.where(eqn)} (site {name})", **more)


def _itself(array: Any) -> Any:
    return array


def _closed(jaxpr: Any) -> Any:
    return jaxpr if hasattr(jaxpr, "consts") else jax.core.ClosedJaxpr(jaxpr, ())


def _public_number(interpreter: Interpreter, eqn: Any, value: Value, what: str) -> Any:
    if not is_public(value):
        raise UserError(
            f"{interpreter.where(eqn)}: {what} depends on a secret, so no party may know it; make it depend on public values only"
        )
    return np.asarray(value)


def _cond(interpreter: Interpreter, eqn: Any, inputs: list[Value]) -> list[Value]:
    index = int(_public_number(interpreter, eqn, inputs[0], "which branch to take"))
    branches = eqn.params["branches"]
    return interpreter.run(branches[min(max(index, 0), len(branches) - 1)], inputs[1:])


def _while(interpreter: Interpreter, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Unrolled: its condition may depend on public values only."""
    params = eqn.params
    a, b = params["cond_nconsts"], params["body_nconsts"]
    tests, body, carry = inputs[:a], inputs[a : a + b], inputs[a + b :]
    while bool(_public_number(interpreter, eqn, interpreter.run(params["cond_jaxpr"], tests + carry)[0], "the end of a loop")):
        carry = interpreter.run(params["body_jaxpr"], body + carry)
    return carry


def _scan(interpreter: Interpreter, eqn: Any, inputs: list[Value]) -> list[Value]:
    """Unrolled: every step needs masks of its own."""
    params = eqn.params
    a, b = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carry, sequences = inputs[:a], inputs[a:b], inputs[b:]
    steps = range(params["length"])
    rows: list[list[Value]] = []
    for i in reversed(steps) if params["reverse"] else steps:
        out = interpreter.run(params["jaxpr"], consts + carry + [_row(interpreter, eqn, each, i) for each in sequences])
        carry, row = out[: params["num_carry"]], out[params["num_carry"] :]
        rows.append(row)
    if params["reverse"]:
        rows.reverse()
    return carry + [_stacked(interpreter, eqn, column) for column in zip(*rows, strict=True)]


def _row(interpreter: Interpreter, eqn: Any, value: Value, i: int) -> Value:
    if is_public(value):
        return np.asarray(value)[i]
    secret = interpreter.plain(eqn, value)
    return Secret(secret.shape[1:], secret.dtype, lambda: interpreter.engine.moved(lambda raw: raw[i], secret.array()))


def _stacked(interpreter: Interpreter, eqn: Any, column: Sequence[Value]) -> Value:
    if all(is_public(value) for value in column):
        return np.stack(column)
    parts = [interpreter.entered(eqn, value) for value in column]

    def make() -> Any:
        return interpreter.engine.moved(lambda *raws: jnp.stack(raws), *(part.array() for part in parts))

    return Secret((len(parts), *parts[0].shape), parts[0].dtype, make)


CONTROL: dict[str, Callable[[Interpreter, Any, list[Value]], list[Value]]] = {"cond": _cond, "while": _while, "scan": _scan}
