"""A session: named secret variables that stay with the parties, and programs that run on them.

Here the parties are threads of one process; `remote.py` has the session of a process that is one party of several.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike
from spu import Io, libspu
from spu.experimental import drop_cached_var, make_cached_var

from ..errors import UserError
from . import shares
from .cheetah import rewritten
from .party import Party
from .profile import OpCost, Profile, Traffic, profiled, read_profile, start_profiling
from .program import Program, Slot, compile_program
from .protocol import ProtocolConfig

_SPU_LOG = threading.Lock()  # SPU has one log a process, so one program is profiled at a time
_RECEIVE_TIMEOUT_MS = 900_000  # a party waits this long for another that is computing
_CLOSE_TIMEOUT = 30.0
_UNUSED = "keep_opened.unused"


@dataclass
class Phase:
    """What a part of a session cost: seconds of compute, and what each rank sent."""

    seconds: float = 0.0
    sent: list[Traffic] = field(default_factory=list)
    ops: dict[str, OpCost] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes one party sends (the larger of the parties)."""
        return max((traffic.bytes for traffic in self.sent), default=0)

    @property
    def messages(self) -> int:
        """Messages one party sends (the larger of the parties)."""
        return max((traffic.messages for traffic in self.sent), default=0)

    def add(self, sent: list[Traffic]) -> None:
        self.sent = [a + b for a, b in zip(self.sent, sent, strict=True)] if self.sent else list(sent)

    def add_ops(self, ops: dict[str, OpCost]) -> None:
        for name, cost in ops.items():
            total = self.ops.setdefault(name, OpCost())
            for key, value in vars(cost).items():
                setattr(total, key, getattr(total, key) + value)


