"""What the dealer's server and a party's puller say to each other: one gRPC stream each way, of msgpack maps.

A party sends {role, session, description, place, start} and later {kept}: all records below that number lie in its folder for good.
The dealer sends {wait} once a second while there is nothing to send, {key} first, for each record {number, size}, its bytes in
{data} of at most CHUNK, and {digest} (SHA-256 of the record), and {end} after the last one there will be.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from ...errors import UserError
from ..protocol import ROLES
from ..supply import PARTIES

SERVICE, METHOD = "spu_llm.Material1", "Pull"  # a change of the messages changes the service's name
CHUNK = 1 << 20
PARTY_ROLES = tuple(ROLES[rank] for rank in PARTIES)

_SHORTEST_PING_MS = 1_000  # a busy machine may answer late


def pings(seconds: float) -> list[tuple[str, int]]:
    """gRPC options by which an end notices, within `seconds` or so, that the other's machine is gone or frozen."""
    half = max(int(seconds * 500), _SHORTEST_PING_MS)
    return [
        ("grpc.keepalive_time_ms", half),
        ("grpc.keepalive_timeout_ms", half),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _SHORTEST_PING_MS // 2),  # what it suffers from the other end
    ]


@dataclass(frozen=True)
class Wanted:
    """One generation's material, as a party asks for it.

    session: what both parties call this generation and no other, agreed on between them (letters, digits, - and _).
    description: all that the dealer must know, in bytes that are equal at both parties; public.
    """

    session: str
    description: bytes

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.session):
            raise UserError(f"session {self.session!r}: use 1 to 64 letters, digits, - and _")


def pack(message: dict[str, Any]) -> bytes:
    return msgpack.packb(message)


def unpack(data: bytes) -> dict[str, Any]:
    """ValueError where it is not a map."""
    message = msgpack.unpackb(data)
    if not isinstance(message, dict):
        raise ValueError("a message that is not a map")
    return message


def write_once(path: Path, data: bytes) -> bytes:
    """Write a file that only this user can read, whole and lasting when this returns; what it holds if it is there already."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.new")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(partial, path)
    except FileExistsError:
        data = path.read_bytes()
    partial.unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return data
