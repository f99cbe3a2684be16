"""OPT family: GPT-2's layer with ReLU; only names and the position offset of its checkpoints differ."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import numpy as np

from . import gpt2
from .config import DecoderConfig, Params, Reader, end_tokens, refuse, start_token

_POSITION_OFFSET = 2  # the first rows of OPT's position table belong to padding


class Block(gpt2.Block):
    """One layer: x [n, width] -> x [n, width], and the layer's cache."""

    @staticmethod
    def activation(x: jax.Array) -> jax.Array:
        return nn.relu(x)


FinalNorm = gpt2.FinalNorm


def read_config(hf: dict[str, Any]) -> DecoderConfig:
    """The decoder described by a Hugging Face config of type "opt". Raises UserError for what we cannot run."""
    width = hf["hidden_size"]
    refuse(hf, "activation_function", "relu")
    refuse(hf, "do_layer_norm_before", True)
    refuse(hf, "word_embed_proj_dim", width)
    refuse(hf, "enable_bias", True)
    refuse(hf, "layer_norm_elementwise_affine", True)
    refuse(hf, "_remove_final_layer_norm", False)
    return DecoderConfig(
        family="opt",
        vocabulary=hf["vocab_size"],
        width=width,
        layers=hf["num_hidden_layers"],
        heads=hf["num_attention_heads"],
        kv_heads=hf["num_attention_heads"],
        ffn=hf["ffn_dim"],
        positions=hf["max_position_embeddings"],
        epsilon=1e-5,
        tied_head=hf.get("tie_word_embeddings", True),
        end_tokens=end_tokens(hf),
        start_token=start_token(hf),
    )


def read_params(tensor: Reader, config: DecoderConfig) -> Params:
    """Parameters under their Hugging Face names; kernels become [in, out], q, k, v are put side by side."""

    def norm(name: str) -> Params:
        return {"scale": tensor(f"{name}.weight"), "bias": tensor(f"{name}.bias")}

    def dense(*names: str) -> Params:
        return {
            "kernel": np.concatenate([tensor(f"{name}.weight").T for name in names], axis=1),
            "bias": np.concatenate([tensor(f"{name}.bias") for name in names]),
        }

    def block(i: int) -> Params:
        layer = f"decoder.layers.{i}"
        return {
            "attention_norm": norm(f"{layer}.self_attn_layer_norm"),
            "qkv": dense(*(f"{layer}.self_attn.{x}_proj" for x in "qkv")),
            "out": dense(f"{layer}.self_attn.out_proj"),
            "ffn_norm": norm(f"{layer}.final_layer_norm"),
            "up": dense(f"{layer}.fc1"),
            "down": dense(f"{layer}.fc2"),
        }

    params: Params = {
        "embed": {
            "table": tensor("decoder.embed_tokens.weight"),
            "positions": tensor("decoder.embed_positions.weight")[_POSITION_OFFSET:],
        },
        "layers": [block(i) for i in range(config.layers)],
        "final": {"norm": norm("decoder.final_layer_norm")},
    }
    if not config.tied_head:
        params["head"] = {"table": tensor("lm_head.weight")}
    return params
