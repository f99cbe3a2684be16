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
from .trace import MASKED, Places, embedded, sequences, trace_layer, traced_params

_RIDGE = 3.0

Reference = Literal["learned", "sink", "maxima"]


@dataclass(frozen=True)
class LayerRanges:
    """Least and largest of each quantity over the text, prefix positions left out.

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
    score of position 0 (sink), or the largest of a few scores (maxima, see soal/maxima.py).
    """

    layers: tuple[LayerRanges, ...]
    references: tuple[np.ndarray, ...]
    final_squares: tuple[float, float]
    tokens: int
    reference: Reference = "learned"


def calibrate(
    decoder: Decoder,
    texts: Sequence[Sequence[int]],
    prefix: Sequence[int] = (),
    progress: Progress = silent,
) -> Calibration:
    """Run texts (token ids) through the model in plaintext, layer by layer, each after `prefix`."""
    config = decoder.config
    parts = list(sequences(prefix, texts))
    states = [embedded(decoder, part) for part in parts]
    layers, references = [], []
    step = jax.jit(partial(_measured, config))
    for params in progress(decoder.params["layers"], "calibrating", "layer"):
        layer, seen = traced_params(config, params), []
        for i, part in enumerate(parts):
            states[i], found = step(layer, states[i], part.places)
            rows = {name: np.asarray(value)[part.kept] for name, value in found.items()}
            seen.append(rows | {"position": part.positions[part.kept]})
        reference = _fit_reference(seen)
        references.append(reference)
        layers.append(_ranges(seen, reference))
    squares = [np.mean(np.square(np.asarray(x)[part.kept]), -1) for x, part in zip(states, parts, strict=True)]
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
        "gate": trace.hidden[:, : config.hidden],
        "router": jnp.zeros((len(x), 1)) if config.experts is None else trace.hidden[:, 2 * config.hidden :],
    }
    return x, found


def _fit_reference(seen: list[dict[str, np.ndarray]]) -> np.ndarray:
    """Ridge regression of the log of each head's sum on the normalised input and the position: [width + 1 + 2, heads]."""
    features = np.concatenate([_features(part) for part in seen])
    target = np.concatenate([part["log_sum"] for part in seen]).astype(np.float64)
    gram = features.T @ features + _RIDGE * np.eye(features.shape[1])
    return np.linalg.solve(gram, features.T @ target)


def _features(part: dict[str, np.ndarray]) -> np.ndarray:
    rows = part["normed"].astype(np.float64)
    return np.concatenate([rows, np.ones((len(rows), 1)), place_features(part["position"])], axis=1)


def place_features(positions: np.ndarray) -> np.ndarray:
    """[n, 2] what a reference takes from public positions: a sum grows with the number of its terms."""
    count = np.asarray(positions, np.float64) + 1
    return np.stack([np.log(count), 1 / count], axis=1)


def _ranges(seen: list[dict[str, np.ndarray]], reference: np.ndarray) -> LayerRanges:
    joined = {name: np.concatenate([part[name] for part in seen]) for name in seen[0]}
    predicted = np.concatenate([_features(part) for part in seen]) @ reference
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
