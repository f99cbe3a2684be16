"""A sparse run in plaintext: what quality is left where each token has only its chosen blocks and heads computed (Comet).

It says what a secure sparse run computes, in float32 and for whole sequences: predictions are made from the sparse run's own
states; a block that is not chosen adds nothing; a head that is not chosen adds nothing to this token's output, while its keys and
values are there for later tokens. It saves no time: what is not chosen is computed and set to 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..models.cache import Window, window
from ..models.config import DecoderConfig, Params
from ..models.decoder import Decoder
from ..models.losses import Batch, next_token_loss
from ..models.sequences import Reader, sequence_weights
from ..progress import Progress, silent
from .activity import dense, embedded, heads_of, normed, refuse_family
from .prepared import LayerSparsity, LowRank

_BATCH = 8  # sequences of one pass

How = Literal["predicted", "best", "threshold", "oracle"]
"""Which blocks are computed: a constant number by the layer's threshold (gate.py), as secure runs do; the best-scoring ones; all
above the threshold, whose number varies; or those that truly have most mass."""


@dataclass(frozen=True)
class Setting:
    """A sparse run. how: by what blocks are chosen. blocks, heads: how many are computed in every layer, None as the layers say.

    skip_heads: whether heads are skipped at all.
    """

    how: How = "predicted"
    blocks: int | None = None
    heads: int | None = None
    skip_heads: bool = True


class Read(NamedTuple):
    """logits [batch, n, vocabulary], and means over the rows past the prefix.

    blocks, heads [layers]: how many were computed; caught [layers]: the share of the neurons' mass in these blocks.
    """

    logits: jax.Array
    blocks: np.ndarray
    heads: np.ndarray
    caught: np.ndarray


class SparseReader:
    """Reads whole sequences [batch, n] with a decoder, sparsely. The first `skipped` positions, a prefix, are computed densely."""

    def __init__(self, decoder: Decoder, layers: Sequence[LayerSparsity], skipped: int = 0):
        refuse_family(decoder.config)
        self._config, self._skipped = decoder.config, skipped
        self._params = jax.tree_util.tree_map(jnp.asarray, decoder.params)
        self._layers = layers

    def __call__(self, tokens: np.ndarray, setting: Setting = Setting()) -> Read:
        config, params = self._config, self._params
        place = window(config, 0, tokens.shape[1], tokens.shape[1])
        rows = np.arange(tokens.shape[1]) >= self._skipped
        x, y, tallies = embedded(params, tokens), None, []
        for layer, weights in zip(self._layers, params["layers"], strict=True):
            x, y, tally = _layer(config, setting.how, weights, _sparsity(config, layer, setting), (x, y), place, rows)
            tallies.append(tally)
        blocks, heads, caught = np.asarray(tallies, np.float64).T
        table = params["embed" if config.tied_head else "head"]["table"]
        return Read(_logits(config, params["final"], table, x), blocks, heads, caught)


class _Sparsity(NamedTuple):
    """What a layer's program takes of `LayerSparsity` and `Setting`; heads is None where none is skipped."""

    block_of: Any
    neurons: LowRank
    active_blocks: Any
    threshold: Any
    heads: LowRank | None
    active_heads: Any


def _sparsity(config: DecoderConfig, layer: LayerSparsity, setting: Setting) -> _Sparsity:
    layer = layer.computing(setting.blocks, setting.heads)
    threshold = np.float32(0 if layer.threshold is None else layer.threshold)
    heads = layer.heads if setting.skip_heads else None
    return _Sparsity(layer.block_of, layer.neurons, np.int32(layer.active_blocks), threshold, heads, np.int32(layer.active_heads))


