"""A session with a dealer: programs whose protocols run on correlated randomness from a third party.

The dealer, at hand or ahead of time (see `supply.py`), is told specifications and position numbers only. What it sends goes to
the parties before each run and is booked to a phase of its own (`offline`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import enable_x64

from ..dealer.generator import message_bytes
from ..dealer.material import Specification
from ..errors import UserError
from ..primitives.dealing import Dealing, Dealt, with_material
from .ahead import Split, split
from .program import Program, Slot
from .session import Session
from .supply import MATERIAL, LiveSupply, Run, Supply, offline
from .trust import check_trust

TRUST = "third-party dealer, which sees no input, weight or opening, and colludes with neither party"

VIOLATION = "violation"
"""The variable that holds a share of 0 where every lookup of a run had its input in range."""

_WORDS_AHEAD = 1 << 25  # of material that a party has unpacked at one time: 256 MB


@dataclass(frozen=True)
class OperandSlot:
    """An input (or output) of a program that is a masked operand: known to the dealer as `name` within the program.

    Of one that never changes the parties keep shares of the value itself, of one that grows (which the program also gives back)
    shares of its mask. A matrix may have these `transposed`: SPU multiplies a public vector by shares of a matrix three times
    faster that way round.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def slots(self) -> tuple[Slot, Slot]:
        """The opened value, and the shares of the value or of its mask."""
        shape = self.shape[::-1] if self.transposed else self.shape
        return Slot(self.shape, np.int64, public=True), Slot(shape, np.int64)


@dataclass(frozen=True)
class OperandName:
    """A masked operand in a session: its opened value and the shares that go with it are variables derived from `name`.

    turned: its shares in the other layout (see `Assisted.turn`).
    """

    name: str
    turned: bool = False

    @property
    def variables(self) -> tuple[str, str]:
        return f"{self.name}.opened", f"{self.name}.{'turned' if self.turned else 'share'}"


@dataclass(frozen=True)
class DealtProgram:
    """A compiled program together with the material one run of it takes, and the part of it that is run ahead, if any."""

    program: Program
    specification: Specification
    leaves: tuple[Any, ...]
    keeps: dict[int, str]
    tree: Any
    ahead: Program | None = None
    parts: Split | None = None

    @property
    def dealer_bytes(self) -> int:
        """Bytes the dealer sends for one run to the party that gets more."""
        return max(message_bytes(self.specification))


@dataclass(frozen=True)
class Call:
    """One run of a program: trees of the names of its arguments and results, and the position numbers that the dealer is told."""

    dealt: DealtProgram
    arguments: Any
    results: Any
    publics: Mapping[str, int]


