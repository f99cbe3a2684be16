"""The tokens that a client has got so far, on disk, so that a generation that broke off goes on after its last whole token."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..generation import Step
from .files import write_whole


class Journal:
    """Keeps each token and the logits it was drawn from in `folder`, for this user alone: they are the client's secrets.

    `digest` tells the settings; what another run left is begun anew. `done`: whether the last token is there. UserError where
    another process uses the folder.
    """

    def __init__(self, folder: Path, digest: str):
        self._digest = digest
        self._lock = _lock(folder / "lock")
        self._tokens_file, self._logits_file = folder / "tokens.json", folder / "logits.f32"
        for path in (self._tokens_file, self._logits_file):
            path.touch(mode=0o600)
        self.tokens: list[int] = []
        self.done = False
        self._row_bytes = 0
        self._read()
        with open(self._logits_file, "r+b") as file:
            file.truncate(len(self.tokens) * self._row_bytes)  # a row without its token is not whole

    def add(self, step: Step, last: bool) -> None:
        """Keep a token durably: its logits first, so that a token that is there has them. UserError where that cannot be."""
        row = np.asarray(step.logits, np.float32).tobytes()
        try:
            with open(self._logits_file, "ab") as file:
                file.write(row)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"{self._logits_file}: cannot be written ({error.strerror}); make room, and start again") from None
        self.tokens.append(step.token)
        self.done = last
        kept = {"digest": self._digest, "row_bytes": len(row), "tokens": self.tokens, "done": last}
        write_whole(self._tokens_file, json.dumps(kept), private=True)

    def steps(self) -> list[Step]:
        """Every token kept."""
        rows = np.fromfile(self._logits_file, np.float32).reshape(len(self.tokens), -1)
        return [Step(token, row) for token, row in zip(self.tokens, rows, strict=True)]

    def _read(self) -> None:
        try:
            found = json.loads(self._tokens_file.read_text())
        except ValueError:
            return
        if found.get("digest") == self._digest:
            self._row_bytes = found["row_bytes"]
            self.tokens = found["tokens"][: self._logits_file.stat().st_size // self._row_bytes]
            self.done = found["done"] and len(self.tokens) == len(found["tokens"])


def _lock(path: Path) -> int:
    """The handle of a file that is this process's alone while it lives."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{path.parent}: another process uses it; wait for that, or choose another --out") from None
    return file
