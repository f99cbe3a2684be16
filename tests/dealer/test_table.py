"""Tables of local polynomials: fit, range, size; that a rotated table is the table; what is refused."""

from dataclasses import replace
from math import comb

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import enable_x64
from scipy import special

from spu_llm.dealer.table import ExponentialTable, Table

SIGMOID = Table(special.expit, np.tanh, -8.0, 32, -1, 3)
EXP = ExponentialTable(np.exp, np.exp, -12.0, 32, -1, 4, largest=2.0)


def on_range(table, count=2000):
    """Places over the range, both ends and all edges among them."""
    return np.concatenate([np.linspace(table.low, table.high, count), table.low + np.arange(table.segments) * table.width])


def test_range_ends_before_the_last_segment():
    assert (SIGMOID.low, SIGMOID.high, SIGMOID.width) == (-8, 7.5, 0.5)
    thirds = replace(SIGMOID, factor=3)
    assert (thirds.width, thirds.high) == (pytest.approx(1 / 6), pytest.approx(-8 + 31 / 6))


def test_sizes():
    assert (SIGMOID.depth, SIGMOID.words, SIGMOID.output_bits) == (5, 128, 34)
    assert not SIGMOID.spread
    assert not replace(SIGMOID, segments=512).spread
    assert replace(SIGMOID, segments=1024).spread


@pytest.mark.parametrize("table", [SIGMOID, replace(SIGMOID, degree=5), replace(SIGMOID, factor=3, low=-2.0), EXP])
def test_fits_its_function(table):
    x = on_range(table)
    x = x[x <= 2] if table is EXP else x
    unit = 2.0**-table.bits
    assert np.abs(table.evaluate(x) - table.function(x)).max() < 2e-4 + (table.degree + 1) * unit


@pytest.mark.parametrize("table", [SIGMOID, EXP])
def test_both_segments_beside_an_edge_serve_it(table):
    """A borrow selects the next segment, with a place below 0."""
    edges = np.arange(1, table.segments - 1)
    for u in (-0.999, -0.5, 0.5, 0.999):
        x = table.low + (edges + u) * table.width
        good = x <= 2 if table is EXP else slice(None)
        by_edge = (table.coefficients[edges] * u ** np.arange(table.degree + 1)).sum(-1) / 2.0**table.bits
        assert np.abs(by_edge - table.function(x))[good].max() < 1e-3


def test_has_a_period():
    x = on_range(SIGMOID)
    assert np.abs(SIGMOID.evaluate(x + 32 * SIGMOID.width) - SIGMOID.evaluate(x)).max() < 1e-9


def test_exponential_is_cut():
    x = np.linspace(EXP.low, EXP.high, 500)
    found = EXP.evaluate(x)
    assert np.abs(found - np.exp(x))[x <= 2].max() < 1e-2
    assert found.max() < np.exp(2.5) + 1e-2 and (found[x > 2.5] > np.exp(2) - 1e-2).all()


@pytest.mark.parametrize("table", [SIGMOID, replace(SIGMOID, segments=4, width_bits=2), EXP, replace(SIGMOID, degree=0, bits=20)])
def test_values_fit_what_is_said_of_them(table):
    """The limits hold wherever the public place is, so the modulus has room for them and for a truncation."""
    low, high = table.limits
    u = np.linspace(-1, 1, 41)[:, None, None] ** np.arange(table.degree + 1)
    values = (table.coefficients * u).sum(-1) / 2.0**table.bits
    assert low <= values.min() and values.max() <= high
    assert 2.0 ** (table.modulus - 2) > high * 2.0**table.output_bits


@settings(deadline=None, max_examples=30)
@given(
    depth=st.integers(1, 6), degree=st.integers(0, 6), modulus=st.integers(1, 64), n=st.integers(0, 4), seed=st.integers(0, 99),
    exponential=st.booleans(),
)  # fmt: skip
def test_rotation_is_linear_and_exact(depth, degree, modulus, n, seed, exponential):
    """Of any words, as a party's share has them, against integers of Python."""
    segments = 1 << depth
    if exponential:
        table = ExponentialTable(np.exp, np.exp, -4.0, segments, -2, degree, largest=3.0)
    else:
        table = Table(special.expit, np.tanh, -4.0, segments, -2, degree)
    spread = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, (n, segments, table.payload_words))
    found = table.rotate(spread, modulus)
    assert found.shape == spread.shape
    words, a = spread.astype(object), table.coefficients.astype(object)
    for k in range(segments):
        for i in range(table.payload_words):
            want = np.zeros(n, object)
            for r in range(segments):
                if exponential:
                    want = want + int(table._scales[(k - r) % segments]) * words[:, r, i]
                else:
                    want = want + sum(comb(p, i) * a[(k - r) % segments, p] * words[:, r, p - i] for p in range(i, degree + 1))
            assert ((found[:, k, i].astype(object) - want) % 2**modulus == 0).all()


