"""Run a program of primitives in plaintext and see how near every value comes to the limit of its site.

A lookup's input must lie in its table; a truncated value must keep |raw| < 2^(modulus - 2), or the truncation is off by a
whole period; a product must fit what is left of its modulus, and compared numbers their stated bits. Inside these bounds no
protocol here can fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Literal, Primitive
from jax.experimental import enable_x64

from .argmax import argmax_p
from .compare import is_negative_p, relu_p
from .contract import contract_p
from .dealing import called, is_call
from .lookup import lookup_p
from .scale import scale_p
from .topk import keep_top_k_p, top_k_p
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
        sites: list[Site] = []
        leaves = _run(closed.jaxpr, closed.consts, jax.tree_util.tree_leaves(args), sites)
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(out), leaves), sites


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], sites: list[Site]) -> list[Any]:
    """The results of a jaxpr; what its calls see counts as its own."""
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for eqn in jaxpr.eqns:
        inputs = [read(variable) for variable in eqn.invars]
        if is_call(eqn):
            results = _run(*called(eqn), inputs, sites)
        else:
            subfuns, params = eqn.primitive.get_bind_params(eqn.params)
            found = eqn.primitive.bind(*subfuns, *inputs, **params)
            results = found if eqn.primitive.multiple_results else [found]
        values |= zip(eqn.outvars, results, strict=True)
        if eqn.primitive in _LIMITS:
            sites += _LIMITS[eqn.primitive](inputs, eqn.params)
    return [read(variable) for variable in jaxpr.outvars]


def _of_lookup(inputs: list[Any], params: dict[str, Any]) -> list[Site]:
    table, x = params["table"], np.asarray(inputs[0]) / 2.0 ** params["bits"] / params["table"].factor
    if table.low == 0:  # of numbers that are never negative: near 0 is not near a bound
        return [_site("lookup", np.where(x < 0, np.inf, x / table.high))]
    middle, half = (table.high + table.low) / 2, (table.high - table.low) / 2
    return [_site("lookup", np.abs(x - middle) / half)]


def _of_truncate(inputs: list[Any], params: dict[str, Any]) -> list[Site]:
    return [_fits("truncate", inputs[0], params["modulus"] - 2)]


def _of_scale(inputs: list[Any], params: dict[str, Any]) -> list[Site]:
    x, y = _rounded(inputs, params)
    operands = zip(inputs, params["moduli"], strict=True)
    return [*(_fits("scale operand", raw, modulus - 2) for raw, modulus in operands), _fits("scale", x * y, 63)]


def _of_contract(inputs: list[Any], params: dict[str, Any]) -> list[Site]:
    left = min(modulus - shift for modulus, shift in zip(params["moduli"], params["shifts"], strict=True))
    return [_fits("contract", jnp.einsum(params["subscripts"], *_rounded(inputs, params)), left - 1)]


def _rounded(inputs: list[Any], params: dict[str, Any]) -> list[np.ndarray]:
    """Operands as floating point numbers: their integer product might wrap around unseen."""
    return [np.asarray(x, np.float64) / 2.0**shift for x, shift in zip(inputs, params["shifts"], strict=True)]


def _of_sign(inputs: list[Any], params: dict[str, Any]) -> list[Site]:
    return [_fits("comparison", inputs[0], params["width"] - 1)]


def _of_order(inputs: list[Any], params: dict[str, Any]) -> list[Site]:
    return [_fits("order", np.ptp(np.asarray(inputs[0], np.float64), -1), params["width"] - 1)]


def _fits(kind: str, raw: Any, bits: int) -> Site:
    return _site(kind, np.abs(np.asarray(raw, np.float64)) / 2.0**bits)


def _site(kind: str, used: np.ndarray) -> Site:
    return Site(kind, float(used.max(initial=0)), int((used > 1).sum()), used.size)


_LIMITS: dict[Primitive, Callable[[list[Any], dict[str, Any]], list[Site]]] = {
    lookup_p: _of_lookup,
    truncate_p: _of_truncate,
    scale_p: _of_scale,
    contract_p: _of_contract,
    is_negative_p: _of_sign,
    relu_p: _of_sign,
    argmax_p: _of_order,
    top_k_p: _of_order,
    keep_top_k_p: _of_order,
}


def spare_bits(site: Site) -> float:
    """Bits between the largest value seen and the bound."""
    return -log2(site.used) if site.used else 64.0
