"""Files that a client and a server exchange: there whole or not at all, and listed with their sizes and digests in a JSON beside.

OpenFHE's readers believe what a file says of itself, so no file is given to them before its size and digest were compared.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from ..errors import UserError


@contextmanager
def whole(path: Path, private: bool = False) -> Iterator[Path]:
    """A name to write to in place of `path`, which takes its place, lasting, when the block ends without an error.

    A private file is for this user alone from the beginning. Raises UserError where it cannot be written.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o644))
        yield part
        _settle(part)
        part.replace(path)
        _settle(path.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); make room or choose another --out") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


class Listed(BaseModel):
    """A file in a listing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    bytes: NonNegativeInt
    sha256: str


class FolderFacts(BaseModel):
    """What the JSON of a folder holds; kinds of folders add to it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kind: str
    digest: str
    files: dict[str, Listed]


def write_bytes(path: Path, data: bytes, private: bool = False) -> None:
    """All of it, whole or not at all."""
    with whole(path, private) as part:
        part.write_bytes(data)


def write_facts(path: Path, kind: str, facts: dict[str, Any]) -> str:
    """A JSON file of `facts`; returns its digest, which stands for it elsewhere."""
    found = {"kind": kind, **facts}
    digest = digest_of(found)
    write_bytes(path, (json.dumps(found | {"digest": digest}, indent=1) + "\n").encode())
    return digest


def read_facts(path: Path, kind: str, remedy: str, shape: type[FolderFacts] | None = None) -> dict[str, Any]:
    """What `write_facts` wrote, its "digest" included. Raises UserError, with what to do, where the file is anything else."""
    try:
        found = json.loads(path.read_bytes())
        digest = found.pop("digest")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise UserError(f"{path}: truncated or no JSON of ours; {remedy}") from None
    if found.get("kind") != kind:
        raise UserError(f"{path}: is of kind {found.get('kind')!r}, not {kind!r}; {remedy}")
    if digest != digest_of(found):
        raise UserError(f"{path}: was changed after it was written; {remedy}")
    found |= {"digest": digest}
    try:
        return found if shape is None else shape.model_validate(found).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}; {remedy}") from None


def digest_of(facts: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def listing(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size and digest of each file."""
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": file_digest(folder / name)} for name in names}


def check_listing(folder: Path, listed: dict[str, dict[str, Any]], remedy: str) -> None:
    """Raise UserError, with what to do, where a listed file is missing, has another size, or was changed."""
    for name, entry in listed.items():
        path = folder / name
        if Path(name).name != name or not name.isprintable() or path.is_symlink() or (path.exists() and not path.is_file()):
            raise UserError(f"{path}: is listed, but is no plain file of {folder}; {remedy}")
        try:
            size = path.stat().st_size
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
        if size != entry["bytes"]:
            raise UserError(f"{path}: has {size} bytes of {entry['bytes']}; {remedy}")
        if file_digest(path) != entry["sha256"]:
            raise UserError(f"{path}: is not the file that was listed, though of its size; {remedy}")


def file_digest(path: Path) -> str:
    """SHA-256, read piece by piece: keys of a large ring take gigabytes."""
    with path.open("rb") as file:
        found = hashlib.sha256()
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


def _settle(path: Path) -> None:
    """On the disk, not only on its way there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
