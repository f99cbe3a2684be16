"""Which table serves a function on a range: the one the dealer sends least for, or the parties expand fastest, within an error.

Every candidate is measured by the lookup protocol's own integer arithmetic under random masks (`emulate`), so that an error
holds the fit, the rounding of place, payload and coefficients, and what the last usable segment does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil, comb, inf, log2
from typing import Any, Literal

import numpy as np

from ..errors import UserError
from . import dpf
from .table import Table

Function = Callable[[np.ndarray], np.ndarray]
Preference = Literal["bytes", "seconds"]

_SEGMENTS = tuple(1 << depth for depth in range(1, 13))
_DEGREES = range(10)
_FACTORS = (1, 3, 5, 7)  # a width is a power of two over one of them, which the input is multiplied by
_BITS = range(10, 19)  # fraction bits of coefficients
_PLACE_BITS = range(6, 17)  # a steep function needs many: its slope times a unit of the place is an error
_INPUT_BITS = 18  # fraction bits that every input has, as SPU's own numbers do: the place cannot use more
_FEW, _MANY = 1 << 11, 1 << 14  # places at which a candidate, and the choice, is measured
_DRAWS = 4  # of masks of either kind, for the choice
_SWEPT, _SWEEP, _TURNS = 48, 1 << 12, 2  # worst places, masks or places tried for each, times that both are changed
_LOW_BITS = 8  # bits of the input below its place: what is dropped there carries into the place or not
_RING = 64
_DOUBLE = 53  # bits of an integer that a float64 product sum keeps exact (see `Table.rotate`)
# Of one core with AES instructions, measured from K = 4 to K = 4096, right within a factor of two.
_EXPAND_SECONDS = 10e-9  # a word of the tree's end
_LIMB_SECONDS = 8e-9  # a word and limb: cut, converted, added
_MULTIPLY_SECONDS = 0.06e-9  # a multiply-add of the map that turns the table
_SPREAD_SECONDS = 1.5e-3  # an element whose table is turned in the program, between K = 1024 and K = 4096


@dataclass(frozen=True, eq=False)
class PlannedTable:
    """A table and what an element of it costs.

    key_bytes: what the dealer sends to each party. multiply_adds, seconds: of a party's expansion (and of turning the table in
    the program, where that is done: `Table.spread`), estimated for one core.
    max_error: the largest seen on the range. continued: whether `table.function` leaves the given function beyond the range.
    """

    table: Table
    key_bytes: float
    multiply_adds: int
    seconds: float
    max_error: float
    continued: bool


@dataclass(frozen=True)
class Shape:
    """What a table's costs hang on, and whether its function is continued beyond the range by polynomials (see `continue_from`)."""

    segments: int
    width_bits: int
    degree: int
    factor: int = 1
    continued: bool = False

    @property
    def width(self) -> float:
        return 2.0**self.width_bits / self.factor

    @property
    def key_bytes(self) -> float:
        return dpf.key_bytes(self.segments.bit_length() - 1, self.degree + 1)

    @property
    def least_seconds(self) -> float:
        """No table of the shape takes less."""
        return min(self.expansion(limbs)[1] for limbs in (0, 1))

    def expansion(self, limbs: int) -> tuple[int, float]:
        """(multiply-adds, seconds) of one element: the tree's end, and the map that turns the table; 0 limbs: in the program."""
        words = self.segments * (self.degree + 1)
        if limbs == 0:
            return words, words * _EXPAND_SECONDS + _SPREAD_SECONDS
        products = limbs * self.segments**2 * (self.degree + 1) * (self.degree + 2) // 2
        return products, words * (_EXPAND_SECONDS + limbs * _LIMB_SECONDS) + products * _MULTIPLY_SECONDS


def plan_table(
    function: Function,
    low: float,
    high: float,
    max_error: float,
    prefer: Preference = "bytes",
    stock: Callable[[Any], Any] | None = None,
) -> PlannedTable:
    """The table from `low` on that is off by at most `max_error` up to `high`, with the least dealer bytes or expansion time.

    The other of the two decides between equals. `function` (numpy) must be finite on [low, high]; `stock` is its JAX meaning
    for SPU without a dealer. Takes seconds. Raises UserError where no table of up to 4096 segments and degree 9 is that exact.
    """
    _check(function, low, high, max_error)

    def rank(size: float, seconds: float) -> tuple[float, float]:
        return (size, seconds) if prefer == "bytes" else (seconds, size)

    hopes = sorted(((rank(shape.key_bytes, shape.least_seconds), shape) for shape in _shapes(low, high)), key=lambda hope: hope[0])
    best, reached, least = None, (inf, inf), inf
    for hope, shape in hopes:
        if hope >= reached:
            break
        error, found = _fitted(shape, function, stock or _no_stock, (low, high), max_error)
        least = min(least, error)
        if found is not None and rank(found.key_bytes, found.seconds) < reached:
            best, reached = found, rank(found.key_bytes, found.seconds)
    if best is None:
        raise UserError(
            f"no table of up to {_SEGMENTS[-1]} segments on [{low:g}, {high:g}] is within {max_error:g} (best: {least:.2g}); "
            "narrow the range or allow a larger error"
        )
    return best


