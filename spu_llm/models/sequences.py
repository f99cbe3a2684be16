"""Whole sequences through a decoder, without a cache, all layers in one scanned function; and texts cut into sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserError
from .cache import LayerCache, Window, cache_shape, window
from .config import DecoderConfig, Params
from .decoder import Decoder

Block = Callable[[Any, jax.Array, LayerCache, Window], tuple[jax.Array, Any]]
"""(a layer's weights, x [n, width], an empty cache, where the n tokens stand) -> (x after the layer, what is kept of it)."""

Change = Callable[[jax.Array, jax.Array], jax.Array]
"""(hidden units [n, hidden], what the first kernel gave them [n, columns]) -> the units that the second kernel is applied to."""


@partial(jax.jit, static_argnums=0)
def sequence_logits(config: DecoderConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Logits [batch, n, vocabulary] of whole sequences [batch, n]. `params` has its layers `stacked`."""

    def block(weights: Params, x: jax.Array, cache: LayerCache, place: Window) -> tuple[jax.Array, None]:
        return Decoder(config, {}).block(weights, x, cache, place)[0], None

    return sequence_pass(config, params, tokens, block)[0]


def sequence_pass(config: DecoderConfig, params: Params, tokens: jax.Array, block: Block) -> tuple[jax.Array, Any]:
    """Logits of whole sequences [batch, n] through layers that `block` computes, and what it keeps, as [layers, batch, ...].

    `block` is given one layer of params["layers"], whatever that holds, stacked.
    """
    n = tokens.shape[1]
    place = window(config, 0, n, n)
    empty = LayerCache(*(jnp.zeros(cache_shape(config, n)) for _ in range(2)))
    x = params["embed"]["table"][tokens]
    if "positions" in params["embed"]:
        x = x + params["embed"]["positions"][:n]

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, Any]:
        return jax.vmap(lambda row: block(weights, row, empty, place))(x)

    x, kept = jax.lax.scan(layer, x, params["layers"])
    table = params["embed" if config.tied_head else "head"]["table"]
    return Decoder(config, {}).final(params["final"], x) @ table.T, kept


def hidden_block(config: DecoderConfig, change: Change | None = None, keep: Literal["units", "inputs"] = "units") -> Block:
    """A decoder's own layer, which keeps its hidden units [n, hidden], after `change` where one is given, or what the first kernel
    gave them.

    Raises UserError for a mixture of experts, whose units are many small layers'.
    """
    if config.experts is not None:
        raise UserError(f"family {config.family}: hidden units of experts are not read; use a decoder without experts")

    def block(weights: Params, x: jax.Array, cache: LayerCache, place: Window) -> tuple[jax.Array, jax.Array]:
        seen: dict[str, jax.Array] = {}

        def intercept(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
            name = context.module.name
            if name == "down":
                seen["units"] = args[0] if change is None else change(args[0], seen["inputs"])
                return call(seen["units"])
            found = call(*args, **kwargs)
            if name in ("up", "gate_up"):
                seen["inputs"] = found
            return found

        with nn.intercept_methods(intercept):
            x, _ = Decoder(config, {}).block(weights, x, cache, place)
        return x, seen[keep]

    return block


class Reader:
    """Reads whole sequences with a decoder: logits [batch, n, vocabulary] as a JAX array."""

    def __init__(self, decoder: Decoder):
        self._config, self._params = decoder.config, stacked(decoder.params)

    def __call__(self, tokens: np.ndarray) -> jax.Array:
        return sequence_logits(self._config, self._params, tokens)


def stacked(params: Params) -> Params:
    """The parameters with those of all layers as arrays [layers, ...], in memory of their own."""
    layers = jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *params["layers"])
    others = {name: jax.tree_util.tree_map(jnp.array, part) for name, part in params.items() if name != "layers"}
    return {**others, "layers": layers}


def unstacked(params: Params, layers: int) -> Params:
    """The inverse of `stacked`, as NumPy arrays."""
    whole = jax.tree_util.tree_map(np.asarray, params)
    return {**whole, "layers": [jax.tree_util.tree_map(lambda leaf, i=i: leaf[i], whole["layers"]) for i in range(layers)]}


def cut_sequences(ids: np.ndarray, length: int, prefix: tuple[int, ...] = ()) -> np.ndarray:
    """A text's tokens as sequences [count, length], each after a model's prefix; what is left at the end is dropped."""
    own = length - len(prefix)
    count = len(ids) // own if own > 0 else 0
    if count == 0:
        raise UserError(
            f"a text of {len(ids)} tokens gives no sequence of {length} with a prefix of {len(prefix)}; give a longer one"
        )
    body = np.asarray(ids[: count * own], np.int32).reshape(count, own)
    return np.concatenate([np.tile(np.asarray(prefix, np.int32), (count, 1)), body], axis=1)


def sequence_weights(length: int, prefix: tuple[int, ...] = ()) -> np.ndarray:
    """1 where a position predicts a token of the text, 0 inside the prefix."""
    return (np.arange(length) >= len(prefix) - 1).astype(np.float32)
