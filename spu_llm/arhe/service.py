"""The server's process: a request and evaluation keys in, a response out, token by token, and on from where it was after a kill.

    OUT/state.bin    all that it needs to go on (`state_file`)
    OUT/response/    what the client is to get (`request`)

A run that was killed gives the same ciphertexts, bit by bit, as one that was not: OpenFHE draws nothing at random after encryption.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..errors import UserError
from ..models.decoder import Decoder
from ..progress import Progress, silent
from .ciphertexts import write_ciphertexts
from .ckks import OpenFheBackend
from .executor import Server, check_request
from .files import check_listing, digest_of
from .graph import Op
from .keys import PublicKeys
from .meaning import Meaning
from .request import Request, write_response
from .schedule import Schedule, part_of
from .slots import Places, SlotMap
from .state_file import Work, load_state, save_state


@dataclass(frozen=True)
class Job:
    """What is computed, and for whom. `model`: digest of the weights and of what ranges were calibrated on."""

    keys: PublicKeys
    request: Request
    meaning: Meaning
    schedule: Schedule
    model: str

    def identity(self) -> dict[str, str]:
        """What a kept state must agree in, by the name that an error gives it."""
        return {
            "set of keys": self.keys.digest,
            "request": self.request.digest,
            "model or calibration": self.model,
            "schedule": digest_of(repr([self.schedule.program.ops, self.schedule.refreshes])),
        }


@dataclass
class Life:
    """What one process did: tokens and operations that were done before it, what each of its tokens took, by part of the model."""

    tokens: int = 0
    operations: int = 0
    seconds: list[dict[str, float]] = field(default_factory=list)
    bootstraps: list[int] = field(default_factory=list)
    saving_seconds: float = 0.0
    state_bytes: int = 0


Said = Callable[[int, dict[str, float], int], None]
"""Told of each token: its number, seconds by part of the model, bootstraps."""


class Service:
    """A server's work on one request. Its folder is this process's alone while it runs.

    save_seconds: the state is kept after each token, and after any operation when this long has passed: what a kill can cost.
    """

    def __init__(self, job: Job, folder: Path, save_seconds: float = 10.0):
        self.job, self.folder = job, folder
        self.backend = OpenFheBackend(job.keys.terms.parameters, job.keys.context)
        self.server = Server(job.meaning, job.schedule, self.backend)
        self.server.watch = self._watch
        self.work = Work(job.identity())
        self.life = Life()
        self._state, self._response = folder / "state.bin", folder / "response"
        self._save_seconds = save_seconds
        self._parts: dict[str, float] = {}
        self._saved = self._ticked = time.monotonic()

    def run(self, tokens: int, progress: Progress = silent, said: Said = lambda number, seconds, bootstraps: None) -> Life:
        """Compute until `tokens` tokens are in the response.

        Raises UserError for more than the model has positions for, where what is kept belongs to other work or is damaged, and
        where another process is at it.
        """
        check_request(self.job.meaning.config, [0] * self.job.request.prompt, tokens)
        with alone(self.folder):
            self._begin()
            for number in progress(range(len(self.work.performed), tokens), "encrypted decoding", "token"):
                seconds = self._token(progress)
                said(number + 1, seconds, self.work.performed[-1])
        self.life.state_bytes = self._state.stat().st_size
        return self.life

    def _begin(self) -> None:
        if self._state.exists():
            self.work = load_state(self._state, self.work.identity, self.server, self.job.keys)
            check_listing(self._response, self.work.files, "bring it back, or begin anew with --restart")
        else:
            self.server.take(self.job.request.one_hots, self.job.request.prompt)
            self._save()
        self.backend.bootstraps = self.work.begun
        self.life.tokens, self.life.operations = len(self.work.performed), self.server.done
        self._ticked = time.monotonic()

    def _token(self, progress: Progress) -> dict[str, float]:
        """One pass: ciphertexts of the token first, then the list of them, then the state that says that they are there."""
        one_hot = self._cleared(self.server.step(progress))
        self.work.performed.append(self.backend.bootstraps)
        number = len(self.work.performed)
        self.work.files |= write_ciphertexts(self._response, f"token-{number}", one_hot)
        write_response(self._response, self.job.keys, self.job.request, number, self.work.files)
        self.backend.bootstraps = 0
        self._save()
        seconds, self._parts = self._parts, {}
        self.life.seconds.append(seconds)
        self.life.bootstraps.append(self.work.performed[-1])
        return seconds

    def _cleared(self, one_hot: list[Any]) -> list[Any]:
        """What the client gets: the vocabulary's slots, at the lowest level. Others, where signs of leftovers stand, become 0."""
        index, parameters = np.arange(self.job.meaning.config.vocabulary), self.backend.parameters
        kept = SlotMap(lambda values: values, Places(index, len(one_hot)), Places(index, len(one_hot)))
        return [self.backend.lower(x, parameters.reserve) for x in self.backend.linear(one_hot, kept)]

    def _watch(self, op: Op, result: list[Any]) -> None:
        """After each operation: its time, and a save if the last one is too long ago."""
        now, part = time.monotonic(), part_of(op)
        self._parts[part] = self._parts.get(part, 0.0) + now - self._ticked
        if now - self._saved >= self._save_seconds and self.server.done < len(self.server.program.ops):
            self._save()
        self._ticked = time.monotonic()

    def _save(self) -> None:
        began = time.monotonic()
        self.work.begun = self.backend.bootstraps
        save_state(self._state, self.work, self.server)
        self._saved = time.monotonic()
        self.life.saving_seconds += self._saved - began


def restart(folder: Path) -> None:
    """Drop what is kept of earlier work. Raises UserError where a process is at it."""
    with alone(folder):
        response = folder / "response"
        for path in (response / "response.json", *response.glob("token-*.ct"), folder / "state.bin"):
            path.unlink(missing_ok=True)


def model_digest(decoder: Decoder, calibration: Any) -> str:
    """Of a model's shape and weights, and of what its ranges are calibrated on."""
    found = hashlib.sha256()
    for leaf in jax.tree_util.tree_leaves(decoder.params):
        found.update(np.ascontiguousarray(leaf).tobytes())
    return digest_of([repr(decoder.config), calibration, found.hexdigest()])


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """The folder, made if it is not there, for this process alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to ({error.strerror}); choose another --out") from None
    try:
        _lock(file, folder)
        yield
    finally:
        os.close(file)


def _lock(file: int, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder}: another process serves from it; wait for that, or choose another --out") from None
