"""Ciphertexts as bytes and as files. Each carries the name of the secret key that it is under, compared when it is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openfhe

from ..errors import UserError
from .files import listing, write_bytes
from .keys import PublicKeys


def packed(x: Any) -> bytes:
    """A ciphertext as OpenFHE writes it."""
    found: bytes = openfhe.Serialize(x, openfhe.BINARY)
    return found


def unpacked(data: bytes, keys: PublicKeys, place: Path) -> Any:
    """The ciphertext of bytes whose digest was compared. Raises UserError where it is none, or under another client's key."""
    try:
        found = openfhe.DeserializeCiphertextString(data, openfhe.BINARY)
    except RuntimeError:
        raise UserError(f"{place}: holds no ciphertext; make or copy it again") from None
    if found.GetKeyTag() != keys.tag:
        raise UserError(f"{place}: is under key {found.GetKeyTag()}, not {keys.tag}; name the keys that it was made with")
    return found


def write_ciphertexts(folder: Path, name: str, ciphertexts: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Files `name`.0.ct and so on; returns their listing."""
    names = [f"{name}.{number}.ct" for number in range(len(ciphertexts))]
    for file, x in zip(names, ciphertexts, strict=True):
        write_bytes(folder / file, packed(x))
    return listing(folder, names)


def read_ciphertexts(folder: Path, names: Sequence[str], keys: PublicKeys) -> list[Any]:
    """Files whose listing was checked."""
    return [unpacked((folder / name).read_bytes(), keys, folder / name) for name in names]
