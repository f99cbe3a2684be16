"""Exact traffic of a program, read from the profile SPU itself writes to its log."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from spu import libspu

from .workspace import workspace

_OP = re.compile(
    r"- pphlo\.(?P<op>[\w .:]+), executed (?P<count>\d+) times, duration (?P<seconds>[\d.e+-]+)s, "
    r"send bytes (?P<bytes>\d+) recv bytes \d+, send actions (?P<messages>\d+)"
)
_LINK = re.compile(r"Link details: total send bytes (\d+), recv bytes (\d+), send actions (\d+), recv actions (\d+)")


@dataclass
class Traffic:
    """What one party sends."""

    bytes: int = 0
    messages: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes + other.bytes, self.messages + other.messages)


@dataclass
class OpCost:
    """One kind of operation over a program's run, at the party that logged it."""

    count: int = 0
    seconds: float = 0.0
    bytes: int = 0
    messages: int = 0


@dataclass
class Profile:
    """One run of one program: what each rank sent, and the cost by operation."""

    sent: list[Traffic]
    ops: dict[str, OpCost] = field(default_factory=dict)


@cache
def _log_file() -> Path:
    """Send SPU's log to a file of ours (SPU has one logger a process and no way to read it back)."""
    path = workspace() / "spu.log"
    options = libspu.logging.LogOptions()
    options.enable_console_logger = False
    options.system_log_path = str(path)
    libspu.logging.setup_logging(options)
    return path


def start_profiling() -> None:
    """Begin logging to the file; forgets whatever is in it."""
    os.truncate(_log_file(), 0)


def profiled(rank: int, world_size: int) -> bool:
    """Whether this rank should log. Of two parties one is enough: what it receives is what the other sends."""
    return rank == 0 or world_size > 2


def read_own_profile(rank: int, world_size: int) -> Profile:
    """As `read_profile` where one party of several runs in this process; nothing is said of the others."""
    text, [(sent_bytes, _, sent_messages, _)] = _read_log(1)
    sent = [Traffic()] * world_size
    sent[rank] = Traffic(sent_bytes, sent_messages)
    return Profile(sent, _op_costs(text))


def read_profile(world_size: int) -> Profile:
    """Read the profile of the program that every party has just finished, and empty the log.

    With two parties the figures are exact for each rank. With three, SPU's lines do not name the party, so every rank
    is given the largest: exact for the busiest party of that program, an upper bound on a party's sum over programs.
    """
    text, lines = _read_log(sum(profiled(rank, world_size) for rank in range(world_size)))
    if world_size == 2:
        sent_bytes, received_bytes, sent_messages, received_messages = lines[0]
        sent = [Traffic(sent_bytes, sent_messages), Traffic(received_bytes, received_messages)]
    else:
        largest = Traffic(max(line[0] for line in lines), max(line[2] for line in lines))
        sent = [largest] * world_size
    return Profile(sent, _op_costs(text))


def _read_log(expected: int) -> tuple[str, list[tuple[int, ...]]]:
    """The log, which is emptied, and its traffic lines: bytes sent, received, messages sent, received."""
    text = _log_file().read_text(errors="replace")
    start_profiling()
    lines = [tuple(map(int, found.groups())) for found in _LINK.finditer(text)]
    if len(lines) != expected:
        raise RuntimeError(f"SPU's log holds {len(lines)} traffic lines where {expected} were due")
    return text, lines


def _op_costs(text: str) -> dict[str, OpCost]:
    ops: dict[str, OpCost] = {}
    for found in _OP.finditer(text):
        cost = ops.setdefault(found["op"].replace("custom_call: ", ""), OpCost())
        cost.count = max(cost.count, int(found["count"]))
        cost.seconds = max(cost.seconds, float(found["seconds"]))
        cost.bytes = max(cost.bytes, int(found["bytes"]))
        cost.messages = max(cost.messages, int(found["messages"]))
    return ops
