"""Where the parties' correlated randomness comes from: a dealer at hand, or messages that were dealt before and kept on disk.

Either way a run of a program takes a number that was never used, so no mask is ever used twice. What is dealt ahead serves one
generation: its folder is marked used before the first mask is taken from it, and each message before it is read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Protocol

import numpy as np

from ..dealer.generator import Dealer, receive
from ..dealer.material import Derived, Looked, Operand, Pointed, Specification
from ..dealer.prg import KEY_BYTES, Stream, derive_key
from ..dealer.store import Counter, MaterialStore
from ..dealer.table import Table
from ..errors import UserError
from .party import Party
from .profile import Traffic
from .session import Session

MATERIAL = "material"
"""Begins the names of the variables that hold each party's share of a run's material vector."""
PARTIES = (0, 1)
FIRST_RUN = 1
"""The number of a folder's first run; number 0 is the mark that its masks were used."""

_DIGEST_BYTES = 32
_HEAD_BYTES = 2 * _DIGEST_BYTES  # of a record: its tag and its run's digest
_LOCK_SECONDS = 10.0  # the dealer holds a party's store for the time of one message only
_PAUSE = 0.05


def offline(phase: str) -> str:
    """The phase to which the dealing of material for another phase is booked."""
    return f"{phase}, offline"


@dataclass(frozen=True)
class Run:
    """One run of a program as the dealer is told of it; every party knows it too, and nothing of it is secret.

    operands: by its name within the program, the operand's name in the session; keeps: the same of results that are operands.
    publics: position numbers.
    """

    specification: Specification
    operands: Mapping[str, str]
    keeps: Mapping[str, str]
    publics: Mapping[str, int]

    def digest(self) -> bytes:
        """32 bytes that tell this run from one of another program, on other operands or at other positions."""
        facts = (sorted(self.operands.items()), sorted(self.keeps.items()), sorted(self.publics.items()))
        return hashlib.sha256(repr(facts).encode() + _digest(self.specification)).digest()


class Supply(Protocol):
    """What `Assisted` needs of the dealer and of each party's end of it."""

    def operand_mask(self, name: str, shape: tuple[int, ...], rank: int) -> np.ndarray:
        """int64 `shape`: the mask of an operand that party `rank` owns, from the key it has in common with the dealer."""

    def provide(self, session: Session, run: Run, name: str) -> None:
        """Make the parties' shares of one run's material a variable, in the session's present phase."""


class Masks:
    """The dealer with what it remembers: the masks of all operands, by name. Sees no input, weight, opening or output."""

    def __init__(self, keys: tuple[bytes, bytes]):
        self._keys = keys
        self._dealer = Dealer(keys)
        self.masks: dict[str, np.ndarray] = {}

    def operand_mask(self, name: str, shape: tuple[int, ...], rank: int, number: int = 0) -> np.ndarray:
        self.masks[name] = operand_mask(self._keys[rank], name, shape, number)
        return self.masks[name]

    def deal(self, run: Run, number: int) -> tuple[bytes, bytes]:
        """The message for each party."""
        given = {slot: self.masks[name] for slot, name in run.operands.items()}
        dealt = self._dealer.deal(run.specification, number, given, run.publics)
        self.masks |= {name: dealt.operands[slot] for slot, name in run.keeps.items()}
        return dealt.messages


class LiveSupply:
    """A dealer in this process, which deals right before each run. Its keys are of this process, its numbers too by default."""

    def __init__(self, counter: Counter | None = None):
        self._keys = new_keys()
        self.dealer = Masks(self._keys)
        self._counter = counter or Counter(None)

    def operand_mask(self, name: str, shape: tuple[int, ...], rank: int) -> np.ndarray:
        return self.dealer.operand_mask(name, shape, rank, self._counter.take())

    def provide(self, session: Session, run: Run, name: str) -> None:
        phase, number = session.phases[session.current_phase], self._counter.take()
        start = time.perf_counter()
        messages = self.dealer.deal(run, number)
        phase.seconds += time.perf_counter() - start
        phase.add([Traffic(len(message), 1) for message in messages])

        def expand(party: Party) -> np.ndarray:
            return receive(run.specification, party.rank, self._keys[party.rank], number, messages[party.rank])

        session.place_made(name, expand)


