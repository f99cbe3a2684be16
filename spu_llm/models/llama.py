"""Llama family: RMS norm, rotary positions, grouped key/value heads, SwiGLU, no biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from .cache import LayerCache, Window
from .config import DecoderConfig, Params, Reader, end_tokens, refuse, start_token
from .layers import RMSNorm, attend, rotate


class Block(nn.Module):
    """One layer: x [n, width] -> x [n, width], and the layer's cache."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array, cache: LayerCache, window: Window) -> tuple[jax.Array, LayerCache]:
        c = self.config
        q_width, kv_width = c.heads * c.head_width, c.kv_heads * c.head_width
        h = RMSNorm(c.epsilon, name="attention_norm")(x)
        qkv = nn.Dense(q_width + 2 * kv_width, use_bias=False, name="qkv")(h)
        q, k, v = jnp.split(qkv, [q_width, q_width + kv_width], axis=-1)
        q = rotate(q.reshape(-1, c.heads, c.head_width), window.cos, window.sin)
        k = rotate(k.reshape(-1, c.kv_heads, c.head_width), window.cos, window.sin)
        mixed, cache = attend(q, k, v.reshape(-1, c.kv_heads, c.head_width), cache, window)
        x = x + nn.Dense(c.width, use_bias=False, name="out")(mixed)
        return x + self.feed_forward(RMSNorm(c.epsilon, name="ffn_norm")(x)), cache

    def feed_forward(self, h: jax.Array) -> jax.Array:
        """What is done at each position alone: h [n, width] -> [n, width]."""
        gate, up = jnp.split(nn.Dense(2 * self.config.ffn, use_bias=False, name="gate_up")(h), 2, axis=-1)
        return nn.Dense(self.config.width, use_bias=False, name="down")(nn.silu(gate) * up)


class FinalNorm(nn.Module):
    """What stands between the last layer and the output layer."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return RMSNorm(self.config.epsilon, name="norm")(x)


def read_config(hf: dict[str, Any]) -> DecoderConfig:
    """The decoder described by a Hugging Face config of type "llama". Raises UserError for what we cannot run."""
    heads, width = hf["num_attention_heads"], hf["hidden_size"]
    rope = hf.get("rope_parameters") or {}  # where newer configs keep rope_theta and rope_scaling
    refuse(hf, "rope_scaling", None)
    refuse(rope, "rope_type", "default")
    refuse(hf, "attention_bias", False)
    refuse(hf, "mlp_bias", False)
    refuse(hf, "hidden_act", "silu")
    refuse(hf, "head_dim", width // heads)
    return DecoderConfig(
        family="llama",
        vocabulary=hf["vocab_size"],
        width=width,
        layers=hf["num_hidden_layers"],
        heads=heads,
        kv_heads=hf.get("num_key_value_heads") or heads,
        ffn=hf["intermediate_size"],
        positions=hf["max_position_embeddings"],
        epsilon=hf["rms_norm_eps"],
        tied_head=hf.get("tie_word_embeddings", False),
        rope_base=float(rope.get("rope_theta") or hf.get("rope_theta", 10000.0)),
        end_tokens=end_tokens(hf),
        start_token=start_token(hf),
    )


FeedForward = Callable[[Reader, DecoderConfig, str], Params]
"""Gives the feed-forward parameters of a layer by its name."""


def joined(tensor: Reader, *names: str) -> np.ndarray:
    """Weights, [out, in] in PyTorch, side by side as one kernel [in, out]."""
    return np.concatenate([tensor(f"{name}.weight").T for name in names], axis=1)


def read_feed_forward(tensor: Reader, config: DecoderConfig, layer: str) -> Params:
    """The parameters of `Block.feed_forward`."""
    gate_up = joined(tensor, f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")
    return {"gate_up": {"kernel": gate_up}, "down": {"kernel": joined(tensor, f"{layer}.mlp.down_proj")}}


def read_params(tensor: Reader, config: DecoderConfig, feed_forward: FeedForward = read_feed_forward) -> Params:
    """Parameters under their Hugging Face names; kernels become [in, out], q, k, v and gate, up are put side by side."""

    def block(layer: str) -> Params:
        return {
            "attention_norm": {"scale": tensor(f"{layer}.input_layernorm.weight")},
            "qkv": {"kernel": joined(tensor, *(f"{layer}.self_attn.{part}_proj" for part in "qkv"))},
            "out": {"kernel": joined(tensor, f"{layer}.self_attn.o_proj")},
            "ffn_norm": {"scale": tensor(f"{layer}.post_attention_layernorm.weight")},
            **feed_forward(tensor, config, layer),
        }

    params: Params = {
        "embed": {"table": tensor("embed_tokens.weight")},
        "layers": [block(f"layers.{i}") for i in range(config.layers)],
        "final": {"norm": {"scale": tensor("norm.weight")}},
    }
    if not config.tied_head:
        params["head"] = {"table": tensor("lm_head.weight")}
    return params
