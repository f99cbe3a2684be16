"""A process that carries the traffic between two parties as a link of given bandwidth and delay would.

SPU's brpc link makes TCP connections both ways: A connects to B for what A sends, B to A for what B sends, and each connection
brings answers back. So one relay serves one pair: two listeners, and for each physical direction, A to B and B to A, one `Lane`
that all connections share. Run as `python -m spu_llm.network.relay`; `emulation.Relay` starts and ends it.

What it emulates: bytes leave one after another at the lane's bandwidth (a token bucket that holds no more than one read, at most
1 ms of bandwidth), each arrives `delay` after it left, and a lane takes no more bytes than are under way and 4 ms of queue. Order,
half-close, close and reset are passed on, in their place among the bytes. What it does not: loss, jitter, packet headers, and TCP's
slow start over a long path, since both ends of each TCP connection are near. It is the link of a connection that is warm.

Precision. One thread sleeps in `select` (microseconds, where epoll has milliseconds) until a byte comes or is due; it never spins.
When bytes came is the kernel's time stamp, not when the relay woke, so a late relay catches up and adds neither delay nor lost
bandwidth. When they are due the relay wakes by its usual lateness earlier. It asks for wake-ups without slack and for real-time
priority, which a network has over the parties' compute; without the right to that it goes on as an ordinary process. What lateness
remains is counted and told to who asks.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

_READ = 1 << 18  # bytes at most in one read
_LEAST_READ = 1 << 11
_READ_SECONDS = 1e-3  # of bandwidth: a read is delivered as one, so what shares it waits no longer than this
_QUEUE_SECONDS = 4e-3  # of bandwidth that may wait for the lane; when half of it has left the lane takes more
_CONNECTIONS = 400  # at the same time: `select` knows 1024 file descriptors
_UNSHAPED_HELD = 1 << 22  # bytes a flow may hold on a lane without bandwidth
_PR_SET_TIMERSLACK = 29
_SO_TIMESTAMPNS = 35  # Linux; not in Python's socket module
_MARGIN_STEP = 5e-6  # seconds by which the usual lateness is followed, up or down: its median is what is found
_MARGIN_MOST = 0.5e-3
_CLOSE, _RESET = "close", "reset"


class Lane:
    """One physical direction: when bytes that are read now have arrived at the other end. Seconds and bytes a second."""

    def __init__(self, rate: float | None, delay: float):
        self.rate, self.delay = rate, delay
        self.read_size = _READ if rate is None else int(min(_READ, max(_LEAST_READ, rate * _READ_SECONDS)))
        self.held_at_most = _UNSHAPED_HELD if rate is None else int(rate * (delay + _QUEUE_SECONDS)) + 2 * self.read_size
        self.due: deque[tuple[float, Flow, bytes | str]] = deque()
        self.carried = 0
        self.late_sum = self.late_most = 0.0
        self.deliveries = 0
        self._free = self._opens = 0.0  # when the last byte taken has left; when the queue has room

    def opens_at(self) -> float:
        """When the lane takes more bytes."""
        return self._opens

    def take(self, came: float, flow: Flow, item: bytes | str) -> None:
        """Take what came at that time: bytes, or the end of a flow."""
        if isinstance(item, bytes):
            self.carried += len(item)
            if self.rate is not None:
                self._free = max(self._free, came) + len(item) / self.rate
                if self._free > time.monotonic() + _QUEUE_SECONDS:
                    self._opens = self._free - _QUEUE_SECONDS / 2
        self.due.append((max(self._free, came) + self.delay, flow, item))

    def deliver(self, until: float) -> float | None:
        """Hand out all that is due `until` then; returns by how much the first was late, None if there was none."""
        first = None
        while self.due and self.due[0][0] <= until:
            due, flow, item = self.due.popleft()
            flow.arrive(item)
            late = time.monotonic() - due
            first = late if first is None else first
            self.late_sum += abs(late)
            self.late_most = max(self.late_most, late)
            self.deliveries += 1
        return first


class Flow:
    """What goes from one socket to another: one half of a connection through the relay."""

    def __init__(self, source: socket.socket, sink: socket.socket, lane: Lane, connection: Connection):
        self.source, self.sink, self.lane, self.connection = source, sink, lane, connection
        self.reading, self.done = True, False
        self._held, self._unblocked = 0, 0.0
        self._waiting: deque[memoryview | str] = deque()  # arrived, but the sink's buffer is full

    @property
    def wants_read(self) -> bool:
        return self.reading and self._has_room()

    @property
    def wants_write(self) -> bool:
        return bool(self._waiting)

    def read(self) -> None:
        """Take what has come, or the end of it."""
        try:
            data, stamps, _, _ = self.source.recvmsg(self.lane.read_size, _STAMP_SPACE)
        except BlockingIOError:
            return
        except OSError:
            self.reading = False
            self.lane.take(time.monotonic(), self, _RESET)
            return
        self.reading = bool(data)
        self._held += len(data)
        # bytes that waited because this flow's sink was slow were held back at the sender, as TCP's window would
        self.lane.take(max(_came(stamps), self._unblocked), self, data or _CLOSE)

    def _has_room(self) -> bool:
        return self._held < self.lane.held_at_most

    def arrive(self, item: bytes | str) -> None:
        if self.connection.ended:
            return
        self._waiting.append(memoryview(item) if isinstance(item, bytes) else item)
        if len(self._waiting) == 1 and self.connection.open:
            self.write()

    def write(self) -> None:
        """Give the sink what has arrived, as far as it takes it."""
        while self._waiting:
            item = self._waiting[0]
            if item is _RESET:
                self.connection.reset()
                return
            if item is _CLOSE:
                self._close()
                return
            assert isinstance(item, memoryview)
            try:
                sent = self.sink.send(item)
            except BlockingIOError:
                return
            except OSError:  # the sink is gone: its peer learns of that one delay later
                self._lose()
                return
            if not self._has_room() and self._held - sent < self.lane.held_at_most:
                self._unblocked = time.monotonic()
            self._held -= sent
            if sent < len(item):
                self._waiting[0] = item[sent:]
                return
            self._waiting.popleft()

    def _close(self) -> None:
        self._waiting.clear()
        self.done = True
        with suppress(OSError):
            self.sink.shutdown(socket.SHUT_WR)
        self.connection.close_if_done()

    def _lose(self) -> None:
        self._waiting.clear()
        self.reading, self._held = False, 0
        back = self.connection.back if self is self.connection.forth else self.connection.forth
        back.reading = False
        back.lane.take(time.monotonic(), back, _RESET)


@dataclass
class Listener:
    """Where one party connects to reach the other at `target`; the lanes go `forth` to the target and `back` from it."""

    socket: socket.socket
    target: tuple[str, int]
    forth: Lane
    back: Lane


class Connection:
    """A connection through the relay: the accepted socket, one to the target, and a flow each way."""

    def __init__(self, accepted: socket.socket, listener: Listener):
        self.near, self.far = accepted, socket.socket(accepted.family, socket.SOCK_STREAM)
        self.forth = Flow(self.near, self.far, listener.forth, self)
        self.back = Flow(self.far, self.near, listener.back, self)
        self.open = self.ended = False
        for each in (self.near, self.far):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.far.connect_ex(listener.target)  # how it went shows when the socket becomes writable

    def connected(self) -> None:
        """The connect to the target has ended, one way or the other."""
        if self.far.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.reset()
            return
        self.open = True
        self.forth.write()

    def reset(self) -> None:
        """End both sides as a broken connection does."""
        for each in (self.near, self.far):
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._end()

    def close_if_done(self) -> None:
        if self.forth.done and self.back.done:
            self._end()

    def _end(self) -> None:
        self.ended = True
        self.forth.reading = self.back.reading = False
        self.near.close()
        self.far.close()


@dataclass
class Relayed:
    """All that a relay serves."""

    listeners: list[Listener]
    lanes: list[Lane]
    connections: list[Connection] = field(default_factory=list)
    margin: float = 0.0  # the usual lateness of what is delivered after a sleep
    slept: bool = False

    def serve(self) -> None:
        """Carry until standard input ends; a line there is answered with a line of counts."""
        while self._step():
            pass

    def _step(self) -> bool:
        now = time.monotonic()
        late = [lane.deliver(now + self.margin) for lane in self.lanes]
        if self.slept:
            self._learn(late)
        self.connections = [each for each in self.connections if not each.ended]
        readers, writers = self._wanted(now)
        servers = {listener.socket: listener for listener in self.listeners}
        moment = self._next_moment(now)
        patience = None if moment is None else max(0.0, moment - self.margin - time.monotonic())
        ready, writable, _ = select.select([0, *servers, *readers], writers, [], patience)
        self.slept = bool(patience) and not ready and not writable
        for key in writable:
            writers[key]()
        for key in ready:
            if key in readers:
                readers[key].read()
            elif key in servers:
                self._accept(servers[key])
            elif not self._answer():
                return False
        return True

    def _wanted(self, now: float) -> tuple[dict, dict]:
        readers, writers = {}, {}
        for connection in self.connections:
            if not connection.open:
                writers[connection.far] = connection.connected
                continue
            for flow in (connection.forth, connection.back):
                if flow.wants_read and flow.lane.opens_at() <= now:
                    readers[flow.source] = flow
                if flow.wants_write:
                    writers[flow.sink] = flow.write
        return readers, writers

    def _next_moment(self, now: float) -> float | None:
        """When something is due next, or a lane takes bytes again that may be waiting for it."""
        moments = [lane.due[0][0] for lane in self.lanes if lane.due]
        moments += [lane.opens_at() for lane in self.lanes if lane.opens_at() > now]
        return min(moments, default=None)

    def _learn(self, late: list[float | None]) -> None:
        for each in late:
            if each is not None:
                step = _MARGIN_STEP if each > 0 else -_MARGIN_STEP
                self.margin = min(_MARGIN_MOST, max(0.0, self.margin + step))

    def _accept(self, listener: Listener) -> None:
        with suppress(OSError):
            accepted, _ = listener.socket.accept()
            if len(self.connections) < _CONNECTIONS:
                self.connections.append(Connection(accepted, listener))
            else:
                accepted.close()

    def _answer(self) -> bool:
        """Answer a line of standard input; False at its end: whoever started the relay is gone."""
        if not os.read(0, 4096):
            return False
        counts = {
            "carried": [lane.carried for lane in self.lanes],
            "connections": len(self.connections),
            "deliveries": sum(lane.deliveries for lane in self.lanes),
            "late_seconds": sum(lane.late_sum for lane in self.lanes),
            "late_most": max(lane.late_most for lane in self.lanes),
            "margin": self.margin,
        }
        print(json.dumps(counts), flush=True)
        return True


_STAMP = struct.Struct("ll")
_STAMP_SPACE = socket.CMSG_SPACE(_STAMP.size)


def _came(ancillary: list[tuple[int, int, bytes]]) -> float:
    """When the last of the bytes just read reached this machine, on the monotonic clock; without a stamp: now."""
    now, wall = time.monotonic(), time.time()
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS) and len(data) >= _STAMP.size:
            seconds, nanoseconds = _STAMP.unpack_from(data)
            return now - max(0.0, wall - seconds - nanoseconds * 1e-9)
    return now


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    try:
        return socket.gethostbyname(host), int(port)
    except (OSError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port of a host that is known here") from None


def be_punctual() -> None:
    """Ask for wake-ups of this thread without slack and before other processes; what the system refuses is done without."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))


