"""Checkpoints from files: Hugging Face folders (safetensors) and GGUF. Never pickle."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import UserError
from .config import Reader
from .decoder import FAMILIES, Decoder
from .gguf_file import open_gguf
from .tokenizer import Tokenizer, gguf_tokenizer, read_folder_tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """A decoder and its tokenizer (None where the checkpoint brings none)."""

    decoder: Decoder
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


def _load_folder(folder: Path) -> Checkpoint:
    hf = _read_json(folder / "config.json")
    decoder = _build(hf, _safetensors_reader(folder), str(folder))
    return Checkpoint(decoder, read_folder_tokenizer(folder))


def _load_gguf(path: Path) -> Checkpoint:
    file = open_gguf(path)
    return Checkpoint(_build(file.hf_config, file.tensor, str(path)), gguf_tokenizer(file.fields, str(path)))


def _build(hf: dict[str, Any], tensor: Reader, place: str) -> Decoder:
    family = FAMILIES.get(hf.get("model_type", ""))
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(f"{place}: model_type {hf.get('model_type')!r} is not supported; known families: {known}")
    try:
        config = family.read_config(hf)
    except KeyError as missing:
        raise UserError(f"{place}: config.json has no {missing}; it is not a complete {hf['model_type']} config") from None
    decoder = Decoder(config, family.read_params(tensor, config))
    decoder.check_shapes()
    return decoder


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a Hugging Face checkpoint folder needs it") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); fetch the checkpoint again") from None


def _safetensors_reader(folder: Path) -> Reader:
    """Reads tensors of one or several safetensors files by name, with or without the usual model prefixes."""
    index = folder / "model.safetensors.index.json"
    names = sorted(set(_read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    place: dict[str, Path] = {}
    for name in names:
        for key in _keys(folder / name):
            place[key] = folder / name

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
        value = np.asarray(file.get_tensor(name).astype("float32"))
    if not np.isfinite(value).all():
        raise UserError(f"{path}: tensor {name} holds values that are not finite; fetch the checkpoint again")
    return value
