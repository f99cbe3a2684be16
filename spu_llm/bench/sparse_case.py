"""One layer of a ReLU model on real tokens: what its secure runs take, and what they should give, in plaintext."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ..comet.activity import dense, embedded, heads_of, normed, refuse_family
from ..comet.gate import above, chosen
from ..comet.prepared import LayerSparsity
from ..comet.sparse_plain import best
from ..errors import UserError
from ..models.cache import LayerCache, Window, window
from ..models.calibration import Calibration
from ..models.config import DecoderConfig, Params
from ..models.decoder import Decoder


@dataclass(frozen=True)
class SparseModel:
    """A model, how it is made sparse, and for the plugin its calibration."""

    decoder: Decoder
    sparsity: Sequence[LayerSparsity]
    calibration: Calibration | None = None


@dataclass(frozen=True)
class LayerCase:
    """A layer and the pass of n tokens that it is measured on.

    decoder, sparsity: of this layer and the next one, whose heads it predicts, if there is one. layer: its number in the model.
    x [n, width]: what it takes; cache: rows [context, heads, head_width] before. active [n, active heads], index [n, active
    blocks]: what is predicted, in order. What it gives [n, width]: `want` dense, `want_sparse` of `active` heads and the blocks
    `index`, `want_all_heads` of all heads and these blocks.
    """

    decoder: Decoder
    sparsity: Sequence[LayerSparsity]
    layer: int
    x: np.ndarray
    cache: LayerCache
    active: np.ndarray
    index: np.ndarray
    want: np.ndarray
    want_all_heads: np.ndarray
    want_sparse: np.ndarray

    @property
    def config(self) -> DecoderConfig:
        return self.decoder.config

    @property
    def tokens(self) -> int:
        return len(self.x)

    @property
    def context(self) -> int:
        return len(self.cache.keys)


def layer_case(model: SparseModel, sequence: Sequence[int], tokens: int, layer: int | None = None) -> LayerCase:
    """The case of the last `tokens` of a sequence (prefix included) after those before; by default of the middle layer.

    Raises UserError for a model without ReLU, a layer that it has not, and a sequence that does not fit it.
    """
    config = model.decoder.config
    refuse_family(config)
    i = config.layers // 2 if layer is None else layer
    if not 0 <= i < config.layers:
        raise UserError(f"layer {layer}: the model has layers 0 to {config.layers - 1}; name one of these")
    if not 0 < tokens < len(sequence) <= config.positions:
        raise UserError(
            f"{len(sequence)} tokens, {tokens} of them in the pass: give at least one more than the pass has, and at most "
            f"{config.positions}, the model's positions"
        )
    place = window(config, 0, len(sequence), len(sequence))
    states = _States(embedded(model.decoder.params, np.asarray(sequence)[None])[0], None)
    for params in model.decoder.params["layers"][:i]:
        states = _advance(config, params, states.x, place)
    sparsity = model.sparsity[i]
    found = _run(config, model.decoder.params["layers"][i], sparsity, states, place)
    rows = slice(-tokens, None)
    cache = LayerCache(found.keys[:-tokens], found.values[:-tokens])
    decoder, following = _cut(model, i)
    return LayerCase(
        decoder,
        following,
        i,
        np.asarray(states.x)[rows],
        cache,
        _places(found.heads[rows]),
        _places(found.blocks[rows]),
        found.dense[rows],
        found.all_heads[rows],
        found.sparse[rows],
    )


@dataclass(frozen=True)
class _States:
    """x [rows, width] before a layer, and the layer before's attention_norm output, by which heads are predicted, if any."""

    x: jax.Array
    before: jax.Array | None


@dataclass(frozen=True)
class _Found:
    """A layer over a sequence: what it writes to the cache, what is predicted (bool), and its outputs."""

    keys: np.ndarray
    values: np.ndarray
    heads: np.ndarray
    blocks: np.ndarray
    dense: np.ndarray
    all_heads: np.ndarray
    sparse: np.ndarray


def _cut(model: SparseModel, i: int) -> tuple[Decoder, Sequence[LayerSparsity]]:
    """The decoder of layer i and of the next one where it is i that predicts its heads, and their sparsity."""
    end = i + 2 if i + 1 < len(model.sparsity) and model.sparsity[i + 1].heads is not None else i + 1
    decoder = model.decoder
    params = {**decoder.params, "layers": decoder.params["layers"][i:end]}
    return Decoder(replace(decoder.config, layers=end - i), params), model.sparsity[i:end]


@partial(jax.jit, static_argnums=0)
def _attended(config: DecoderConfig, params: Params, x: jax.Array, place: Window) -> tuple[jax.Array, jax.Array]:
    """attention_norm's output, and each head's [rows, heads, head_width]."""
    y = normed(config, params["attention_norm"], x)
    return y, heads_of(config, params["qkv"], y, place)


@partial(jax.jit, static_argnums=0)
def _second_half(config: DecoderConfig, params: Params, x: jax.Array, mixed: jax.Array, kept: jax.Array) -> jax.Array:
    """x after the layer from its heads' outputs, hidden units being 0 where `kept` [rows, ffn] is."""
    x = x + dense(params["out"], mixed.reshape(x.shape))
    hidden = jax.nn.relu(dense(params["up"], normed(config, params["ffn_norm"], x)))
    return x + dense(params["down"], hidden * kept)


def _advance(config: DecoderConfig, params: Params, x: jax.Array, place: Window) -> _States:
    y, mixed = _attended(config, params, x, place)
    return _States(_second_half(config, params, x, mixed, jnp.ones((len(x), config.ffn))), y)


def _run(config: DecoderConfig, params: Params, sparsity: LayerSparsity, states: _States, place: Window) -> _Found:
    x = states.x
    y, mixed = _attended(config, params, x, place)
    _, k, v = (np.asarray(part).reshape(len(x), config.heads, -1) for part in jnp.split(dense(params["qkv"], y), 3, -1))
    heads = jnp.ones((len(x), config.heads), bool)
    if sparsity.heads is not None and states.before is not None:
        heads = best(sparsity.heads.scores(states.before), sparsity.active_heads)
    scores = np.asarray(above(sparsity).scores(y))
    blocks = np.zeros(scores.shape, bool)
    np.put_along_axis(blocks, chosen(scores, 0.0, sparsity.active_blocks), True, 1)
    some, every = jnp.where(heads[..., None], mixed, 0), jnp.ones((len(x), config.ffn))
    kept = blocks[:, sparsity.block_of]
    outputs = (_second_half(config, params, x, *parts) for parts in ((mixed, every), (mixed, kept), (some, kept)))
    return _Found(k, v, *map(np.asarray, (heads, blocks, *outputs)))


def _places(mask: np.ndarray) -> np.ndarray:
    """[n, count] int64 where each row of a mask with `count` ones has them, in order."""
    return np.nonzero(mask)[1].reshape(len(mask), -1).astype(np.int64)
