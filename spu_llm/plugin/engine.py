"""What the interpreter computes secrets with: fixed-point primitives, or plain floating point for calibration and stock SPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import log2
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ..dealer.table import Table
from ..errors import UserError
from ..primitives.compare import relu
from ..primitives.contract import contract
from ..primitives.fixed import RING_BITS, Fixed, encode
from ..primitives.lookup import lookup
from ..primitives.scale import scale
from ..primitives.select import one_hot
from ..primitives.stock import FRACTION_BITS, as_real, as_ring
from ..primitives.truncate import truncate
from .ranges import WIDE, Ranges, Span, usual
from .tables import fit_table

Univariate = Callable[[Any], Any]


@dataclass(frozen=True)
class Site:
    """A place where a function is looked up: its name, the equation in the user's terms, its usual range, and what matters there.

    `shown` is False where a result is multiplied by zero anyway.
    """

    name: str
    where: str
    usual: Span | None = None
    shown: np.ndarray | None = None
    kinked: bool = False


class Engine(Protocol):
    """Arithmetic on secret arrays. Public operands are numpy arrays that every party knows.

    `general` engines hold real arrays that any equation without a rule can be applied to.
    """

    general: bool

    def plus(self, x: Any, y: Any) -> Any: ...
    def minus(self, x: Any, y: Any) -> Any: ...
    def plus_public(self, x: Any, y: np.ndarray) -> Any: ...
    def times_public(self, x: Any, y: np.ndarray) -> Any: ...
    def dot_public(self, subscripts: str, x: Any, y: np.ndarray) -> Any: ...
    def multiply(self, x: Any, y: Any) -> Any: ...
    def dot(self, subscripts: str, x: Any, y: Any) -> Any: ...
    def moved(self, move: Callable, *arrays: Any) -> Any: ...
    def constant(self, x: np.ndarray) -> Any: ...
    def summed(self, x: Any, axes: tuple[int, ...]) -> Any: ...
    def table(self, site: Site, function: Univariate, x: Any) -> Any: ...
    def reference(self, site: Site, x: Any, axis: int) -> Any: ...
    def relu(self, x: Any) -> Any: ...
    def one_hot(self, x: Any, places: int) -> Any: ...


@dataclass(frozen=True)
class Precision:
    """How the numbers of a function are held in the 64-bit ring; more of one kind of bits leaves room for fewer of the other."""

    fraction_bits: int = 16
    """Kept by an operand of a product: results are off by about 2^-fraction_bits."""

    integer_bits: int = 12
    """Every value of the function must lie below 2^integer_bits; `calibrate` checks that on its samples."""

    tolerance: float = 3e-4
    """Largest absolute error of a looked-up function whose values are up to 4; in proportion where they are larger."""

    @property
    def room(self) -> int:
        """Bits of modulus above the fraction: the integer part, its sign and one bit for an exact truncation."""
        return self.integer_bits + 2


@dataclass
class FixedEngine:
    """The dealer's primitives. Truncations happen inside openings; one of its own is added only where the modulus is used up."""

    ranges: Ranges
    precision: Precision
    plaintext: bool = False
    general: bool = False
    sites: dict[str, Table] = field(default_factory=dict)

    def plus(self, x: Fixed, y: Fixed) -> Fixed:
        a, b = self._aligned(x, y)
        return a + b

    def plus_public(self, x: Fixed, y: np.ndarray) -> Fixed:
        return x.with_raw(x.raw + self._public(y, x.bits))

    def times_public(self, x: Fixed, y: np.ndarray) -> Fixed:
        return self._public_product(x, y, lambda raw, factor: raw * factor)

    def dot_public(self, subscripts: str, x: Fixed, y: np.ndarray) -> Fixed:
        return self._public_product(x, y, lambda raw, factor: jnp.einsum(subscripts, raw, factor))

    def multiply(self, x: Fixed, y: Fixed) -> Fixed:
        """Element-wise with broadcasting. 1 round."""
        letters = "abcdefghij"[: len(x.shape)]
        if self._fits(x, y):
            return contract(f"{letters},{letters}->{letters}", x, y, self._kept(x), self._kept(y))
        return scale(x, y, self._kept(x), self._kept(y))

    def dot(self, subscripts: str, x: Fixed, y: Fixed) -> Fixed:
        """1 round, and one before it where an operand's modulus is used up."""
        if not self._fits(x, y):
            x = x if self._left(x) >= self._wanted(x, y) else self._whole(x)
            y = y if self._left(y) >= self._wanted(x, y) else self._whole(y)
        return contract(subscripts, x, y, self._kept(x), self._kept(y))

    def moved(self, move: Callable, *arrays: Fixed) -> Fixed:
        """A local rearrangement of one or more arrays, brought to one scale."""
        first = arrays[0]
        for other in arrays[1:]:
            first, _ = self._aligned(first, other)
        same = [self._aligned(first, other)[1] for other in arrays]
        return Fixed(move(*(each.raw for each in same)), first.bits, min(each.modulus for each in same))

    def constant(self, x: np.ndarray) -> Fixed:
        bits = self.precision.fraction_bits if jnp.issubdtype(x.dtype, jnp.floating) else 0
        return Fixed(jnp.asarray(encode(x, bits)), bits)

    def summed(self, x: Fixed, axes: tuple[int, ...]) -> Fixed:
        return x.with_raw(jnp.sum(x.raw, axis=axes))

    def table(self, site: Site, function: Univariate, x: Fixed) -> Fixed:
        """1 round."""
        table = self.sites[site.name] = self._fitted(site, function)
        return self._looked_up(x, table)

    def reference(self, site: Site, x: Fixed, axis: int) -> Fixed:
        """About the maximum along an axis (never off by more than `slack` a level): log2(n) rounds of looked-up differences."""
        span = self.ranges.at(site.name, site.where) or site.usual or WIDE
        table = self.sites[site.name] = fit_table(_relu, lambda v: jnp.maximum(v, 0), span, SLACK, site.where)
        x = x.with_raw(jnp.moveaxis(x.raw, axis, -1))
        while x.shape[-1] > 1:
            n = x.shape[-1]
            left, right = x[..., : (n + 1) // 2], x[..., n // 2 :]
            x = self.plus(right, self._looked_up(self.minus(left, right), table))
        return x.with_raw(x.raw[..., 0])

    def minus(self, x: Fixed, y: Fixed) -> Fixed:
        return self.plus(x, y.with_raw(-y.raw))

    def relu(self, x: Fixed) -> Fixed:
        """max(x, 0) exactly. 3 rounds."""
        return relu(x, min(x.modulus - 1, x.bits + self.precision.integer_bits))

    def one_hot(self, x: Fixed, places: int) -> Fixed:
        return one_hot(x, places)

    def enter(self, x: Any) -> Fixed:
        """A secret argument as SPU shares it."""
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jnp.floating):
            raw = jnp.round(x.astype(jnp.float64) * 2.0**FRACTION_BITS).astype(jnp.int64) if self.plaintext else as_ring(x)
            return Fixed(raw, FRACTION_BITS)
        return Fixed(x.astype(jnp.int64), 0)

    def leave(self, x: Fixed, dtype: Any) -> Any:
        """A result as SPU holds it."""
        if not jnp.issubdtype(dtype, jnp.floating):
            return (x if x.modulus == RING_BITS and not x.bits else self._whole(x, 0)).raw
        if x.modulus < RING_BITS or x.bits > FRACTION_BITS:
            x = self._whole(x, FRACTION_BITS)
        raw = x.at_bits(FRACTION_BITS).raw
        return raw / 2.0**FRACTION_BITS if self.plaintext else as_real(raw)

    def _looked_up(self, x: Fixed, table: Table) -> Fixed:
        if x.bits + table.width_bits < table.place_bits:
            x = x.at_bits(table.place_bits - table.width_bits)
        if x.bits + table.width_bits + table.depth > x.modulus - 2:
            x = self._whole(x)
        return lookup(x, table)

    def _fitted(self, site: Site, function: Univariate) -> Table:
        def numeric(x: np.ndarray) -> np.ndarray:
            with jax.ensure_compile_time_eval(), np.errstate(all="ignore"):
                return np.asarray(function(jnp.asarray(x, jnp.float64)), np.float64)

        span = self.ranges.at(site.name, site.where) or site.usual or usual(site.name.split("[")[0], numeric)
        size = float(np.abs(numeric(np.linspace(*span, 65))).max())
        tolerance = self.precision.tolerance * max(1.0, size / 4)
        return fit_table(numeric, function, span, tolerance, site.where, worst=KINK if site.kinked else None)

    def _public(self, y: np.ndarray, bits: int) -> np.ndarray:
        return encode(np.asarray(y, np.float64), bits)

    def _public_product(self, x: Fixed, y: np.ndarray, product: Callable) -> Fixed:
        """Small integers and powers of two are exact and cost nothing; other factors keep fraction_bits + 2 significant bits."""
        y = np.asarray(y, np.float64)
        largest = float(np.abs(y).max(initial=0.0))
        exact = _binary_scale(y)
        bits = exact if exact is not None else self.precision.fraction_bits + 2 - round(log2(largest))
        bits = max(bits, 0)
        if x.modulus - x.bits - bits < self.precision.room:
            x = self._whole(x)
        return Fixed(product(x.raw, encode(y, bits)), x.bits + bits, x.modulus)

    def _aligned(self, x: Fixed, y: Fixed) -> tuple[Fixed, Fixed]:
        bits = max(x.bits, y.bits)
        return self._at(x, bits), self._at(y, bits)

    def _at(self, x: Fixed, bits: int) -> Fixed:
        if x.bits == bits:
            return x
        if min(RING_BITS, x.modulus + bits - x.bits) - bits < self.precision.room:
            x = self._whole(x)
        return x.at_bits(bits)

    def _kept(self, x: Fixed) -> int:
        return min(x.bits, self.precision.fraction_bits)

    def _left(self, x: Fixed) -> int:
        return x.modulus - x.bits + self._kept(x)

    def _wanted(self, x: Fixed, y: Fixed) -> int:
        return self._kept(x) + self._kept(y) + self.precision.room

    def _fits(self, x: Fixed, y: Fixed) -> bool:
        return min(self._left(x), self._left(y)) >= self._wanted(x, y)

    def _whole(self, x: Fixed, bits: int | None = None) -> Fixed:
        """In the whole ring, with `bits` fraction bits. 1 round."""
        bits = self.precision.fraction_bits if bits is None else bits
        return truncate(x if x.bits > bits else x.at_bits(bits + 1), bits)


