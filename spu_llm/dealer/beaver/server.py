"""The server: SPU's Beaver service over HTTP/1.1 and HTTP/2, on one port, with or without mutual TLS."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypercorn.asyncio import serve
from hypercorn.config import Config

from ...errors import UserError
from ...network.certificates import Identity
from .checks import check
from .correlations import adjustments
from .keys import ServerKey, load_key
from .refusal import BAD_REQUEST, Refusal
from .seeds import SeedMemory
from .wire import DATA, JSON, PROTOBUF, Request, frame, kind_of, read_request

_LOG = logging.getLogger(__name__)
_LONGEST_BODY = 1 << 20  # a request names counters and seeds, a few hundred bytes a party
_BACKLOG = 128
_QUICK = 1 << 18  # bytes of shares that are made sooner than a thread takes over
_PATIENCE = 5.0  # seconds for answers under way when the server is closed


@dataclass
class Served:
    """What a server has done so far."""

    requests: Counter[str] = field(default_factory=Counter)
    """Answers in full, by kind."""
    refused: int = 0
    bytes: int = 0
    """Adjustments sent, without the few bytes around them."""
    seconds: float = 0.0
    """Computing, on all threads together."""


class BeaverServer:
    """Serves from its own threads between `with` and its end. Any number of sessions at a time share it.

    `address` is host:port, with port 0 any free one; once made, the server's own. `idle` is how many seconds after a session's last
    request its seeds are forgotten and its connections closed (SPU's client opens new ones when it goes on). With an identity (the
    dealer's), TLS, for parties with a certificate of the same authority: it keeps others from using the server and spoiling its
    answers. What is secret does not rest on it, as seeds are encrypted and adjustments uniform to all but the parties.
    UserError if the address cannot be had or the identity is not in order.
    """

    def __init__(self, address: str, key: ServerKey, identity: Identity | None = None, idle: float = 30.0):
        if identity:
            identity.check()
        self._socket = _listen(address)
        host, port = self._socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.public_pem = key.public_pem
        self.served = Served()
        self._service = _Service(SeedMemory(key.open_seed, idle), self.served)
        self._config = _config(self._socket, identity, idle)
        self._idle = idle
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True, name="beaver")
        self._started = threading.Event()

    def __enter__(self) -> BeaverServer:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: Any) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._service.close()
        self._socket.close()

    @property
    def remembered(self) -> int:
        """Seeds of sessions that are not forgotten yet."""
        return len(self._service.seeds)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        sweep = asyncio.create_task(self._sweep())
        self._started.set()
        await serve(self._service, self._config, shutdown_trigger=self._stop.wait)  # type: ignore[arg-type]
        sweep.cancel()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._idle / 4)
            self._service.seeds.forget()


def serve_beaver(address: str, key_file: Path, identity: Identity | None, ready: Callable[[BeaverServer], None]) -> Served:
    """Serve until SIGINT or SIGTERM; `ready` is called when clients can connect. The key file is made if there is none.

    For the main thread of a process (signals).
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with BeaverServer(address, load_key(key_file), identity) as server:
        ready(server)
        stop.wait()
    return server.served


class _Service:
    """The ASGI application."""

    def __init__(self, seeds: SeedMemory, served: Served):
        self.seeds = seeds
        self._served = served
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(os.cpu_count(), "beaver")

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Awaitable[dict]], send: Callable) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _http(self, scope: dict[str, Any], receive: Callable[[], Awaitable[dict]], send: Callable) -> None:
        kind, content_type = kind_of(scope["path"]), _content_type(scope)
        if scope["method"] != "POST" or kind is None:
            return await _reject(send, 404, f"no {scope['method']} {scope['path']} here: this is a server of SPU's Beaver service")
        if content_type not in (JSON, PROTOBUF):
            return await _reject(send, 415, f"content-type is {content_type!r}; {JSON} and {PROTOBUF} are read")
        body = await _read(receive)
        if body is None:
            return await _reject(send, 413, f"the body is longer than {_LONGEST_BODY} bytes")
        frames, quick = self._answer(kind, content_type, body, scope.get("client"))
        if quick:
            await _respond(send, 200, b"application/octet-stream", b"".join(frames))
        else:
            await self._stream(frames, receive, send)

    async def _stream(self, frames: Iterator[bytes], receive: Callable[[], Awaitable[dict]], send: Callable) -> None:
        """Send pieces while threads compute the next, until the client is gone."""
        loop, gone = asyncio.get_running_loop(), asyncio.create_task(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/octet-stream")]})
            while part := await loop.run_in_executor(self._threads, next, frames, b""):
                if gone.done():
                    return
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()

    def _answer(self, kind: str, content_type: str, body: bytes, client: Any) -> tuple[Iterator[bytes], bool]:
        """The frames of an answer, and whether they are computed sooner than a thread would begin."""
        try:
            request = read_request(kind, content_type, body)
            check(request)
        except Refusal as error:
            return iter([self._refuse(error, kind, client)]), True
        return self._frames(request, client), sum(each.size * len(each.seeds) for each in request.inputs) <= _QUICK

    def _frames(self, request: Request, client: Any) -> Iterator[bytes]:
        """A refusal, or a defect of ours, is the last one."""
        start, sent = time.thread_time(), 0
        try:
            for part in adjustments(request, self.seeds.get):
                sent += len(part)
                self._count(0, time.thread_time() - start)
                yield frame(DATA, part)
                start = time.thread_time()
            self._count(sent, 0.0, request.kind)
        except Refusal as error:
            yield self._refuse(error, request.kind, client)
        except Exception:
            _LOG.exception("%s from %s failed", request.kind, client)
            yield frame(BAD_REQUEST, b"the server failed; its log says why")

    def _refuse(self, error: Refusal, kind: str, client: Any) -> bytes:
        _LOG.warning("%s from %s refused: %s", kind, client, error)
        with self._lock:
            self._served.refused += 1
        return frame(error.code, str(error).encode())

    def _count(self, bytes_: int, seconds: float, kind: str | None = None) -> None:
        with self._lock:
            self._served.bytes += bytes_
            self._served.seconds += seconds
            if kind:
                self._served.requests[kind] += 1


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        return socket.create_server((host.strip("[]"), int(port)), family=_family(host), backlog=_BACKLOG)
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"address {address}: {error}; give host:port of this machine, with a free port") from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _config(listening: socket.socket, identity: Identity | None, idle: float) -> Config:
    config = Config()
    config.bind = [f"fd://{os.dup(listening.fileno())}"]  # hypercorn closes its own
    config.include_server_header = False
    config.graceful_timeout = _PATIENCE
    config.keep_alive_timeout = idle  # hypercorn holds connections that clients closed for as long, too
    config.keep_alive_max_requests = 1 << 62
    config.accesslog = None
    config.errorlog = _LOG
    if identity:
        config.certfile, config.keyfile, config.ca_certs = str(identity.certificate), str(identity.key), str(identity.ca)
        config.verify_mode = ssl.CERT_REQUIRED
    return config


def _content_type(scope: dict[str, Any]) -> str:
    found = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")
    return found.partition(";")[0].strip().lower()


async def _read(receive: Callable[[], Awaitable[dict]]) -> bytes | None:
    """The body, or None if it is too long."""
    parts, size = [], 0
    while True:
        event = await receive()
        parts.append(event.get("body", b""))
        size += len(parts[-1])
        if size > _LONGEST_BODY:
            return None
        if not event.get("more_body"):
            return b"".join(parts)


async def _disconnected(receive: Callable[[], Awaitable[dict]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _reject(send: Callable, status: int, text: str) -> None:
    await _respond(send, status, b"text/plain; charset=utf-8", text.encode())


async def _respond(send: Callable, status: int, content_type: bytes, body: bytes) -> None:
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _lifespan(receive: Callable[[], Awaitable[dict]], send: Callable) -> None:
    with suppress(asyncio.CancelledError):
        while True:
            event = (await receive())["type"]
            await send({"type": event + ".complete"})
            if event == "lifespan.shutdown":
                return
