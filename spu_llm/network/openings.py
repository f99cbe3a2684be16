"""How long an opening takes between two processes over SPU's link: as measured through a relay, and as the cost model has it.

An opening: both parties send as many bytes and wait for the other's. `python -m spu_llm.network.openings` is one of the two.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from .emulation import Relay
from .link import link_options
from .profile import NetworkProfile

if TYPE_CHECKING:
    from spu import libspu

SIZES = (8, 1 << 13, 1 << 17, 1 << 20, 1 << 23)
"""Bytes one party sends: an element, a token's activations, a prompt's, and what takes more than one call."""

_PATIENCE = 300.0


@dataclass(frozen=True)
class Opening:
    """One opening of `size` bytes each way, in seconds: over the bare link, through the relay, and by `NetworkProfile.seconds`.

    The model's compute is the shortest opening's time over the bare link. What a longer one takes there beyond that is copying,
    most of it while other bytes are under way.
    """

    size: int
    bare_seconds: float
    link_seconds: float
    model_seconds: float

    @property
    def error(self) -> float:
        """By how much the model is off, as a share of the measured time."""
        return self.model_seconds / self.link_seconds - 1


@dataclass(frozen=True)
class _Task:
    """What to time: the median of so many pairs of openings of each size, over links between these addresses.

    `routes` has for each link what either party is told: its own address and the other's.
    """

    profile: str
    sizes: Sequence[int]
    pairs: int
    routes: Sequence[Sequence[tuple[str, str]]]


def time_openings(profile: NetworkProfile, sizes: Sequence[int] = SIZES, pairs: int = 10) -> list[Opening]:
    """Time openings between two processes of this machine, without and with a relay in between."""
    a, b, c, d = (_free_address() for _ in range(4))
    with Relay(profile, c, d) as relay:
        routes = [[(a, b), (b, a)], [(c, relay.to_b), (d, relay.to_a)]]
        bare, linked = _run(_Task(profile.model_dump_json(), sizes, pairs, routes))
    return [
        Opening(size, direct, seconds, profile.seconds(min(bare), 1, size))
        for size, direct, seconds in zip(sizes, bare, linked, strict=True)
    ]


def _run(task: _Task) -> list[list[float]]:
    """Seconds of an opening over each route, of each size."""
    command = [sys.executable, "-m", "spu_llm.network.openings", json.dumps(asdict(task))]
    children = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    try:
        found = [child.communicate(timeout=_PATIENCE) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (_, errors) in zip(children, found, strict=True):
        if child.returncode:
            raise RuntimeError(f"a process that timed openings ended with code {child.returncode}: {errors[-2000:]}")
    seconds: list[list[float]] = json.loads(found[0][0])
    return seconds


def _free_address() -> str:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def _party(task: _Task, rank: int) -> list[list[float]]:
    """One of the two."""
    from spu import libspu

    found = []
    for route in task.routes:
        desc = libspu.link.Desc()
        desc.id = "openings"
        link_options(desc, NetworkProfile.model_validate_json(task.profile))
        for party in range(2):
            desc.add_party(str(party), route[rank][party != rank])
        link = libspu.link.create_brpc(desc, rank)
        found.append([_seconds(link, bytes(size), task.pairs) for size in task.sizes])
        link.stop_link()
    return found


def _seconds(link: libspu.link.Context, data: bytes, pairs: int) -> float:
    """Of one opening. Two are timed as one: a party that is ahead by part of a delay gains it in every second."""
    times = []
    for _ in range(pairs + 1):
        start = time.monotonic()
        for _ in range(2):
            link.send_async(1 - link.rank, data)
            link.recv(1 - link.rank)
        times.append((time.monotonic() - start) / 2)
    return statistics.median(times[1:])  # in the first, connections and buffers grow


if __name__ == "__main__":
    print(json.dumps(_party(_Task(**json.loads(sys.argv[1])), int(sys.argv[2]))))
