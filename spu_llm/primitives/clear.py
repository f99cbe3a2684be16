"""Dealer programs in the clear: the same program, masks and roundings on whole ring integers, with nobody to hide them from.

For measuring quality where a secure run would take too long. A secret is one array instead of two shares, opening it is the
identity, and what a dealer derives from masks is computed on the spot. The protocols themselves run, so every rounding falls as
it does between parties under the same masks: each value is the same integer modulo the 2^m it is known to. What is above,
garbage in a secure run too, may differ. Three protocols are replaced by what they amount to (`_SHORTCUTS`): a contraction by one
exact product, a scaling likewise, a lookup by the one row it picks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil, log2, prod
from typing import Any

import numpy as np
from jax.core import Primitive

from ..dealer.generator import mask_position
from ..dealer.material import Hidden, Looked, Recorder, Shape
from ..dealer.table import Table
from .base import PROTOCOLS
from .contract import contract_p
from .dealing import RING, Dealing, Opened, Request, Value, logical_shift
from .lookup import lookup_p
from .range_check import STRENGTH
from .scale import scale_p

_EXACT_BITS = 53  # integers that a float64 product sum holds exactly
_LIMB_BITS = 32  # of the right factor; the left one's limbs get the bits that are left
_CHUNK = 1 << 13  # lookups computed at once: their columns stay in the processor's cache


class ClearRecorder(Recorder):
    """Hands out hidden values themselves instead of shares of them. `draw` gives the uniform masks, in the program's order."""

    def __init__(self, draw: Callable[[Shape], np.ndarray]):
        super().__init__(lambda count: np.empty(0, np.int64))
        self._draw = draw

    def uniform(self, shape: Shape) -> Hidden:
        return Hidden(0, self._draw(shape))

    def derive(self, make: Callable[..., np.ndarray], *sources: Hidden, modulus: int = RING) -> Hidden:
        with np.errstate(over="ignore"):  # the ring wraps around; numpy warns of it in scalars only
            return Hidden(0, np.asarray(make(*(np.asarray(source.share) for source in sources))).astype(np.int64))

    def one_hot(self, make: Callable[..., np.ndarray], size: int, *sources: Hidden) -> Hidden:
        return Hidden(0, np.eye(size, dtype=np.int64)[self.derive(make, *sources).share])

    def follow(self, make: Callable[..., np.ndarray], share: Any, *sources: Hidden, publics: tuple[str, ...] = ()) -> Hidden:
        return Hidden(0, np.asarray(share))

    def table(self, mask: Hidden, table: Table, place_shift: int, modulus: int) -> Hidden:
        deal = Looked(mask.shape, (0,), table, place_shift, modulus)
        segment, payload = mask_position(deal, np.asarray(mask.share))
        spread = np.eye(table.segments, dtype=np.int64)[segment][..., None] * payload[:, None]
        whole = spread if table.spread else table.rotate(spread, modulus)
        return Hidden(0, whole.reshape(*mask.shape, table.segments, table.payload_words))

    def operand(self, name: str, share: Any) -> Hidden:
        return Hidden(0, share)

    def retain(self, name: str, hidden: Hidden) -> None:
        """Nobody deals for later programs."""


@dataclass
class ClearDealing(Dealing):
    """Opens by doing nothing. `factors` keeps what products have prepared of operands that never change."""

    factors: Factors = field(default_factory=lambda: Factors())
    shortcuts: bool = True

    def flush(self) -> None:
        for request in self.pending:
            request.result = np.asarray(request.masked)
        self.pending = []

    def protocol(self, primitive: Primitive) -> Callable | None:
        return (_SHORTCUTS if self.shortcuts else {}).get(primitive) or PROTOCOLS.get(primitive)

    def local(self, primitive: Primitive, shares: Sequence[Any], params: dict[str, Any]) -> Any:
        if primitive.name in _LOCAL:
            with np.errstate(over="ignore"):
                return _LOCAL[primitive.name](*map(np.asarray, shares), **params)
        out = super().local(primitive, shares, params)
        return [np.asarray(each) for each in out] if primitive.multiple_results else np.asarray(out)


