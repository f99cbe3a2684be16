"""Conformant maxima: what stands for a row's largest score in softmax, and how far it is off (SOAL, softmax).

Three references, each of a head and a row of scores over the cache:

- `sink`: the score of position 0, which costs nothing;
- `learned`: a prediction of the log of the sum from the layer's input (`models/calibration.py`): one column more in a product
  that is paid for anyway;
- `maxima`: the largest score among the prefix, the first position after it and the last two; constantly many, but found by
  comparisons.

Softmax is the same whatever is subtracted; what counts is that exp(score - reference) and the sums stay in their tables. So the
ranges on text decide, by `models/plan.py` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, log2
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserError
from ..models.calibration import Calibration, Reference
from ..models.config import DecoderConfig
from ..models.decoder import Decoder
from ..models.plan import plan_model
from ..models.trace import MASKED, Sequenced, embedded, sequences, trace_layer, traced_params
from ..progress import Progress, silent

_MAXIMUM = 3  # messages of one maximum of scores (docs/protocols.md)
_REFINEMENT = 2  # messages that a refined reference adds to a layer
_REACH = 12.0  # how far above its reference a score may be: a refined one looks up exp of half of that, right up to 6

Pairs = tuple[tuple[float, float], ...]
"""Least and largest, a pair for each layer."""


@dataclass(frozen=True)
class ScoreReference:
    """A score that stands for the maximum. coverage: share of rows where it is the maximum; miss: how far it is below it at
    most, 0 where it never is; both [layers][heads]. relative: of score - reference; log_sum: of the log of the sum of exp of that.
    """

    coverage: tuple[tuple[float, ...], ...]
    miss: tuple[tuple[float, ...], ...]
    relative: Pairs
    log_sum: Pairs

    @property
    def mean_coverage(self) -> float:
        return float(np.mean(self.coverage))

    @property
    def largest_miss(self) -> float:
        return float(np.max(self.miss))


@dataclass(frozen=True)
class Choice:
    """The reference to use, the messages that each would add to a pass through all layers, and why others cannot be used."""

    reference: Reference
    messages: dict[Reference, int]
    refused: dict[Reference, str]


@dataclass(frozen=True)
class MaximaReport:
    """Measured over `rows` positions of text after the prefix, prefix positions left out; `positions` are compared by `maxima`.

    Ranges are also over tokens that a text may begin with. learned_relative, learned_log_sum: those of the learned references.
    """

    rows: int
    positions: int
    maxima: ScoreReference
    sink: ScoreReference
    learned_relative: Pairs
    learned_log_sum: Pairs
    choice: Choice


class _Columns(NamedTuple):
    """Which columns of scores stand for the maximum: mask [n, n] bool of `maxima`, sink [n] the column of position 0."""

    mask: Any
    sink: Any


def measure_maxima(
    decoder: Decoder,
    texts: Sequence[Sequence[int]],
    prefix: Sequence[int],
    calibration: Calibration,
    progress: Progress = silent,
    firsts: Sequence[int] = (),
) -> MaximaReport:
    """Run texts, and tokens that they may begin with, through the model in plaintext, layer by layer, each after `prefix`.

    `calibration` is of the same. Raises UserError where no reference fits the tables.
    """
    config = decoder.config
    of_text = list(sequences(prefix, texts))
    parts = [*of_text, *sequences(prefix, [[token] for token in firsts])]
    states, columns = [embedded(decoder, part) for part in parts], [_columns(part) for part in parts]
    step = jax.jit(partial(_measured, config))
    found: list[dict[str, dict[str, np.ndarray]]] = []
    for params in progress(decoder.params["layers"], "measuring maxima", "layer"):
        layer, seen = traced_params(config, params), []
        for i, part in enumerate(parts):
            states[i], rows = step(layer, states[i], part.places, columns[i])
            seen.append(jax.tree_util.tree_map(lambda value, kept=part.kept: np.asarray(value)[kept], rows))
        found.append(jax.tree_util.tree_map(lambda *values: np.concatenate(values), *seen))
    rows = sum(map(len, texts))
    maxima, sink = (_reference([layer[name] for layer in found], rows) for name in ("maxima", "sink"))
    compared = len(prefix) + 3
    return MaximaReport(
        rows=rows,
        positions=compared,
        maxima=maxima,
        sink=sink,
        learned_relative=tuple(layer.relative for layer in calibration.layers),
        learned_log_sum=tuple(layer.log_sum for layer in calibration.layers),
        choice=choose(config, calibration, maxima, sink, compared),
    )


def choose(config: DecoderConfig, calibration: Calibration, maxima: ScoreReference, sink: ScoreReference, positions: int) -> Choice:
    """The reference of the fewest messages with which the model's ranges fit the tables; of equals sink, learned, maxima.

    `maxima` takes a tree of comparisons of `positions` scores. Raises UserError, with the reason, where none fits.
    """
    a_layer: dict[Reference, int] = {"sink": 0, "learned": 0, "maxima": _MAXIMUM * ceil(log2(positions))}
    scores = {"sink": sink, "maxima": maxima}
    messages: dict[Reference, int] = {}
    refused: dict[Reference, str] = {}
    for name, own in a_layer.items():
        ranged = by_reference(calibration, name, scores[name]) if name in scores else calibration
        try:
            plan = plan_model(config, _within_reach(ranged))
        except UserError as error:
            refused[name] = str(error)
            continue
        refined = sum(block.softmax.refinement is not None for block in plan.blocks)
        messages[name] = own * config.layers + _REFINEMENT * refined
    if not messages:
        raise UserError(refused["learned"])
    best = min(messages, key=lambda name: messages[name])
    return Choice(best, messages, refused)


def _within_reach(calibration: Calibration) -> Calibration:
    """The calibration; UserError where scores are so far above their reference that not even a refined one finds them."""
    high, i = max((layer.relative[1], i) for i, layer in enumerate(calibration.layers))
    if high > _REACH:
        raise UserError(f"layer {i}: scores reach {high:.1f} above their reference on the calibration text; tables take {_REACH:g}")
    return calibration


def by_reference(calibration: Calibration, name: Reference, reference: ScoreReference) -> Calibration:
    """The calibration with the ranges that softmax has under a score as its reference."""
    pairs = zip(calibration.layers, reference.relative, reference.log_sum, strict=True)
    return replace(calibration, layers=tuple(replace(layer, relative=r, log_sum=s) for layer, r, s in pairs), reference=name)


def by_choice(calibration: Calibration, report: MaximaReport) -> Calibration:
    """The calibration, which is by learned references, by the reference that was chosen."""
    name = report.choice.reference
    if name == "learned":
        return calibration
    return by_reference(calibration, name, report.maxima if name == "maxima" else report.sink)


def conformant(part: Sequenced) -> np.ndarray:
    """[n, n] bool: the columns that `maxima` looks at for each row: prefix, first position, the last two up to the row itself."""
    n, own = len(part.tokens), part.passage
    same, row, column = own[:, None] == own[None, :], np.arange(n)[:, None], np.arange(n)[None, :]
    first = same & (part.positions == _start(part))[None, :]
    last = same & (column <= row) & (column >= row - 1)
    return part.places.mask & (first | last | (own < 0)[None, :])


def _start(part: Sequenced) -> int:
    """Positions of the prefix."""
    return int(np.sum(part.passage == -1))


def _columns(part: Sequenced) -> _Columns:
    mask = conformant(part)
    return _Columns(mask, mask.argmax(-1))  # the first column of a row's own is position 0


def _measured(config: DecoderConfig, layer: dict[str, Any], x: jax.Array, places: Any, columns: _Columns) -> Any:
    """One folded layer over a sequence; by reference the rows' [n, heads] misses and ranges."""
    x, trace = trace_layer(config, layer, x, places)
    seen, scores = places.mask[:, None], trace.scores
    most, least = jnp.max(jnp.where(seen, scores, MASKED), -1), jnp.min(jnp.where(seen, scores, -MASKED), -1)
    log_sum = jax.nn.logsumexp(jnp.where(seen, scores, MASKED), -1)

    def against(reference: jax.Array) -> dict[str, jax.Array]:
        return {"miss": most - reference, "low": least - reference, "log_sum": log_sum - reference}

    maxima = jnp.max(jnp.where(columns.mask[:, None], scores, MASKED), -1)
    sink = jnp.take_along_axis(scores, columns.sink[:, None, None], axis=-1)[..., 0]
    return x, {"maxima": against(maxima), "sink": against(sink)}


def _reference(layers: list[dict[str, np.ndarray]], rows: int) -> ScoreReference:
    """Coverage and misses of the first `rows`, which are text; ranges of all."""
    return ScoreReference(
        tuple(tuple(np.mean(layer["miss"][:rows] <= 0, axis=0).tolist()) for layer in layers),
        tuple(tuple(np.max(layer["miss"][:rows], axis=0).tolist()) for layer in layers),
        tuple((float(layer["low"].min()), float(layer["miss"].max())) for layer in layers),
        tuple((float(layer["log_sum"].min()), float(layer["log_sum"].max())) for layer in layers),
    )
