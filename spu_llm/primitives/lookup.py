"""Any smooth function of one secret number by one opening: table lookup with local polynomials (DESIGN, section 2).

x = c - u for public c and the dealer's u: integer and fraction parts of (x - low) / 2^width are (c_i - u_i) and
(c_f - u_f), in (-1, 1). The dealer shares the table rotated by u_i and re-centred by u_f as a distributed point function;
each party picks row c_i of its share (a public index) and multiplies by powers of c_f. 1 round, 8 bytes an element; dealer:
about 16 log2(segments) + 8 (degree + 2) bytes an element to each party (`dpf.key_bytes`).

Wrong outside [table.low, table.high]: whoever calls must know the range. A program that asks for it tells the client, for no
opening of its own, of inputs that left the table's period: certainly one period further out, and nearer with a chance of the
distance in periods (see `range_check.py`), so that values which are too large in general do not go unseen.
"""

from __future__ import annotations

from collections.abc import Generator
from math import comb
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..dealer.table import Table
from .base import define
from .dealing import Dealing, Request, Value, logical_shift
from .fixed import Fixed
from .range_check import violation
from .stock import to_raw, to_real


def lookup(x: Fixed, table: Table, modulus: int | None = None) -> Fixed:
    """table.function(x), with `table.output_bits` fraction bits. Takes any input scale. 1 round.

    Right modulo 2^`modulus`, by default just enough for the value to be lifted; a larger one lets it be truncated as it is
    opened by the next protocol, and costs the parties expansion time.
    """
    modulus = modulus or table.modulus
    if table.factor != 1:  # else x keeps its identity, and an opening it has already
        x = x.times_integer(table.factor)
    place = x.bits + table.width_bits - table.place_bits
    if place < 0 or place + table.place_bits + table.depth > x.modulus - 2:
        raise ValueError(
            f"a lookup of {x.bits} fraction bits modulo 2^{x.modulus} has no room for {table.segments} segments of width "
            f"2^{table.width_bits} with {table.place_bits} bits within; change the scale or the table"
        )
    if not x.raw.size:
        return Fixed(x.raw, table.output_bits, modulus)
    return Fixed(lookup_p.bind(x.raw, table=table, bits=x.bits, known=x.modulus, modulus=modulus), table.output_bits, modulus)


def _plain(x: Any, *, table: Table, bits: int, known: int, modulus: int) -> Any:
    """The table itself on floating point: what every other meaning is compared with."""
    edges, place = jnp.asarray(table.coefficients), x.astype(jnp.float64) / 2.0**bits / table.factor - table.low
    position = place / table.width
    edge = jnp.floor(position).astype(jnp.int64)
    row = edges[jnp.bitwise_and(edge, table.segments - 1)]
    powers = (position - edge)[..., None] ** jnp.arange(table.degree + 1)
    return jnp.round(jnp.sum(row * powers, -1) * 2.0 ** (table.output_bits - table.bits)).astype(jnp.int64)


def _stock(x: Any, *, table: Table, bits: int, known: int, modulus: int) -> Any:
    return to_raw(table.stock(to_real(x, bits) * (1 / table.factor)), table.output_bits)


def _dealer(dealing: Dealing, x: Value, *, table: Table, bits: int, known: int, modulus: int) -> Generator[Request, None, Any]:
    shift = bits + table.width_bits - table.place_bits
    c = yield from dealing.open(x)
    assert x.mask is not None
    low = round(table.low * table.factor * 2.0**bits)
    if dealing.violations is not None:
        dealing.violations.append((yield from violation(dealing, x, low, bits + table.width_bits + table.depth, known)))
    words = dealing.recorder.table(x.mask, table, shift, modulus).share
    c = logical_shift(c - low, shift)
    place = jnp.bitwise_and(c, (1 << table.place_bits) - 1)
    segment = jnp.bitwise_and(jnp.right_shift(c, table.place_bits), table.segments - 1)
    return (_from_spread if table.spread else _from_rows)(table, words, segment, place)


def _from_rows(table: Table, rows: Any, segment: Any, place: Any) -> Any:
    """Pick a row of each rotated table, and sum its words times what the public place gives."""
    row = jnp.take_along_axis(rows, segment[..., None, None], axis=-2, mode="promise_in_bounds")[..., 0, :]
    factors = table.factors(place)
    total = row[..., 0] * factors[0]
    for i in range(1, table.payload_words):
        total = total + row[..., i] * factors[i]
    return total


def _from_spread(table: Table, spread: Any, segment: Any, place: Any) -> Any:
    """Turn the public coefficients to the segment instead, and multiply them by the shared one-hot and its payload.

    The turned coefficients are a slice of the reversed, doubled table: cheap for few elements and many segments.
    """
    k, words = table.segments, table.degree + 1
    doubled = jnp.asarray(np.tile(table.coefficients[::-1].T, (1, 2)))
    starts = (k - 1 - segment.reshape(-1)).astype(jnp.uint32)  # unsigned, or JAX would ask of each whether it counts from the end
    products = [  # a product is faster than a sum, and comes before powers of the place, which it leaves few numbers to take
        jax.lax.dynamic_slice(doubled, (jnp.uint32(0), start), (words, k)) @ share
        for start, share in zip(starts, spread.reshape(-1, k, words), strict=True)
    ]
    sums = jnp.concatenate(products).reshape(-1, words, words)  # [n, p, q]
    t = place.reshape(-1)
    powers = [jnp.full_like(t, 1 << table.place_bits), t]
    for _ in range(2, words):
        powers.append(jnp.right_shift(powers[-1] * t, table.place_bits))
    parts = [comb(p, q) * sums[:, p, q] * powers[p - q] for p in range(words) for q in range(p + 1)]
    return sum(parts[1:], parts[0]).reshape(segment.shape)


lookup_p = define("lookup", _plain, _stock, _dealer)
