"""Checkpoints to files: a Hugging Face folder that `load_checkpoint`, and transformers, read back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ..errors import UserError
from .config import DecoderConfig, Params
from .decoder import Decoder
from .tokenizer import Tokenizer

_OPT_OFFSET = 2  # rows of padding before OPT's positions

Tensors = dict[str, np.ndarray]


def save_checkpoint(folder: Path, decoder: Decoder, tokenizer: Tokenizer | None = None, dtype: Any = np.float32) -> None:
    """Write config.json, model.safetensors of `dtype` and tokenizer.json; each file is there whole or not at all.

    Raises UserError where the folder cannot be written to, a weight is too large for `dtype`, or the family has no such form.
    """
    family = decoder.config.family
    if family not in _TENSORS:
        raise UserError(f"{folder}: models of family {family} cannot be saved; only {', '.join(sorted(_TENSORS))}")
    arrays = {name: _cast(name, value, dtype) for name, value in _TENSORS[family](decoder.config, _float32(decoder.params)).items()}
    if not decoder.config.tied_head:
        arrays["lm_head.weight"] = _cast("lm_head.weight", np.asarray(decoder.head_table), dtype)
    config = _common(decoder.config, dtype) | _CONFIGS[family](decoder.config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _whole(folder / "model.safetensors", lambda part: save_file(arrays, part, {"format": "pt"}))
        _whole(folder / "config.json", lambda part: part.write_text(json.dumps(config, indent=2) + "\n"))
        if tokenizer is not None:
            _whole(folder / "tokenizer.json", lambda part: part.write_text(tokenizer.to_json()))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to ({error.strerror}); choose another folder") from None


def _whole(path: Path, write: Callable[[Path], Any]) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _cast(name: str, value: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(over="ignore"):
        out = np.ascontiguousarray(value, dtype)
    if not np.isfinite(out).all():
        raise UserError(f"tensor {name}: its largest value {np.abs(value).max():.3g} does not fit {np.dtype(dtype)}; use float32")
    return out


def _float32(params: Params) -> Any:
    if isinstance(params, dict):
        return {name: _float32(value) for name, value in params.items()}
    return [_float32(value) for value in params] if isinstance(params, list) else np.asarray(params, np.float32)


# Configs


def _common(config: DecoderConfig, dtype: Any) -> dict[str, Any]:
    ends = list(config.end_tokens)
    return {
        "model_type": config.family,
        "vocab_size": config.vocabulary,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": config.start_token,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "torch_dtype": np.dtype(dtype).name,
    }


def _llama_config(config: DecoderConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.ffn,
        "max_position_embeddings": config.positions,
        "rms_norm_eps": config.epsilon,
        "rope_theta": config.rope_base,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _mixtral_config(config: DecoderConfig) -> dict[str, Any]:
    llama = {key: value for key, value in _llama_config(config).items() if not key.endswith("_bias")}
    experts = {"num_local_experts": config.experts, "num_experts_per_tok": config.experts_per_token, "sliding_window": None}
    return llama | {"architectures": ["MixtralForCausalLM"]} | experts


def _gpt2_config(config: DecoderConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.ffn,
        "n_positions": config.positions,
        "layer_norm_epsilon": config.epsilon,
        "activation_function": "gelu_new",
    }


def _opt_config(config: DecoderConfig) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "hidden_size": config.width,
        "word_embed_proj_dim": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "ffn_dim": config.ffn,
        "max_position_embeddings": config.positions,
        "activation_function": "relu",
        "do_layer_norm_before": True,
    }


# Tensors under their Hugging Face names: the inverse of the families' `read_params`


def _llama(config: DecoderConfig, params: Params, feed_forward: Callable[..., Tensors] | None = None) -> Tensors:
    out = {"model.embed_tokens.weight": params["embed"]["table"], "model.norm.weight": params["final"]["norm"]["scale"]}
    queries = config.heads * config.head_width
    edges = [queries, queries + config.kv_heads * config.head_width]
    for i, layer in enumerate(params["layers"]):
        name = f"model.layers.{i}"
        out[f"{name}.input_layernorm.weight"] = layer["attention_norm"]["scale"]
        out[f"{name}.post_attention_layernorm.weight"] = layer["ffn_norm"]["scale"]
        for part, kernel in zip("qkv", np.split(layer["qkv"]["kernel"], edges, axis=1), strict=True):
            out[f"{name}.self_attn.{part}_proj.weight"] = kernel.T
        out[f"{name}.self_attn.o_proj.weight"] = layer["out"]["kernel"].T
        out |= (feed_forward or _llama_ffn)(config, name, layer)
    return out


def _llama_ffn(config: DecoderConfig, name: str, layer: Params) -> Tensors:
    gate, up = np.split(layer["gate_up"]["kernel"], 2, axis=1)
    kernels = {"gate": gate, "up": up, "down": layer["down"]["kernel"]}
    return {f"{name}.mlp.{part}_proj.weight": kernel.T for part, kernel in kernels.items()}


def _mixtral_ffn(config: DecoderConfig, name: str, layer: Params) -> Tensors:
    experts = config.experts or 1
    gates, ups = (np.split(half, experts, axis=1) for half in np.split(layer["gate_up"]["kernel"], 2, axis=1))
    downs = np.split(layer["down"]["kernel"], experts)
    out = {f"{name}.block_sparse_moe.gate.weight": layer["router"]["kernel"].T}
    for i in range(experts):
        for part, kernel in (("w1", gates[i]), ("w3", ups[i]), ("w2", downs[i])):
            out[f"{name}.block_sparse_moe.experts.{i}.{part}.weight"] = kernel.T
    return out


def _mixtral(config: DecoderConfig, params: Params) -> Tensors:
    return _llama(config, params, _mixtral_ffn)


def _norm(name: str, norm: Params) -> Tensors:
    return {f"{name}.weight": norm["scale"], f"{name}.bias": norm["bias"]}


def _gpt2(config: DecoderConfig, params: Params) -> Tensors:
    embed = params["embed"]
    out = {"transformer.wte.weight": embed["table"], "transformer.wpe.weight": embed["positions"]}
    out |= _norm("transformer.ln_f", params["final"]["norm"])
    places = {"qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    for i, layer in enumerate(params["layers"]):
        name = f"transformer.h.{i}"
        out |= _norm(f"{name}.ln_1", layer["attention_norm"]) | _norm(f"{name}.ln_2", layer["ffn_norm"])
        for ours, theirs in places.items():
            out |= {f"{name}.{theirs}.weight": layer[ours]["kernel"], f"{name}.{theirs}.bias": layer[ours]["bias"]}
    return out


def _opt(config: DecoderConfig, params: Params) -> Tensors:
    embed = params["embed"]
    padding = np.zeros((_OPT_OFFSET, config.width), np.float32)
    out = {
        "model.decoder.embed_tokens.weight": embed["table"],
        "model.decoder.embed_positions.weight": np.concatenate([padding, embed["positions"]]),
    }
    out |= _norm("model.decoder.final_layer_norm", params["final"]["norm"])
    for i, layer in enumerate(params["layers"]):
        name = f"model.decoder.layers.{i}"
        out |= _norm(f"{name}.self_attn_layer_norm", layer["attention_norm"])
        out |= _norm(f"{name}.final_layer_norm", layer["ffn_norm"])
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), _thirds(layer["qkv"]), strict=True)) | {"out_proj": layer["out"]}
        denses = {f"self_attn.{part}": dense for part, dense in parts.items()} | {"fc1": layer["up"], "fc2": layer["down"]}
        for part, dense in denses.items():
            out |= {f"{name}.{part}.weight": dense["kernel"].T, f"{name}.{part}.bias": dense["bias"]}
    return out


def _thirds(dense: Params) -> list[Params]:
    kernels, biases = np.split(dense["kernel"], 3, axis=1), np.split(dense["bias"], 3)
    return [{"kernel": kernel, "bias": bias} for kernel, bias in zip(kernels, biases, strict=True)]


_TENSORS: dict[str, Callable[[DecoderConfig, Params], Tensors]] = {
    "gpt2": _gpt2, "llama": _llama, "mixtral": _mixtral, "opt": _opt,
}  # fmt: skip
_CONFIGS = {"gpt2": _gpt2_config, "llama": _llama_config, "mixtral": _mixtral_config, "opt": _opt_config}
