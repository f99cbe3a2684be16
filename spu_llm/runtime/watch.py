"""Signs of life between the processes of a session, so that one that is killed, stopped or cut off is noticed in time.

Parties wait for each other's computing as long as it takes, which no timeout of a single message can tell from a failure. So each
sends a beat a second on a channel of its own, from a thread that works while the others compute. Channels share one connection, so
the timeout must be longer than the largest opening takes on the network; other messages are paced (`PacedSender`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Protocol

from ..errors import UserError

PEER_FAILED = "has failed, as its own output tells"

_PERIOD = 1.0
_FAREWELL = 3.0
_LAST_WORDS = 5.0
_BEAT, _END, _FAILED = b"beat", b"end", b"failed"


class Channel(Protocol):
    """What is needed of a link."""

    def send_async(self, rank: int, data: bytes) -> None: ...
    def recv(self, rank: int) -> bytes: ...


class Watch:
    """Watches the peers `names` (by rank) over a channel that serves nothing else."""

    def __init__(self, channel: Channel, names: Mapping[int, str], timeout: float):
        self._channel = channel
        self._names = names
        self._timeout = timeout
        self._heard = dict.fromkeys(names, time.monotonic())
        self._ended: dict[int, tuple[float, str]] = {}  # how, and from when on that counts
        self._failed = False
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=partial(work, rank), daemon=True, name=f"watch-{rank}")
            for rank in names
            for work in (self._send, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """UserError where a peer has ended, or was not heard for the timeout."""
        now = time.monotonic()
        for rank, name in self._names.items():
            since, how = self._ended.get(rank, (self._heard[rank] + self._timeout, f"was not heard for {self._timeout:g} seconds"))
            if now > since:
                raise UserError(f"{name} {how}; start the parties again: the client goes on after its last whole token")

    def close(self, failed: bool) -> None:
        """Tell the peers that this party ends, in order or not, and wait a while for them to end too.

        A thread that still listens to a peer which is gone cannot be woken: the process should then end by `os._exit`.
        """
        self._failed = failed
        self._stop.set()
        end = time.monotonic() + _FAREWELL
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _send(self, rank: int) -> None:
        while not self._stop.wait(_PERIOD) and rank not in self._ended:
            if not self._say(rank, _BEAT):
                self._ended.setdefault(rank, (0.0, "cannot be reached any more"))
        self._say(rank, _FAILED if self._failed else _END)

    def _say(self, rank: int, what: bytes) -> bool:
        try:
            self._channel.send_async(rank, what)
        except RuntimeError:  # what SPU raises where a connection is gone
            return False
        return True

    def _listen(self, rank: int) -> None:
        while True:
            try:
                said = self._channel.recv(rank)
            except RuntimeError:
                return
            self._heard[rank] = time.monotonic()
            if said != _BEAT:
                # what a peer sent before an orderly end may still be on its way
                self._ended[rank] = (self._heard[rank] + _LAST_WORDS, "has ended") if said == _END else (0.0, PEER_FAILED)
                return
