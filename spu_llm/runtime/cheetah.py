"""What a program is rewritten to for CHEETAH, where products send ciphertexts and single bits go by oblivious transfers.

- A product of matrices sends some 440 KB, whatever its size. A batch of products is as many as it has members: it becomes few, of
  which each member takes its own block.
- SPU's exponential and reciprocal are made of products of elements: 20 bytes each, and 157 for a triple made in batches; a square
  sends 640 KB, were it of a single number. A bit times a number takes 8. So where the exponent is known not to be positive, as in a
  softmax, exp is the product of its bits' exponentials; and the reciprocal of a sum of exponentials, which is positive, is its
  inverse root times itself.

Elsewhere products cost by their size, and all of this would be a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ClosedJaxpr, Literal

from ..primitives.stock import as_real, as_ring

_RESULTS = 1 << 14
"""Numbers that a product of several members may have, those that are thrown away with them: two ciphertexts of each party.

With more, ciphertexts cost more than products are saved, and compute grows by the number of members.
"""

_FINEST, _LEAST = 14, 4
"""exp takes bits of the exponent from 2^-14, where the format has them, which leaves an error of 3e-5 of the result, and gives 0
below -2^4. The sum is even."""

_GUARD = 8  # bits more that are kept of a product of bits' exponentials, of which every factor is rounded

_CALLS = {"pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
"""Calls that are entered, with the parameter that holds what they call."""


def rewritten(function: Callable, fraction_bits: int) -> Callable:
    """The same function of the same arrays, in operations that are cheap on CHEETAH; means something in SPU only."""

    def traced(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        outputs = _Rewriting(fraction_bits).of(closed, jax.tree_util.tree_leaves(args))
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shapes), outputs)

    return traced


class _Rewriting:
    """One pass over a function's equations, with what is known of its values."""

    def __init__(self, fraction_bits: int) -> None:
        self._bits = fraction_bits
        # by identity; values are kept with what is known of them, so that no other can get theirs
        self._given: dict[int, Any] = {}  # depends on arguments: XLA computes the rest itself, where ring integers mean nothing
        self._positive: dict[int, Any] = {}
        self._not_positive: dict[int, Any] = {}
        self._largest: dict[int, tuple[Any, Any, tuple[int, ...]]] = {}  # a maximum, of what, over which axes

    def of(self, closed: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        self._given = {id(x): x for x in arguments}
        return self.run(closed, arguments)

    def run(self, closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        jaxpr = closed.jaxpr
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        values |= dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            outputs = self._apply(eqn, [read(atom) for atom in eqn.invars])
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _apply(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name in _CALLS:
            return self.run(_closed(eqn.params[_CALLS[name]]), inputs)
        subfunctions, params = eqn.primitive.get_bind_params(eqn.params)
        bind = self._cheaper(eqn, inputs) or partial(eqn.primitive.bind, *subfunctions, **params)
        found = bind(*inputs)
        outputs = list(found) if eqn.primitive.multiple_results else [found]
        if any(id(x) in self._given for x in inputs):
            self._given |= {id(output): output for output in outputs}
        self._learn(eqn, inputs, outputs[0])
        return outputs

    def _cheaper(self, eqn: Any, inputs: Sequence[Any]) -> Callable | None:
        """What to do instead of an equation."""
        name = eqn.primitive.name
        if name == "dot_general" and eqn.params["dimension_numbers"][1][0]:
            return partial(_few_products, eqn.params["dimension_numbers"])
        if name == "exp" and id(inputs[0]) in self._not_positive and id(inputs[0]) in self._given:
            return partial(_exp, self._bits)
        if name == "div" and id(inputs[1]) in self._positive:
            if isinstance(eqn.invars[0], Literal) and eqn.invars[0].val == 1:
                return lambda _, x: _inverse(x)
            if id(inputs[0]) in self._positive:  # at most its denominator; of larger numbers the inverse's error would be seen
                return lambda number, x: number * _inverse(x)
        return None

    def _learn(self, eqn: Any, inputs: Sequence[Any], output: Any) -> None:
        name, x, key = eqn.primitive.name, inputs[0] if inputs else None, id(output)
        softmax = name == "exp" and id(x) in self._not_positive and id(x) in self._given
        if softmax or (name in ("reduce_sum", "broadcast_in_dim", "reshape") and id(x) in self._positive):
            self._positive[key] = output
        if name == "reduce_max":
            self._largest[key] = output, x, eqn.params["axes"]
        if name == "stop_gradient" and id(x) in self._largest:
            self._largest[key] = output, *self._largest[id(x)][1:]
        if name == "broadcast_in_dim" and id(x) in self._largest:
            _, of, axes = self._largest[id(x)]
            rest = tuple(axis for axis in range(of.ndim) if axis not in axes)
            if eqn.params["broadcast_dimensions"] == rest and output.ndim == of.ndim:
                self._largest[key] = output, of, axes
        if name == "sub" and id(inputs[1]) in self._largest:
            largest, of, _ = self._largest[id(inputs[1])]
            if of is x and largest.ndim == x.ndim:
                self._not_positive[key] = output


def _closed(jaxpr: Any) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def _inverse(x: Any) -> Any:
    """1 / x of x > 0. A step of Newton's takes the inverse root's error away."""
    root = jax.lax.rsqrt(x)
    y = root * root
    return y * (2.0 - x * y)


def _exp(fraction_bits: int, x: Any) -> Any:
    """exp(x) of x <= 0, off by 5e-5 at most.

    The exponent's upper and lower bits are two chains that run side by side, each the product of (bit ? exp(-2^place) : 1).
    """
    finest = min(_FINEST, fraction_bits - fraction_bits % 2)
    count = (finest + _LEAST) // 2
    lower = np.arange(count) - finest
    z = as_ring(-x) & ((1 << (fraction_bits + _LEAST)) - 1)
    left_out = np.exp(-(2.0 ** (-finest - 1)))  # in the middle
    first = np.round(np.array([left_out, 1.0]) * 2.0 ** (fraction_bits + _GUARD)).astype(np.int64)
    chains: Any = jnp.broadcast_to(first.reshape(2, *[1] * x.ndim), (2, *x.shape))
    for place in lower:
        bits = jnp.stack([(z >> (fraction_bits + int(each))) & 1 for each in (place, place + count)])
        lost = -np.expm1(-(2.0 ** np.array([place, place + count], np.float64))).reshape(2, *[1] * x.ndim)
        chains = chains - bits * as_ring(as_real(chains) * lost)
    low, high = ((as_real(chain) * 2.0**-_GUARD).astype(x.dtype) for chain in chains)
    return jnp.where(x > -(2.0**_LEAST), low * high, 0.0)


def _few_products(dimensions: Any, x: Any, y: Any) -> Any:
    """A batched product of any dimensions; its own are those of the batch, of x and of y that are left, in this order."""
    (x_sum, y_sum), (x_batch, y_batch) = dimensions
    x_left, y_left = (
        [axis for axis in range(value.ndim) if axis not in (*batch, *summed)]
        for value, batch, summed in ((x, x_batch, x_sum), (y, y_batch, y_sum))
    )
    shape = [x.shape[axis] for axis in (*x_batch, *x_left)] + [y.shape[axis] for axis in y_left]
    batch, depth = prod(x.shape[axis] for axis in x_batch), prod(x.shape[axis] for axis in x_sum)
    rows = x.transpose(*x_batch, *x_left, *x_sum).reshape(batch, -1, depth)
    columns = y.transpose(*y_batch, *y_sum, *y_left).reshape(batch, depth, -1)
    return batched(rows, columns).reshape(shape)


def batched(x: Any, y: Any) -> Any:
    """x [batch, n, k] @ y [batch, k, m], by few products: of the rows of several members with all their columns.

    As many members share a product as give _RESULTS numbers at most.
    """
    batch, n, k = x.shape
    m = y.shape[-1]
    size = max(g for g in range(1, batch + 1) if batch % g == 0 and (g == 1 or n * m * g * g <= _RESULTS))
    if size == 1:
        return x @ y
    found = []
    for at in range(0, batch, size):
        columns = y[at : at + size].transpose(1, 0, 2).reshape(k, size * m)
        every = (x[at : at + size].reshape(size * n, k) @ columns).reshape(size, n, size, m)
        found += [every[i, :, i] for i in range(size)]
    return jnp.stack(found)
