"""The dealer's end: serves each party its own folder, and nobody else's, and deletes what the party has kept.

A record may be sent again until the party says that it is kept, but only ever to one folder: the first one that a party names for a
session is written down before anything is sent, and no other is served. So a mask cannot come to lie in two places.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgpack

from ...dealer.store import MaterialStore
from ...errors import UserError
from ...network.certificates import DEALER, Identity
from ..supply import party_folder, read_key, with_store
from .wire import CHUNK, METHOD, PARTY_ROLES, SERVICE, Wanted, pack, pings, unpack, write_once

_WORKERS = 32  # streams at once; each of them keeps one thread
_PAUSE = 0.02
_HEARTBEAT = 1.0
_SILENCE = 20.0  # a party that does not answer for so long has left
_Message = dict[str, Any]


@dataclass
class Dealing:
    """A generation's material in the making, at the dealer: whoever deals changes it, the server reads it.

    folder: holds party-0 and party-1, each with its key when the server is given this. records: how many there are for each party
    in all, once that is known. error: why there will be no more than lie there, one line for both parties.
    """

    folder: Path
    records: int | None = None
    error: str = ""


class MaterialServer:
    """Serves material at `address` (host:port, port 0 for any free one) while its context is entered.

    `on_open` is called with what both parties have asked for, once a session and life of the server, in a thread of its own. It
    returns when the keys are in the folder; dealing may go on. Its UserError goes to both parties. In a later life of the server
    it is called again for a session that goes on: records in the folder may be served on, but masks that were lost with the
    process cannot be dealt on, so it returns what is there or raises.

    `folder` is where it remembers which party's folder each session goes to. UserError where the identity is not in order or the
    address is taken.
    """

    def __init__(self, address: str, identity: Identity, folder: Path, on_open: Callable[[Wanted], Dealing]):
        identity.check()
        self._folder = folder
        self._on_open = on_open
        self._sessions: dict[str, _Session] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_WORKERS, "material")
        options = [*pings(_SILENCE), ("grpc.so_reuseport", 0)]
        self._server = grpc.server(self._pool, options=options, maximum_concurrent_rpcs=_WORKERS)
        method = grpc.stream_stream_rpc_method_handler(self._pull, unpack, pack)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: method}),))
        credentials = grpc.ssl_server_credentials(
            [(identity.key.read_bytes(), identity.certificate.read_bytes())], identity.ca.read_bytes(), require_client_auth=True
        )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            port = self._server.add_secure_port(address, credentials)
        except OSError as error:
            raise UserError(f"{folder}: cannot be made ({error.strerror}); choose another folder for the dealer") from None
        except RuntimeError:
            port = 0
        if not port:
            raise UserError(f"{address}: the dealer cannot listen there; choose an address of this machine and a free port")
        self.address = f"{address.rpartition(':')[0]}:{port}"

    def __enter__(self) -> MaterialServer:
        self._server.start()
        return self

    def __exit__(self, *_: Any) -> None:
        """Break all streams off; parties wait for their patience for the next life of the server."""
        self._server.stop(None).wait()
        self._pool.shutdown(wait=False)

    def _pull(self, requests: Iterator[_Message], context: grpc.ServicerContext) -> Iterator[_Message]:
        try:
            asked = _Asked.read(next(requests))
        except (ValueError, TypeError, KeyError, StopIteration, UserError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a request that cannot be read: {error!r}")
        shown = " and ".join(name.decode() for name in context.auth_context().get("x509_common_name", [])) or "nobody"
        if asked.role not in PARTY_ROLES or shown != asked.role:
            said = f"a certificate of the {shown} asks for the {asked.role}'s material; use the certificate of the role that asks"
            context.abort(grpc.StatusCode.PERMISSION_DENIED, said)
        try:
            yield from self._serve(asked, requests, context)
        except UserError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    def _serve(self, asked: _Asked, requests: Iterator[_Message], context: grpc.ServicerContext) -> Iterator[_Message]:
        with self._lock:
            path = self._folder / f"{asked.wanted.session}.session"
            session = self._sessions.setdefault(asked.wanted.session, _Session(path, self._on_open))
        with session.joined(asked):
            yield from _wait(lambda: session.missing(asked), context)
        if session.dealing is None:
            return  # the party has left
        folder = party_folder(session.dealing.folder, PARTY_ROLES.index(asked.role))
        yield {"key": read_key(folder)}
        keeper = _Keeper(folder, asked.start, requests, context)
        yield from _records(session.dealing, folder, asked.start, context)
        yield from _wait(keeper.missing, context)


@dataclass
class _Asked:
    """A party's request: place is the name of the folder it pulls to, start the first number that it does not have."""

    wanted: Wanted
    role: str
    place: str
    start: int
    error: str = ""

    @classmethod
    def read(cls, message: _Message) -> _Asked:
        place, start = str(message["place"]), int(message["start"])
        if not re.fullmatch("[0-9a-f]{32}", place) or start < 0:
            raise ValueError(f"place {place!r}, start {start}")
        return cls(Wanted(str(message["session"]), bytes(message["description"])), str(message["role"]), place, start)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.wanted.description).hexdigest()


@dataclass
class _Agreed:
    """What is written down of a session: the description's digest, and by role the folder that everything goes to."""

    digest: str
    places: dict[str, str]

    @classmethod
    def load(cls, path: Path) -> _Agreed | None:
        try:
            return cls(**msgpack.unpackb(path.read_bytes()))
        except FileNotFoundError:
            return None

    def save(self, path: Path) -> None:
        write_once(path, msgpack.packb(vars(self)))