def table_of(
    shape: Shape, function: Function, stock: Callable[[Any], Any], span: tuple[float, float], bits: int, place_bits: int
) -> Table:
    """The table of a shape on a range, its function continued beyond the range if the shape says so."""
    if shape.continued:
        function = continue_from(function, span, shape.width, shape.degree)
    return Table(function, stock, span[0], shape.segments, shape.width_bits, shape.degree, bits, place_bits, shape.factor)


def emulate(table: Table, x: np.ndarray, masks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the inputs as the ring holds them, what the lookup gives for each) for reals x and uniform masks u int64, both [n].

    The same integers as `primitives/lookup.py` with an input c - u, shares added up.
    """
    raw, position, input_bits = _ring(table, x)
    segment, place = _position(table, position + masks)
    mask_segment, mask_place = _position(table, masks)
    row = table.row((segment - mask_segment) & (table.segments - 1), table.payload(mask_place))
    total = sum(word * factor for word, factor in zip(row, table.factors(place), strict=True))
    unused = _RING - min(_RING, table.modulus)
    return raw / 2.0**input_bits, (total << unused >> unused) / 2.0**table.output_bits


def worst_error(table: Table, function: Function, span: tuple[float, float], enough: float = inf) -> float:
    """The largest error that a search finds on the range: at random, then by other masks for the worst places, then the reverse.

    Random masks alone miss a third of it: roundings must meet, and at the end of a segment one kind of mask is rare. The
    search stops at an error above `enough`.
    """
    random = np.random.default_rng(1)
    x, masks, error = errors(table, function, span, draws=_DRAWS)
    worst = np.argsort(-error)[:_SWEPT]
    x, masks, largest = x[worst, None], masks[worst, None], float(error.max())
    for turn in range(2 * _TURNS):
        if largest > enough:
            break
        if turn % 2:
            near = x + random.uniform(-0.1, 0.1, (_SWEPT, _SWEEP)) * table.width
            tried = np.clip(near, *span), np.broadcast_to(masks, near.shape)
        else:
            other = random.integers(0, 1 << (table.place_bits + _LOW_BITS), (_SWEPT, _SWEEP))
            tried = np.broadcast_to(x, other.shape), other
        found = _errors_at(table, function, *(part.reshape(-1) for part in tried)).reshape(_SWEPT, _SWEEP)
        x, masks = (np.take_along_axis(part, found.argmax(1)[:, None], 1) for part in tried)
        largest = max(largest, float(found.max()))
    return largest


def errors(
    table: Table, function: Function, span: tuple[float, float], points: int = _MANY, draws: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A grid of a range, and for each point the worst mask of `draws` of either kind (`_masks`), with its error."""
    x = _grid(table, span, points)
    random = np.random.default_rng(0)
    worst, error = np.zeros(len(x), np.int64), np.zeros(len(x))
    for draw in range(2 * draws):
        masks = _masks(table, x, random, borrows=bool(draw % 2))
        found = _errors_at(table, function, x, masks)
        worst, error = np.where(found > error, masks, worst), np.maximum(found, error)
    return x, worst, error


def _errors_at(table: Table, function: Function, x: np.ndarray, masks: np.ndarray) -> np.ndarray:
    held, found = emulate(table, x, masks)
    return np.abs(found - function(held))


def continue_from(function: Function, span: tuple[float, float], width: float, degree: int) -> Function:
    """The function on a range, and for a width beyond each end the polynomial that fits it best there; constant further out.

    A pole, or a steep rise outside the range, then does not spoil the segments at its ends.
    """
    low, high = span
    reach = min(width, high - low)
    nodes = 0.5 + 0.5 * np.cos(np.pi * (np.arange(4 * (degree + 1)) + 0.5) / (4 * (degree + 1)))
    ends = [low + reach * nodes, high - reach * nodes]
    before, after = (np.polynomial.Polynomial.fit(end, function(end), degree) for end in ends)

    def continued(x: np.ndarray) -> np.ndarray:
        outside = np.clip(x, low - width, high + width)
        inside = function(np.clip(x, low, high))
        return np.where(x < low, before(outside), np.where(x > high, after(outside), inside))

    return continued


def _check(function: Function, low: float, high: float, max_error: float) -> None:
    if not low < high or not np.isfinite(high - low):
        raise UserError(f"a table from {low:g} to {high:g}: give a lower end below the higher one")
    if not max_error > 0:
        raise UserError(f"a table within an error of {max_error:g}: give an error above 0")
    x = np.linspace(low, high, 257)
    with np.errstate(all="ignore"):
        values = function(x)
    if not np.all(np.isfinite(values)):
        at = x[~np.isfinite(values)][0]
        raise UserError(f"the function is not finite at {at:g}; move the range [{low:g}, {high:g}] away from there")


