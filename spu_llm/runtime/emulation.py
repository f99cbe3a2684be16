"""A session in which one process plays all parties in the clear: what a secure run computes, many times as fast.

`Assisted` and what is built on it run in an `EmulatedSession` unchanged: programs are traced, not compiled for SPU, and
evaluated as `primitives/clear.py` says. Given the masks of a secure run (`WitnessedSupply`, `ReplayedSupply`), every value is
that run's, bit by bit; given random ones (`SeededSupply`), it is that of some secure run. Nothing in it is secret: it is for
measuring.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import enable_x64
from numpy.typing import ArrayLike

from ..dealer.material import Shape, Specification, Uniform, shared_words
from ..primitives.clear import ClearDealing, ClearRecorder, Factors
from . import shares
from .assisted import DealtCall
from .program import Program
from .protocol import ProtocolConfig
from .session import Phase, Session
from .supply import Run, Supply

_PARTIES = 2


class Masks(Supply, Protocol):
    """A supply for an emulated session, which takes no material but the uniform masks themselves."""

    def uniform(self, shape: Shape) -> np.ndarray:
        """int64 `shape`: the next mask of the run that was provided for last."""


class SeededSupply:
    """Masks from a seeded generator. Not for secrets: it is fast, not cryptographic."""

    def __init__(self, seed: int):
        self._random = np.random.Generator(np.random.SFC64(seed))

    def operand_mask(self, name: str, shape: tuple[int, ...], rank: int) -> np.ndarray:
        return self.uniform(shape)

    def provide(self, session: Session, run: Run, name: str) -> None:
        """Masks are made as they are asked for."""

    def uniform(self, shape: Shape) -> np.ndarray:
        return self._random.integers(-(1 << 63), 1 << 63, shape, np.int64)


class WitnessedSupply:
    """Another supply, whose masks are written down as it gives them: both parties' shares added up, so that nothing is secret."""

    def __init__(self, supply: Supply):
        self._supply = supply
        self.operands: dict[str, np.ndarray] = {}
        self.runs: list[tuple[bytes, list[np.ndarray]]] = []

    def operand_mask(self, name: str, shape: tuple[int, ...], rank: int) -> np.ndarray:
        self.operands[name] = self._supply.operand_mask(name, shape, rank)
        return self.operands[name]

    def provide(self, session: Session, run: Run, name: str) -> None:
        self._supply.provide(session, run, name)
        vector = np.sum(session.words(name), axis=0, dtype=np.int64)
        self.runs.append((run.digest(), _uniform(run.specification, vector)))


class ReplayedSupply:
    """The masks that were witnessed, for the same runs in the same order. ValueError where a run is another one."""

    def __init__(self, witnessed: WitnessedSupply):
        self._operands = witnessed.operands
        self._runs = iter(witnessed.runs)
        self._masks: list[np.ndarray] = []

    def operand_mask(self, name: str, shape: tuple[int, ...], rank: int) -> np.ndarray:
        return self._operands[name]

    def provide(self, session: Session, run: Run, name: str) -> None:
        digest, masks = next(self._runs, (b"", []))
        if digest != run.digest():
            raise ValueError("the emulated run is not the one whose masks were witnessed; make the same passes in the same order")
        self._masks = list(masks)

    def uniform(self, shape: Shape) -> np.ndarray:
        return self._masks.pop(0).reshape(shape)


def _uniform(specification: Specification, vector: np.ndarray) -> list[np.ndarray]:
    """The uniform masks in a material vector, in order."""
    found, at = [], 0
    for deal in specification.deals:
        words = shared_words(deal)
        if isinstance(deal, Uniform):
            found.append(vector[at : at + words].copy())
        at += words
    return found


@dataclass(frozen=True)
class _Seat:
    """A party's place, with nobody in it."""

    rank: int


@dataclass(frozen=True)
class _Traced(Program):
    """A program that is evaluated as it was traced."""

    call: DealtCall


