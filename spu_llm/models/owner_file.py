"""A file that only the model's owner may read: JSON facts in safetensors' metadata, arrays as tensors, and a sum over all of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..errors import UserError

Facts = TypeVar("Facts")


@dataclass(frozen=True)
class OwnerFile:
    """A kind of such files: its name inside and for users, its version, and what to do about one that will not do.

    Facts are of a type that pydantic knows.
    """

    kind: str
    called: str
    version: int
    remedy: str

    def write(self, path: Path, facts: Any, tensors: Mapping[str, np.ndarray]) -> None:
        """Write the file whole or not at all, for its owner alone. Raises UserError where it cannot be written."""
        text = TypeAdapter(type(facts)).dump_json(facts).decode()
        metadata = {"kind": self.kind, "version": str(self.version), "facts": text, "sum": content_sum(text, tensors)}
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

    def read(self, path: Path, kind: type[Facts]) -> tuple[Facts, dict[str, np.ndarray]]:
        """Facts and tensors as they were written. Raises UserError for a file that is another, or damaged."""
        with self._open(path) as file:
            metadata = file.metadata() or {}
            facts = self._facts(path, metadata, kind)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
        if content_sum(metadata["facts"], tensors) != metadata.get("sum"):
            raise self.damaged(path)
        return facts, tensors

    def read_facts(self, path: Path, kind: type[Facts]) -> Facts:
        """The facts alone. Raises UserError for what is no such file."""
        with self._open(path) as file:
            return self._facts(path, file.metadata() or {}, kind)

    def damaged(self, path: Path, why: Exception | None = None) -> UserError:
        """What to raise for a file that was changed since it was written."""
        reason = "" if why is None else f" ({why})"
        return UserError(f"{path}: damaged{reason}; {self.remedy} anew")

    def _open(self, path: Path) -> Any:
        try:
            return safe_open(path, "numpy")
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; {self.remedy}") from None
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: truncated or not a prepared file ({error}); {self.remedy} anew") from None

    def _facts(self, path: Path, metadata: Mapping[str, str], kind: type[Facts]) -> Facts:
        if metadata.get("kind") != self.kind:
            raise UserError(f"{path}: holds tensors, but is not {self.called}; {self.remedy}")
        if metadata.get("version") != str(self.version):
            found = metadata.get("version")
            raise UserError(f"{path}: of version {found}, where this spu_llm reads {self.version}; {self.remedy} anew")
        try:
            return TypeAdapter(kind).validate_json(metadata["facts"])
        except (KeyError, ValidationError):
            raise self.damaged(path) from None


def content_sum(facts: str, tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over all of the file's contents, which the format itself does not check."""
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(json.dumps([name, str(value.dtype), value.shape]).encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()