def _shapes(low: float, high: float) -> Iterator[Shape]:
    """Tables that cover the range, with the narrowest segments for their number, which the last one is not usable of.

    With a factor of 1 besides: only then can an opening of the input that was made for something else serve the lookup.
    """
    for segments in _SEGMENTS:
        least = (high - low) / (segments - 1)
        widths = [(ceil(log2(least * factor)), factor) for factor in _FACTORS]
        narrowest = min(widths, key=lambda width: 2.0 ** width[0] / width[1])
        for (width_bits, factor), degree, continued in product({widths[0]: 0, narrowest: 0}, _DEGREES, (False, True)):
            yield Shape(segments, width_bits, degree, factor, continued)


def _fitted(
    shape: Shape, function: Function, stock: Callable[[Any], Any], span: tuple[float, float], max_error: float
) -> tuple[float, PlannedTable | None]:
    """(the least error of a shape, with the finest numbers; the table of the coarsest numbers that keep `max_error`, if any)."""
    precisions = _precisions(shape)
    if not precisions:
        return inf, None
    with np.errstate(all="ignore"):
        try:
            finest = table_of(shape, function, stock, span, *precisions[-1])
            least = _quick_error(finest, function, span) if finest.modulus <= _RING else inf
        except ValueError:  # not finite beyond the range
            return inf, None
    if least > max_error:
        return least, None
    for bits, place_bits in precisions:
        table = table_of(shape, function, stock, span, bits, place_bits)
        if _quick_error(table, function, span) > max_error:
            continue
        error = worst_error(table, function, span, max_error)
        if error <= max_error:
            products, seconds = shape.expansion(_limbs(table))
            return least, PlannedTable(table, shape.key_bytes, products, seconds, error, shape.continued)
    return least, None


def _quick_error(table: Table, function: Function, span: tuple[float, float]) -> float:
    return float(errors(table, function, span, _FEW)[2].max())


def _precisions(shape: Shape) -> list[tuple[int, int]]:
    """(bits, place_bits), those first whose tables take the fewest bits to turn."""
    places = [place_bits for place_bits in _PLACE_BITS if place_bits <= _INPUT_BITS + shape.width_bits]
    return sorted(product(_BITS, places), key=lambda pair: (pair[0] + 2 * pair[1], pair[0]))


def _limbs(table: Table) -> int:
    """Parts in which a share is multiplied by the coefficients, as in `Table.rotate` but without its matrices; 0 if it is not."""
    if table.spread:
        return 0
    size = np.abs(table.coefficients.astype(np.float64)).sum(0)
    columns = [sum(comb(p, i) * size[p] for p in range(i, table.degree + 1)) for i in range(table.degree + 1)]
    limb = _DOUBLE - ceil(log2(max(columns) + 1))
    return -(-table.modulus // limb) if limb > 0 else 64


def _ring(table: Table, x: np.ndarray) -> tuple[np.ndarray, int, int]:
    """(reals in the ring, factor times what they are above the table's low end, their fraction bits).

    These bits put `_LOW_BITS` bits below the place.
    """
    bits = table.place_bits - table.width_bits + _LOW_BITS
    raw = np.round(x * 2.0**bits).astype(np.int64)
    return raw, raw * table.factor - round(table.low * table.factor * 2.0**bits), bits


def _masks(table: Table, x: np.ndarray, random: np.random.Generator, borrows: bool) -> np.ndarray:
    """Masks int64 [n] that make every input of x borrow, so that the segment after its own serves it, or make none do so.

    Masks of one kind are uniform among themselves. At the ends of a segment one kind is too rare to be met by chance, and
    that is where polynomials are worst.
    """
    _, position, _ = _ring(table, x)
    width = 1 << (table.place_bits + _LOW_BITS)
    free = width - position % width  # masks whose place is below this do not carry into the next segment
    place = random.integers(np.minimum(free, width - 1), width) if borrows else random.integers(0, free)
    return place + width * random.integers(0, table.segments, len(x))


def _position(table: Table, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(segment, place within it) of ring integers with `_LOW_BITS` bits below the place."""
    scaled = raw >> _LOW_BITS
    return scaled >> table.place_bits & (table.segments - 1), scaled & ((1 << table.place_bits) - 1)


def _grid(table: Table, span: tuple[float, float], points: int) -> np.ndarray:
    """Evenly spaced points with both ends, and the places next to each edge."""
    unit = table.width * 2.0**-table.place_bits
    edges = table.low + np.arange(table.segments) * table.width
    near = (edges[:, None] + unit * np.array([-1.0, -0.5, 0.0, 0.5, 1.0])).reshape(-1)
    x = np.concatenate([np.linspace(*span, points), near])
    return np.sort(x[(x >= span[0]) & (x <= span[1])])


def _no_stock(x: Any) -> Any:
    raise UserError("this table was planned without a JAX function, so SPU cannot run it without a dealer; give plan_table stock=")
