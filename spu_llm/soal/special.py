"""Activation outliers: how large each token's activations get, in the vocabulary and over text (SOAL, special tokens).

M of a token is the largest |input| over all norms, and over all activations (SiLU, GELU, ReLU), of all layers. The two are kept
apart and each is held against its own median, because norms' inputs are far larger. A norm's input is the residual stream as
the plugin's norms take it: centred where the family's norms subtract the mean (`models/folded.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..models.config import DecoderConfig
from ..models.decoder import Decoder
from ..models.trace import Places, Sequenced, embedded, sequences, trace_layer, traced_params
from ..progress import Progress, silent

KINDS = ("norm", "activation")
"""What the two columns of every table of maxima are of."""
_FORMAT = 1


def special(maxima: np.ndarray, median: np.ndarray, eta: float) -> list[int]:
    """Rows of maxima [n, 2] that are above eta times their median [2] in either column, the worst first."""
    worst = ratios(maxima, median)
    return [int(i) for i in np.argsort(-worst, kind="stable") if worst[i] > eta]


def ratios(maxima: np.ndarray, median: np.ndarray) -> np.ndarray:
    """[n] the larger of a row's two ratios to the median."""
    return np.max(maxima / median, axis=-1)


class Activations:
    """M of tokens after a prefix, in plaintext float32.

    What was measured is kept in `folder` after every sequence, so that a run that was cut short goes on where it stopped. The
    folder must belong to this checkpoint: names of files tell prefix and passages, not weights.
    """

    def __init__(self, decoder: Decoder, folder: Path, progress: Progress = silent):
        self.decoder = decoder
        self._folder = folder
        self.progress = progress

    def of_vocabulary(self, prefix: Sequence[int]) -> np.ndarray:
        """[vocabulary, 2] M of every token, each alone after the prefix."""
        return self.of(prefix, [[token] for token in range(self.decoder.config.vocabulary)], "every token")

    def of(self, prefix: Sequence[int], passages: Sequence[Sequence[int]], what: str = "") -> np.ndarray:
        """[tokens, 2] M of every position of the passages, each passage after the prefix. `what` they are; unnamed, no progress."""
        parts = list(sequences(prefix, passages))
        path = self._folder / f"{_digest(prefix, passages)}.npy"
        found = _kept(path)
        ends = np.cumsum([0, *(part.kept.sum() for part in parts)])
        done = int(np.searchsorted(ends, len(found)))
        if done == len(ends) or ends[done] != len(found):
            found, done = np.zeros((0, len(KINDS)), np.float32), 0
        left = parts[done:]
        for part in self.progress(left, f"{what} after {list(prefix)}", "sequence") if what and left else left:
            found = np.concatenate([found, self._rows(part)])
            _keep(path, found)
        return found

    def of_prefix(self, prefix: Sequence[int]) -> np.ndarray:
        """[n, 2] M of the prefix's own tokens in their places."""
        return self.of((), [list(prefix)]) if prefix else np.zeros((0, len(KINDS)), np.float32)

    def _rows(self, part: Sequenced) -> np.ndarray:
        x, places = embedded(self.decoder, part), jax.tree_util.tree_map(jnp.asarray, part.places)
        found = []
        for layer in self._layers:
            x, maxima = self._step(layer, x, places)
            found.append(maxima)
        last = jnp.stack([_largest(x), jnp.zeros(len(x))], -1)  # the final norm's input
        return np.asarray(jnp.stack([*found, last]).max(0))[part.kept]

    @cached_property
    def _layers(self) -> list[dict[str, Any]]:
        return [traced_params(self.decoder.config, params) for params in self.decoder.params["layers"]]

    @cached_property
    def _step(self) -> Any:
        return jax.jit(partial(_maxima, self.decoder.config))


def _maxima(config: DecoderConfig, layer: dict[str, Any], x: jax.Array, places: Places) -> tuple[jax.Array, jax.Array]:
    x, trace = trace_layer(config, layer, x, places)
    norm = jnp.maximum(_largest(trace.attention_input), _largest(trace.ffn_input))
    return x, jnp.stack([norm, _largest(trace.hidden[:, : config.hidden])], -1)


def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), axis=-1)


def _digest(prefix: Sequence[int], passages: Sequence[Sequence[int]]) -> str:
    asked = json.dumps([_FORMAT, list(map(int, prefix)), [list(map(int, passage)) for passage in passages]])
    return hashlib.sha256(asked.encode()).hexdigest()[:16]


def _keep(path: Path, found: np.ndarray) -> None:
    """Write the file whole or not at all; for the owner alone to read, as the model is."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as file:
        np.save(file, found)
    part.replace(path)


def _kept(path: Path) -> np.ndarray:
    """What was measured before; nothing where there is nothing, or nothing whole."""
    try:
        found = np.load(path)
    except (OSError, ValueError, EOFError):
        return np.zeros((0, len(KINDS)), np.float32)
    return found