class EmulatedSession(Session):
    """Named variables hold whole ring integers, public and secret alike; phases are booked seconds, and no traffic.

    `supply` gives the masks, and must be that of the `Assisted` which runs here. Without `shortcuts` every protocol runs in
    full, tables and all.
    """

    runs_ahead = False

    def __init__(self, supply: Masks, shortcuts: bool = True):
        self.protocol = ProtocolConfig()
        self.phases = defaultdict(Phase)
        self.parties = [_Seat(rank) for rank in range(_PARTIES)]  # type: ignore[misc]
        self._phase = "setup"
        self._supply = supply
        self._shortcuts = shortcuts
        self._variables: dict[str, np.ndarray] = {}
        self._cut_shares = np.random.Generator(np.random.SFC64(0))  # which shares are cut decides no more than a last bit
        self._factors = Factors()

    def close(self) -> None:
        """Forget all variables."""
        self._variables, self._factors = {}, Factors()

    def share(self, name: str, value: np.ndarray, owner: str) -> None:
        """A secret, which must be integers: reals have no meaning here before they are encoded."""
        if not np.issubdtype(np.asarray(value).dtype, np.integer):
            raise ValueError(f"{name}: only ring integers are emulated, not {np.asarray(value).dtype}; encode it first")
        self._variables[name] = np.asarray(value, np.int64)

    def publish(self, name: str, value: ArrayLike) -> None:
        self._variables[name] = np.asarray(value)

    def publish_from(self, name: str, value: np.ndarray, owner: str) -> None:
        """The public part of an operand, which never changes."""
        self._factors.keep(value)
        self._variables[name] = value

    def place(self, name: str, words: Sequence[np.ndarray]) -> None:
        held = [part for part in words if part.any()]
        self._variables[name] = sum(held[1:], held[0]) if held else words[0]

    def place_made(self, name: str, make: Callable[[Any], np.ndarray]) -> None:
        self.place(name, [make(party) for party in self.parties])

    def public(self, name: str) -> np.ndarray:
        return self._variables[name]

    def words(self, name: str) -> list[np.ndarray]:
        """All of it as one party's share, the other's being 0."""
        return [self._variables[name], *[np.zeros_like(self._variables[name])] * (_PARTIES - 1)]

    def give(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.sum(parts, axis=0, dtype=np.int64)

    def receive(self, name: str) -> np.ndarray:
        return self._variables[name]

    def broadcast(self, data: bytes, role: str) -> bytes:
        return data

    def receive_narrow(self, name: str, scale_bits: int, row: int | None = None) -> np.ndarray:
        """As between parties whose shares are random: each cuts its own, so the last of the 16 bits may be one short."""
        value, shift = self._variables[name], scale_bits - shares.NARROW_BITS
        value = value if row is None else value[row]
        first = self._cut_shares.integers(-(1 << 63), 1 << 63, value.shape, np.int64)
        return shares.join_words([(part >> shift).astype(np.uint32) for part in (first, value - first)], value.shape)

    def compile(self, name: str, function: Callable, arguments: tuple) -> Program:
        """ValueError for a function that does not come from `Assisted`."""
        if not isinstance(function, DealtCall):
            raise ValueError(f"program {name}: only programs with a dealer are emulated")
        leaf = jax.tree_util.tree_structure(0)
        return _Traced(name, "", leaf, leaf, function)

    def run(self, program: Program, arguments: tuple, results: Any) -> None:
        """Evaluate; `arguments` are the material's name, which is not looked at, and names or pairs of them."""
        assert isinstance(program, _Traced)
        dealing = ClearDealing(ClearRecorder(self._supply.uniform), factors=self._factors, shortcuts=self._shortcuts)
        with self._timed(), enable_x64():
            found = program.call.evaluate(dealing, [self._read(name) for name in arguments[1:]])
            for name, value in zip(results, found, strict=True):
                self._write(name, value)

    def _read(self, name: Any) -> Any:
        return self._variables[name] if isinstance(name, str) else tuple(self._variables[part] for part in name)

    def _write(self, name: Any, value: Any) -> None:
        if isinstance(name, str):
            self._variables[name] = np.asarray(value)
            return
        for part, each in zip(name, value, strict=True):
            self._variables[part] = np.asarray(each)
