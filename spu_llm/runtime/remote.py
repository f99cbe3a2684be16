"""A session whose parties are processes: this one is one of them, linked to the others by SPU's brpc over mutual TLS.

Every process runs the same calls in the same order. A value that another party owns is given as zeros of its shape, and what only
the client may see comes as zeros elsewhere. What each process learns is what its party learns in `Session`.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
from spu import Io, libspu

from ..errors import UserError
from ..network.certificates import Identity
from ..network.link import PacedSender, link_options
from ..network.profile import NetworkProfile
from ..network.tls import check_peer, secure_link
from .party import Party
from .profile import Profile, Traffic, read_own_profile, start_profiling
from .protocol import ProtocolConfig
from .session import Phase, Session
from .watch import Watch

_LINK_ID = "spu_llm"
_POLL_SECONDS = 0.5
_DAY_MS = 86_400_000  # a message may take as long as a party computes; the watch notices failures
_RETRY_MS = 500
_RESEND_FACTOR = 4
_NONCE_BYTES = 32
_CONNECT_GRACE = 5.0  # for the link's own report of why it did not come about, which says more
_GRACE_SECONDS = 3.0  # for the watch to learn why a message failed


@dataclass(frozen=True)
class Peers:
    """Where the parties of a session are, as seen from one of them.

    addresses: host:port by role; one's own is where it listens. network: what lies between them, for the link's settings. timeout:
    seconds without a sign of life after which a peer is given up. patience: seconds that a party waits for the others to start.
    """

    role: str
    addresses: Mapping[str, str]
    identity: Identity
    network: NetworkProfile
    timeout: float = 30.0
    patience: float = 120.0


class RemoteSession(Session):
    """As `Session`, with this process as one party. `agreement`: facts that must be equal at all parties.

    Raises UserError where a peer does not come, cannot prove its role, or has another agreement; nothing secret has moved by then.
    """

    def __init__(self, protocol: ProtocolConfig, peers: Peers, agreement: Mapping[str, Any]):
        self.protocol = protocol
        self.phases = defaultdict(Phase)
        self._phase = "setup"
        self._failed = False
        self._programs = {}
        self._io = Io(protocol.world_size, protocol.spu_config(profile=False))
        self._peers = peers
        # absolute, as a party's thread has a working directory of its own
        self._identity = replace(peers.identity, folder=peers.identity.folder.absolute())
        self._watch: Watch | None = None
        self.rank = self.roles.index(peers.role)
        self._connected_by = time.monotonic() + peers.patience + _CONNECT_GRACE
        start_profiling()
        try:
            config = protocol.spu_config(profile=True, identity=self._identity)
            self._open([Party(self.rank, self._connect, config, protocol.world_size)])
        except RuntimeError as error:
            raise self._unreached(str(error).splitlines()[0][:160]) from None
        (party,) = self.parties
        party.post = PacedSender(party.channel, peers.network, round(1e3 * peers.timeout)).send
        link = party.link.spawn()
        names = {rank: f"{role} ({peers.addresses[role]})" for rank, role in enumerate(self.roles) if rank != self.rank}
        self._watch = Watch(link, names, peers.timeout)
        try:
            self._agree(agreement)
        except BaseException:
            self._failed = True
            self.close()
            raise
        self.phases.clear()  # waiting for the others to start is no cost of the session

    def _connect(self) -> libspu.link.Context:
        desc = libspu.link.Desc()
        desc.id = _LINK_ID
        # yacl ends the whole process, without a word, when a message cannot be sent: the watch has to be sooner
        resend_ms = round(_RESEND_FACTOR * 1e3 * self._peers.timeout)
        link_options(desc, self._peers.network, resend_ms)
        desc.recv_timeout_ms = _DAY_MS
        retry = desc.retry_opts
        retry.max_retry, retry.retry_interval_ms, retry.retry_interval_incr_ms = resend_ms // _RETRY_MS, _RETRY_MS, 0
        desc.retry_opts = retry
        desc.connect_retry_interval_ms = _RETRY_MS
        desc.connect_retry_times = max(1, round(1e3 * self._peers.patience / _RETRY_MS))
        for role in self.roles:
            desc.add_party(role, self._peers.addresses[role])
        secure_link(desc, self._identity)
        return libspu.link.create_brpc(desc, self.rank)

    def _unreached(self, reason: str) -> UserError:
        """Why the link did not come about."""
        for role in self.roles:
            if role != self._peers.role:
                check_peer(self._peers.addresses[role], self._identity, role)
        others = ", ".join(f"{role} at {self._peers.addresses[role]}" for role in self.roles if role != self._peers.role)
        return UserError(
            f"no link to {others} within {self._peers.patience:g} seconds ({reason}); start all parties, or correct an address"
        )

    def _agree(self, agreement: Mapping[str, Any]) -> None:
        """Each party proves its role on numbers that all just drew, and compares what it was told to run."""
        facts = msgpack.packb(dict(agreement))
        said = self._swap(os.urandom(_NONCE_BYTES) + facts)
        for role, message in zip(self.roles, said, strict=True):
            theirs = msgpack.unpackb(message[_NONCE_BYTES:])
            for key in sorted(agreement.keys() | theirs.keys()):
                if agreement.get(key) != theirs.get(key):
                    raise UserError(
                        f"the {role} has {key} {theirs.get(key)!r} where this party has {agreement.get(key)!r}; give all parties "
                        "the same"
                    )
        session = b"".join(said)
        for role, proof in zip(self.roles, self._swap(self._identity.prove(self._peers.role.encode() + session)), strict=True):
            self._identity.check_proof(role, role.encode() + session, proof)

    def _swap(self, message: bytes) -> list[bytes]:
        """What each party says, by rank."""

        def work(party: Party) -> list[bytes]:
            for rank in self._others:
                party.send(rank, message)
            return [message if rank == party.rank else party.receive(rank) for rank in range(self.protocol.world_size)]

        said: list[bytes] = self._each(work)[0]
        return said

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.protocol.world_size) if rank != self.rank]

    def close(self) -> None:
        """End this party and tell the others so."""
        if self._watch is not None:
            self._watch.close(self._failed)
        super().close()

    def check(self) -> None:
        """UserError where a peer is gone: to be asked while this party waits for somebody else."""
        if self._watch is not None:
            self._watch.check()
        elif time.monotonic() > self._connected_by:
            raise self._unreached("nobody answered")

    def meet(self) -> None:
        """One message of a byte to each other party."""
        self._swap(b"\0")

    def fail(self) -> None:
        """Let the others know, when this party closes, that it could not go on."""
        self._failed = True

    def broadcast(self, data: bytes, role: str) -> bytes:
        """Give what `role` says, which is not secret, to every party. Other parties' `data` do not count."""
        origin = self._rank(role)

        def work(party: Party) -> bytes:
            if party.rank != origin:
                return party.receive(origin)
            for rank in self._others:
                party.send(rank, data)
            return data

        said: bytes = self._each(work)[0]
        return said

    def gather_costs(self) -> None:
        """Complete the phases of rank 0 by what the others sent in theirs. The last thing a session does."""
        own = {name: vars(phase.sent[self.rank]) for name, phase in self.phases.items() if phase.sent}

        def work(party: Party) -> dict[int, Any]:
            if party.rank:
                party.send(0, msgpack.packb(own))
                return {}
            return {rank: msgpack.unpackb(party.receive(rank)) for rank in self._others}

        for rank, phases in self._each(work)[0].items():
            for name, traffic in phases.items():
                sent = [Traffic()] * self.protocol.world_size
                sent[rank] = Traffic(**traffic)
                self.phases[name].add(sent)

    def publish_from(self, name: str, value: np.ndarray, owner: str) -> None:
        origin = self._rank(owner)

        def work(party: Party) -> None:
            known = np.asarray(value)
            if party.rank != origin:
                known = np.frombuffer(party.receive(origin), value.dtype).reshape(value.shape)
            for rank in self._others if party.rank == origin else ():
                party.send(rank, np.ascontiguousarray(value).tobytes())
            shares = self._io.make_shares(known, libspu.Visibility.VIS_PUBLIC)
            party.runtime.set_var(name, shares[party.rank])

        self._each(work)

    def give(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        (own,) = parts

        def work(party: Party) -> np.ndarray:
            if party.rank:
                party.send(0, own.tobytes())
                return np.zeros_like(own)
            received = [np.frombuffer(party.receive(rank), own.dtype).reshape(own.shape) for rank in self._others]
            return np.sum([own, *received], axis=0, dtype=np.int64)

        total: np.ndarray = self._each(work)[0]
        return total

    def _profile(self) -> Profile:
        return read_own_profile(self.rank, self.protocol.world_size)

    def _wait(self, futures: list[Future]) -> tuple[set[Future], set[Future]]:
        while True:
            done, waiting = wait(futures, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
            broken = any(isinstance(future.exception(), RuntimeError) for future in done)
            if broken and self._watch is not None:
                self._blame_peer(self._watch)
            if not waiting or any(future.exception() for future in done):
                return done, waiting
            self.check()

    @staticmethod
    def _blame_peer(watch: Watch) -> None:
        """UserError where a message failed because a peer is gone; the watch may need a moment to see it."""
        end = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < end:
            watch.check()
            time.sleep(_GRACE_SECONDS / 10)
