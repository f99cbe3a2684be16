"""How a primitive is defined: its plaintext meaning, its stock SPU meaning, and its dealer protocol."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.core import Primitive, ShapedArray
from jax.interpreters import batching, mlir, xla

_SPU_PLATFORM = "interpreter"  # the platform SPU's frontend lowers for

PROTOCOLS: dict[Primitive, Callable] = {}
"""Dealer protocols by primitive; each is a generator that yields what it needs opened (see `dealing.py`)."""


EAGER: set[Primitive] = set()
"""Primitives that open all their operands: one that is there may be opened while another is still being computed."""


def define(
    name: str, plain: Callable, stock: Callable, dealer: Callable, batch: Callable | None = None, eager: bool = False
) -> Primitive:
    """A primitive over int64 arrays with static keyword parameters and one result.

    `plain` runs on CPU, GPU and under `jax.jit`; `stock` is lowered for SPU where no dealer is at hand; `dealer` is used by
    `dealing.with_material`; `eager` says that it opens all its operands. `batch(args, axes, **params)` is its `vmap` rule,
    by default for element-wise primitives.
    """
    primitive = Primitive(f"spu_llm.{name}")
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(partial(_abstract, plain))
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=False))
    mlir.register_lowering(primitive, mlir.lower_fun(stock, multiple_results=False), platform=_SPU_PLATFORM)
    batching.primitive_batchers[primitive] = batch or partial(_elementwise, primitive)
    PROTOCOLS[primitive] = dealer
    if eager:
        EAGER.add(primitive)
    return primitive


def _abstract(plain: Callable, *avals: Any, **params: Any) -> Any:
    out = jax.eval_shape(partial(plain, **params), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    return ShapedArray(out.shape, out.dtype)


def _elementwise(primitive: Primitive, args: tuple, axes: tuple, **params: Any) -> tuple[Any, int]:
    """Move every batch axis to the front; operands without one get an axis of length 1, aligned for broadcasting."""
    rank = max(arg.ndim - (axis is not batching.not_mapped) for arg, axis in zip(args, axes, strict=True))

    def aligned(arg: Any, axis: Any) -> Any:
        arg = arg[None] if axis is batching.not_mapped else jax.numpy.moveaxis(arg, axis, 0)
        return arg.reshape(arg.shape[0], *[1] * (rank + 1 - arg.ndim), *arg.shape[1:])

    return primitive.bind(*map(aligned, args, axes), **params), 0