@pytest.mark.parametrize("table", [SIGMOID, EXP])
def test_a_rotated_table_is_the_table_seen_from_the_mask(table):
    """Row c of the table turned by a mask of segment r and place f gives, at a place g, f(segment c - r, place g - f)."""
    random = np.random.default_rng(0)
    r, f, c, g = (random.integers(0, top, 400) for top in (table.segments, 1024, table.segments, 1024))
    spread = np.zeros((400, table.segments, table.payload_words), np.int64)
    spread[np.arange(400), r] = table.payload(f)
    row = table.rotate(spread, 64)[np.arange(400), c]
    found = sum(row[:, i] * factor for i, factor in enumerate(table.factors(g))) / 2.0**table.output_bits
    u = (g - f) / 1024.0
    want = (table.coefficients[(c - r) & (table.segments - 1)] * u[:, None] ** np.arange(table.degree + 1)).sum(
        -1
    ) / 2.0**table.bits
    assert np.abs(found - want).max() < 2e-3 * max(1, table.limits[1])


WIDE_EXP = ExponentialTable(np.exp, np.exp, -112.0, 64, 1, 5, bits=12, place_bits=12, largest=6.0)


@pytest.mark.parametrize("table", [SIGMOID, replace(SIGMOID, degree=0), replace(SIGMOID, degree=9, place_bits=14), EXP, WIDE_EXP])
def test_factors_of_every_place(table):
    """Powers of the place or, of an exponential, exp of it: each product rounds down, and numpy and JAX agree to the last bit."""
    place = np.arange(1 << table.place_bits)
    found, unit = table.factors(place), 2.0**-table.place_bits
    if isinstance(table, ExponentialTable):
        want, off = [np.exp(place * unit * table.width)], table.degree + 1  # one product a degree, each with its coefficient
    else:
        want, off = [(place * unit) ** i for i in range(table.degree + 1)], max(0, table.degree - 1)
    assert len(found) == len(want) == table.payload_words
    for ours, exact in zip(found, want, strict=True):
        assert ours.dtype == np.int64
        assert np.abs(ours * unit - exact).max() <= off * unit + 1e-12
    with enable_x64():
        traced = jax.jit(table.factors)(place)
    assert all((np.asarray(ours) == theirs).all() for ours, theirs in zip(traced, found, strict=True))


@pytest.mark.parametrize("table", [EXP, WIDE_EXP])
def test_payload_of_an_exponential_is_exp_of_minus_the_place(table):
    place = np.arange(1 << table.place_bits)
    unit = 2.0**-table.place_bits
    found = table.payload(place)
    assert found.shape == (len(place), 1)
    assert np.abs(found[:, 0] * unit - np.exp(-place * unit * table.width)).max() <= unit / 2


@pytest.mark.parametrize("table", [SIGMOID, EXP, WIDE_EXP])
def test_a_row_in_the_clear_is_the_row_of_the_rotated_table(table):
    """To the last bit: what is computed in the clear to foretell the protocol."""
    random = np.random.default_rng(0)
    r, f, c = (random.integers(0, top, 200) for top in (table.segments, 1 << table.place_bits, table.segments))
    spread = np.zeros((200, table.segments, table.payload_words), np.int64)
    spread[np.arange(200), r] = table.payload(f)
    found = table.row((c - r) & (table.segments - 1), table.payload(f))
    assert (np.stack(found, -1) == table.rotate(spread, 64)[np.arange(200), c]).all()


def test_payload_is_powers_of_minus_the_place():
    place = np.array([0, 1, 512, 1023])
    want = np.round((-place[:, None] / 1024.0) ** np.arange(4) * 1024)
    assert (SIGMOID.payload(place) == want).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segments": 0}, "a table has 0 segments; use a power of two, at least 2"),
        ({"segments": 1}, "a table has 1 segments; use a power of two, at least 2"),
        ({"segments": 24}, "a table has 24 segments; use a power of two, at least 2"),
        ({"degree": -1}, "a table of degree -1; use 0 to 12"),
        ({"degree": 13}, "a table of degree 13; use 0 to 12"),
    ],
)
def test_refused_when_constructed(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SIGMOID, **change)


def test_an_exponential_of_too_many_segments_is_refused():
    with pytest.raises(ValueError, match="an exponential table has 1024 segments; use at most 512"):
        replace(EXP, segments=1024)
    assert replace(EXP, segments=512).words == 512


def test_refuses_a_function_with_a_pole():
    with (
        np.errstate(all="ignore"),
        pytest.raises(ValueError, match=r"the table's function is not finite on \[0.0, 7.0\]; give it tails"),
    ):
        _ = Table(np.log, np.log, 0.0, 8, 0, 2).coefficients
