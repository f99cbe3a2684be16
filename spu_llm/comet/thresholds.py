"""Zeros for models that have none: hidden units of small magnitude are set to 0, below a threshold a layer, without training.

Two rules are known. CATS (Lee et al., COLM 2024) looks at |silu(gate)|, which is there before the other half of the first kernel
and all of the second are computed; TEAL (Liu et al., ICLR 2025) at the hidden vector itself, which is what the second kernel is
applied to. Thresholds are quantiles over public text, so that every layer has the same share of zeros there. All of this is
plaintext: the owner's preparation, done before any secure run. Thresholds are part of what the owner knows of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserError
from ..models.cache import LayerCache, Window
from ..models.config import DecoderConfig, Params
from ..models.decoder import Decoder
from ..models.losses import Batch, next_token_loss
from ..models.sequences import Block, cut_sequences, hidden_block, sequence_pass, stacked
from ..progress import Progress, silent

Rule = Literal["gate", "hidden"]
"""Whose magnitude is compared: silu(gate) (CATS) or the hidden units (TEAL)."""
_LENGTH = 128  # tokens of a sequence that calibration reads, the prefix left out
_BATCH = 4
_SAMPLED = 1536  # positions whose magnitudes a quantile is taken of, a few million values a layer


def calibrate(
    decoder: Decoder,
    texts: Sequence[Sequence[int]],
    share: float | Sequence[float],
    rule: Rule = "hidden",
    prefix: Sequence[int] = (),
    progress: Progress = silent,
) -> np.ndarray:
    """Thresholds [layers] that set the part `share` of each layer's hidden units to 0 over texts (token ids), each after `prefix`.

    For several shares at once, [shares, layers]. Units below the threshold become 0, so a share of 0 leaves the model as it is.
    Raises UserError for a share outside 0 to 1, for no text, and for a rule that the family does not have.
    """
    shares = np.asarray(share, np.float64)
    if not ((shares >= 0) & (shares < 1)).all():
        raise UserError(f"share {share}: give shares of zeros from 0 to below 1")
    if not any(map(len, texts)):
        raise UserError("thresholds: the texts to calibrate on hold no token; give ordinary text")
    _check(decoder.config, rule)
    ids = np.concatenate([np.asarray(text, np.int32) for text in texts])
    rows = cut_sequences(ids, len(prefix) + min(_LENGTH, len(ids)), tuple(prefix))
    read = jax.jit(partial(_magnitude_pass, decoder.config, rule))
    params, every, seen = stacked(decoder.params), -(-rows[:, len(prefix) :].size // _SAMPLED), []
    for at in progress(range(0, len(rows), _BATCH), "calibrating", "batch"):
        found = np.asarray(read(params, rows[at : at + _BATCH]))[:, :, len(prefix) :]
        seen.append(found.reshape(len(found), -1, decoder.config.hidden)[:, ::every])
    values = np.concatenate(seen, axis=1).reshape(decoder.config.layers, -1)
    found = np.stack([np.quantile(layer, shares, method="higher") for layer in values], axis=-1)
    return np.where(shares[..., None] > 0, found, 0).astype(np.float32)


def magnitudes(config: DecoderConfig, rule: Rule, units: jax.Array, inputs: jax.Array) -> jax.Array:
    """[n, hidden] what is compared with a threshold, from hidden units and what the first kernel gave [n, columns]."""
    return jnp.abs(units if rule == "hidden" else jax.nn.silu(inputs[:, : config.hidden]))


class ThresholdedReader:
    """Reads whole sequences with small hidden units set to 0; one program serves all thresholds."""

    def __init__(self, decoder: Decoder, rule: Rule = "hidden"):
        _check(decoder.config, rule)
        self._config, self._params = decoder.config, stacked(decoder.params)
        self._pass = jax.jit(partial(_thresholded_pass, decoder.config, rule))

    def __call__(self, tokens: np.ndarray, thresholds: np.ndarray) -> tuple[jax.Array, np.ndarray]:
        """Logits [batch, n, vocabulary] of tokens [batch, n], and the share of zeros at each position, [layers, batch, n]."""
        if np.shape(thresholds) != (self._config.layers,):
            raise UserError(f"thresholds of shape {np.shape(thresholds)}: give one for each of {self._config.layers} layers")
        logits, zeros = self._pass(self._params, tokens, jnp.asarray(thresholds, jnp.float32))
        return logits, np.asarray(zeros)

    def perplexity(self, rows: np.ndarray, weights: np.ndarray, thresholds: np.ndarray, batch: int = 4) -> tuple[float, np.ndarray]:
        """exp of the mean cross-entropy of the next tokens of rows [count, n], and the share of zeros in each layer.

        weights [n]: 1 where a position predicts a token that counts, else 0; zeros are counted at the same positions.
        """
        total, zeros = 0.0, np.zeros(self._config.layers)
        for at in range(0, len(rows), batch):
            part = rows[at : at + batch]
            logits, found = self(part, thresholds)
            total += float(next_token_loss(logits, Batch(part, weights))) * len(part)
            zeros += np.average(found, axis=-1, weights=weights).sum(-1)
        return float(np.exp(total / len(rows))), zeros / len(rows)


def largest_share(shares: Sequence[float], perplexities: Sequence[float], loss: float = 0.01) -> float:
    """The share of zeros at which perplexity is `loss` above its first value, read off between the points measured.

    Shares rise from one that costs nothing. The first crossing counts; where there is none, the last share is given.
    """
    excess = np.asarray(perplexities, np.float64) / perplexities[0] - 1 - loss
    over = np.flatnonzero(excess > 0)
    if not len(over):
        return float(shares[-1])
    after = int(over[0])
    before = after - 1
    part = excess[before] / (excess[before] - excess[after])
    return float(shares[before] + part * (shares[after] - shares[before]))


def _check(config: DecoderConfig, rule: Rule) -> None:
    if rule == "gate" and not config.llama_like:
        raise UserError(f"family {config.family}: has no gate to compare with a threshold; use the rule hidden")
    if config.experts is not None:
        raise UserError(f"family {config.family}: experts have no thresholds; use a decoder without experts")


def _changed(config: DecoderConfig, rule: Rule, threshold: jax.Array) -> Block:
    """A layer whose units below the threshold are 0."""

    def change(units: jax.Array, inputs: jax.Array) -> jax.Array:
        return jnp.where(magnitudes(config, rule, units, inputs) < threshold, 0, units)

    return hidden_block(config, change)


def _thresholded_pass(
    config: DecoderConfig, rule: Rule, params: Params, tokens: jax.Array, thresholds: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Logits, and zeros [layers, batch, n] as parts of 1."""

    def block(weights: tuple[Params, jax.Array], x: jax.Array, cache: LayerCache, place: Window) -> tuple[jax.Array, jax.Array]:
        x, units = _changed(config, rule, weights[1])(weights[0], x, cache, place)
        return x, jnp.mean(units == 0, axis=-1)

    return sequence_pass(config, {**params, "layers": (params["layers"], thresholds)}, tokens, block)


def _magnitude_pass(config: DecoderConfig, rule: Rule, params: Params, tokens: jax.Array) -> jax.Array:
    """Magnitudes [layers, batch, n, hidden] of whole sequences [batch, n]."""

    def block(weights: Params, x: jax.Array, cache: LayerCache, place: Window) -> tuple[jax.Array, jax.Array]:
        seen: list[jax.Array] = []

        def change(units: jax.Array, inputs: jax.Array) -> jax.Array:
            seen.append(magnitudes(config, rule, units, inputs))
            return units

        x, _ = hidden_block(config, change)(weights, x, cache, place)
        return x, seen[0]

    return sequence_pass(config, params, tokens, block)[1]
