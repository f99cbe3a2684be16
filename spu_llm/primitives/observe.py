"""Run a program of primitives in plaintext and see how near every value comes to the limit of its site.

A lookup's input must lie in its table; a truncated value must keep |raw| < 2^(modulus - 2), or the truncation is off by a
whole period; a product must fit what is left of its modulus. Inside these bounds no protocol here can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log2
from typing import Any

import jax
import numpy as np
from jax.core import Literal
from jax.experimental import enable_x64

from .contract import contract_p
from .lookup import lookup_p
from .scale import scale_p
from .truncate import truncate_p


@dataclass(frozen=True)
class Site:
    """One bound: what was seen of it. `used` is the largest fraction of the bound; above 1 the protocol gives a wrong value."""

    kind: str
    used: float
    outside: int
    values: int


def observe(function: Callable, *args: Any) -> tuple[Any, list[Site]]:
    """The function's results on plaintext ring integers, and its sites in program order (the same for the same shapes)."""
    with enable_x64():
        closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
        flat = jax.tree_util.tree_leaves(args)
        sites: list[Site] = []
        values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values |= zip(closed.jaxpr.invars, flat, strict=True)

        def read(variable: Any) -> Any:
            return variable.val if isinstance(variable, Literal) else values[variable]

        for eqn in closed.jaxpr.eqns:
            inputs = [read(variable) for variable in eqn.invars]
            subfuns, params = eqn.primitive.get_bind_params(eqn.params)
            found = eqn.primitive.bind(*subfuns, *inputs, **params)
            results = found if eqn.primitive.multiple_results else [found]
            values |= zip(eqn.outvars, results, strict=True)
            if eqn.primitive in _LIMITS:
                sites += _LIMITS[eqn.primitive](inputs, results[0], eqn.params)
        leaves = [read(variable) for variable in closed.jaxpr.outvars]
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(out), leaves), sites


def _of_lookup(inputs: list[Any], result: Any, params: dict[str, Any]) -> list[Site]:
    table, x = params["table"], np.asarray(inputs[0]) / 2.0 ** params["bits"] / params["table"].factor
    if table.low == 0:  # of numbers that are never negative: near 0 is not near a bound
        return [_site("lookup", np.where(x < 0, np.inf, x / table.high))]
    middle, half = (table.high + table.low) / 2, (table.high - table.low) / 2
    return [_site("lookup", np.abs(x - middle) / half)]


def _of_truncate(inputs: list[Any], result: Any, params: dict[str, Any]) -> list[Site]:
    return [_fits("truncate", inputs[0], params["modulus"] - 2)]


def _of_scale(inputs: list[Any], result: Any, params: dict[str, Any]) -> list[Site]:
    operands = zip(inputs, params["moduli"], strict=True)
    return [*(_fits("scale operand", x, modulus - 2) for x, modulus in operands), _fits("scale", result, 63)]


def _of_contract(inputs: list[Any], result: Any, params: dict[str, Any]) -> list[Site]:
    left = min(modulus - shift for modulus, shift in zip(params["moduli"], params["shifts"], strict=True))
    return [_fits("contract", result, left - 1)]


def _fits(kind: str, raw: Any, bits: int) -> Site:
    return _site(kind, np.abs(np.asarray(raw, np.float64)) / 2.0**bits)


def _site(kind: str, used: np.ndarray) -> Site:
    return Site(kind, float(used.max(initial=0)), int((used > 1).sum()), used.size)


_LIMITS = {lookup_p: _of_lookup, truncate_p: _of_truncate, scale_p: _of_scale, contract_p: _of_contract}


def spare_bits(site: Site) -> float:
    """Bits between the largest value seen and the bound."""
    return -log2(site.used) if site.used else 64.0