SLACK = 0.1
"""How far a level of the tree may miss a maximum that only steadies a softmax: it cancels in the quotient."""


KINK = 1e-2
"""How far a table may miss a function with a kink, such as a leaky ReLU."""


def levels(count: int) -> int:
    """Levels of a tree over `count` values."""
    return max(1, (count - 1).bit_length())


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def _binary_scale(y: np.ndarray) -> int | None:
    """The fewest bits, of up to 10, with which all factors are integers below 2^10 exactly."""
    for bits in range(11):
        scaled = y * 2.0**bits
        if np.all(scaled == np.round(scaled)) and np.abs(scaled).max(initial=0.0) <= 1 << 10:
            return bits
    return None


@dataclass
class FloatEngine:
    """Floating point: records the range at every table when arrays are concrete, and serves stock SPU when they are traced.

    `drift` is how far a softmax's reference is off: -1 and 1 are the furthest that the fixed-point tree of `reference` may be.
    """

    seen: dict[str, Span] | None = None
    drift: int = 0
    general: bool = False
    largest: float = 0.0

    def plus(self, x: Any, y: Any) -> Any:
        return self._note(x + y)

    def minus(self, x: Any, y: Any) -> Any:
        return x - y

    def plus_public(self, x: Any, y: np.ndarray) -> Any:
        return x + _alike(x, y)

    def times_public(self, x: Any, y: np.ndarray) -> Any:
        return self._note(x * _alike(x, y))

    def dot_public(self, subscripts: str, x: Any, y: np.ndarray) -> Any:
        return self._note(jnp.einsum(subscripts, x, _alike(x, y)))

    def multiply(self, x: Any, y: Any) -> Any:
        return self._note(x * y)

    def dot(self, subscripts: str, x: Any, y: Any) -> Any:
        return self._note(jnp.einsum(subscripts, x, y))

    def moved(self, move: Callable, *arrays: Any) -> Any:
        return move(*arrays)

    def constant(self, x: np.ndarray) -> Any:
        return jnp.asarray(x)

    def summed(self, x: Any, axes: tuple[int, ...]) -> Any:
        return self._note(jnp.sum(x, axis=axes))

    def table(self, site: Site, function: Univariate, x: Any) -> Any:
        if self.seen is not None:
            self._saw(site, np.asarray(x)[site.shown] if site.shown is not None else x)
        out = function(x)
        return out if site.shown is None else jnp.where(site.shown, out, 0)

    def reference(self, site: Site, x: Any, axis: int) -> Any:
        top = jnp.max(x, axis=axis)
        if self.seen is not None:
            spread = float(jnp.max(top - jnp.min(x, axis=axis)))
            self._saw(site, np.asarray([-spread, spread]))
        return top + self.drift * SLACK * levels(x.shape[axis])

    def relu(self, x: Any) -> Any:
        return self._note(jnp.maximum(x, 0))

    def one_hot(self, x: Any, places: int) -> Any:
        return jax.nn.one_hot(x, places, dtype=jnp.float32)

    def enter(self, x: Any) -> Any:
        x = jnp.asarray(x)
        return self._note(x) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def leave(self, x: Any, dtype: Any) -> Any:
        return x.astype(dtype)

    def _saw(self, site: Site, x: Any) -> None:
        assert self.seen is not None
        if not np.size(x):
            return
        low, high = float(np.min(x)), float(np.max(x))
        if not np.isfinite(low + high):
            raise UserError(f"{site.where}: the sample gives values that are not finite; check the function on it in plaintext")
        before = self.seen.get(site.name, (low, high))
        self.seen[site.name] = (min(low, before[0]), max(high, before[1]))

    def _note(self, x: Any) -> Any:
        if self.seen is not None and x.size:
            self.largest = max(self.largest, float(jnp.abs(x).max()))
        return x


def _alike(x: Any, y: np.ndarray) -> Any:
    return jnp.asarray(y, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(y)
