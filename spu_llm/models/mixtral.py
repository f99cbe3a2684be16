"""Mixtral family: Llama with a mixture of experts for its feed-forward part.

A router gives each position a logit an expert. The output is the sum of the k experts with the largest logits, weighted by the
softmax of these; that is what the softmax over all of them gives once its k largest are divided by their sum. Between parties
the routing is a secret: every expert is evaluated, and those outside the k have a weight of 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserError
from . import llama
from .config import DecoderConfig, Params, Reader
from .layers import softmax
from .llama import FinalNorm

_DEFAULTS = {"rope_theta": 1e6, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
"""What transformers takes for keys that a config of type "mixtral" leaves out."""


class Block(llama.Block):
    """One layer: x [n, width] -> x [n, width], and the layer's cache.

    Kernels: gate_up holds the gates of all experts, then their ups; down the rows of all experts below one another.
    """

    def feed_forward(self, h: jax.Array) -> jax.Array:
        """All experts side by side: one product in, each expert's units times its weight, one product that adds them up."""
        c = self.config
        assert c.experts is not None and c.experts_per_token is not None
        weights = routing(nn.Dense(c.experts, use_bias=False, name="router")(h), c.experts_per_token)
        gate, up = jnp.split(nn.Dense(2 * c.hidden, use_bias=False, name="gate_up")(h), 2, axis=-1)
        units = (nn.silu(gate) * up).reshape(-1, c.experts, c.ffn) * weights[:, :, None]
        return nn.Dense(c.width, use_bias=False, name="down")(units.reshape(-1, c.hidden))


def routing(logits: jax.Array, k: int) -> jax.Array:
    """[n, experts] -> the softmax of each row's k largest logits, 0 for the others; of equal logits the first ones are taken."""
    return softmax(logits, largest(logits, k))


def largest(logits: jax.Array, k: int) -> jax.Array:
    """[n, experts] bool: where each row's k largest logits are.

    All pairs are compared in one operation, experts being few; the k largest are those that lost fewer than k times.
    """
    shifts = range(1, logits.shape[1])
    if k == logits.shape[1]:
        return jnp.ones(logits.shape, bool)
    first = jnp.concatenate([logits[:, :-s] for s in shifts], axis=1)
    second = jnp.concatenate([logits[:, s:] for s in shifts], axis=1)
    lost = (first < second).astype(jnp.int32)  # so the first of a pair wins where they are equal
    ends = np.cumsum([logits.shape[1] - s for s in shifts])
    rank = jnp.zeros(logits.shape, jnp.int32)
    for s, part in zip(shifts, jnp.split(lost, ends[:-1], axis=1), strict=True):
        rank = rank + jnp.pad(part, ((0, 0), (0, s))) + jnp.pad(1 - part, ((0, 0), (s, 0)))
    return rank < k


def read_config(hf: dict[str, Any]) -> DecoderConfig:
    """The decoder described by a Hugging Face config of type "mixtral". Raises UserError for what we cannot run."""
    hf = _DEFAULTS | hf
    window, positions = hf.get("sliding_window"), hf["max_position_embeddings"]
    if window is not None and window < positions:
        raise UserError(
            f"config.json: sliding_window is {window}, less than the {positions} positions, but only attention to all positions is "
            f"supported for mixtral; set sliding_window to null and max_position_embeddings to {window} at most"
        )
    experts = {"experts": hf["num_local_experts"], "experts_per_token": hf["num_experts_per_tok"]}
    return replace(llama.read_config(hf), family="mixtral", **experts)


def read_feed_forward(tensor: Reader, config: DecoderConfig, layer: str) -> Params:
    """The parameters of `Block.feed_forward`."""
    experts = [f"{layer}.block_sparse_moe.experts.{i}" for i in range(config.experts or 0)]
    gates_ups = [f"{expert}.{part}" for part in ("w1", "w3") for expert in experts]
    return {
        "router": {"kernel": llama.joined(tensor, f"{layer}.block_sparse_moe.gate")},
        "gate_up": {"kernel": llama.joined(tensor, *gates_ups)},
        "down": {"kernel": np.concatenate([tensor(f"{expert}.w2.weight").T for expert in experts])},
    }


def read_params(tensor: Reader, config: DecoderConfig) -> Params:
    """Parameters under their Hugging Face names, as `llama.read_params` gives them."""
    return llama.read_params(tensor, config, read_feed_forward)


__all__ = ["Block", "FinalNorm", "largest", "read_config", "read_params", "routing"]
