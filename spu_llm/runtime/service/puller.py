"""A party's end: brings its material from the dealer to its own folder, ahead of use and across failures of either."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import msgpack

from ...dealer.store import MaterialStore
from ...errors import UserError
from ...network.certificates import DEALER, Identity
from ...network.tls import check_peer
from ..supply import party_folder, with_store
from .wire import METHOD, PARTY_ROLES, SERVICE, Wanted, pack, pings, unpack, write_once

_PAUSE = 0.05
_LONGEST_PAUSE = 2.0  # between two attempts to reach the dealer
_CONNECT_SECONDS = 5.0
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT)
_Message = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """patience: seconds to wait for a dealer that does not answer, and for the other party to ask for the same.

    Nothing more is fetched while the folder holds hold_bytes or hold_records (None: any number) or more of unused material.
    """

    patience: float = 30.0
    hold_bytes: int = 1 << 30
    hold_records: int | None = None


class MaterialPuller:
    """Fetches one generation's records to `folder`/party-RANK while its context is entered, in a thread of its own.

    Entering returns when the key and the first record lie there. After a crash of this process or the dealer's, or a broken
    connection, the same call with the same folder goes on where it was. UserError, on entering or from `check`, where the dealer
    or the other party does not come within the patience, where a certificate is refused, where the other party describes another
    generation, or where the folder holds other material.
    """

    def __init__(
        self,
        address: str,
        identity: Identity,
        wanted: Wanted,
        folder: Path,
        limits: Limits | None = None,
        others: Callable[[], None] = lambda: None,
    ):
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise UserError(f"dealer's address {address!r}: give it as HOST:PORT")
        if identity.role not in PARTY_ROLES:
            raise UserError(f"role {identity.role}: gets no material; it is for {' and '.join(PARTY_ROLES)}")
        self._address = address
        self._identity = identity
        self._wanted = wanted
        self._folder = party_folder(folder.absolute(), PARTY_ROLES.index(identity.role))
        self._others = others
        self._limits = limits or Limits()
        self._connect_seconds = min(_CONNECT_SECONDS, self._limits.patience)
        self._failure: BaseException | None = None
        self._call: Any = None
        self._closing = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="material")
        self.finished = False
        """Whether all the records that there will be have come."""

    def __enter__(self) -> MaterialPuller:
        self._identity.check()
        self._claim = _Claim(self._folder, self._wanted.session, self._identity.role)
        self._thread.start()
        try:
            while not self._ready.wait(_PAUSE):
                self._others()
            self.check()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        """Stop fetching; what has come stays."""
        self._closing.set()
        if self._call is not None:
            self._call.cancel()
        self._thread.join()
        self._claim.release()

    def check(self) -> None:
        """UserError where fetching has failed for good, or `others` raises: call it while waiting for a record."""
        self._others()
        if isinstance(self._failure, UserError):
            raise UserError(str(self._failure))
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Return when all records have come, for which the limits must have room, and the dealer has deleted its own.

        UserError as from `check`.
        """
        while self._thread.is_alive():
            self._thread.join(_PAUSE)
            self._others()
        self.check()

    def _work(self) -> None:
        try:
            self._pull()
        except BaseException as error:  # handed to whoever checks
            self._failure = error
        finally:
            self._ready.set()

    def _pull(self) -> None:
        """One stream after another, until one comes to the end of the material."""
        self._heard = time.monotonic()  # when the dealer last said anything
        self._failing_since: float | None = None  # since when nothing it said has helped
        pause = _PAUSE
        while (reason := self._stream()) and not self._closing.is_set():
            if self._failing_since is None:
                self._failing_since, pause = self._heard, _PAUSE
            if time.monotonic() - self._failing_since > self._limits.patience:
                if self.finished:  # only the dealer has not heard of it
                    return
                raise UserError(
                    f"{self._address}: no material from the dealer for {self._limits.patience:g} s ({reason}); "
                    "see that it runs and can be reached, and start again to go on"
                )
            self._closing.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _stream(self) -> str:
        """Take in one stream; returns why another may do better, or "" at the end of all. UserError where none will."""
        # Without a pool of its own it would share the waiting times that an earlier channel's failures left.
        options = [("grpc.ssl_target_name_override", DEALER), ("grpc.use_local_subchannel_pool", 1)]
        options += [*pings(self._limits.patience / 2), ("grpc.min_reconnect_backoff_ms", int(self._connect_seconds * 1000))]
        requests: SimpleQueue = SimpleQueue()
        try:
            with grpc.secure_channel(self._address, self._credentials(), options) as channel:
                self._call = channel.stream_stream(f"/{SERVICE}/{METHOD}", pack, unpack)(iter(requests.get, None))
                if self._closing.is_set():
                    self._call.cancel()
                self._take_in(self._messages(self._call), requests)
            return "" if self.finished else "it ended the stream early"
        except _BadRecord as error:
            return str(error)
        except grpc.RpcError as error:
            return "" if self._closing.is_set() else self._judge(error)
        finally:
            requests.put(None)

    def _credentials(self) -> grpc.ChannelCredentials:
        self._identity.check()  # it may have expired since the last stream
        files = (self._identity.ca, self._identity.key, self._identity.certificate)
        return grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))

    def _messages(self, call: Iterator[_Message]) -> Iterator[_Message]:
        for message in call:
            self._heard = time.monotonic()
            yield message

    def _take_in(self, messages: Iterator[_Message], requests: SimpleQueue) -> None:
        number, alone_since = with_store(self._folder, MaterialStore.next_number), None
        place = {"session": self._wanted.session, "role": self._identity.role, "place": self._claim.place}
        requests.put({**place, "description": self._wanted.description, "start": number})
        for message in messages:
            if "wait" in message:
                self._failing_since = None
                alone_since = self._check_alone(message["wait"], alone_since)
            elif "key" in message:
                self._keep_key(message["key"])
            elif "number" in message:
                data = _read_record(message, number, messages)
                self._keep(number, data)
                number += 1
                self._failing_since = None
                requests.put({"kept": number})
                self._hold()
            elif "end" in message:
                requests.put(None)  # the dealer ends the stream when it has deleted all
                self.finished = True
            if number or self.finished:
                self._ready.set()

    def _check_alone(self, missing: str, since: float | None) -> float | None:
        if missing == DEALER:
            return None
        since = since or time.monotonic()
        if time.monotonic() - since > self._limits.patience:
            raise UserError(
                f"session {self._wanted.session}: the {missing} has not asked {self._address} for its material within "
                f"{self._limits.patience:g} s; start it with the same settings"
            )
        return since

    def _keep_key(self, key: bytes) -> None:
        if write_once(self._folder / "key", key) != key:
            raise UserError(f"{self._folder / 'key'}: is not the key that the dealer has for this session; use another folder")

    def _keep(self, number: int, data: bytes) -> None:
        try:
            with_store(self._folder, lambda store: store.put(number, data))
        except OSError as error:
            raise UserError(
                f"{self._folder}: material {number} cannot be written ({error.strerror}); make room, or hold less"
            ) from None

    def _hold(self) -> None:
        """Wait, with the stream standing still, while the folder holds as much as it may."""
        while not self._closing.is_set():
            records, held = _held(self._folder)
            if held < self._limits.hold_bytes and (self._limits.hold_records is None or records < self._limits.hold_records):
                break
            self._closing.wait(_PAUSE)
        self._heard = time.monotonic()  # it was not listened to

    def _judge(self, error: grpc.RpcError) -> str:
        code, details = error.code(), error.details()
        if code in _REFUSALS:
            raise UserError(f"dealer at {self._address}: {details}")
        if code == grpc.StatusCode.UNIMPLEMENTED:
            raise UserError(f"{self._address}: is no dealer of this version of spu_llm; run one version everywhere")
        check_peer(self._address, self._identity, DEALER, self._connect_seconds)
        return " ".join(str(details).split())