class StoredSupply:
    """Messages that were dealt ahead to `folder`/party-0 and party-1, in the order of one generation.

    Each party reads its own folder only: its key, and its messages, which are marked used before they are read. `ranks` are the
    parties of this process. Where the dealer is still at work, a party waits up to `patience` seconds for its message, as long as
    `check` does not raise. Raises UserError where the folder has served before, in this process or one that broke off, or where a
    message was changed.
    """

    def __init__(
        self, folder: str | Path, patience: float = 0.0, ranks: tuple[int, ...] = PARTIES, check: Callable[[], None] = lambda: None
    ):
        self._folder = Path(folder).absolute()  # a party's thread has a working directory of its own
        self._patience = patience
        self._check = check
        self._next = FIRST_RUN
        self._keys = {rank: read_key(party_folder(self._folder, rank)) for rank in ranks}
        for rank in ranks:
            if 0 not in with_store(party_folder(self._folder, rank), MaterialStore.available):
                raise UserError(
                    f"{folder}: its material was used before, by a run that ended or broke off, and must not serve again; "
                    f"deal to another folder with `spu-llm deal --out FOLDER`"
                )
        for rank in ranks:
            with_store(party_folder(self._folder, rank), lambda store: store.take(0))

    def operand_mask(self, name: str, shape: tuple[int, ...], rank: int) -> np.ndarray:
        """Zeros where the operand's owner is not in this process."""
        return operand_mask(self._keys[rank], name, shape, 0) if rank in self._keys else np.zeros(shape, np.int64)

    def provide(self, session: Session, run: Run, name: str) -> None:
        number, digest = self._next, run.digest()
        self._next += 1
        sizes = [0, 0]

        def expand(party: Party) -> np.ndarray:
            record = self._take(party.rank, number)
            place = f"material {number} of {party_folder(self._folder, party.rank)}"
            tag, dealt_for, message = record[:_DIGEST_BYTES], record[_DIGEST_BYTES:_HEAD_BYTES], record[_HEAD_BYTES:]
            if not hmac.compare_digest(tag, _tag(self._keys[party.rank], number, dealt_for, message)):
                raise UserError(f"{place} was changed since it was dealt, or is another's; deal to another folder")
            if dealt_for != digest:
                raise UserError(
                    f"{place} was dealt for another run than this one: "
                    "deal for this model, prefix, capacity, number of prompt tokens and order of passes"
                )
            sizes[party.rank] = len(message)
            return receive(run.specification, party.rank, self._keys[party.rank], number, message)

        session.place_made(name, expand)
        session.phases[session.current_phase].add([Traffic(size, 1) for size in sizes])

    def _take(self, rank: int, number: int) -> bytes:
        """A party's message. UserError where it was used before, or where it does not come within the patience."""
        folder, end = party_folder(self._folder, rank), time.monotonic() + self._patience

        def take_if_there(store: MaterialStore) -> bytes | None:
            return store.take(number) if number < store.next_number() else None

        while (record := with_store(folder, take_if_there)) is None:
            self._check()
            if time.monotonic() >= end:
                raise UserError(
                    f"{folder}: material has run out after {number - FIRST_RUN} program runs; deal for more tokens with "
                    "`spu-llm deal --tokens N --out FOLDER`, or let the dealer keep further ahead"
                )
            time.sleep(_PAUSE)
        return record


def put_message(folder: Path, key: bytes, number: int, digest: bytes, message: bytes) -> None:
    """Keep a message durably for the party whose folder and key it is, bound to its run and to the number."""
    record = _tag(key, number, digest, message) + digest + message
    with_store(folder, lambda store: store.put(number, record))