def _broadcast(x: np.ndarray, *, shape: Shape, broadcast_dimensions: tuple[int, ...]) -> np.ndarray:
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _slice(x: np.ndarray, *, start_indices: Shape, limit_indices: Shape, strides: Shape | None) -> np.ndarray:
    steps = strides or (1,) * x.ndim
    return x[tuple(slice(*each) for each in zip(start_indices, limit_indices, steps, strict=True))]


# What layers do most on shares: numpy has no compiler to wait for at every new number of tokens.
_LOCAL: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "reshape": lambda x, *, new_sizes, dimensions: x.reshape(new_sizes),
    "transpose": lambda x, *, permutation: x.transpose(permutation),
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "concatenate": lambda *parts, dimension: np.concatenate(parts, dimension),
    "reduce_sum": lambda x, *, axes: x.sum(axes),
}


def _contract(
    dealing: ClearDealing, x: Value, y: Value, *, subscripts: str, shifts: tuple[int, int], moduli: tuple[int, int]
) -> Generator[Request, None, Any]:
    """The product of the rounded operands: what the protocol's three products and the dealer's one add up to."""
    dealing.request(x, y)
    a = yield from dealing.opened(x, shifts[0], moduli[0])
    b = yield from dealing.opened(y, shifts[1], moduli[1])
    return dealing.factors.einsum(subscripts, a, b)


def _scale(
    dealing: ClearDealing, x: Value, y: Value, *, shifts: tuple[int, int], moduli: tuple[int, int]
) -> Generator[Request, None, Any]:
    dealing.request(x, y)
    a = yield from dealing.lifted(x, shifts[0], moduli[0])
    b = yield from dealing.lifted(y, shifts[1], moduli[1])
    return a.share * b.share


def _lookup(dealing: ClearDealing, x: Value, *, table: Table, bits: int, known: int, modulus: int) -> Generator[Request, None, Any]:
    """The polynomial of the row that the opened value picks from the table that its mask has rotated."""
    c = yield from dealing.open(x)
    assert x.mask is not None
    u = -x.mask.share
    c = c - round(table.low * table.factor * 2.0**bits)
    if dealing.violations is not None:
        dealing.recorder.uniform(c.shape)  # the check's weights: drawn to keep the masks after them in their order
        dealing.violations.append(_reported(c, u, bits + table.width_bits + table.depth, known))
    return _picked(table, bits + table.width_bits - table.place_bits, c, u)


def _reported(c: np.ndarray, u: np.ndarray, b: int, modulus: int) -> int:
    """How many values the range check reports under these masks (see `range_check.violation`, whose z this is)."""
    low = (1 << modulus) - 1
    c, u = (c, u) if modulus == RING else (c & low, u & low)
    z, z_bits = logical_shift(c, b) - logical_shift(u, b), modulus - b
    if z_bits < STRENGTH:
        z = z + (logical_shift(u, modulus - 1) & ~logical_shift(c, modulus - 1) & 1) * (1 << z_bits)
    else:
        z = z & ((1 << z_bits) - 1)
    return np.count_nonzero(z & ~1)


def _picked(table: Table, shift: int, c: np.ndarray, u: np.ndarray) -> np.ndarray:
    out = np.empty(c.shape, np.int64)
    flat, c, u = out.reshape(-1), logical_shift(c, shift).reshape(-1), logical_shift(u, shift).reshape(-1)
    places, payloads = (1 << table.place_bits) - 1, _payloads(table)
    for start in range(0, len(flat), _CHUNK):
        public, hidden = c[start : start + _CHUNK], u[start : start + _CHUNK]
        segment = ((public >> table.place_bits) - (hidden >> table.place_bits)) & (table.segments - 1)
        columns = table.row(segment, payloads[hidden & places])
        place = public & places
        flat[start : start + _CHUNK] = sum(map(np.multiply, columns, table.factors(place)))
    return out