def main(arguments: list[str]) -> None:
    """Serve one pair; prints {"to_a": port, "to_b": port} once both listeners are there."""
    parser = argparse.ArgumentParser(
        prog="python -m spu_llm.network.relay", description="Carries two parties' traffic as a link would."
    )
    parser.add_argument("--a", required=True, type=_address, help="host:port at which party A listens")
    parser.add_argument("--b", required=True, type=_address, help="host:port at which party B listens")
    parser.add_argument("--bandwidth-mbps", type=float, help="of payload, each way; none: as fast as it goes")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    options = parser.parse_args(arguments)
    rate = None if options.bandwidth_mbps is None else options.bandwidth_mbps * 1e6 / 8
    a_to_b, b_to_a = (Lane(rate, options.delay_ms / 1e3) for _ in range(2))
    to_a, to_b = (socket.create_server((options.host, 0)) for _ in range(2))
    for server in (to_a, to_b):
        server.setblocking(False)
    be_punctual()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted user's parties say goodbye through it
    print(json.dumps({"to_a": to_a.getsockname()[1], "to_b": to_b.getsockname()[1]}), flush=True)
    Relayed([Listener(to_a, options.a, b_to_a, a_to_b), Listener(to_b, options.b, a_to_b, b_to_a)], [a_to_b, b_to_a]).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
