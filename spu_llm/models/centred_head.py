"""An output layer whose logits are relative to a prediction of the log of their softmax's sum, for softmax without a maximum.

log sum exp(z / T) is predicted from the final normalised state h by least squares on the owner's text, as references of attention
are (`calibration.py`). The prediction is linear in h, so T times its weights are subtracted from every row of the head: the
softmax is unchanged, and exponentials of the logits, less a public constant, have a sum near 1 with nothing computed for it. The
table of the head is then no longer that of the embedding.

Where sums miss their prediction by too much, 2 log sum exp(z / 2T) is predicted instead, which is more nearly linear: a
protocol computes it as a second reference (`Refinement` in primitives/attention.py), which only has to be in its table's range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ..progress import Progress, silent
from .decoder import Decoder
from .trace import embedded, sequences, trace_layer, traced_params

_RIDGE = 3.0
_ROWS = 256  # whose logits are held at once


@dataclass(frozen=True)
class CentredHead:
    """A decoder with such a head, and what its logits x = z / temperature are on text that the prediction was not fitted on.

    log_sum: least and largest of log sum exp(x), or where `halved` of 2 log sum exp(x / 2); deviation: its standard deviation;
    least: the least x; fall: the least of x less that log. All of it is the owner's secret but what its plan makes public.
    """

    decoder: Decoder
    temperature: float
    halved: bool
    log_sum: tuple[float, float]
    deviation: float
    least: float
    fall: float

    @property
    def span(self) -> float:
        return self.log_sum[1] - self.log_sum[0]


def centred_head(
    decoder: Decoder,
    texts: Sequence[Sequence[int]],
    temperature: float,
    most: float,
    prefix: Sequence[int] = (),
    progress: Progress = silent,
) -> CentredHead:
    """Centre the head on texts (token ids), each after `prefix`; halved where log sums span more than `most`.

    What is measured of a text is held against a prediction fitted on the other half of the texts.
    """
    states = _final_states(decoder, texts, prefix, progress)
    found = _centred(decoder, states, temperature, False)
    return found if found.span <= most else _centred(decoder, states, temperature, True)


def _centred(decoder: Decoder, states: list[np.ndarray], temperature: float, halved: bool) -> CentredHead:
    head = np.asarray(decoder.head_table, np.float32)
    seen = [_measured(head, rows, temperature, 1 + halved) for rows in states]
    sums = [log_sum for log_sum, _ in seen]
    halves = [slice(1, None, 2), slice(None, None, 2)] if len(states) > 1 else [slice(None)] * 2
    fits = [_fit(states[half], sums[half]) for half in halves]  # for even texts by odd ones, and the other way round
    weights, constant = _fit(states, sums)
    log_sums, least = [], []
    for i, (rows, (log_sum, lowest)) in enumerate(zip(states, seen, strict=True)):
        missed = constant - (rows @ fits[i % 2][0] + fits[i % 2][1])  # the constant is left for a table's offset
        log_sums.append(log_sum + missed)
        least.append(lowest + missed)
    found, lows = np.concatenate(log_sums), np.concatenate(least)
    table = head - np.float32(temperature) * weights.astype(np.float32)
    untied = replace(decoder, config=replace(decoder.config, tied_head=False), params={**decoder.params, "head": {"table": table}})
    ends = float(found.min()), float(found.max())
    return CentredHead(untied, temperature, halved, ends, float(found.std()), float(lows.min()), float((lows - found).min()))


def _final_states(decoder: Decoder, texts: Sequence[Sequence[int]], prefix: Sequence[int], progress: Progress) -> list[np.ndarray]:
    """What the output layer takes at each token of each text, [tokens, width] each."""
    parts = list(sequences(prefix, texts))
    states = [embedded(decoder, part) for part in parts]
    step = jax.jit(lambda layer, x, places: trace_layer(decoder.config, layer, x, places)[0])
    for params in progress(decoder.params["layers"], "centring the head", "layer"):
        layer = traced_params(decoder.config, params)
        states = [step(layer, x, part.places) for x, part in zip(states, parts, strict=True)]
    final = jax.jit(partial(decoder.final, decoder.params["final"]))
    rows = np.concatenate([np.asarray(final(x))[part.kept] for x, part in zip(states, parts, strict=True)])
    return np.split(rows, np.cumsum([len(text) for text in texts])[:-1])


def _measured(head: np.ndarray, rows: np.ndarray, temperature: float, power: int) -> tuple[np.ndarray, np.ndarray]:
    """At each row, for logits x = z / temperature: power * log sum exp(x / power), and the least x."""
    sums, least = [], []
    for start in range(0, len(rows), _ROWS):
        logits = jnp.asarray(rows[start : start + _ROWS] @ head.T) / temperature
        sums.append(power * np.asarray(jax.nn.logsumexp(logits / power, -1), np.float64))
        least.append(np.asarray(logits.min(-1), np.float64))
    return np.concatenate(sums), np.concatenate(least)


def _fit(states: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> tuple[np.ndarray, float]:
    """Ridge regression: weights [width], as small as they can be, and a constant."""
    rows, targets = np.concatenate(states).astype(np.float64), np.concatenate(wanted)
    centre = rows.mean(0)
    rows -= centre
    gram = rows.T @ rows + _RIDGE * np.eye(len(centre))
    weights = np.linalg.solve(gram, rows.T @ (targets - targets.mean()))
    return weights, float(targets.mean() - centre @ weights)