@dataclass
class _Session:
    """Brings the two parties of a generation together, and has the dealer open it."""

    path: Path
    on_open: Callable[[Wanted], Dealing]
    dealing: Dealing | None = None
    _asking: dict[str, _Asked] = field(default_factory=dict)
    _opening: threading.Thread | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def joined(self, asked: _Asked) -> Iterator[None]:
        with self._lock:
            self._asking[asked.role] = asked
        try:
            yield
        finally:
            with self._lock:
                if self._asking.get(asked.role) is asked:
                    del self._asking[asked.role]

    def missing(self, asked: _Asked) -> str:
        """Whom the session waits for: the other party, the dealer, or "" for nobody. UserError where it cannot be served."""
        with self._lock:
            if asked.error:
                raise UserError(asked.error)
            agreed = _Agreed.load(self.path) or self._agree(asked)
            if agreed is None:
                return _other(asked.role)
            if agreed.digest != asked.digest:
                raise UserError(
                    f"session {asked.wanted.session} was opened with another description than the {asked.role}'s: "
                    "agree on a new session for other settings"
                )
            if agreed.places[asked.role] != asked.place:
                raise UserError(
                    f"session {asked.wanted.session}: its material goes to another folder of the {asked.role} already, and must "
                    "not lie in two: use that folder, or agree on a new session"
                )
            if self.dealing is None and self._opening is None:
                self._opening = threading.Thread(target=self._open, args=(asked.wanted,), daemon=True)
                self._opening.start()
            return DEALER if self.dealing is None else ""

    def _agree(self, asked: _Asked) -> _Agreed | None:
        other = self._asking.get(_other(asked.role))
        if other is None:
            return None
        if other.digest != asked.digest:
            asked.error = other.error = (
                f"session {asked.wanted.session}: client and owner describe different generations; "
                "start both with the same model, prompt length, tokens and settings"
            )
            raise UserError(asked.error)
        agreed = _Agreed(asked.digest, {each.role: each.place for each in (asked, other)})
        agreed.save(self.path)
        return agreed

    def _open(self, wanted: Wanted) -> None:
        dealing, error = None, ""
        try:
            dealing = self.on_open(wanted)
        except UserError as refused:
            error = str(refused)
        except Exception:
            logging.getLogger(__name__).exception("the dealer could not open session %s", wanted.session)
            error = f"session {wanted.session}: the dealer failed; its own output says why"
        with self._lock:
            self.dealing, self._opening = dealing, None
            for asked in self._asking.values():
                asked.error = error


class _Keeper:
    """Deletes, in a thread of its own, what the party says it has kept."""

    def __init__(self, folder: Path, start: int, requests: Iterator[_Message], context: grpc.ServicerContext):
        self._folder = folder
        self._context = context
        self._thread = threading.Thread(target=self._work, args=(start, requests), daemon=True)
        self._thread.start()

    def missing(self) -> str:
        """Who is at work while the party may still report something."""
        return DEALER if self._thread.is_alive() else ""

    def _work(self, kept: int, requests: Iterator[_Message]) -> None:
        try:
            self._drop(kept)
            for message in requests:
                self._drop(int(message["kept"]))
        except grpc.RpcError:  # the stream broke off
            return
        except Exception:
            logging.getLogger(__name__).exception("%s: what the party has kept cannot be deleted", self._folder)
            self._context.cancel()  # the party's next stream says again what it has

    def _drop(self, kept: int) -> None:
        def drop(store: MaterialStore) -> None:
            for number in store.available():
                if number < kept:
                    store.take(number)

        with_store(self._folder, drop)


def _records(dealing: Dealing, folder: Path, number: int, context: grpc.ServicerContext) -> Iterator[_Message]:
    """All records from `number` on, as they come to lie in the folder."""

    def missing() -> str:
        if _path(folder, number).exists() or number == dealing.records:
            return ""
        if dealing.error:
            raise UserError(dealing.error)
        return DEALER

    while context.is_active():
        if missing():
            _check_not_gone(folder, number)
            yield from _wait(missing, context)
        elif number == dealing.records:
            yield {"end": number}
            return
        else:
            yield from _chunks(_path(folder, number), number)
            number += 1


def _chunks(path: Path, number: int) -> Iterator[_Message]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        yield {"number": number, "size": path.stat().st_size}
        while data := file.read(CHUNK):
            digest.update(data)
            yield {"data": data}
    yield {"digest": digest.digest()}


def _check_not_gone(folder: Path, number: int) -> None:
    if number < with_store(folder, MaterialStore.next_number) and not _path(folder, number).exists():
        raise UserError(
            f"material {number} was kept and deleted before, and must not be dealt again: the party's folder was changed or "
            "brought back from a copy; agree on a new session"
        )


def _wait(missing: Callable[[], str], context: grpc.ServicerContext) -> Iterator[_Message]:
    """Until nothing is missing or the party has left; says once a second what is."""
    beat = 0.0
    while (name := missing()) and context.is_active():
        if time.monotonic() >= beat:
            beat = time.monotonic() + _HEARTBEAT
            yield {"wait": name}
        time.sleep(_PAUSE)


def _other(role: str) -> str:
    return next(each for each in PARTY_ROLES if each != role)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number}.material"
