"""Checkpoints from files: Hugging Face folders (safetensors) and GGUF. Never pickle."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import UserError
from . import t5
from .config import Reader
from .decoder import FAMILIES, Decoder
from .gguf_file import open_gguf
from .tokenizer import Tokenizer, gguf_tokenizer, read_folder_tokenizer

_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Constants that some checkpoints carry along with the weights."""

_T5_COPIES = ("coder.embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight")
"""What some T5 checkpoints repeat (the embedding, once a stack) or carry unused (cross-attention knows no positions)."""

_Model = TypeVar("_Model", bound=Decoder)


@dataclass(frozen=True)
class Checkpoint:
    """A decoder and its tokenizer (None where the checkpoint brings none)."""

    decoder: Decoder
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class T5Checkpoint:
    """An encoder and decoder and their tokenizer (None where the checkpoint brings none)."""

    model: t5.T5
    tokenizer: Tokenizer | None


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a Hugging Face folder or a .gguf file. Raises UserError naming the file and what is wrong with it."""
    if path.is_dir():
        return _load_folder(path)
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; give a Hugging Face folder or a .gguf file")
    if path.suffix != ".gguf":
        raise UserError(f"{path}: not a checkpoint we read; give a Hugging Face folder (safetensors) or a .gguf file")
    return _load_gguf(path)


def load_t5(path: Path) -> T5Checkpoint:
    """Read a Hugging Face folder of type "t5". Raises UserError as `load_checkpoint`."""
    tokenizer, place = read_folder_tokenizer(path), _safetensors_places(path)
    names = [name for name in place if not name.endswith(_T5_COPIES)]
    hf, tensor = _read_json(path / "config.json"), _safetensors_reader(path, place)
    return T5Checkpoint(_build(hf, tensor, names, str(path), {"t5": t5}, t5.T5), tokenizer)


def load_tokenizer(path: Path) -> Tokenizer | None:
    """A checkpoint's tokenizer alone: all that a client reads of it. Raises UserError as `load_checkpoint`."""
    if path.is_dir():
        return read_folder_tokenizer(path)
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; give a Hugging Face folder or a .gguf file")
    return gguf_tokenizer(open_gguf(path).fields, str(path))


def _load_folder(folder: Path) -> Checkpoint:
    tokenizer = read_folder_tokenizer(folder)
    place = _safetensors_places(folder)
    hf, tensor = _read_json(folder / "config.json"), _safetensors_reader(folder, place)
    return Checkpoint(_build(hf, tensor, place, str(folder), FAMILIES, Decoder), tokenizer)


def _load_gguf(path: Path) -> Checkpoint:
    file = open_gguf(path)
    tokenizer = gguf_tokenizer(file.fields, str(path))
    return Checkpoint(_build(file.hf_config, file.tensor, file.hf_names, str(path), FAMILIES, Decoder), tokenizer)


def _build(
    hf: dict[str, Any], tensor: Reader, names: Iterable[str], place: str, families: Mapping[str, Any], make: type[_Model]
) -> _Model:
    """The model of a config whose tensors `tensor` reads. A tensor of `names` left unread means that the config is wrong."""
    family = families.get(str(hf.get("model_type")))
    if family is None:
        known = ", ".join(sorted(families))
        raise UserError(f"{place}: model_type {hf.get('model_type')!r} is not supported; known families: {known}")
    try:
        config = family.read_config(hf)
    except KeyError as missing:
        raise UserError(f"{place}: config.json has no {missing}; it is not a complete {hf['model_type']} config") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{place}: the config describes no {hf['model_type']} decoder ({error}); correct it") from None
    read: set[str] = set()

    def finite(name: str) -> np.ndarray:
        read.add(name)
        value = tensor(name)
        if not np.isfinite(value).all():
            raise UserError(f"{place}: tensor {name} holds values that are not finite; fetch the checkpoint again")
        return value

    model = make(config, family.read_params(finite, config))
    model.check_shapes()
    unread = sorted(name for name in names if _plain(name) not in read and not name.endswith(_BUFFERS))
    if unread and not (config.tied_head and unread == ["lm_head.weight"]):
        raise UserError(f"{place}: tensor {unread[0]} has no place in the model that its config describes; is the config right?")
    return model


def _plain(name: str) -> str:
    """A tensor's name without the prefix that some checkpoints put before all names."""
    return name.removeprefix("model.").removeprefix("transformer.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__} where a mapping is due")
        return value
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a Hugging Face checkpoint folder needs it") from None
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path}: not a valid JSON file ({error}); fetch the checkpoint again") from None


def _safetensors_places(folder: Path) -> dict[str, Path]:
    """Which of a folder's safetensors files holds each tensor."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        files = _read_json(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise UserError(f"{index}: has no weight_map from tensors to files; fetch the checkpoint again")
        names = sorted(set(files.values()))
    place: dict[str, Path] = {}
    for name in names:
        for key in _keys(folder / name):
            place[key] = folder / name
    return place


def _safetensors_reader(folder: Path, place: dict[str, Path]) -> Reader:
    """Reads tensors by name, with or without the usual model prefixes."""

    def tensor(name: str) -> np.ndarray:
        for prefix in ("", "model.", "transformer."):
            if prefix + name in place:
                path = place[prefix + name]
                return _read_tensor(path, prefix + name)
        raise UserError(f"{folder}: no tensor {name}; the checkpoint is incomplete or of another family than its config.json says")

    return tensor


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="flax")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; convert the checkpoint to safetensors (pickled weights are not read)") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: truncated or not a safetensors file ({error}); fetch the checkpoint again") from None


def _keys(path: Path) -> list[str]:
    with _open_safetensors(path) as file:
        return list(file.keys())


def _read_tensor(path: Path, name: str) -> np.ndarray:
    with _open_safetensors(path) as file:
        return np.asarray(file.get_tensor(name).astype("float32"))