class Assisted:
    """Runs dealer programs in a session, by default with a dealer at hand. Every run takes new material."""

    def __init__(self, session: Session, supply: Supply | None = None):
        self.session = session
        self._supply = supply or LiveSupply()
        self._masked: set[str] = set()
        self._violation = [np.zeros((), np.int64)] * len(session.parties)

    def mask_operand(self, name: str, value: np.ndarray, owner: str, transposed: bool = False, grows: bool = False) -> OperandName:
        """Make ring integers known to `owner` a masked operand: value - mask becomes public, the value stays with the owner.

        Of an operand that `grows` (cache rows: programs give it back with more of them) the mask stays there instead. The mask
        comes from the key the owner shares with the dealer; the owner sends 8 bytes an element. No other party learns anything
        of the value. A name is masked once: another value under one mask would give away the difference.
        """
        if name in self._masked:
            raise ValueError(f"operand {name} was masked before; a changed value needs a new name")
        self._masked.add(name)
        rank = self.session.roles.index(owner)
        mask = self._supply.operand_mask(name, value.shape, rank)
        operand = OperandName(name)
        opened, hidden = operand.variables
        self.session.publish_from(opened, value - mask, owner)
        own = mask if grows else value
        share = own.T if transposed else own
        self.session.place_made(hidden, lambda party: share if party.rank == rank else np.zeros_like(share))
        return operand

    def turn(self, operand: OperandName, value: np.ndarray, owner: str) -> OperandName:
        """The same operand, whose `value` never changes, with transposed shares beside those it has, for other products."""
        rank, turned = self.session.roles.index(owner), OperandName(operand.name, turned=True)
        share = value.T
        self.session.place_made(turned.variables[1], lambda party: share if party.rank == rank else np.zeros_like(share))
        return turned

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
        slots = (Slot((dealt.specification.words,), np.int64), *(_slots(leaf) for leaf in leaves))
        turned = frozenset(i for i, leaf in enumerate(leaves) if isinstance(leaf, OperandSlot) and leaf.transposed)
        call: Callable = DealtCall(dealt, turned)
        parts = self._split(call, slots, leaves, kept) if self.session.runs_ahead else None
        ahead = None
        if parts is not None:
            flat = jax.tree_util.tree_leaves(slots)
            ahead = self.session.compile(f"{name}, ahead", parts.ahead, tuple(flat[i] for i in parts.known))
            check_trust(ahead)
            call, slots = parts.rest, (*parts.between, *flat)
        program = self.session.compile(name, call, slots)
        check_trust(program)
        return DealtProgram(program, dealt.specification, tuple(leaves), kept, dealt.tree, ahead, parts)

    @staticmethod
    def _split(call: Callable, slots: tuple, leaves: Sequence[Any], kept: Mapping[int, str]) -> Split | None:
        """Known ahead are the material and operands that never change."""
        flat, tree = jax.tree_util.tree_flatten(slots)
        static = (isinstance(leaf, OperandSlot) and leaf.name not in kept.values() for leaf in leaves)
        known = [True, *(early for early, slot in zip(static, slots[1:], strict=True) for _ in jax.tree_util.tree_leaves(slot))]

        def function(*args: Any) -> Any:
            return call(*jax.tree_util.tree_unflatten(tree, args))

        with enable_x64():
            return split(function, flat, known)

    def run(self, dealt: DealtProgram, arguments: Any, results: Any, publics: Mapping[str, int] | None = None) -> None:
        """Provide material for one run and run it. Operands are named by `OperandName`s in both trees of names."""
        self.run_all([Call(dealt, arguments, results, publics or {})])

    def run_all(self, calls: Sequence[Call]) -> None:
        """Run one after the other. What needs no input is done before for as many at once as memory has room for.

        The parties wait for each other in between, so that none waits online for one that still unpacks its material.
        """
        for group in self._groups(calls):
            with self.session.phase(offline(self.session.current_phase)):
                ready = [self._prepare(call, f"{MATERIAL}.{i}") for i, call in enumerate(group)]
                self.session.meet()
            for program, arguments, outputs in ready:
                self.session.run(program, arguments, outputs)
                self._collect()

    def _groups(self, calls: Sequence[Call]) -> Iterator[list[Call]]:
        """Those that are prepared together: one at a time where nothing is gained by it."""
        group: list[Call] = []
        words = 0
        for call in calls:
            more = call.dealt.specification.words
            if group and (not self.session.runs_ahead or words + more > _WORDS_AHEAD):
                yield group
                group, words = [], 0
            group.append(call)
            words += more
        if group:
            yield group

    def _prepare(self, call: Call, material: str) -> tuple[Program, tuple[Any, ...], list[Any]]:
        """Make everything of a run that needs no input: what is left is a program, its arguments and the names of its results."""
        dealt = call.dealt
        names, results = _names(call.arguments), _names(call.results)
        slots = [leaf.name if isinstance(leaf, OperandSlot) else None for leaf in dealt.leaves]
        operands = {slot: name.name for slot, name in zip(slots, names, strict=True) if slot is not None}
        keeps = {slot: results[i].name for i, slot in dealt.keeps.items()}
        self._supply.provide(self.session, Run(dealt.specification, operands, keeps, call.publics), material)
        arguments: tuple[Any, ...] = (material, *map(_variables, names))
        outputs = [*map(_variables, results), VIOLATION]
        if dealt.ahead is None or dealt.parts is None:
            return dealt.program, arguments, outputs
        flat = jax.tree_util.tree_leaves(arguments)
        made = [f"{material}.{i}" for i in range(len(dealt.parts.between))]
        self.session.run(dealt.ahead, tuple(flat[i] for i in dealt.parts.known), made)
        return dealt.program, (*made, *flat), jax.tree_util.tree_leaves(outputs)

    def _collect(self) -> None:
        """Add what a run found out of range, each party its share, to what runs before it found."""
        self._violation = [a + b for a, b in zip(self._violation, self.session.words(VIOLATION), strict=True)]

    def check_ranges(self) -> None:
        """Whether a lookup since the last check had its input out of range: one number for the client, 8 bytes.

        The client learns 0, or the number of twos in a random number. An input one period of its table out of range is always
        seen, a nearer one with a chance of its distance in periods (see `range_check.py`). Raises UserError where one was
        seen: what was computed is worth nothing.
        """
        total = self.session.give([np.asarray(share) for share in self._violation])
        self._violation = [np.zeros((), np.int64)] * len(self._violation)
        if total:
            raise UserError(
                "range check: a value left its table during this pass, so its result is void; calibrate on text like this one "
                "(calibration in the model's config), or give the model a prefix that takes its outliers"
            )


def _slots(leaf: Any) -> Any:
    return leaf.slots if isinstance(leaf, OperandSlot) else leaf


def _names(tree: Any) -> list[Any]:
    return jax.tree_util.tree_leaves(tree, is_leaf=lambda x: isinstance(x, OperandName))


def _variables(name: Any) -> Any:
    return name.variables if isinstance(name, OperandName) else name


@dataclass(frozen=True)
class DealtCall:
    """A dealt function with the masks of transposed operands turned back."""

    dealt: Dealt
    turned: frozenset[int]

    def __call__(self, material: Any, *args: Any) -> Any:
        return self.dealt(material, *self._turn(args))

    def evaluate(self, dealing: Dealing, args: Sequence[Any]) -> list[Any]:
        """As a call, by other means than SPU (see emulation.py)."""
        return self.dealt.evaluate(dealing, self._turn(args))

    def _turn(self, args: Sequence[Any]) -> list[Any]:
        return [(arg[0], arg[1].T) if i in self.turned else arg for i, arg in enumerate(args)]


__all__ = ["Assisted", "Call", "DealtCall", "DealtProgram", "OperandName", "OperandSlot", "offline"]
