"""Settings of SPU's brpc link that suit a network, and how to send much over it.

What yacl does over it (channel.cc, channel.h): every message is a remote call of its own, made by a task of its own, so a sender
waits for nothing. The answer to the call and, once the receiver has taken the message, an acknowledgement come back beside other
traffic. Nobody waits for them either, but for two windows:

- A message above `http_max_payload_size` is cut into calls of that size, at most 8 of them without answer
  (`chunk_parallel_send_size`, not settable from Python). An answer comes a round trip after its call, so these 8 must hold more
  than the bandwidth carries in a round trip.
- At most `throttle_window_size` messages that the receiver has not taken; all later ones wait, whatever channel they are of. The
  default of 10 stops a party that sends many in a row for a round trip after each ten, and as long as the other computes before
  it takes them, its signs of life included. Off, what is under way is for the sender to bound: `PacedSender`.

All messages share one TCP connection. Left alone, as nothing was gained when measured through the relay: `brpc_channel_protocol`
(h2:grpc is slower for megabytes, http is refused), `brpc_channel_connection_type` (pooled is as fast, and makes a connection, with
TLS several round trips, for each call under way), and retries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from .profile import NetworkProfile

if TYPE_CHECKING:  # it loads SPU, which a process that only looks at a profile needs not
    from spu import libspu

RECEIVE_TIMEOUT_MS = 30_000

_CHUNKS = 8  # yacl's chunk_parallel_send_size
_LEAST_PAYLOAD, _MOST_PAYLOAD = 1 << 20, 1 << 25  # yacl's default; half of what brpc takes in one call (max_body_size)
_UNDER_WAY = 1 << 26  # bytes, where the network carries them in time
_SHARE_OF_TIMEOUT = 0.25


def link_options(desc: libspu.link.Desc, profile: NetworkProfile, recv_timeout_ms: int = RECEIVE_TIMEOUT_MS) -> None:
    """Set payload, window and timeouts of `desc` for the profile's bandwidth and delay; call it before `create_brpc`.

    `recv_timeout_ms` is how long a party waits for a message of the other, its compute included, before it fails; a single call may
    take as long. The payload is twice what 8 calls need to fill the bandwidth over a round trip.
    """
    desc.recv_timeout_ms = recv_timeout_ms
    desc.http_timeout_ms = recv_timeout_ms
    desc.throttle_window_size = 0
    in_a_round_trip = _rate(profile) * 2 * profile.delay_ms / 1e3
    desc.http_max_payload_size = int(min(_MOST_PAYLOAD, max(_LEAST_PAYLOAD, 2 * in_a_round_trip / _CHUNKS)))


class Channel(Protocol):
    """What is needed of a link."""

    def send(self, rank: int, data: bytes) -> None: ...
    def send_async(self, rank: int, data: bytes) -> None: ...


class PacedSender:
    """Sends to peers without waiting, but for a message now and then, so that what is under way stays bounded.

    Bounded is what a small message (a sign of life) may have before it on the connection: 64 MB, or what the network carries in a
    quarter of the timeout if that is less, and the calls under way of one message beyond that. It costs a round trip each time.
    """

    def __init__(self, channel: Channel, profile: NetworkProfile, timeout_ms: int = RECEIVE_TIMEOUT_MS):
        self._channel = channel
        in_time = _rate(profile) * timeout_ms / 1e3 * _SHARE_OF_TIMEOUT
        self._most = int(min(_UNDER_WAY, in_time)) if in_time else _UNDER_WAY
        self._under_way: dict[int, int] = {}

    def send(self, rank: int, data: bytes) -> None:
        """Send; returns at once, or, when enough is under way, when the peer's machine has this message."""
        self._under_way[rank] = self._under_way.get(rank, 0) + len(data)
        if self._under_way[rank] < self._most:
            self._channel.send_async(rank, data)
        else:
            self._channel.send(rank, data)
            self._under_way[rank] = 0


def _rate(profile: NetworkProfile) -> float:
    """Bytes a second; 0 where the profile has no bandwidth."""
    return (profile.bandwidth_mbps or 0.0) * 1e6 / 8