@partial(jax.jit, static_argnums=(0, 1))
def _layer(
    config: DecoderConfig, how: How, params: Params, sparsity: _Sparsity, states: Any, place: Window, rows: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A layer over x [batch, n, width], whose heads are chosen by y of the layer before; x, y and a tally [3].

    rows [n]: True where a row is computed sparsely.
    """

    def one(x: jax.Array, before: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        y = normed(config, params["attention_norm"], x)
        mixed = heads_of(config, params["qkv"], y, place)
        heads = jnp.ones(mixed.shape[:2], bool)
        if sparsity.heads is not None and before is not None:
            heads = best(sparsity.heads.scores(before), sparsity.active_heads) | ~rows[:, None]
        mixed = jnp.where(heads[..., None], mixed, 0)
        x = x + dense(params["out"], mixed.reshape(x.shape))
        hidden = jax.nn.relu(dense(params["up"], normed(config, params["ffn_norm"], x)))
        masses = block_masses(params["down"], sparsity.block_of, hidden, len(sparsity.neurons.second_bias))
        scores = masses if how == "oracle" else sparsity.neurons.scores(y)
        above = scores > sparsity.threshold
        blocks = above if how == "threshold" else best(above if how == "predicted" else scores, sparsity.active_blocks)
        blocks = blocks | ~rows[:, None]
        hidden = jnp.where(blocks[:, sparsity.block_of], hidden, 0)
        whole = masses.sum(-1)
        caught = jnp.where(whole > 0, jnp.where(blocks, masses, 0).sum(-1) / jnp.maximum(whole, 1e-12), 1)
        tally = jnp.stack([blocks.sum(-1), heads.sum(-1), caught])
        return x + dense(params["down"], hidden), y, jnp.sum(tally * rows, -1) / jnp.maximum(rows.sum(), 1)

    x, y, tally = jax.vmap(one, in_axes=(0, None if states[1] is None else 0))(*states)
    return x, y, tally.mean(0)


def best(scores: jax.Array, count: Any) -> jax.Array:
    """[rows, n] bool: the `count` largest of each row of scores [rows, n]; of equal ones the first. The count may be traced."""
    places = jnp.argsort(jnp.argsort(-1.0 * scores, axis=-1, stable=True), axis=-1)
    return places < count


def block_masses(params: Params, block_of: jax.Array, hidden: jax.Array, blocks: int) -> jax.Array:
    """[rows, blocks] of ReLU outputs [rows, ffn]: sums of the neurons' masses."""
    masses = hidden * jnp.linalg.norm(params["kernel"], axis=1)
    return masses @ (jnp.asarray(block_of)[:, None] == jnp.arange(blocks)).astype(masses.dtype)


@partial(jax.jit, static_argnums=0)
def _logits(config: DecoderConfig, params: Params, table: jax.Array, x: jax.Array) -> jax.Array:
    return Decoder(config, {}).final(params, x) @ table.T


# What it costs in quality


@dataclass(frozen=True)
class Quality:
    """Of next tokens: perplexity; accuracy, the share that has the largest logit; agreement, the share of positions whose largest
    logit is the dense model's. active_share, head_share: of blocks and heads that were computed, over layers; caught: of the
    neurons' mass, in the sparse run itself.
    """

    perplexity: float
    accuracy: float
    agreement: float
    active_share: float
    head_share: float
    caught: float


def measure_quality(
    decoder: Decoder,
    layers: Sequence[LayerSparsity],
    sequences: np.ndarray,
    skipped: int,
    settings: Sequence[Setting],
    progress: Progress = silent,
) -> list[Quality]:
    """The dense model's quality on sequences [count, n] that begin with a prefix of `skipped` tokens, then that of each setting."""
    weights = sequence_weights(sequences.shape[1], (0,) * skipped)
    dense_reader, sparse = Reader(decoder), SparseReader(decoder, layers, skipped)
    found: list[list[list[float]]] = [[] for _ in range(1 + len(settings))]
    for at in progress(range(0, len(sequences), _BATCH), "reading sparsely", f"{_BATCH} sequences"):
        rows = sequences[at : at + _BATCH]
        whole = dense_reader(rows)
        found[0].append([*_sums(whole, whole, rows, weights), 1.0, 1.0, 1.0])
        for i, setting in enumerate(settings, 1):
            read = sparse(rows, setting)
            shares = [read.blocks.mean() / layers[0].blocks, read.heads.mean() / decoder.config.heads, read.caught.mean()]
            found[i].append([*_sums(read.logits, whole, rows, weights), *shares])
    counts = [len(sequences[at : at + _BATCH]) for at in range(0, len(sequences), _BATCH)]
    means = (np.average(np.asarray(each), axis=0, weights=counts) for each in found)
    return [Quality(float(np.exp(mean[0])), *map(float, mean[1:])) for mean in means]


def _sums(logits: jax.Array, whole: jax.Array, rows: np.ndarray, weights: np.ndarray) -> list[float]:
    """Means over a batch: cross-entropy, accuracy, agreement with the dense model's logits."""
    kept = weights[:-1] > 0
    picked, theirs = (np.asarray(each.argmax(-1))[:, :-1][:, kept] for each in (logits, whole))
    right = picked == rows[:, 1:][:, kept]
    return [float(next_token_loss(logits, Batch(rows, weights))), float(right.mean()), float((picked == theirs).mean())]


__all__ = ["How", "Quality", "Read", "Setting", "SparseReader", "block_masses", "measure_quality"]
