"""What correlated randomness a program needs, recorded while it is traced.

A protocol asks the recorder for *hidden* values: uniform masks, and whatever the dealer computes from masks. Each is
known to the dealer alone and additively shared between the two parties. The record is run by `generator.py` (the dealer)
and `receive` there (a party), in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from .table import Table

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Uniform:
    """A mask, uniform in the ring. Both shares come from the parties' seeds: no dealer bytes."""

    shape: Shape


@dataclass(frozen=True)
class Derived:
    """`make` of earlier deals (numpy int64 in, int64 out). One party's share is from its seed, the other's is sent: 8 B a word.

    Where it is not `shared`, the parties get their shares by the same linear map of shares they hold, at no cost.
    `publics` names numbers known to all at run time (a position), which `make` takes after its sources. A smaller `modulus`:
    the shares are right modulo 2^modulus only, in words of 1, 2 or 4 bytes from seed and dealer, and at least 0 in the program.
    """

    shape: Shape
    sources: tuple[int, ...]
    make: Callable[..., np.ndarray]
    shared: bool = True
    publics: tuple[str, ...] = ()
    modulus: int = 64

    @property
    def word_bytes(self) -> int:
        """Bytes a word takes on its way: the least power of two that holds `modulus` bits."""
        return next(size for size in (1, 2, 4, 8) if 8 * size >= self.modulus)


@dataclass(frozen=True)
class Looked:
    """Rotated tables for the masks of a lookup: a distributed point function an element, expanded by each party."""

    shape: Shape
    sources: tuple[int, ...]
    table: Table
    place_shift: int
    modulus: int


@dataclass(frozen=True)
class Pointed:
    """One-hot rows of `size` words, their ones at the points that `make` finds from earlier deals (numpy, int64 `shape`).

    A distributed point function an element, expanded by each party. No later deal builds on it.
    """

    shape: Shape
    sources: tuple[int, ...]
    make: Callable[..., np.ndarray]
    size: int

    @property
    def depth(self) -> int:
        return (self.size - 1).bit_length()


@dataclass(frozen=True)
class Operand:
    """A mask that outlives a program (of a weight, or of cache rows). Its shares are program inputs; the dealer knows its name."""

    shape: Shape
    name: str


Deal = Uniform | Derived | Looked | Pointed | Operand


@dataclass(frozen=True)
class Hidden:
    """A value the dealer knows: its place in the record, and the traced array that is secret-shared in the program."""

    key: int
    share: Any

    @property
    def shape(self) -> Shape:
        return tuple(self.share.shape)


@dataclass(frozen=True)
class Specification:
    """The material of one run of a program. `keep` names deals that become operands of later programs."""

    deals: tuple[Deal, ...]
    keep: tuple[tuple[str, int], ...] = ()

    @property
    def words(self) -> int:
        """Ring words of one party's share of everything that enters the program as material."""
        return sum(shared_words(deal) for deal in self.deals)


def shared_words(deal: Deal) -> int:
    """Words a deal adds to the material vector of a program."""
    if isinstance(deal, Uniform):
        return prod(deal.shape)
    if isinstance(deal, Derived):
        return prod(deal.shape) if deal.shared else 0
    if isinstance(deal, Looked):
        return prod(deal.shape) * deal.table.words
    if isinstance(deal, Pointed):
        return prod(deal.shape) * deal.size
    return 0


@dataclass
class Recorder:
    """Hands out hidden values in order. `take(count)` gives the next words of the material vector."""

    take: Callable[[int], Any]
    deals: list[Deal] = field(default_factory=list)
    keep: list[tuple[str, int]] = field(default_factory=list)

    def uniform(self, shape: Shape) -> Hidden:
        """A fresh one-time mask."""
        return self._add(Uniform(shape), shape)

    def derive(self, make: Callable[..., np.ndarray], *sources: Hidden, modulus: int = 64) -> Hidden:
        """A function of earlier hidden values; its shape is found by running `make` on zeros."""
        shape = _shape_made(make, sources)
        return self._add(Derived(shape, tuple(source.key for source in sources), make, modulus=modulus), shape)

    def one_hot(self, make: Callable[..., np.ndarray], size: int, *sources: Hidden) -> Hidden:
        """One-hot rows, shape + [size], of points in [0, size) that `make` finds from earlier hidden values."""
        shape = _shape_made(make, sources)
        return self._add(Pointed(shape, tuple(source.key for source in sources), make, size), (*shape, size))

    def follow(self, make: Callable[..., np.ndarray], share: Any, *sources: Hidden, publics: tuple[str, ...] = ()) -> Hidden:
        """A linear map of hidden values that the parties compute on their shares (`share`) and the dealer by `make`."""
        keys = tuple(source.key for source in sources)
        self.deals.append(Derived(tuple(share.shape), keys, make, False, publics))
        return Hidden(len(self.deals) - 1, share)

    def table(self, mask: Hidden, table: Table, place_shift: int, modulus: int) -> Hidden:
        """The rows of `table`, rotated for every element of `mask`: shape + [segments, payload_words], modulo 2^modulus.

        Bit `place_shift` of a mask is the lowest bit of its place within a segment that is looked at.
        """
        deal = Looked(mask.shape, (mask.key,), table, place_shift, modulus)
        return self._add(deal, (*mask.shape, table.segments, table.payload_words))

    def operand(self, name: str, share: Any) -> Hidden:
        """A mask dealt before, whose shares are already a variable of the parties."""
        self.deals.append(Operand(tuple(share.shape), name))
        return Hidden(len(self.deals) - 1, share)

    def retain(self, name: str, hidden: Hidden) -> None:
        """Let the dealer remember a hidden value under a name, as an operand of later runs."""
        self.keep.append((name, hidden.key))

    def specification(self) -> Specification:
        return Specification(tuple(self.deals), tuple(self.keep))

    def _add(self, deal: Deal, shape: Shape) -> Hidden:
        self.deals.append(deal)
        return Hidden(len(self.deals) - 1, self.take(shared_words(deal)).reshape(shape))


def _shape_made(make: Callable[..., np.ndarray], sources: tuple[Hidden, ...]) -> Shape:
    return np.shape(make(*(np.zeros(source.shape, np.int64) for source in sources)))
