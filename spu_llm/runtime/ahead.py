"""What of a program can be done before its inputs are there: products of the dealer's words with operands that never change.

Of a product x W with x = E + A opened and W = E_W + B, the parties can compute [A] E_W as soon as material has come; E [W] is
what is left. That halves the work of products with weights once the input is there. Nothing is sent either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun
from jax.interpreters import partial_eval as pe

from .program import Slot


@dataclass(frozen=True)
class Split:
    """A program in two: `ahead` of the inputs numbered `known` gives what `rest` takes before all inputs of the program."""

    ahead: Callable
    known: tuple[int, ...]
    rest: Callable
    between: tuple[Slot, ...]


def split(function: Callable, slots: Sequence[Slot], known: Sequence[bool]) -> Split | None:
    """Split a function of flat arguments, of which `known` says that they are there ahead; None where nothing is to be done.

    Called under 64-bit JAX types.
    """
    closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(slot.shape, slot.dtype) for slot in slots))
    jaxpr = closed.jaxpr
    there = {variable for variable, early in zip(jaxpr.invars, known, strict=True) if early} | set(jaxpr.constvars)
    made: list[Var] = []
    for eqn in jaxpr.eqns:
        if all(isinstance(variable, Literal) or variable in there for variable in eqn.invars):
            there.update(eqn.outvars)
            made += eqn.outvars if _multiplies(eqn) else []
    if not made:
        return None
    first, used = pe.dce_jaxpr(jaxpr.replace(outvars=made, debug_info=None), [True] * len(made))
    rest = jaxpr.replace(
        invars=[*made, *jaxpr.invars],
        eqns=[eqn for eqn in jaxpr.eqns if eqn.outvars[0] not in made],
        debug_info=None,
    )
    return Split(
        jaxpr_as_fun(ClosedJaxpr(first, closed.consts)),
        tuple(i for i, wanted in enumerate(used) if wanted),
        jaxpr_as_fun(ClosedJaxpr(rest, closed.consts)),
        tuple(_slot(variable.aval) for variable in made),
    )


def _slot(shaped: Any) -> Slot:
    return Slot(shaped.shape, shaped.dtype)


def _multiplies(eqn: Any) -> bool:
    """Whether a product that sums is in an equation, at any depth."""
    inner = eqn.params.get("jaxpr")
    return eqn.primitive.name == "dot_general" or (inner is not None and any(map(_multiplies, inner.jaxpr.eqns)))
