"""A file that only the model's owner may read: JSON facts in safetensors' metadata, arrays as tensors, and a sum over all of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..errors import UserError


def write_owner_file(path: Path, kind: str, version: int, facts: str, tensors: Mapping[str, np.ndarray]) -> None:
    """Write the file whole or not at all, for its owner alone. Raises UserError where it cannot be written."""
    metadata = {"kind": kind, "version": str(version), "facts": facts, "sum": content_sum(facts, tensors)}
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(save(dict(tensors), metadata))
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another --out") from None


def open_owner_file(path: Path, remedy: str) -> Any:
    """The file, opened by safetensors. Raises UserError, with what to do, where it is none."""
    try:
        return safe_open(path, "numpy")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {remedy}") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: truncated or not a prepared file ({error}); {remedy} anew") from None


def content_sum(facts: str, tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over all of the file's contents, which the format itself does not check."""
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(json.dumps([name, str(value.dtype), value.shape]).encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()
