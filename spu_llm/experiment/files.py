"""Folders and files that a run writes, whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ..errors import UserError


def make_folder(folder: Path) -> None:
    """Make a folder that files can be written to. Raises UserError if that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{folder}: cannot be made or written to ({error.strerror}); choose another --out") from None


def write_whole(path: Path, text: str, private: bool = False) -> None:
    """Write a file so that it is there whole or not at all; a private one is for this user alone."""
    part = path.with_name(path.name + ".part")
    try:
        part.touch(mode=0o600 if private else 0o666)
        with part.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another --out") from None