def _tag(key: bytes, number: int, digest: bytes, message: bytes) -> bytes:
    """Authenticates a message from the dealer to the holder of a key: HMAC-SHA256."""
    return hmac.digest(derive_key(key, "authenticate", number), digest + message, "sha256")


def party_folder(folder: Path, rank: int) -> Path:
    return folder / f"party-{rank}"


def new_keys() -> tuple[bytes, bytes]:
    """A key for each party, from the operating system."""
    return os.urandom(KEY_BYTES), os.urandom(KEY_BYTES)


def write_keys(folder: Path, keys: tuple[bytes, bytes]) -> None:
    """Each key in a file that only its party's user can read. UserError where there are keys already."""
    try:
        for rank, key in enumerate(keys):
            party_folder(folder, rank).mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(party_folder(folder, rank) / "key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(key)
                file.flush()
                os.fsync(handle)
    except FileExistsError:
        raise UserError(f"{folder}: holds dealt material already, which serves one generation; choose another --out") from None
    except OSError as error:
        raise UserError(f"{folder}: cannot be made or written to ({error.strerror}); choose another --out") from None


def read_key(folder: Path) -> bytes:
    """A party's key. UserError where there is none, or others may read it."""
    path = folder / "key"
    try:
        key, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); make material with `spu-llm deal --out FOLDER`") from None
    if len(key) != KEY_BYTES:
        raise UserError(f"{path}: holds {len(key)} bytes, not the {KEY_BYTES} of a key; deal to another folder")
    if mode & 0o077:
        raise UserError(f"{path}: may be read by other users; chmod 600 it if nobody has, else deal to another folder")
    return key


def with_store(folder: Path, use: Callable[[MaterialStore], Any]) -> Any:
    """Do something with a party's store, opened for that time only: the dealer and the party take turns."""
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            store = MaterialStore(folder)
            break
        except UserError:  # another process has it
            if time.monotonic() >= end:
                raise
            time.sleep(_PAUSE)
    try:
        return use(store)
    finally:
        store.close()


def operand_mask(key: bytes, name: str, shape: tuple[int, ...], number: int) -> np.ndarray:
    """The mask int64 `shape` of an operand; under one key a name and number must serve one value only."""
    return Stream(derive_key(key, "operand " + name, number)).words(shape)


def _digest(specification: Specification) -> bytes:
    """Everything about a specification that decides what is dealt. Functions count by where they are written and what they hold."""
    parts: list[Any] = [specification.keep]
    for deal in specification.deals:
        parts.append((type(deal).__name__, deal.shape))
        if isinstance(deal, Derived):
            parts.append((deal.sources, deal.shared, deal.publics, deal.modulus, _function(deal.make)))
        elif isinstance(deal, Looked):
            parts.append((deal.sources, _held(deal.table), deal.place_shift, deal.modulus))
        elif isinstance(deal, Pointed):
            parts.append((deal.sources, deal.size, _function(deal.make)))
        elif isinstance(deal, Operand):
            parts.append(deal.name)
    return hashlib.sha256(repr(parts).encode()).digest()


def _function(function: Any) -> Any:
    """What a function is, the same in every process."""
    code: CodeType | None = getattr(function, "__code__", None)
    if code is None:  # a partial, or one of a library's
        held = [_held(part) for part in (getattr(function, name, None) for name in ("func", "args", "keywords"))]
        return (getattr(function, "__name__", ""), held)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return (function.__module__, function.__qualname__, code.co_firstlineno, [_held(cell) for cell in cells])


def _held(value: Any) -> Any:
    """A value that a function holds: by content where that is plain, else by type."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, (tuple, list)):
        return [_held(part) for part in value]
    if isinstance(value, dict):
        return sorted((str(key), _held(part)) for key, part in value.items())
    if isinstance(value, (np.ndarray, np.generic)):
        return (value.dtype.str, value.shape, hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest())
    if isinstance(value, Table):
        return (
            type(value).__name__,
            value.low,
            value.width_bits,
            value.factor,
            value.place_bits,
            value.bits,
            _held(value.coefficients),
        )
    return _function(value) if callable(value) else type(value).__name__
