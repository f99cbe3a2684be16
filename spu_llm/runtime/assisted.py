"""A session with a dealer: programs whose protocols run on correlated randomness from a third party.

The dealer is an object of this process here, as the parties are threads of it; it is handed specifications and position
numbers only. Its messages go to the parties before each run and are booked to a phase of their own (`offline`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import enable_x64

from ..dealer.generator import Dealer, message_bytes, receive, run_stream
from ..dealer.material import Specification
from ..dealer.prg import Stream, derive_key
from ..dealer.store import Counter
from ..errors import UserError
from ..primitives.dealing import Dealt, with_material
from .party import Party
from .profile import Traffic
from .program import Program, Slot
from .session import Session
from .trust import check_trust

TRUST = "third-party dealer, which sees no input, weight or opening, and colludes with neither party"


_VIOLATION = "violation"


def offline(phase: str) -> str:
    """The phase to which the dealing of material for another phase is booked."""
    return f"{phase}, offline"


@dataclass(frozen=True)
class OperandSlot:
    """An input (or output) of a program that is a masked operand: known to the dealer as `name` within the program.

    A matrix that never changes keeps the shares of its mask `transposed`: SPU multiplies a public vector by shares of a
    matrix six times faster that way round.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def slots(self) -> tuple[Slot, Slot]:
        """The opened value, and the shares of its mask."""
        shape = self.shape[::-1] if self.transposed else self.shape
        return Slot(self.shape, np.int64, public=True), Slot(shape, np.int64)


@dataclass(frozen=True)
class OperandName:
    """A masked operand in a session: its opened value and the shares of its mask are variables derived from `name`."""

    name: str

    @property
    def variables(self) -> tuple[str, str]:
        return f"{self.name}.opened", f"{self.name}.mask"


@dataclass(frozen=True)
class DealtProgram:
    """A compiled program together with the material one run of it takes."""

    program: Program
    specification: Specification
    leaves: tuple[Any, ...]
    keeps: dict[int, str]
    tree: Any

    @property
    def dealer_bytes(self) -> int:
        """Bytes the dealer sends for one run to the party that gets more."""
        return max(message_bytes(self.specification))


