"""The seeds of sessions that are under way, so that each is decrypted once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class SeedMemory:
    """Seeds by what encrypts them, forgotten when they were not asked for during `idle` seconds.

    The protocol has no end of a session: its requests just cease. Methods may be called from several threads.
    """

    def __init__(self, open_seed: Callable[[bytes], bytes], idle: float, now: Callable[[], float] = time.monotonic):
        self._open = open_seed
        self._idle = idle
        self._now = now
        self._lock = threading.Lock()
        self._seeds: dict[bytes, tuple[bytes, float]] = {}

    def __len__(self) -> int:
        return len(self._seeds)

    def get(self, encrypted: bytes) -> bytes:
        """The seed. Refusal if it cannot be decrypted."""
        with self._lock:
            known = self._seeds.get(encrypted)
        seed = known[0] if known else self._open(encrypted)
        with self._lock:
            self._seeds[encrypted] = seed, self._now()
        return seed

    def forget(self) -> None:
        """Drop what was idle for long enough; to be called now and then."""
        oldest = self._now() - self._idle
        with self._lock:
            self._seeds = {key: value for key, value in self._seeds.items() if value[1] > oldest}
