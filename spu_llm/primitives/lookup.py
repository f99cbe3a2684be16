"""Any smooth function of one secret number by one opening: table lookup with local polynomials (DESIGN, section 2).

x = c - u for public c and the dealer's u: integer and fraction parts of (x - low) / 2^width are (c_i - u_i) and
(c_f - u_f), in (-1, 1). The dealer shares the table rotated by u_i and re-centred by u_f as a distributed point function;
each party picks row c_i of its share (a public index) and multiplies by powers of c_f. 1 round, 8 bytes an element; dealer:
about 16 log2(segments) + 8 (degree + 2) bytes an element to each party (`dpf.key_bytes`).

Wrong outside [table.low, table.high]: whoever calls must know the range (see `range_check.py`).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jax.numpy as jnp

from ..dealer.table import Table
from .base import define
from .dealing import Dealing, Request, Value, logical_shift
from .fixed import Fixed
from .stock import to_raw, to_real


def lookup(x: Fixed, table: Table) -> Fixed:
    """table.function(x), with `table.output_bits` fraction bits, modulo 2^table.modulus. Takes any input scale. 1 round."""
    place = x.bits + table.width_bits - table.place_bits
    if place < 0 or place + table.place_bits + table.depth > x.modulus:
        raise ValueError(
            f"a lookup of {x.bits} fraction bits modulo 2^{x.modulus} has no room for {table.segments} segments of width "
            f"2^{table.width_bits} with {table.place_bits} bits within; change the scale or the table"
        )
    return Fixed(lookup_p.bind(x.raw, table=table, bits=x.bits), table.output_bits, table.modulus)


def _plain(x: Any, *, table: Table, bits: int) -> Any:
    """The table itself on floating point: what every other meaning is compared with."""
    edges, place = jnp.asarray(table.coefficients), x.astype(jnp.float64) / 2.0**bits - table.low
    position = place / 2.0**table.width_bits
    edge = jnp.floor(position).astype(jnp.int64)
    row = edges[jnp.bitwise_and(edge, table.segments - 1)]
    powers = (position - edge)[..., None] ** jnp.arange(table.degree + 1)
    return jnp.round(jnp.sum(row * powers, -1) * 2.0 ** (table.output_bits - table.bits)).astype(jnp.int64)


def _stock(x: Any, *, table: Table, bits: int) -> Any:
    return to_raw(table.stock(to_real(x, bits)), table.output_bits)


def _dealer(dealing: Dealing, x: Value, *, table: Table, bits: int) -> Generator[Request, None, Any]:
    shift = bits + table.width_bits - table.place_bits
    c = yield from dealing.open(x)
    assert x.mask is not None
    rows = dealing.recorder.table(x.mask, table, shift, table.modulus).share
    c = logical_shift(c - round(table.low * 2.0**bits), shift)
    place = jnp.bitwise_and(c, (1 << table.place_bits) - 1)
    segment = jnp.bitwise_and(jnp.right_shift(c, table.place_bits), table.segments - 1)
    row = jnp.take_along_axis(rows, segment[..., None, None], axis=-2, mode="promise_in_bounds")[..., 0, :]
    total, power = row[..., 0] * (1 << table.place_bits), place
    for i in range(1, table.degree + 1):
        total, power = total + row[..., i] * power, jnp.right_shift(power * place, table.place_bits)
    return total


lookup_p = define("lookup", _plain, _stock, _dealer)
