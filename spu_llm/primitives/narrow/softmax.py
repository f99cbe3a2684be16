"""Softmax at a cost that is constant in length but for one exponential a score: exp(score - reference) / sum.

Any reference cancels in the quotient; it must be near the maximum, or the log of the sum, only as far as ranges go (SOAL). Hidden
scores are replaced by 0 before exp and their weights by 0 after it, both by the public mask, so that what they hold does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, exp, log, log2
from typing import Any

import jax.numpy as jnp

from .chain import Chain
from .coefficients import chains
from .exponential import exponential, exponential_plan
from .maximum import largest
from .pieces import Pieces
from .reciprocal import reciprocal, reciprocal_plan

_ROUNDED = 1.1  # how far errors may carry a sum
_LARGEST_SUM, _LEAST_SUM = 2.0**8, 2.0**-9  # beyond, the inverse of a sum, or the sum itself, has too few bits


@dataclass(frozen=True)
class SoftmaxPlan:
    """exp: of score - reference - drop, or of half of it; inverse: of the sum of weights.

    halved: where scores or sums span too much, weights are the squares of exp((score - reference) / 2) times this inverse of its
    sum. What they add up to lies between gain^2 / length and gain^2 whatever the reference missed. 2 k + 17 messages and 44 bytes a
    score more on SEMI2K.
    """

    exp: Chain
    inverse: Pieces
    drop: float = 0.0
    halved: Pieces | None = None


def softmax(scores: Any, mask: Any, reference: Any, plan: SoftmaxPlan) -> Any:
    """Softmax over the last axis where the public `mask` is True; `reference` [..., 1] is what scores are taken relative to."""
    weights = softmax_weights(scores - reference, mask, plan)
    return weights * inverse_sum(weights, plan)


def softmax_weights(relative: Any, mask: Any, plan: SoftmaxPlan) -> Any:
    """What softmax is up to a factor, from scores less their reference; 0 where the mask is not."""
    relative = relative if plan.halved is None else relative * 0.5
    kept = jnp.where(mask, relative - plan.drop if plan.drop else relative, 0.0)
    weights = jnp.where(mask, exponential(kept, plan.exp), 0.0)
    if plan.halved is None:
        return weights
    normal = weights * _inverse_sum(weights, plan.halved)
    return jnp.where(mask, normal * normal, 0.0)  # CHEETAH may truncate 0 to a unit less


def inverse_sum(weights: Any, plan: SoftmaxPlan) -> Any:
    """1 / sum over the last axis, which stays with length 1."""
    return _inverse_sum(weights, plan.inverse)


def _inverse_sum(weights: Any, plan: Pieces) -> Any:
    return reciprocal(jnp.sum(weights, axis=-1, keepdims=True), plan)


def conformant_maximum(scores: Any, columns: Any) -> Any:
    """The largest of a few scores of each row: scores [..., n, t], public columns [n, c] -> [..., n, 1].

    Columns of the prefix, the first and the last two positions hold the row's maximum nearly always (SOAL); whatever t, the cost
    is a tree of c - 1 comparisons.
    """
    index = jnp.broadcast_to(columns, (*scores.shape[:-1], columns.shape[-1]))
    return largest(jnp.take_along_axis(scores, index, axis=-1, mode="promise_in_bounds"))


def softmax_plan(relative: tuple[float, float], log_sum: tuple[float, float], length: int) -> SoftmaxPlan:
    """For rows up to `length` of scores less their reference, and logs of the sum of their exponentials, in these ranges.

    Raises ValueError where no plan reaches so far.
    """
    inverse, drop = _inverse(*log_sum)
    if inverse is not None and relative[0] - drop >= chains("exponential")[-1].low:
        return SoftmaxPlan(exponential_plan(relative[0] - drop, relative[1] - drop), inverse, drop)
    # the sum of square roots lies between the root of the sum and that of length times the sum
    half = log_sum[0] / 2, (log_sum[1] + log(length)) / 2
    halved, drop = _inverse(*half)
    if halved is None:
        raise ValueError(
            f"sums of their exponentials from e^{log_sum[0]:.1f} to e^{log_sum[1]:.1f} over {length} scores span too much"
        )
    gain = 2.0 ** min(4, ceil(log2(length) / 2))
    last = reciprocal_plan(gain**2 / length / _ROUNDED, gain**2 * _ROUNDED)
    exponential_of_half = exponential_plan(relative[0] / 2 - drop, relative[1] / 2 - drop)
    return SoftmaxPlan(exponential_of_half, last, drop, replace(halved, gain=gain))


def _inverse(low: float, high: float) -> tuple[Pieces | None, float]:
    """A plan for the inverse of sums, given their logs, and what to subtract from these; None where they span too much."""
    drop = ceil(2 * max(0.0, high - log(_LARGEST_SUM))) / 2  # public, so to halves only
    if low - drop < log(_LEAST_SUM):
        return None, 0.0
    return reciprocal_plan(exp(low - drop), exp(high - drop)), drop