@cache
def _payloads(table: Table) -> np.ndarray:
    """The dealer's payload for every place a mask can have in its segment: [2^place_bits, payload_words]."""
    return table.payload(np.arange(1 << table.place_bits))


_SHORTCUTS: dict[Primitive, Callable] = {contract_p: _contract, scale_p: _scale, lookup_p: _lookup}


Limbs = list[tuple[int, np.ndarray, float]]
"""The right factor of matrix products, [batch, inner, columns], in limbs: (place in bits, float64, largest sum of a column)."""


class Factors:
    """Exact products modulo 2^64 by float64 products of limbs, several times as fast as those of integers.

    An operand given to `keep` must not change: it is prepared once for each way it is used.
    """

    def __init__(self) -> None:
        self._kept: dict[int, np.ndarray] = {}
        self._prepared: dict[Any, Limbs] = {}

    def keep(self, public: np.ndarray) -> None:
        """Take the public part of an operand, which tells it from others by where it lies in memory."""
        self._kept[_address(public)] = public

    def einsum(self, subscripts: str, x: Opened, y: Opened) -> np.ndarray:
        """An einsum of two, int64."""
        left, right, out = subscripts.replace("->", ",").split(",")
        inner = [letter for letter in left if letter not in out]
        if not inner:
            return np.einsum(subscripts, np.asarray(x.share), np.asarray(y.share))
        batch = [letter for letter in left if letter in right and letter in out]
        rows, columns = ([letter for letter in side if letter not in (*batch, *inner)] for side in (left, right))
        sizes = dict(zip((*left, *right), (*x.public.shape, *y.public.shape), strict=True))
        factor = self._factor(y, [right.index(letter) for letter in (*batch, *inner, *columns)], len(batch), len(inner))
        first = _signed(x).transpose([left.index(letter) for letter in (*batch, *rows, *inner)])
        first = first.reshape(*(prod(sizes[letter] for letter in part) for part in (batch, rows, inner)))
        found = _product(first, factor).reshape([sizes[letter] for letter in (*batch, *rows, *columns)])
        order = [*batch, *rows, *columns]
        return found.transpose([order.index(letter) for letter in out])

    def _factor(self, y: Opened, order: list[int], batch: int, inner: int) -> Limbs:
        address = _address(y.public)
        key = (address, y.public.shape, y.modulus, tuple(order), batch, inner)
        if key in self._prepared:
            return self._prepared[key]
        value = _signed(y).transpose(order)
        shape = value.shape
        flat = value.reshape(prod(shape[:batch]), prod(shape[batch : batch + inner]), -1)
        factor = [(at, limb, float(np.abs(limb).sum(1).max(initial=0))) for at, limb in _limbs(flat, _LIMB_BITS)]
        if address in self._kept:
            self._prepared[key] = factor
        return factor


def _product(x: np.ndarray, factor: Limbs) -> np.ndarray:
    """x [batch, rows, inner] times the factor, modulo 2^64: every float64 sum stays below 2^53."""
    total: Any = 0
    for at, limb, most in factor:
        bits = _EXACT_BITS - ceil(log2(most + 1))
        for place, part in _limbs(x, bits):
            if at + place < RING:
                total = total + ((part @ limb).astype(np.int64) << (at + place))
    return total


def _limbs(x: np.ndarray, bits: int) -> list[tuple[int, np.ndarray]]:
    """(place, float64) limbs below 2^bits in size that add up to x; as many as its largest number needs, the last one signed."""
    largest = max(-int(x.min(initial=0)), int(x.max(initial=0)))
    limbs, place = [], 0
    while largest >> (place + bits):
        limbs.append((place, (x >> place & ((1 << bits) - 1)).astype(np.float64)))
        place += bits
    return [*limbs, (place, (x >> place).astype(np.float64))]


def _signed(x: Opened) -> np.ndarray:
    """The value, in [-2^(modulus - 1), 2^(modulus - 1))."""
    unused = RING - x.modulus
    share = np.asarray(x.share)
    return share << unused >> unused if unused else share


def _address(x: Any) -> int:
    return np.asarray(x).__array_interface__["data"][0]
