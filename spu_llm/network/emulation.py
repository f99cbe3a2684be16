"""Starts the relay that stands for the network between two parties of this machine.

The kernel's own emulation, `netem`, would need no process. Whether it is there is found out by asking for it, see `netem_refusal`;
many kernels of virtual machines come without ("Specified qdisc kind is unknown"). The relay works everywhere.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from .profile import NetworkProfile

_PROBE = "unshare --net tc qdisc add dev lo root netem delay 1ms"  # in a network of its own: touches nothing of this machine
_PROBE_SECONDS = 10.0


@dataclass(frozen=True)
class Carried:
    """What a relay has carried so far: bytes on the wire (framing, answers and TLS included) and how punctual it was.

    `late_ms` is the mean distance of a delivery from when it was due, `late_most_ms` the largest lateness: on a machine that has
    other work, or a host that takes its processors away, these say how far to trust a timed run.
    """

    a_to_b: int
    b_to_a: int
    connections: int
    deliveries: int
    late_ms: float
    late_most_ms: float


class Relay:
    """A process that carries two parties' traffic as a link with the profile's bandwidth and delay would (see relay.py).

    `a` and `b` are the addresses (host:port) at which the parties listen. B is told that A is at `to_a`, A that B is at `to_b`.
    The parties need not be there yet. Use as a context manager. The process ends with the one that started it,
    however that ends. A profile without bandwidth (`mode: none`) gives a relay that only carries.
    """

    def __init__(self, profile: NetworkProfile, a: str, b: str, host: str = "127.0.0.1"):
        command = [sys.executable, "-m", "spu_llm.network.relay", "--a", a, "--b", b, "--host", host]
        command += ["--delay-ms", str(profile.delay_ms)]
        if profile.bandwidth_mbps is not None:
            command += ["--bandwidth-mbps", str(profile.bandwidth_mbps)]
        self.profile = profile
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ports = self._line()
        self.to_a, self.to_b = (f"{host}:{ports[key]}" for key in ("to_a", "to_b"))

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the relay's process."""
        return self._process.pid

    def close(self) -> None:
        """End the relay; connections that are still open break."""
        self._process.kill()
        self._process.communicate()

    def carried(self) -> Carried:
        """What it has carried since it was started."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = self._line()
        late = found["late_seconds"] / max(1, found["deliveries"])
        a_to_b, b_to_a = found["carried"]
        return Carried(a_to_b, b_to_a, found["connections"], found["deliveries"], late * 1e3, found["late_most"] * 1e3)

    def cut(self) -> None:
        """Interrupt the link: nothing arrives any more, and nobody is told; what is under way is kept."""
        self._process.send_signal(signal.SIGSTOP)

    def mend(self) -> None:
        """Go on after `cut`."""
        self._process.send_signal(signal.SIGCONT)

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the network relay has ended with code {self._process.wait()}")
        return json.loads(line)


def netem_refusal() -> str | None:
    """Why the kernel's netem cannot be used here, None if it can: a qdisc is asked for in a network namespace made for that."""
    try:
        found = subprocess.run(_PROBE.split(), capture_output=True, text=True, timeout=_PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if found.returncode == 0 else (found.stderr.strip().splitlines() or [f"code {found.returncode}"])[-1]
