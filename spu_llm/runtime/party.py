"""One party of a session: a thread that owns an SPU runtime, a link, and a channel for messages outside SPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from spu import Runtime, libspu

from .cores import keep_to_one_core
from .profile import Traffic
from .workspace import enter_workspace


class Party:
    """Lives as long as its session; all its work happens in its own thread, in order.

    `connect` makes its link to the other `parties`. `ready` is done when the runtime is up.
    `channel` carries what SPU does not send itself: shares of inputs and of outputs. What goes over it, by `post`, is counted in
    `sent`.
    """

    def __init__(self, rank: int, connect: Callable[[], libspu.link.Context], config: libspu.RuntimeConfig, parties: int):
        self.rank = rank
        self.sent = Traffic()
        self._tasks: SimpleQueue = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"party-{rank}")
        self._thread.start()
        self.ready = self.submit(lambda: self._open(connect, config, parties))

    def _open(self, connect: Callable[[], libspu.link.Context], config: libspu.RuntimeConfig, parties: int) -> None:
        enter_workspace()
        keep_to_one_core(parties)
        self.link = connect()
        self.channel = self.link.spawn()
        self.post = self.channel.send_async
        self.runtime = Runtime(self.link, config)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function, args = task
            try:
                future.set_result(function(*args))
            except BaseException as error:  # handed to whoever waits for the future
                future.set_exception(error)
            del task, future, function, args  # a waiting thread must not keep the last value alive

    def submit(self, function: Callable, *args: Any) -> Future:
        """Have the party's thread do something, after all it was given before."""
        future: Future = Future()
        self._tasks.put((future, function, args))
        return future

    def send(self, rank: int, data: bytes) -> None:
        """Send bytes outside SPU; one message."""
        self.post(rank, data)
        self.sent += Traffic(len(data), 1)

    def count(self, size: int, messages: int) -> None:
        """Book what this party sends where, in one process, all parties read the same memory."""
        self.sent += Traffic(size, messages)

    def receive(self, rank: int) -> bytes:
        return self.channel.recv(rank)

    def close(self, timeout: float) -> None:
        """Drop the runtime (in its own thread: that removes its Beaver cache) and end the thread."""
        self.submit(self._drop)
        self._tasks.put(None)
        self._thread.join(timeout)

    def _drop(self) -> None:
        del self.runtime
