"""Holds a relay against its profile: round trips of small messages and a long transfer, measured between two sockets."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from .emulation import Relay
from .profile import NetworkProfile
from .relay import be_punctual

TOLERANCE = 0.05

_PING = b"8 bytes."
_PINGS, _UNCOUNTED = 25, 5
_PIECE = bytes(1 << 20)
_LONG_SECONDS = 0.5  # of the profile's bandwidth in a long transfer
_LONG_TRANSFERS = 3
_CEILING_BYTES = 1 << 29
_PATIENCE = 60.0


@dataclass(frozen=True)
class EmulationCheck:
    """A profile's round trip and bandwidth as asked and as measured, and the most this relay carries here.

    Round trips are of 8 bytes each way, one at a time; the median, the ends' wake-ups included, which have the relay's priority.
    `direct_ms` is the same without relay. Throughput is of payload, in both directions at the same time, as openings load a link:
    the slower direction's, in the fastest of three transfers, as slower ones tell of a busy machine. `ceiling_mbps` is that of a
    relay without bandwidth and delay in one direction, `ceiling_both_mbps` in each of both. Lateness is as in `Carried`.
    """

    profile: str
    asked_rtt_ms: float
    measured_rtt_ms: float
    direct_ms: float
    asked_mbps: float
    measured_mbps: float
    ceiling_mbps: float
    ceiling_both_mbps: float
    late_ms: float
    late_most_ms: float

    @property
    def rtt_error(self) -> float:
        return self.measured_rtt_ms / self.asked_rtt_ms - 1

    @property
    def throughput_error(self) -> float:
        return self.measured_mbps / self.asked_mbps - 1

    @property
    def holds(self) -> bool:
        """Whether both are within 5% of the profile."""
        return abs(self.rtt_error) <= TOLERANCE and abs(self.throughput_error) <= TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        errors = {"rtt_error": self.rtt_error, "throughput_error": self.throughput_error}
        return {**asdict(self), **errors, "within_5_percent": self.holds}

    def __str__(self) -> str:
        verdict = "within 5%" if self.holds else "NOT within 5%"
        return (
            f"link {self.profile}: round trip {self.measured_rtt_ms:.2f} ms of {self.asked_rtt_ms:g} asked, "
            f"{self.measured_mbps:.0f} Mbps of {self.asked_mbps:g} asked, {verdict}; this relay carries up to "
            f"{self.ceiling_mbps:.0f} Mbps, {self.ceiling_both_mbps:.0f} in each direction at the same time"
        )


@dataclass(frozen=True)
class Ceiling:
    """What an unshaped relay carries on this machine now, in Mbit/s, and the round trip without any relay in ms."""

    mbps: float
    both_mbps: float
    direct_ms: float


def measure_ceiling() -> Ceiling:
    """Load a relay that has no bandwidth and no delay, with the ends of the transfer on the same cores."""
    unshaped = NetworkProfile(name="unshaped", mode="none")
    with _Ends() as ends:
        direct = statistics.median(ends.round_trips(ends.address, _PINGS))
        with Relay(unshaped, ends.address, ends.address) as relay:
            one = ends.transfer(relay, _CEILING_BYTES, both=False)
            both = ends.transfer(relay, _CEILING_BYTES, both=True)
    return Ceiling(_mbps(_CEILING_BYTES, one), _mbps(_CEILING_BYTES, both), direct * 1e3)


def check_emulation(profile: NetworkProfile, ceiling: Ceiling | None = None) -> EmulationCheck:
    """Measure a relay with this profile, which needs a bandwidth and a delay; seconds. `ceiling` saves measuring that again."""
    if profile.bandwidth_mbps is None or not profile.delay_ms:
        raise ValueError(f"profile {profile.name} has no bandwidth or no delay to compare with")
    ceiling = ceiling or measure_ceiling()
    size = int(profile.bandwidth_mbps * 1e6 / 8 * _LONG_SECONDS)
    with _Ends() as ends, Relay(profile, ends.address, ends.address) as relay:
        round_trip = statistics.median(ends.round_trips(relay.to_b, _PINGS))
        late = relay.carried()
        seconds = [ends.transfer(relay, size, both=True) - profile.delay_ms / 1e3 for _ in range(_LONG_TRANSFERS)]
    return EmulationCheck(
        profile=profile.name,
        asked_rtt_ms=2 * profile.delay_ms,
        measured_rtt_ms=round_trip * 1e3,
        direct_ms=ceiling.direct_ms,
        asked_mbps=profile.bandwidth_mbps,
        measured_mbps=_mbps(size, min(seconds)),
        ceiling_mbps=ceiling.mbps,
        ceiling_both_mbps=ceiling.both_mbps,
        late_ms=late.late_ms,
        late_most_ms=late.late_most_ms,
    )


def _mbps(size: int, seconds: float) -> float:
    return size * 8 / seconds / 1e6


class _Ends:
    """Both ends of the measured connections: a server that returns small messages, or swallows long ones, and its clients."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> _Ends:
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def round_trips(self, address: str, count: int) -> list[float]:
        """Seconds of each of `count` round trips, after some that are not counted."""
        found: list[float] = []
        thread = threading.Thread(target=self._ping, args=(address, count + _UNCOUNTED, found))
        thread.start()
        thread.join()
        return found[_UNCOUNTED:]

    def _ping(self, address: str, count: int, found: list[float]) -> None:
        be_punctual()
        with self._connect(address) as end:
            for _ in range(count):
                start = time.monotonic()
                end.sendall(_PING)
                _receive(end, len(_PING))
                found.append(time.monotonic() - start)

    def transfer(self, relay: Relay, size: int, both: bool) -> float:
        """Seconds until `size` bytes have arrived; of `both` directions at the same time, of the slower one."""
        addresses = [relay.to_b, relay.to_a] if both else [relay.to_b]
        ends = [self._connect(address) for address in addresses]
        found: list[float] = []
        threads = [threading.Thread(target=lambda end=end: found.append(self._send(end, size))) for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(found)

    def _connect(self, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        end = socket.create_connection((host, int(port)), _PATIENCE)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return end

    def _send(self, end: socket.socket, size: int) -> float:
        """The far end says when the last byte came, by this machine's one clock."""
        with end:
            start = time.monotonic()
            for at in range(0, size, len(_PIECE)):
                end.sendall(_PIECE[: size - at])
            end.shutdown(socket.SHUT_WR)
            return float(end.recv(64)) - start

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(end,), daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        room = bytearray(len(_PIECE))
        with end:
            count = end.recv_into(room)
            small = room[:count] == _PING
            if small:
                be_punctual()
            while count:
                last = time.monotonic()
                if small:
                    end.sendall(_PING)
                count = end.recv_into(room)
            if not small:
                end.sendall(repr(last).encode())


def _receive(end: socket.socket, size: int) -> None:
    while size:
        size -= len(end.recv(size))