class Assisted:
    """Runs dealer programs in a session. Every run takes a new number, so no mask is ever used twice."""

    def __init__(self, session: Session, counter: Counter | None = None):
        self.session = session
        self._keys = tuple(os.urandom(16) for _ in session.parties)
        self._dealer = Dealer((self._keys[0], self._keys[1]))
        self._counter = counter or Counter(None)
        self._masks: dict[str, np.ndarray] = {}
        self._violation = [np.zeros((), np.int64)] * len(session.parties)

    def mask_operand(self, name: str, value: np.ndarray, owner: str, transposed: bool = False) -> OperandName:
        """Make ring integers known to `owner` a masked operand: value - mask becomes public, the mask stays with the owner.

        The mask comes from the key the owner shares with the dealer; the owner sends 8 bytes an element. No other party
        learns anything of the value. A name is masked once: another value under one mask would give away the difference.
        """
        if name in self._masks:
            raise ValueError(f"operand {name} was masked before; a changed value needs a new name")
        rank = self.session.roles.index(owner)
        stream = Stream(derive_key(self._keys[rank], "operand " + name, self._counter.take()))
        mask = self._masks[name] = stream.words(value.shape)
        operand = OperandName(name)
        opened, hidden = operand.variables
        self.session.publish_from(opened, value - mask, owner)
        share = mask.T if transposed else mask
        self.session.place(hidden, [share if party.rank == rank else np.zeros_like(share) for party in self.session.parties])
        return operand

    def compile(self, name: str, function: Callable, arguments: tuple, keeps: tuple[OperandSlot | None, ...]) -> DealtProgram:
        """Compile a function of primitives for a tree of `Slot`s and `OperandSlot`s, material first.

        `keeps` has an entry a flat result: the operand it is, or None for a plain value. Raises UserError where the compiled
        program would use SPU's own triples (see trust.py).
        """
        leaves, tree = jax.tree_util.tree_flatten(arguments, is_leaf=lambda x: isinstance(x, (Slot, OperandSlot)))
        shapes = [jax.ShapeDtypeStruct(leaf.shape, getattr(leaf, "dtype", np.int64)) for leaf in leaves]
        operands = {i: leaf.name for i, leaf in enumerate(leaves) if isinstance(leaf, OperandSlot)}
        kept = {i: leaf.name for i, leaf in enumerate(keeps) if leaf is not None}
        with enable_x64():
            dealt = with_material(lambda *flat: function(*jax.tree_util.tree_unflatten(tree, flat)), shapes, operands, kept, True)
        material = Slot((dealt.specification.words,), np.int64)
        slots = [leaf.slots if isinstance(leaf, OperandSlot) else leaf for leaf in leaves]
        turned = frozenset(i for i, leaf in enumerate(leaves) if isinstance(leaf, OperandSlot) and leaf.transposed)
        program = self.session.compile(name, _Call(dealt, turned), (material, *slots))
        check_trust(program)
        return DealtProgram(program, dealt.specification, tuple(leaves), kept, dealt.tree)

    def run(
        self, dealt: DealtProgram, arguments: Any, results: Any, publics: Mapping[str, int] | None = None
    ) -> None:
        """Deal material for one run and run it. Operands are named by `OperandName`s in both trees of names."""
        names, results = _names(arguments), _names(results)
        masks = {
            leaf.name: self._masks[name.name]
            for leaf, name in zip(dealt.leaves, names, strict=True)
            if isinstance(leaf, OperandSlot)
        }
        kept = self._supply(dealt.specification, masks, publics or {})
        outputs = [*map(_variables, results), _VIOLATION]
        self.session.run(dealt.program, ("material", *map(_variables, names)), outputs)
        self._violation = [a + b for a, b in zip(self._violation, self.session.words(_VIOLATION), strict=True)]
        for i, slot_name in dealt.keeps.items():
            self._masks[results[i].name] = kept[slot_name]

    def check_ranges(self) -> None:
        """Prove that every lookup since the last check had its input in range: one number for the client, 8 bytes.

        The client learns that, or in the other case the number of twos in a random number (see `range_check.py`). Raises
        UserError then: what was computed is worth nothing.
        """
        total = self.session.give([np.asarray(share) for share in self._violation])
        self._violation = [np.zeros((), np.int64)] * len(self._violation)
        if total:
            raise UserError(
                "range check: a value left its table during this pass, so its result is void; calibrate on text like this one "
                "(calibration in the model's config), or give the model a prefix that takes its outliers"
            )

    def _supply(self, specification: Specification, masks: dict[str, np.ndarray], publics: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Deal one run's material, send it to the parties, and have them make their shares of the material vector."""
        with self.session.phase(offline(self.session.current_phase)) as phase:
            run = self._counter.take()
            start = time.perf_counter()
            dealt = self._dealer.deal(specification, run, masks, publics)
            phase.seconds += time.perf_counter() - start
            phase.add([Traffic(len(message), 1) for message in dealt.messages])

            def expand(party: Party) -> np.ndarray:
                return receive(specification, party.rank, self._keys[party.rank], run, dealt.messages[party.rank])

            self.session.place_made("material", expand)
        return dealt.operands


def _names(tree: Any) -> list[Any]:
    return jax.tree_util.tree_leaves(tree, is_leaf=lambda x: isinstance(x, OperandName))


def _variables(name: Any) -> Any:
    return name.variables if isinstance(name, OperandName) else name


@dataclass(frozen=True)
class _Call:
    """A dealt function with the masks of transposed operands turned back."""

    dealt: Dealt
    turned: frozenset[int]

    def __call__(self, material: Any, *args: Any) -> Any:
        return self.dealt(material, *((arg[0], arg[1].T) if i in self.turned else arg for i, arg in enumerate(args)))


__all__ = ["Assisted", "DealtProgram", "OperandName", "OperandSlot", "run_stream"]
