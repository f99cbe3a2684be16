"""What must never be used twice, kept on disk: dealt material, marked used before it is, and counters that only grow.

A crash of the process or the machine at any moment may lose material or skip numbers; it never brings one back. Restoring a
folder or file from a backup does, so never do it. Each belongs to one process at a time. Imports nothing heavy.
"""

from __future__ import annotations

import fcntl
import io
import os
import threading
from pathlib import Path
from typing import Protocol

from ..errors import UserError

LIMIT = 1 << 30
"""Numbers of material are below this: the marks of all of them take 128 MB."""


class MaterialStore:
    """One party's material by number: in a folder, or with None in this process's memory, where nothing is durable.

    A number can be put once and taken once, in any order. Methods may be called from several threads. Raises UserError if
    another process, or another store in this one, has the folder open.
    """

    def __init__(self, folder: str | Path | None):
        self._place: _Place = _Memory() if folder is None else _Folder(Path(folder))
        self._used = self._place.load_marks()
        self._lock = threading.Lock()
        found = self._place.numbers()
        self._available = {number for number in found if not self._is_used(number)}
        for number in found - self._available:  # a crash came between mark and deletion
            self._place.delete(number)

    def put(self, number: int, data: bytes) -> None:
        """Keep material durably. UserError if the number was ever put before."""
        if not 0 <= number < LIMIT:
            raise ValueError(f"material number {number} is outside [0, {LIMIT})")
        with self._lock:
            if number in self._available or self._is_used(number):
                raise UserError(f"material {number} was put in {self._place.name} before: the next free number is {self._next()}")
            self._place.write(number, data)
            self._available.add(number)

    def take(self, number: int) -> bytes:
        """The material of this number, durably marked used before it is returned. UserError if it is used or not there."""
        with self._lock:
            left = len(self._available)
            if self._is_used(number):
                raise UserError(
                    f"material {number} of {self._place.name} has been used and must not be used again: "
                    f"take one of the {left} left or {self._place.remedy}"
                )
            if number not in self._available:
                raise UserError(f"material {number} is not in {self._place.name}, {left} left: {self._place.remedy}")
            data = self._place.read(number)
            self._mark(number)
            self._place.delete(number)
            return data

    def available(self) -> list[int]:
        """The numbers that can be taken, lowest first."""
        with self._lock:
            return sorted(self._available)

    def next_number(self) -> int:
        """The lowest number above all that were ever put. It stays the same until one is put."""
        with self._lock:
            return self._next()

    def close(self) -> None:
        """Let another process open the folder; nothing can be put or taken here any more."""
        self._place.close()

    def _next(self) -> int:
        # A last byte without a mark: the file grew and a crash lost the byte, so any of its numbers may be meant.
        spare = 8 - self._used[-1].bit_length() if self._used and self._used[-1] else 0
        return max(8 * len(self._used) - spare, max(self._available, default=-1) + 1)

    def _is_used(self, number: int) -> bool:
        return 0 <= number < 8 * len(self._used) and bool(self._used[number // 8] >> number % 8 & 1)

    def _mark(self, number: int) -> None:
        """Used from here on: in this process even if the disk fails."""
        at = number // 8
        self._used.extend(bytes(max(0, at + 1 - len(self._used))))
        self._used[at] |= 1 << number % 8
        self._available.discard(number)
        self._place.save_mark(at, self._used[at])


class Counter:
    """A number that only grows: in a file, or with None in this process's memory, where the next process starts at 0 again.

    The file holds the next number and its complement, 8 bytes each: written within one disk sector, so whole or not at all.
    Raises UserError if another process, or another counter in this one, has the file open, or if it is damaged.
    """

    def __init__(self, path: str | Path | None):
        self._lock = threading.Lock()
        self._file = None if path is None else _LockedFile(Path(path))
        record = self._file.read() if self._file else b""
        self._next = int.from_bytes(record[:8], "big")
        if record and record != _counter_record(self._next):
            self.close()
            raise UserError(f"{path} is damaged, so its numbers cannot be trusted: start with a new file and new keys")

    def take(self, n: int = 1) -> int:
        """The first of n numbers that were never given before; the file knows it before the caller does."""
        if n < 1:
            raise ValueError(f"{n} numbers asked of a counter; it gives 1 or more")
        with self._lock:
            first = self._next
            self._next += n
            if self._file:
                self._file.write(_counter_record(self._next), 0)
            return first

    def close(self) -> None:
        """Let another process open the file; nothing can be taken here any more."""
        if self._file:
            self._file.close()


class _Place(Protocol):
    """Where a store keeps its material and its marks.

    Marks are a bit field: bit number % 8 of byte number // 8 is set when the number has been taken. It grows by a bit a
    number and is written a byte at a time, so that no crash leaves half a mark.
    """

    name: str
    remedy: str

    def numbers(self) -> set[int]: ...
    def read(self, number: int) -> bytes: ...
    def write(self, number: int, data: bytes) -> None: ...
    def delete(self, number: int) -> None: ...
    def load_marks(self) -> bytearray: ...
    def save_mark(self, at: int, byte: int) -> None: ...
    def close(self) -> None: ...


class _Memory:
    name = "this process's memory"
    remedy = "deal more"

    def __init__(self) -> None:
        self._data: dict[int, bytes] = {}

    def numbers(self) -> set[int]:
        return set(self._data)

    def read(self, number: int) -> bytes:
        return self._data[number]

    def write(self, number: int, data: bytes) -> None:
        self._data[number] = data

    def delete(self, number: int) -> None:
        del self._data[number]

    def load_marks(self) -> bytearray:
        return bytearray()

    def save_mark(self, at: int, byte: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Folder:
    """A file `NUMBER.material` each, and the marks in `used`, whose lock is the folder's."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self.remedy = "make more with `spu-llm deal --tokens N --out FOLDER`"
        self._folder = folder
        self._marks = _LockedFile(folder / "used")
        for rest in folder.glob("*.partial"):  # a crash came within a put
            rest.unlink()

    def numbers(self) -> set[int]:
        return {int(path.stem) for path in self._folder.glob("*.material") if path.stem.isdecimal()}

    def read(self, number: int) -> bytes:
        return self._path(number).read_bytes()

    def write(self, number: int, data: bytes) -> None:
        """Whole or not at all, and lasting, when this returns."""
        self._marks.check()
        partial = self._path(number).with_suffix(".partial")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self._path(number))
        _sync_folder(self._folder)

    def delete(self, number: int) -> None:
        self._path(number).unlink()  # need not last: the mark does

    def load_marks(self) -> bytearray:
        return bytearray(self._marks.read())

    def save_mark(self, at: int, byte: int) -> None:
        self._marks.write(bytes([byte]), at)

    def close(self) -> None:
        self._marks.close()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.material"


def _counter_record(number: int) -> bytes:
    return number.to_bytes(8, "big") + (number ^ (1 << 64) - 1).to_bytes(8, "big")


class _LockedFile:
    """A file, made if missing, that this process alone has until it is closed. UserError if another has it."""

    def __init__(self, path: Path):
        missing = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+")
        self._owner = os.getpid()
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UserError(f"{path} is in use by another process: wait until that ends, or use another place") from None
        # If the file or its folders were lost with the power, numbers would start at 0 again.
        for folder in (path.parent, *(each.parent for each in missing)):
            _sync_folder(folder)

    def read(self) -> bytes:
        """All of it, once, before anything is written."""
        return self._file.readall()

    def write(self, data: bytes, at: int) -> None:
        """Lasting when this returns."""
        self.check()
        os.pwrite(self._file.fileno(), data, at)
        os.fsync(self._file.fileno())

    def check(self) -> None:
        """ValueError once it is closed; RuntimeError in a process forked off its owner, which shares the lock."""
        self._file.fileno()
        if os.getpid() != self._owner:
            raise RuntimeError("opened before this process was forked: the other one may use the same numbers")

    def close(self) -> None:
        self._file.close()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
