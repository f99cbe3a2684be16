"""Where values stand in the slots of ciphertexts, and public affine maps between such places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import numpy as np

from .graph import Layout, Span, stacks

ABSENT = -1
"""The place of an element of an array that no slot holds: a masked pair."""


@dataclass(frozen=True)
class Places:
    """Of each element of an array, its slot, counted through `count` ciphertexts end to end, or ABSENT."""

    index: np.ndarray
    count: int

    def read(self, flat: np.ndarray) -> np.ndarray:
        """The array in the slots `flat`; absent elements are 0."""
        return np.where(self.index == ABSENT, 0.0, flat[self.index])

    def write(self, array: np.ndarray, slots: int) -> np.ndarray:
        """Slots [count x slots] that hold the array, 0 elsewhere."""
        flat = np.zeros(self.count * slots)
        present = self.index != ABSENT
        flat[self.index[present]] = np.broadcast_to(array, self.index.shape)[present]
        return flat


@dataclass(frozen=True)
class SlotMap:
    """A public affine map: `function` of the array at `source`, written to `target`; all other slots become 0."""

    function: Callable[[np.ndarray], np.ndarray]
    source: Places
    target: Places

    def applied(self, flat: np.ndarray, slots: int) -> np.ndarray:
        """Slots of the source's ciphertexts -> slots of the target's."""
        return self.target.write(self.function(self.source.read(flat)), slots)

    def matrix(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The map by what it makes of unit vectors: [outputs, inputs], constants [outputs], and their slots [outputs], [inputs]."""
        present = np.flatnonzero(self.target.index.reshape(-1) != ABSENT)
        taken = np.flatnonzero(self.source.index.reshape(-1) != ABSENT)

        def value(array: np.ndarray) -> np.ndarray:
            return np.broadcast_to(self.function(array), self.target.index.shape).reshape(-1)[present]

        constants = value(np.zeros(self.source.index.shape))
        found = np.empty((len(present), len(taken)))
        for column, element in enumerate(taken):
            unit = np.zeros(self.source.index.size)
            unit[element] = 1
            found[:, column] = value(unit.reshape(self.source.index.shape)) - constants
        return found, constants, self.target.index.reshape(-1)[present], self.source.index.reshape(-1)[taken]


@lru_cache(maxsize=32)
def places(layout: Layout, span: Span, slots: int) -> Places:
    """Places of a value's array, [rows, pieces, size], of pairs [rows, pieces, positions, size]; the last row's are the first."""
    units = layout.units(span)
    count = layout.ciphertexts(span, slots)
    if layout.stacked:
        return Places(_stacked(layout, units, span, slots), count)
    elements = _elements(layout, units)
    if span.options.pack:
        return Places(_ordered(elements), count)
    index, first = np.full(elements.shape, ABSENT), 0
    for row in reversed(range(len(units))):
        for piece in range(layout.pieces):
            present = elements[row, piece]
            index[row, piece, present] = first * slots + np.arange(present.sum())
            first += -(-units[row] * layout.size // slots)
    return Places(index, count)


def copies(layout: Layout, span: Span, slots: int) -> list[tuple[int, int, int]]:
    """Of each stack of a stacked value: its copies (positions), slots of one, and copies in a ciphertext (0: one takes several)."""
    units = layout.units(span)
    if span.options.pack:
        size = len(units) * layout.pieces * layout.size
        return [(max(units), size, slots // size)]
    return [(unit, layout.size, slots // layout.size) for unit in reversed(units) for _ in range(layout.pieces)]


def joined(parts: Sequence[Places], slots: int) -> Places:
    """Arrays one below the other, the ciphertexts end to end."""
    begun = np.cumsum([0] + [part.count for part in parts])
    index = [np.where(part.index == ABSENT, ABSENT, part.index + first * slots) for part, first in zip(parts, begun, strict=False)]
    return Places(np.concatenate(index), int(begun[-1]))


def rotation_steps(slots: int, few: bool = False) -> list[int]:
    """Steps that keys are made for: every rotation is one by less than `baby_steps` and one by a multiple of it; with `few` keys,
    as many as the step has bits."""
    if few:
        return [1 << bit for bit in range((slots - 1).bit_length())]
    baby = baby_steps(slots)
    return [*range(1, baby), *range(baby, slots, baby)]


def baby_steps(slots: int) -> int:
    """The power of two next to sqrt(slots) from above."""
    return 1 << (isqrt(slots - 1).bit_length() if slots > 1 else 0)


def _elements(layout: Layout, units: Sequence[int]) -> np.ndarray:
    """Whether each element of the array exists: positions that its row attends to."""
    if not layout.pairs:
        return np.ones((len(units), layout.pieces, layout.size), bool)
    present = np.arange(max(units)) < np.asarray(units)[:, None]
    return np.broadcast_to(present[:, None, :, None], (len(units), layout.pieces, max(units), layout.size))


def _ordered(elements: np.ndarray) -> np.ndarray:
    """Slots end to end: the last row's first, in a row position by position."""
    index = np.full(elements.shape, ABSENT)
    order = (0, 2, 1, 3) if elements.ndim == 4 else (0, 1, 2)
    index.transpose(order)[::-1][elements.transpose(order)[::-1]] = np.arange(elements.sum())
    return index


def _stacked(layout: Layout, units: Sequence[int], span: Span, slots: int) -> np.ndarray:
    """[rows, pieces, positions, size]: copy after copy, in each the rows as they are laid out without positions."""
    index = np.full((len(units), layout.pieces, max(units), layout.size), ABSENT)
    within, first = np.arange(layout.size), 0
    copy = len(units) * layout.pieces * layout.size
    for row in reversed(range(len(units))):
        for piece in range(layout.pieces):
            positions = np.arange(units[row])[:, None]
            if span.options.pack:
                offset = ((len(units) - 1 - row) * layout.pieces + piece) * layout.size
                index[row, piece, : units[row]] = _copy(positions, copy, slots) + offset + within
            else:
                index[row, piece, : units[row]] = first * slots + _copy(positions, layout.size, slots) + within
                first += stacks(units[row], layout.size, slots)
    return index


def _copy(number: np.ndarray, size: int, slots: int) -> np.ndarray:
    """The slot at which a copy begins."""
    if size > slots:
        return number * -(-size // slots) * slots
    each = slots // size
    return number // each * slots + number % each * size
