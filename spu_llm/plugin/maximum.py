"""The maximum over axes, where a function uses it for more than to steady a softmax."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp

from ..errors import UserError
from .engine import Engine
from .values import Masked, Peak, Secret


def exact_maximum(engine: Engine, where: str, peak: Peak) -> Secret:
    """The maximum itself, for whatever else it is used: a tree of comparisons, 3 rounds a level."""
    if isinstance(peak.scores, Masked):
        raise UserError(f"{where}: the maximum of masked scores is used other than to steady a softmax; use jax.nn.softmax")
    scores = peak.scores
    kept = tuple(size for i, size in enumerate(scores.shape) if i not in peak.axes)

    def make() -> Any:
        def last(raw: Any) -> Any:
            return jnp.moveaxis(raw, peak.axes, range(-len(peak.axes), 0)).reshape(*kept, -1)

        x = engine.moved(last, scores.array())
        while (n := x.shape[-1]) > 1:
            left, right = (engine.moved(partial(_part, place=place), x) for place in (slice((n + 1) // 2), slice(n // 2, None)))
            x = engine.plus(right, engine.relu(engine.minus(left, right)))
        return engine.moved(lambda raw: jnp.broadcast_to(raw.reshape(_spread(kept, peak)), peak.shape), x)

    return Secret(peak.shape, scores.dtype, make)


def _part(raw: Any, place: slice) -> Any:
    return raw[..., place]


def _spread(kept: tuple[int, ...], peak: Peak) -> tuple[int, ...]:
    """The shape of a maximum with axes of length 1 where the peak was broadcast, right for maxima kept or dropped in place."""
    if len(peak.shape) == len(kept):
        return kept
    rest = iter(kept)
    return tuple(1 if i in peak.axes else next(rest) for i in range(len(peak.shape)))
