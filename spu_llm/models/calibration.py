"""What the owner measures on text before a model is used: the ranges its tables must cover, and each head's reference.

The reference of a head predicts the log of its softmax's sum from the layer's normalised input, by least squares. It stands
for the maximum in softmax, which would cost comparisons: what is left of the scores is small for nearly every token, and the
tables cover the rest (see `plan.py`). Like everything here it is the owner's secret, part of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..progress import Progress, silent
from .config import DecoderConfig
from .decoder import Decoder
from .table_sizes import PlanSizes
from .trace import MASKED, Places, embedded, sequences, trace_layer, traced_params

_RIDGE = 3.0

Reference = Literal["learned", "sink", "maxima"]


@dataclass(frozen=True)
class LayerRanges:
    """Least and largest of each quantity over the text and its possible first tokens, prefix positions left out.

    attention_squares, ffn_squares: mean square before the two norms; relative: score - reference; log_sum: log of the sum of
    exp(relative); activation: the activation's input; router: logits of experts less their mean, 0 where there are none.
    """

    attention_squares: tuple[float, float]
    ffn_squares: tuple[float, float]
    relative: tuple[float, float]
    log_sum: tuple[float, float]
    activation: tuple[float, float]
    router: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Calibration:
    """The result, one entry a layer. A reference [width + 1 + 2, heads] holds weights, bias, and slopes of `place_features`.

    reference: what stands for softmax's maximum, and what `relative` and `log_sum` were measured against: the learned ones, the
    score of position 0 (sink), or the largest of a few scores (maxima, see soal/maxima.py). sizes: where the rest is the owner's
    secret, the tables that its plan has.
    """

    layers: tuple[LayerRanges, ...]
    references: tuple[np.ndarray, ...]
    final_squares: tuple[float, float]
    tokens: int
    reference: Reference = "learned"
    sizes: PlanSizes | None = None


def calibrate(
    decoder: Decoder,
    texts: Sequence[Sequence[int]],
    prefix: Sequence[int] = (),
    progress: Progress = silent,
    firsts: Sequence[int] = (),
) -> Calibration:
    """Run texts (token ids) through the model in plaintext, layer by layer, each after `prefix`.

    firsts: tokens that a text may begin with. Each counts in the ranges as it stands alone after the prefix, and in the fit of
    the references all of them together count as much as the texts do.
    """
    config = decoder.config
    weight = min(1.0, sum(map(len, texts)) / max(1, len(firsts)))
    parts = [(part, 1.0) for part in sequences(prefix, texts)]
    parts += [(part, weight) for part in sequences(prefix, [[token] for token in firsts])]
    states = [embedded(decoder, part) for part, _ in parts]
    layers, references = [], []
    step = jax.jit(partial(_measured, config))
    for params in progress(decoder.params["layers"], "calibrating", "layer"):
        layer, seen = traced_params(config, params), []
        for i, (part, weight) in enumerate(parts):
            states[i], found = step(layer, states[i], part.places)
            rows = {name: np.asarray(value)[part.kept] for name, value in found.items()}
            seen.append(rows | {"position": part.positions[part.kept], "weight": np.full(part.kept.sum(), weight)})
        reference = _fit_reference(seen)
        references.append(reference)
        layers.append(_ranges(seen, reference))
    squares = [np.mean(np.square(np.asarray(x)[part.kept]), -1) for x, (part, _) in zip(states, parts, strict=True)]
    return Calibration(tuple(layers), tuple(references), _range(np.concatenate(squares)), sum(map(len, texts)))


def _measured(config: DecoderConfig, layer: dict[str, Any], x: jax.Array, places: Places) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One folded layer over a sequence, and everything about it that has a range; all of it [rows, ...]."""
    x, trace = trace_layer(config, layer, x, places)
    mask = places.mask[:, None]
    found = {
        "normed": trace.normed,
        "log_sum": jax.nn.logsumexp(jnp.where(mask, trace.scores, MASKED), -1),
        "least": jnp.min(jnp.where(mask, trace.scores, -MASKED), -1),
        "most": jnp.max(jnp.where(mask, trace.scores, MASKED), -1),
        "first": trace.attention_squares,
        "second": trace.ffn_squares,
        "gate": _ends(trace.hidden[:, : config.hidden]),
        "router": jnp.zeros((len(x), 1)) if config.experts is None else _ends(trace.hidden[:, 2 * config.hidden :]),
    }
    return x, found


def _ends(x: jax.Array) -> jax.Array:
    """[n, 2] the least and the largest of each row."""
    return jnp.stack([jnp.min(x, axis=-1), jnp.max(x, axis=-1)], axis=-1)


def _fit_reference(seen: list[dict[str, np.ndarray]]) -> np.ndarray:
    """Ridge regression of the log of each head's sum on the normalised input and the position: [width + 1 + 2, heads]."""
    columns = seen[0]["normed"].shape[1] + 3
    gram, moment = _RIDGE * np.eye(columns), np.zeros((columns, seen[0]["log_sum"].shape[1]))
    for part in seen:
        features = _features(part)
        weighted = (features * part["weight"][:, None]).T
        gram += weighted @ features
        moment += weighted @ part["log_sum"].astype(np.float64)
    return np.linalg.solve(gram, moment)


def _features(part: dict[str, np.ndarray]) -> np.ndarray:
    rows = part["normed"].astype(np.float64)
    return np.concatenate([rows, np.ones((len(rows), 1)), place_features(part["position"])], axis=1)


def place_features(positions: np.ndarray) -> np.ndarray:
    """[n, 2] what a reference takes from public positions: a sum grows with the number of its terms."""
    count = np.asarray(positions, np.float64) + 1
    return np.stack([np.log(count), 1 / count], axis=1)


def _ranges(seen: list[dict[str, np.ndarray]], reference: np.ndarray) -> LayerRanges:
    joined = {name: np.concatenate([part[name] for part in seen]) for name in seen[0] if name != "normed"}
    predicted = np.concatenate([_features(part) @ reference for part in seen])
    relative = np.concatenate([joined["least"] - predicted, joined["most"] - predicted])
    return LayerRanges(
        _range(joined["first"]),
        _range(joined["second"]),
        _range(relative),
        _range(joined["log_sum"] - predicted),
        _range(joined["gate"]),
        _range(joined["router"]),
    )


def _range(values: np.ndarray) -> tuple[float, float]:
    return float(np.min(values)), float(np.max(values))