def _opened(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    kept = make_cached_var(value)
    return kept, kept * kept


class Session:
    """Parties as threads of this process, with persistent named variables.

    Use as a context manager. Values enter with `share` (secret, from one role) or `publish` (public), are worked on by
    `run`, and leave with `receive`, which gives them to one role only. Nothing else leaves the parties.

    Costs are booked to the phase named by `phase()`, which gives a `Phase`: `seconds` of compute, and the `bytes` and `messages`
    that one party sends (the larger of the parties), by SPU's own counts plus what the session itself sends (shares of inputs
    and outputs). A party that fails ends the session: later calls raise RuntimeError.
    """

    runs_ahead = True
    """Whether it gains by doing ahead of an input what can be done (see ahead.py)."""

    def __init__(self, protocol: ProtocolConfig) -> None:
        self.protocol = protocol
        self.phases: dict[str, Phase] = defaultdict(Phase)
        self._phase = "setup"
        self._failed = False
        self._programs: dict[Any, Program] = {}
        self._io = Io(protocol.world_size, protocol.spu_config(profile=False))
        desc = libspu.link.Desc()
        desc.id = uuid.uuid4().hex
        desc.recv_timeout_ms = _RECEIVE_TIMEOUT_MS
        for role in self.roles:
            desc.add_party(role, f"thread-{role}")
        with _SPU_LOG:
            start_profiling()
        connect = partial(libspu.link.create_mem, desc)
        size = protocol.world_size
        configs = [protocol.spu_config(profiled(rank, size)) for rank in range(size)]
        self._open([Party(rank, partial(connect, rank), config, size) for rank, config in enumerate(configs)])

    def _open(self, parties: list[Party]) -> None:
        """Wait until the runtimes of this process's parties are up."""
        self.parties = parties
        try:
            with self._timed():
                self._all([party.ready for party in self.parties])
        except BaseException:
            self.close()
            raise

    @property
    def roles(self) -> tuple[str, ...]:
        """The parties' names, by rank."""
        return self.protocol.roles

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """End the parties; their variables and Beaver caches are gone.

        After a failure a party may still wait for one that stopped: it is not waited for, and ends by its own timeout.
        """
        for party in self.parties:
            party.close(0.1 if self._failed else _CLOSE_TIMEOUT)
        self.parties = []

    @property
    def current_phase(self) -> str:
        """To which costs are booked now."""
        return self._phase

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Book what happens inside to `name` (set-up, prefill, decode, ...)."""
        before, self._phase = self._phase, name
        try:
            yield self.phases[name]
        finally:
            self._phase = before

    def share(self, name: str, value: np.ndarray, owner: str) -> None:
        """Make `value`, known to `owner`, a secret variable.

        The owner splits it and sends every other party its share: one message a party, ring bytes an element.
        """
        origin = self._rank(owner)
        parts = self._split(value) if any(party.rank == origin for party in self.parties) else []

        def work(party: Party) -> None:
            if party.rank == origin:
                for rank, part in enumerate(parts):
                    if rank != origin:
                        party.send(rank, shares.pack(part))
                party.runtime.set_var(name, parts[origin])
            else:
                party.runtime.set_var(name, shares.unpack(party.receive(origin)))

        self._each(work)

    def share_operand(self, name: str, value: np.ndarray, owner: str) -> None:
        """As `share`, for what is multiplied by in products of matrices, again and again.

        On SEMI2K its masked value is opened once (`keep_opened`). Where products send ciphertexts it stays with its owner, which
        halves them: nothing is sent, and who is not the owner gives its shape. Not for products of elements: they would send more.
        """
        if not self.protocol.ciphertexts:
            self.share(name, value, owner)
            self.keep_opened(name, Slot(value.shape, value.dtype))
            return
        parts = self._io.make_shares(np.asarray(value), libspu.Visibility.VIS_SECRET, self._rank(owner))
        self._each(lambda party: party.runtime.set_var(name, parts[party.rank]))

    def _split(self, value: np.ndarray) -> list[libspu.Share]:
        return self._io.make_shares(np.asarray(value), libspu.Visibility.VIS_SECRET)

    def publish(self, name: str, value: ArrayLike) -> None:
        """Make `value`, which every party knows already, a public variable; nothing is sent."""
        parts = self._io.make_shares(np.asarray(value), libspu.Visibility.VIS_PUBLIC)
        self._each(lambda party: party.runtime.set_var(name, parts[party.rank]))

    def publish_from(self, name: str, value: np.ndarray, owner: str) -> None:
        """Make a value that `owner` computed public: one message to each other party, the value's own bytes."""
        origin = self._rank(owner)
        part = self._io.make_shares(np.asarray(value), libspu.Visibility.VIS_PUBLIC)

        def work(party: Party) -> None:
            if party.rank == origin:
                party.count(value.nbytes * (self.protocol.world_size - 1), self.protocol.world_size - 1)
            party.runtime.set_var(name, part[party.rank])

        self._each(work)

    def broadcast(self, data: bytes, role: str) -> bytes:
        """Give what `role` says, which is not secret, to every party: one message to each other party."""
        origin, others = self._rank(role), self.protocol.world_size - 1
        self._each(lambda party: party.count(others * len(data), others) if party.rank == origin else None)
        return data

    def meet(self) -> None:
        """Wait until every party has done what it was given so far: threads of one process have."""

    def place(self, name: str, words: Sequence[np.ndarray]) -> None:
        """Make a secret integer variable of the shares that each party here already has; nothing is sent."""
        held = {party.rank: part for party, part in zip(self.parties, words, strict=True)}
        self.place_made(name, lambda party: held[party.rank])

    def place_made(self, name: str, make: Callable[[Party], np.ndarray]) -> None:
        """As `place`, each party making its share (int64, SEMI2K) itself."""
        self._each(lambda party: party.runtime.set_var(name, shares.additive(make(party), self.protocol.ring)))

    def public(self, name: str) -> np.ndarray:
        """The value of a public variable, which every party knows; nothing is sent."""
        parts = self._each(lambda party: party.runtime.get_var(name))
        return self._io.reconstruct([parts[0]] * self.protocol.world_size)

    def words(self, name: str) -> list[np.ndarray]:
        """The own share of an integer variable of each party here, for that party to work on; nothing is sent."""
        return self._each(lambda party: shares.additive_words(party.runtime.get_var(name)))

    def give(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Give an additively shared number, of which `parts` are known here, to the client alone: each other party sends its share.

        The result means something where the client is; elsewhere it is 0.
        """

        def work(party: Party) -> None:
            if party.rank:
                party.count(parts[party.rank].nbytes, 1)

        self._each(work)
        return np.sum(parts, axis=0, dtype=np.int64)

    def keep_opened(self, name: str, slot: Slot) -> None:
        """Make a variable a static operand: its masked value is opened once and then re-used.

        SEMI2K only (SPU's Beaver cache); other protocols have nothing of the kind. It is opened by a product of elements: were a
        matrix product the first, SPU would draw its mask again for what comes next (docs/leakage.md, "Masked weights").
        """
        if self.protocol.name != "SEMI2K":
            return
        self.run(self.compile("keep_opened", _opened, (slot,)), (name,), (name, _UNUSED))
        self._each(lambda party: party.runtime.del_var(_UNUSED))

    def forget_opened(self, name: str, slot: Slot) -> None:
        """Free what `keep_opened` keeps of a variable that is about to be replaced: the opened value lies on disk otherwise."""
        if self.protocol.name != "SEMI2K":
            return
        self.run(self.compile("forget_opened", drop_cached_var, (slot,)), (name,), _UNUSED)
        self._each(lambda party: party.runtime.del_var(_UNUSED))

    def compile(self, name: str, function: Callable, arguments: tuple) -> Program:
        """Compile `function` for a tree of slots as arguments, or return what was compiled before under this name and shapes."""
        slots, tree = jax.tree_util.tree_flatten(arguments)
        key = (name, tree, tuple((slot.shape, np.dtype(slot.dtype).str, slot.public) for slot in slots))
        if key not in self._programs:
            cheap = rewritten(function, self.protocol.fraction_bits) if self.protocol.ciphertexts else function
            self._programs[key] = compile_program(cheap, arguments, name)
        return self._programs[key]

    @property
    def programs(self) -> list[Program]:
        """Every program compiled so far."""
        return list(self._programs.values())

    def run(self, program: Program, arguments: tuple, results: Any) -> None:
        """Run `program` on variables named by the tree `arguments`; outputs become variables named by `results`."""
        executable = program.executable(arguments, results)
        with _SPU_LOG:
            self._each(lambda party: party.runtime.run(executable))
            profile = self._profile()
        phase = self.phases[self._phase]
        phase.add(profile.sent)
        phase.add_ops(profile.ops)

    def _profile(self) -> Profile:
        """What the program that was run last cost."""
        return read_profile(self.protocol.world_size)

    def receive(self, name: str) -> np.ndarray:
        """Give a secret variable to the client alone: each other party sends the client its share.

        The client learns the value; no other party learns anything, and where the client is not, zeros of its shape are given.
        """

        def work(party: Party) -> np.ndarray:
            share = party.runtime.get_var(name)
            if party.rank:
                party.send(0, shares.pack(share))
                return np.zeros(shares.shape_of(share))
            parts = [share] + [shares.unpack(party.receive(rank)) for rank in range(1, self.protocol.world_size)]
            return self._io.reconstruct(parts)

        return self._each(work)[0]

    def receive_narrow(self, name: str, scale_bits: int, row: int | None = None) -> np.ndarray:
        """Give an integer variable of `scale_bits` fraction bits, or one row of it, to the client alone, rounded down to 2^-16.

        Only the 32 bits that matter of each summand are sent (see `shares.narrow_words`): 4 bytes an element. Zeros where the
        client is not.
        """

        def work(party: Party) -> np.ndarray:
            share = party.runtime.get_var(name)
            words, shape = shares.narrow_words(share, party.rank, scale_bits), shares.shape_of(share)
            if row is not None:
                words, shape = [word.reshape(shape[0], -1)[row] for word in words], shape[1:]
            if party.rank:
                party.send(0, b"".join(word.tobytes() for word in words))
                return np.zeros(shape)
            for rank in range(1, self.protocol.world_size):
                data = np.frombuffer(party.receive(rank), np.uint32)
                words += [data] if len(data) else []
            return shares.join_words(words, shape)

        return self._each(work)[0]

    def _rank(self, role: str) -> int:
        return self.roles.index(role)

    def _each(self, work: Callable[[Party], Any]) -> list[Any]:
        """Have every party do `work` at the same time; the first failure ends the session."""
        if self._failed or not self.parties:
            raise RuntimeError("the session has ended: a party failed before, or it was closed")
        with self._timed():
            before = [party.sent for party in self.parties]
            results = self._all([party.submit(work, party) for party in self.parties])
            sent = [Traffic()] * self.protocol.world_size
            for party, earlier in zip(self.parties, before, strict=True):
                sent[party.rank] = Traffic(party.sent.bytes - earlier.bytes, party.sent.messages - earlier.messages)
            self.phases[self._phase].add(sent)
            return results

    def _all(self, futures: list[Future]) -> list[Any]:
        """The results of the parties here, or the first failure as soon as it happens."""
        try:
            done, waiting = self._wait(futures)
        except UserError:
            self._failed = True
            raise
        self._failed = bool(waiting) or any(future.exception() for future in done)
        for future in done:
            future.result()
        return [future.result() for future in futures]

    def _wait(self, futures: list[Future]) -> tuple[set[Future], set[Future]]:
        """Those that are done, and those that are not because another failed."""
        return wait(futures, return_when=FIRST_EXCEPTION)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.phases[self._phase].seconds += time.perf_counter() - start
