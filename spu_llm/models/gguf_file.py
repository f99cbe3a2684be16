"""GGUF files of the Llama family, presented under Hugging Face's names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ..errors import UserError

_NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


_REQUIRED = (
    "embedding_length",
    "block_count",
    "attention.head_count",
    "feed_forward_length",
    "context_length",
    "attention.layer_norm_rms_epsilon",
    "tokenizer.ggml.tokens",
)


@dataclass(frozen=True)
class GGUFFile:
    """An open file: its metadata, and its tensors as float32."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, Any]

    @property
    def hf_config(self) -> dict[str, Any]:
        """The metadata as a Hugging Face "llama" config."""
        architecture = self.fields.get("general.architecture")
        if architecture != "llama":
            raise UserError(f"{self.path}: architecture {architecture!r} is not supported in GGUF; only llama is")
        get = {key.removeprefix("llama."): value for key, value in self.fields.items()}
        scaling = get.get("rope.scaling.type", "none")
        missing = [key for key in _REQUIRED if key not in get]
        if missing or scaling != "none":
            problem = f"no {missing[0]}" if missing else f"rope scaling {scaling}, which is not supported"
            raise UserError(f"{self.path}: its metadata has {problem}; use another file of this model")
        return {
            "model_type": "llama",
            "vocab_size": len(get["tokenizer.ggml.tokens"]),
            "hidden_size": get["embedding_length"],
            "num_hidden_layers": get["block_count"],
            "num_attention_heads": get["attention.head_count"],
            "num_key_value_heads": get.get("attention.head_count_kv"),
            "intermediate_size": get["feed_forward_length"],
            "max_position_embeddings": get["context_length"],
            "rms_norm_eps": get["attention.layer_norm_rms_epsilon"],
            "rope_theta": get.get("rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "eos_token_id": get.get("tokenizer.ggml.eos_token_id"),
            "bos_token_id": get.get("tokenizer.ggml.bos_token_id"),
        }

    def tensor(self, name: str) -> np.ndarray:
        """A tensor by its Hugging Face name, dequantised; queries and keys with their rows in Hugging Face's order."""
        layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        ours = f"blk.{layer[1]}.{_NAMES[layer[2]]}" if layer else _NAMES[name]
        if ours not in self.tensors:
            raise UserError(f"{self.path}: no tensor {ours}; the file is incomplete, fetch it again")
        found = self.tensors[ours]
        try:
            value = gguf.quants.dequantize(found.data, found.tensor_type).astype(np.float32)
        except NotImplementedError:
            raise UserError(
                f"{self.path}: {ours} is quantised as {found.tensor_type.name}, which the gguf package cannot undo"
            ) from None
        query_heads = self.fields["llama.attention.head_count"]
        heads = {"attn_q": query_heads, "attn_k": self.fields.get("llama.attention.head_count_kv", query_heads)}
        part = ours.split(".")[-2]
        return _unpermute(value, heads[part]) if part in heads else value

    @property
    def hf_names(self) -> list[str]:
        """The names of all tensors as Hugging Face has them; those it does not know keep their own."""
        theirs = {ours: name for name, ours in _NAMES.items()}
        out = []
        for name in self.tensors:
            layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
            known = theirs.get(layer[2] if layer else name)
            out.append(name if known is None else f"layers.{layer[1]}.{known}" if layer else known)
        return out


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of each head's two rotary halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def open_gguf(path: Path) -> GGUFFile:
    """Open a file. Raises UserError if it is truncated or no GGUF."""
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        return GGUFFile(path, fields, {tensor.name: tensor for tensor in reader.tensors})
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: truncated or not a GGUF file ({error}); fetch it again") from None
