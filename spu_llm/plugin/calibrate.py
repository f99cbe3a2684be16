"""Measuring the ranges that a function's tables need, in plaintext, on samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..errors import UserError
from .engine import FloatEngine, Precision
from .plugin import Plugin
from .ranges import Ranges, Span


def calibrate(function: Plugin | Callable, *samples: tuple, **options: Any) -> Ranges:
    """Run a function, with the options of `enable`, on sample tuples of arguments; the range at every site, and a quarter more.

    Needs plaintext samples of everything, weights too: whoever has them runs it, and only the ranges leave. Given a plugin
    that has ranges, it checks the samples against these instead and returns them. Raises UserError where a sample leaves
    the ranges, or is too large for the precision.
    """
    plugin = function if isinstance(function, Plugin) else Plugin(function, **options)
    engine = FloatEngine(seen={})
    for args in samples:
        leaves = jax.tree_util.tree_leaves((tuple(args), {}))
        for engine.drift in (-1, 1):
            plugin.traced(tuple(args), {}).evaluate(engine, leaves)
    seen = engine.seen or {}
    _check_size(engine.largest, plugin.precision)
    if plugin.ranges.spans:
        _check_inside(seen, plugin.ranges)
        return plugin.ranges
    return Ranges(seen, engine.largest).widened()


def _check_size(largest: float, precision: Precision) -> None:
    if largest >= 2.0**precision.integer_bits:
        raise UserError(
            f"a value of {largest:g} in the sample does not fit {precision.integer_bits} integer bits; use "
            "enable(precision=Precision(fraction_bits=..., integer_bits=...)) with more of these and fewer of those"
        )


def _check_inside(seen: dict[str, Span], ranges: Ranges) -> None:
    for site, (low, high) in seen.items():
        given = ranges.at(site, "the sample")
        if given and not (given[0] <= low and high <= given[1]):
            raise UserError(
                f"{site}: the sample reaches [{low:g}, {high:g}], outside its range [{given[0]:g}, {given[1]:g}]; calibrate with "
                "this sample among the others"
            )
