"""GPT-2 family: layer norm before each half, learned positions, tanh-approximated GELU, biases."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from .cache import LayerCache, Window
from .config import DecoderConfig, Params, Reader, end_tokens, refuse, start_token
from .layers import LayerNorm, attend, softmax


class Block(nn.Module):
    """One layer: x [n, width] -> x [n, width], and the layer's cache."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array, cache: LayerCache, window: Window) -> tuple[jax.Array, LayerCache]:
        c = self.config
        h = LayerNorm(c.epsilon, name="attention_norm")(x)
        q, k, v = jnp.split(nn.Dense(3 * c.width, name="qkv")(h), 3, axis=-1)
        heads = (-1, c.heads, c.head_width)
        mixed, cache = attend(q.reshape(heads), k.reshape(heads), v.reshape(heads), cache, window, self.probabilities)
        x = x + nn.Dense(c.width, name="out")(mixed)
        h = LayerNorm(c.epsilon, name="ffn_norm")(x)
        h = self.activation(nn.Dense(c.ffn, name="up")(h))
        return x + nn.Dense(c.width, name="down")(h), cache

    @staticmethod
    def activation(x: jax.Array) -> jax.Array:
        return nn.gelu(x, approximate=True)

    @staticmethod
    def probabilities(scores: jax.Array, mask: jax.Array) -> jax.Array:
        return softmax(scores, mask)


class FinalNorm(nn.Module):
    """What stands between the last layer and the output layer."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return LayerNorm(self.config.epsilon, name="norm")(x)


def read_config(hf: dict[str, Any]) -> DecoderConfig:
    """The decoder described by a Hugging Face config of type "gpt2". Raises UserError for what we cannot run."""
    width = hf["n_embd"]
    refuse(hf, "activation_function", "gelu_new")
    refuse(hf, "scale_attn_weights", True)
    refuse(hf, "scale_attn_by_inverse_layer_idx", False)
    refuse(hf, "add_cross_attention", False)
    return DecoderConfig(
        family="gpt2",
        vocabulary=hf["vocab_size"],
        width=width,
        layers=hf["n_layer"],
        heads=hf["n_head"],
        kv_heads=hf["n_head"],
        ffn=hf.get("n_inner") or 4 * width,
        positions=hf["n_positions"],
        epsilon=hf.get("layer_norm_epsilon", 1e-5),
        tied_head=hf.get("tie_word_embeddings", True),
        end_tokens=end_tokens(hf),
        start_token=start_token(hf),
    )


def read_params(tensor: Reader, config: DecoderConfig) -> Params:
    """Parameters under their Hugging Face names; GPT-2's kernels are stored [in, out] already."""

    def norm(name: str) -> Params:
        return {"scale": tensor(f"{name}.weight"), "bias": tensor(f"{name}.bias")}

    def dense(name: str) -> Params:
        return {"kernel": tensor(f"{name}.weight"), "bias": tensor(f"{name}.bias")}

    def block(i: int) -> Params:
        return {
            "attention_norm": norm(f"h.{i}.ln_1"),
            "qkv": dense(f"h.{i}.attn.c_attn"),
            "out": dense(f"h.{i}.attn.c_proj"),
            "ffn_norm": norm(f"h.{i}.ln_2"),
            "up": dense(f"h.{i}.mlp.c_fc"),
            "down": dense(f"h.{i}.mlp.c_proj"),
        }

    params: Params = {
        "embed": {"table": tensor("wte.weight"), "positions": tensor("wpe.weight")},
        "layers": [block(i) for i in range(config.layers)],
        "final": {"norm": norm("ln_f")},
    }
    if not config.tied_head:
        params["head"] = {"table": tensor("lm_head.weight")}
    return params
