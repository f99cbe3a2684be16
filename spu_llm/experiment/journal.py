"""The tokens that a client has got so far, on disk, so that a generation that broke off goes on after its last whole token."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from ..generation import Step
from .files import write_whole


class Journal:
    """Keeps each token and the logits it was drawn from in `folder`, for this user alone: they are the client's secrets.

    `digest` tells the settings; what another run left is begun anew.
    """

    def __init__(self, folder: Path, digest: str):
        self._digest = digest
        self._tokens_file, self._logits_file = folder / "tokens.json", folder / "logits.f32"
        for path in (self._tokens_file, self._logits_file):
            path.touch(mode=0o600)
        self.tokens: list[int] = []
        self._row_bytes = 0
        self._read()
        with open(self._logits_file, "r+b") as file:
            file.truncate(len(self.tokens) * self._row_bytes)  # a row without its token is not whole

    def add(self, step: Step) -> None:
        """Keep a token durably: its logits first, so that a token that is there has them."""
        row = np.asarray(step.logits, np.float32).tobytes()
        with open(self._logits_file, "ab") as file:
            file.write(row)
            file.flush()
            os.fsync(file.fileno())
        self.tokens.append(step.token)
        kept = {"digest": self._digest, "row_bytes": len(row), "tokens": self.tokens}
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
