"""What a ReLU decoder does on public text: what predictors read, which neurons fire, how much each head adds (Comet, "Predictor").

Plaintext float32 on the owner's machine, one layer after the other over all of the text, so that one layer's records are in memory
at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserError
from ..models.cache import LayerCache, Window, cache_shape, window
from ..models.config import DecoderConfig, Params
from ..models.decoder import Decoder
from ..models.layers import LayerNorm, attend
from ..progress import Progress, silent

_BATCH = 8  # sequences of one pass


class LayerActivity(NamedTuple):
    """One layer over the rows of a text, those of the model's prefix left out; float32.

    normed [rows, width]: attention_norm's output, of which q, k and v are made. ffn_normed [rows, width]: ffn_norm's. hidden
    [rows, ffn]: ReLU's output, 0 where a neuron does not fire. heads [rows, heads]: the norm of what each head adds to the residual
    stream, its output times its rows of `out`.
    """

    normed: Any
    ffn_normed: Any
    hidden: Any
    heads: Any


def refuse_family(config: DecoderConfig) -> None:
    """Raise UserError for a model whose neurons are never exactly 0."""
    if config.family != "opt":
        raise UserError(
            f"comet: a model of family {config.family} has no ReLU, so none of its neurons is silent; give one of family opt"
        )


def activity(decoder: Decoder, sequences: np.ndarray, skipped: int = 0, progress: Progress = silent) -> Iterator[LayerActivity]:
    """Each layer's records of sequences [count, n], the first `skipped` positions of each (a prefix) left out.

    rows: count * (n - skipped), a sequence after the other. Raises UserError for a model without ReLU.
    """
    config = decoder.config
    refuse_family(config)
    place = window(config, 0, sequences.shape[1], sequences.shape[1])
    states = [embedded(decoder.params, sequences[at : at + _BATCH]) for at in range(0, len(sequences), _BATCH)]
    for params in progress(decoder.params["layers"], "preparing", "layer"):
        found = []
        for i, x in enumerate(states):
            states[i], records = _traced(config, params, x, place)
            found.append([np.asarray(part)[:, skipped:].reshape(-1, part.shape[-1]) for part in records])
        yield LayerActivity(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


@partial(jax.jit, static_argnums=0)
def _traced(config: DecoderConfig, params: Params, x: jax.Array, place: Window) -> tuple[jax.Array, LayerActivity]:
    """A layer over x [batch, n, width], and its records [batch, n, ...]."""

    def one(x: jax.Array) -> tuple[jax.Array, LayerActivity]:
        y = normed(config, params["attention_norm"], x)
        mixed = heads_of(config, params["qkv"], y, place)
        x = x + dense(params["out"], mixed.reshape(x.shape))
        z = normed(config, params["ffn_norm"], x)
        hidden = jax.nn.relu(dense(params["up"], z))
        return x + dense(params["down"], hidden), LayerActivity(y, z, hidden, head_norms(params["out"], mixed))

    return jax.vmap(one)(x)


# Pieces of a layer, each for the rows of one sequence


def embedded(params: Params, tokens: np.ndarray) -> jax.Array:
    """x [batch, n, width] of whole sequences [batch, n]."""
    return jnp.asarray(params["embed"]["table"][tokens] + params["embed"]["positions"][: tokens.shape[1]])


def normed(config: DecoderConfig, params: Params, x: jax.Array) -> jax.Array:
    """A layer norm of x [n, width], its scale and bias applied."""
    out: Any = LayerNorm(config.epsilon).apply({"params": params}, x)
    return out


def dense(params: Params, x: jax.Array) -> jax.Array:
    return x @ params["kernel"] + params["bias"]


def heads_of(config: DecoderConfig, params: Params, y: jax.Array, place: Window) -> jax.Array:
    """Each head's output [n, heads, head_width] from y [n, width], before the product with `out`; no rows came before."""
    n, shape = y.shape[0], (-1, config.heads, config.head_width)
    q, k, v = (part.reshape(shape) for part in jnp.split(dense(params, y), 3, axis=-1))
    empty = LayerCache(*(jnp.zeros(cache_shape(config, n)) for _ in range(2)))
    return attend(q, k, v, empty, place)[0].reshape(shape)


def head_norms(params: Params, mixed: jax.Array) -> jax.Array:
    """[n, heads] the norm of what each head of mixed [n, heads, head_width] adds to the residual stream."""
    kernel = params["kernel"].reshape(*mixed.shape[1:], -1)
    return jnp.linalg.norm(jnp.einsum("nhd,hdw->nhw", mixed, kernel), axis=-1)


def masses(params: Params, hidden: np.ndarray) -> np.ndarray:
    """Masses [rows, ffn]: each neuron's ReLU output times the norm of its row of `down`, the norm of what it adds."""
    return hidden * np.linalg.norm(np.asarray(params["down"]["kernel"], np.float32), axis=1)
