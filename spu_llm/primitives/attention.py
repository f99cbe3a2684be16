"""Attention of new tokens over a cache of opened rows: keys, values and queries are opened once each, all heads together.

Softmax is exp(s - reference) / sum. The reference stands for the maximum, which would cost comparisons: the score of the sink
position, a prediction of the log of the sum that comes with the queries, or the largest of a few scores. 4 rounds after q, k, v:
these; the scores; their exponentials and sums; the mixed values and the inverse sums. 16 bytes for each score, 8 for each
element of q, k, v and of the result, 16 for each head and token. A plan with `power`, a refinement or comparisons takes more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..dealer.table import Table
from .active import active_contract
from .compare import maximum
from .contract import contract
from .fixed import Fixed
from .lookup import lookup
from .rows import append, first_rows
from .scale import scale

_DIFFERENCE_BITS = 8


@dataclass(frozen=True)
class Refinement:
    """A second reference, for heads whose sum the first one misses by far: twice the log of the sum of exp(relative / 2).

    It lies between the log of the sum of exp(relative) and that plus the log of the number of terms, so what is left of
    the sums is at most 1 and at least 1 / terms, whatever the first reference missed. 2 rounds, 8 bytes a score more.
    """

    exp: Table  # exp, of half the relative scores
    log: Table  # twice the log


@dataclass(frozen=True)
class SoftmaxPlan:
    """exp: table of exp(score - reference); inverse: of 1 / sum.

    Where sums span more than a table can hold, `power` is a table of powers of two near 1 / sum: the sum is brought near
    1 by it before `inverse` is looked up, for 2 more rounds.
    """

    exp: Table
    inverse: Table
    power: Table | None = None
    refinement: Refinement | None = None
    bits: int = 14


class RowCache(NamedTuple):
    """Opened keys and values of one layer, [capacity, groups, head_width] each."""

    keys: Fixed
    values: Fixed


class Place(NamedTuple):
    """Where n new tokens stand: `start` [] their first row, `mask` [n, length] 0/1 integers; public all.

    columns [n, c]: the cache rows whose largest score is a token's reference (`conformant_maximum`), where that is wanted.
    """

    start: Any
    mask: Any
    columns: Any = None


def attend(
    q: Fixed, k: Fixed, v: Fixed, cache: RowCache, place: Place, plan: SoftmaxPlan, reference: Fixed | None = None
) -> tuple[Fixed, RowCache]:
    """q [n, groups, queries, head_width] (scaled by 1/sqrt(head_width)), k, v [n, groups, head_width] -> [n, groups, queries,
    head_width] with 2 * bits fraction bits, and the cache with the new rows.

    `reference` [n, groups, queries] is what scores are taken relative to, by default the largest at `place.columns`, or that of
    position 0 where there are none.
    """
    cache = RowCache(append(cache.keys, k, place.start), append(cache.values, v, place.start))
    length = place.mask.shape[1]
    keys, values = first_rows(cache.keys, length), first_rows(cache.values, length)
    scores = contract("ngqd,tgd->gqnt", q, keys, plan.bits)
    if reference is not None:
        reference = reference.with_raw(reference.raw.transpose(1, 2, 0)[..., None])
    weights = _weights(scores - _origin(scores, reference, place), place.mask, plan)
    mixed = contract("gqnt,tgd->gqnd", weights, values, plan.bits)
    out = divide(mixed, weights.sum(-1, keepdims=True), plan)
    return out.with_raw(out.raw.transpose(2, 0, 1, 3)), cache


def attend_active(
    q: Fixed, index: Any, k: Fixed, v: Fixed, cache: RowCache, place: Place, plan: SoftmaxPlan, reference: Fixed | None = None
) -> tuple[Fixed, RowCache]:
    """As `attend`, for each token by the heads `index` [n, active] alone (public; see active.py), each a group of one query.

    q [n, active, head_width] -> [n, active, head_width]; k, v [n, heads, head_width] are of all heads, so that the cache has no
    gaps. `reference` [n, active]. The rounds of `attend`; bytes of q, scores and results are those of active heads.
    """
    cache = RowCache(append(cache.keys, k, place.start), append(cache.values, v, place.start))
    length = place.mask.shape[1]
    keys, values = first_rows(cache.keys, length), first_rows(cache.values, length)
    scores = _heads_first(active_contract("nbd,tbd->nbt", q, keys, index, plan.bits))
    if reference is not None:
        reference = reference.with_raw(reference.raw.T[..., None])
    weights = _weights(scores - _origin(scores, reference, place), place.mask, plan)
    mixed = active_contract("nbt,tbd->nbd", _heads_first(weights), values, index, plan.bits)
    return divide(mixed, _heads_first(weights.sum(-1, keepdims=True)), plan), cache


def _heads_first(x: Fixed) -> Fixed:
    """[n, active, t] to [active, n, t], and back."""
    return x.with_raw(jnp.swapaxes(x.raw, 0, 1))


def _origin(scores: Fixed, reference: Fixed | None, place: Place) -> Fixed:
    """What scores [..., n, t] are relative to, [..., n, 1]."""
    if reference is not None:
        return reference
    return scores[..., :1] if place.columns is None else conformant_maximum(scores, place.columns)


def conformant_maximum(scores: Fixed, columns: Any) -> Fixed:
    """The largest of a few scores of each row, which is the row's maximum nearly always: scores [..., n, t] -> [..., n, 1].

    columns: public [n, c], those of the prefix, the first and the last two positions (SOAL, "conformant maxima"). ceil(log2(c))
    comparisons deep, whatever t: 3 rounds and 24 bytes a row and comparison. Scores differ by less than 2^8.
    """
    index = jnp.broadcast_to(columns, (*scores.shape[:-1], columns.shape[-1]))
    found = scores.with_raw(jnp.take_along_axis(scores.raw, index, axis=-1, mode="promise_in_bounds"))
    while (count := found.shape[-1]) > 1:
        half = count // 2
        larger = maximum(found[..., :half], found[..., half : 2 * half], found.bits + _DIFFERENCE_BITS)
        found = found.with_raw(jnp.concatenate([larger.raw, found.raw[..., 2 * half :]], axis=-1))
    return found


def softmax(scores: Fixed, mask: Any, plan: SoftmaxPlan, reference: Fixed | None = None) -> Fixed:
    """Softmax over the last axis where the public 0/1 integers `mask` are 1.

    3 rounds and 16 bytes an element; with `power` 5 rounds and 24 bytes; with a refinement 2 rounds and 8 bytes more.
    """
    origin = scores[..., :1] if reference is None else reference
    weights = _weights(scores - origin, mask, plan)
    return divide(weights, weights.sum(-1, keepdims=True), plan)


def _weights(relative: Fixed, mask: Any, plan: SoftmaxPlan) -> Fixed:
    """exp of scores relative to their reference; 0 where the mask is. Masked scores look up exp(0), so no range is left."""
    relative = relative.times_integer(mask)
    if plan.refinement is not None:
        half = Fixed(relative.raw, relative.bits + 1, relative.modulus)
        total = lookup(half, plan.refinement.exp, modulus=64).times_integer(mask).sum(-1, keepdims=True)
        relative = (relative - lookup(total, plan.refinement.log, modulus=64)).times_integer(mask)
    return lookup(relative, plan.exp, modulus=64).times_integer(mask)


def divide(x: Fixed, total: Fixed, plan: SoftmaxPlan) -> Fixed:
    """x / total, for total > 0 [..., 1]."""
    if plan.power is None:
        inverse = lookup(total, plan.inverse, modulus=64)
        return scale(x, inverse, plan.bits, plan.bits)
    power = lookup(total, plan.power, modulus=64)
    near_one = scale(total, power, plan.bits, plan.bits)
    inverse = lookup(near_one, plan.inverse, modulus=64)
    return scale(scale(x, power, plan.bits, plan.bits), inverse, plan.bits, plan.bits)