class _BadRecord(Exception):
    """What came is not what was sent."""


class _Claim:
    """A party's folder, for one session and one process at a time. `place` is its name at the dealer: random, and kept in it.

    UserError where it holds material of another session or role, or another process fetches to it.
    """

    def __init__(self, folder: Path, session: str, role: str):
        path = folder / "source"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (folder / "key").exists() and not path.exists():
                raise UserError(f"{folder}: holds material that did not come this way; use another folder")
            own = {"session": session, "role": role, "place": secrets.token_hex(16)}
            found = msgpack.unpackb(write_once(path, msgpack.packb(own)))
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"{folder}: cannot be made or written to ({error.strerror}); use another folder") from None
        try:
            if (found["session"], found["role"]) != (session, role):
                raise UserError(
                    f"{folder}: holds the {found['role']}'s material of session {found['session']}, not the {role}'s of {session}; "
                    "use another folder"
                )
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise UserError(
                f"{folder}: another process fetches material to it; wait until that ends, or use another folder"
            ) from None
        except UserError:
            self.release()
            raise
        self.place: str = found["place"]

    def release(self) -> None:
        os.close(self._handle)


def _read_record(head: _Message, due: int, messages: Iterator[_Message]) -> bytes:
    if head["number"] != due:
        raise _BadRecord(f"record {head['number']} came where {due} was due")
    data, digest = bytearray(), hashlib.sha256()
    for message in messages:
        if "digest" in message:
            if len(data) != head["size"] or message["digest"] != digest.digest():
                raise _BadRecord(f"record {due} came damaged")
            return bytes(data)
        data += message["data"]
        digest.update(message["data"])
        if len(data) > head["size"]:
            raise _BadRecord(f"record {due} is longer than it was said to be")
    raise _BadRecord(f"record {due} broke off")


def _held(folder: Path) -> tuple[int, int]:
    """Records in a folder, and their bytes."""
    records = held = 0
    for path in folder.glob("*.material"):
        try:
            held += path.stat().st_size
            records += 1
        except FileNotFoundError:  # it has just been used
            continue
    return records, held
