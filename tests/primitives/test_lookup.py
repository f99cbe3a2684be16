"""Functions by one opening against SciPy, over the whole range and in the last segment that counts; every way to deal a table."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from harness import run_dealt, run_plain
from hypothesis import given, settings
from hypothesis import strategies as st
from meanings import STOCK, garbled, meanings
from scipy import special

from spu_llm.dealer.plan import emulate
from spu_llm.dealer.table import ExponentialTable, Table
from spu_llm.errors import UserError
from spu_llm.primitives import functions
from spu_llm.primitives.contract import contract
from spu_llm.primitives.fixed import Fixed, encode
from spu_llm.primitives.lookup import lookup
from spu_llm.primitives.named import MAX_ERROR, NAMED
from spu_llm.primitives.norm import root_table
from spu_llm.primitives.truncate import truncate
from spu_llm.runtime import ProtocolConfig, Session, Slot
from spu_llm.runtime.assisted import Assisted

BITS = 20
SIGMOID = Table(special.expit, jax.nn.sigmoid, -8.0, 32, -1, 3)


def gelu(x):
    return x * special.ndtr(x)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def silu(x):
    return x * special.expit(x)


def mean_root(width):
    return lambda s: 1 / np.sqrt(s / width)


# Table, function, range, absolute and relative tolerance. Poles are cut at a kink, near which a segment is off by a few percent.
# Tolerances are those of the worst masks (`plan.worst_error`), for exp of rounding each payload word and power the wrong way.
TABLES = {
    "gelu": (functions.gelu(), gelu, -8, 7.75, 8e-4, 0),
    "gelu, wide": (functions.gelu(-16.0, 128), gelu, -16, 15.75, 8e-4, 0),
    "gelu, tanh": (functions.gelu(approximate=True), gelu_tanh, -8, 7.75, 8e-4, 0),
    "silu": (functions.silu(), silu, -20, 22, 1e-3, 0),
    "silu, wide": (functions.silu(-104.0, 256), silu, -104, 66, 1e-3, 0),
    "exp": (functions.exponential(-112.0, 6.0, 64, 1), np.exp, -112, 6, 1e-3, 2e-3),
    "exp, narrow": (functions.exponential(-18.0, 3.0, 32, 0, 5), np.exp, -18, 3, 5e-4, 1e-3),
    "reciprocal": (functions.reciprocal(0.05, 3.98, degree=3), np.reciprocal, 0.05, 3.984375, 1e-3, 0.03),
    "reciprocal, far from its kink": (functions.reciprocal(0.05, 3.98, degree=3), np.reciprocal, 0.2, 3.984375, 6e-4, 0),
    "twice log": (functions.twice_log(256, -3), lambda x: 2 * np.log(x), 1, 31.875, 3e-3, 0),
    "root": (root_table(64, 1 / 4, 4.0, 128), mean_root(64), 16, 254, 1e-3, 2e-3),
    "root, wide": (root_table(64, 1 / 8, 8.0, 512), mean_root(64), 8, 511, 1e-3, 2e-3),
}


def places(table, low, high, count):
    """Reals over a range, its ends and its last segment."""
    random = np.random.default_rng(0)
    last = random.uniform(max(low, high - table.width), high, count // 4)
    return np.concatenate([[low, high, high], random.uniform(low, high, count // 4), last, np.linspace(low, high, count // 2)])


def held(x, bits, low, high):
    """Reals as ring integers, none rounded out of the range."""
    return np.clip(encode(x, bits), int(np.ceil(low * 2.0**bits)), int(np.floor(high * 2.0**bits)))


def errors(table, function, low, high, count=1000, run=run_dealt, bits=BITS):
    """(what is off at each place, the function there)."""
    raw = held(places(table, low, high, count), bits, low, high)
    found = run(lambda x: lookup(x, table), Fixed(raw, bits))
    found = found[0] if isinstance(found, tuple) else found
    want = function(raw / 2.0**bits)
    return np.abs(found.raw / 2.0**found.bits - want), want


@pytest.mark.parametrize("name", TABLES)
def test_against_scipy(name):
    table, function, low, high, absolute, relative = TABLES[name]
    off, want = errors(table, function, low, high)
    assert (off <= absolute + relative * np.abs(want)).all(), off.max()
    assert not table.spread


@pytest.mark.parametrize("name", NAMED)
def test_named_tables_keep_their_promise(name):
    named = NAMED[name]
    off, _ = errors(named.table, named.numpy, named.low, named.high)
    assert off.max() < MAX_ERROR
    assert named.high <= named.table.high


@pytest.mark.parametrize(
    ("table", "function", "low", "absolute"),
    [
        (root_table(64, 0.5, 16.0, 1024), mean_root(64), 64, 3e-4),
        (functions.reciprocal(0.5, 60.0, 1024, 3), np.reciprocal, 1, 3e-4),
        (functions.power_of_two(1024, -3), functions.power_of_two(1024, -3).function, 0, 0),
        (functions.twice_log(1024, -3), lambda x: 2 * np.log(x), 2, 3e-3),
    ],
)
def test_tables_that_stay_spread(table, function, low, absolute):
    assert table.spread
    if table.degree:
        assert errors(table, function, low, table.high, 10)[0].max() <= absolute
        return
    x = np.array([0.0, 0.126, 5.3, table.high])
    found, _ = run_dealt(lambda x: lookup(x, table), Fixed(encode(x, BITS), BITS))
    edges = np.floor(x / table.width) * table.width
    assert np.any([found.raw / 2.0**found.bits == function(edges + i * table.width) for i in (0, 1)], axis=0).all()


@settings(deadline=None, max_examples=5)
@given(segments=st.sampled_from([64, 512]), width_bits=st.integers(-6, 2), seed=st.integers(0, 99))
def test_powers_of_two_bring_numbers_near_one(segments, width_bits, seed):
    table = functions.power_of_two(segments, width_bits)
    raw = np.random.default_rng(seed).integers(2 ** (BITS + width_bits), int(table.high * 2**BITS) + 1, 300)
    found, _ = run_dealt(lambda x: lookup(x, table), Fixed(raw, BITS))
    near_one = raw / 2.0**BITS * found.raw / 2.0**found.bits
    assert near_one.min() >= 0.5 and near_one.max() <= 2


@pytest.mark.parametrize("table", [SIGMOID, replace(SIGMOID, factor=3, low=-4.0), functions.exponential(-9.0, 2.0, 16, 0, 5)])
@pytest.mark.parametrize("bits", [15, 20, 40])
def test_any_input_scale(table, bits):
    """An untruncated product is looked up as it is."""
    off, want = errors(table, table.function, table.low, min(table.high, 2.0), 400, bits=bits)
    assert (off < 1e-3 + 6e-3 * np.abs(want)).all()


def test_no_worse_than_its_emulation():
    """The planner measures integers as the protocol has them."""
    x = np.linspace(SIGMOID.low, SIGMOID.high, 999)
    held_x, emulated = emulate(SIGMOID, x, np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 999))
    found, _ = run_dealt(lambda x: lookup(x, SIGMOID), Fixed(encode(x, BITS), BITS))
    assert np.abs(found.raw / 2.0**found.bits - special.expit(x)).max() < 2 * np.abs(emulated - special.expit(held_x)).max()


@settings(deadline=None, max_examples=8)
@given(
    modulus=st.integers(32, 64),
    out=st.sampled_from([None, 44, 64]),
    shape=st.sampled_from([(), (1,), (7,), (3, 1, 5)]),
    multiple=st.integers(0, 2**61),
)
def test_any_shape_and_modulus(modulus, out, shape, multiple):
    x = np.random.default_rng(modulus).uniform(SIGMOID.low, SIGMOID.high, shape)
    raw = garbled(encode(x, BITS), modulus, multiple)
    found, cost = run_dealt(lambda x: lookup(x, SIGMOID, out), Fixed(raw, BITS, modulus))
    assert (found.raw.shape, found.bits, found.modulus) == (shape, SIGMOID.output_bits, out or SIGMOID.modulus)
    assert np.abs(found.raw / 2.0**found.bits - special.expit(x)).max() < 5e-4
    assert (cost.messages, cost.bytes) == (1, 8 * x.size)


def test_what_its_modulus_is_enough_for():
    """By default for a truncation of its own; in the whole ring for one that comes with the next opening."""
    x = Fixed(encode(np.linspace(-8, 7.5, 700), BITS), BITS)
    want = special.expit(x.raw / 2.0**BITS)

    def function(x):
        ours, whole = truncate(lookup(x, SIGMOID), 16), lookup(x, SIGMOID, 64)
        return ours, contract("n,n->n", whole, whole, 16, 16)

    (ours, square), cost = run_dealt(function, x)
    assert np.abs(ours.raw / 2.0**16 - want).max() < 5e-4
    assert np.abs(square.raw / 2.0**32 - want**2).max() < 1e-3
    assert (cost.messages, cost.bytes) == (2, 8 * 3 * 700)


@pytest.mark.parametrize("table", [SIGMOID, functions.exponential(-9.0, 2.0, 16, 0, 5), functions.power_of_two(1024, -3)])
def test_cost(table):
    n = 24
    _, cost = run_dealt(lambda x: lookup(x, table), Fixed(encode(np.zeros(n), BITS), BITS))
    assert (cost.messages, cost.bytes) == (1, 8 * n)
    # Seeds and turns of the levels, words of a last node; the range check is 8 bytes an element to both parties together.
    skip = {4: 0, 1: 2}[table.payload_words]
    key = (table.depth - skip) * 16 * n + ((table.depth - skip) * n + 7) // 8 + 8 * n * (table.payload_words << skip)
    assert sum(cost.dealer_bytes) == 2 * key + 8 * n + 8
    assert cost.words == n * (1 + table.words) + 2 * n + 1


def test_operand_is_looked_up_without_an_opening():
    raw = encode(np.linspace(-8, 7.5, 50), BITS)
    found, cost = run_dealt(lambda x: lookup(x, SIGMOID), Fixed(raw, BITS), operands=[0])
    assert np.abs(found.raw / 2.0**found.bits - special.expit(raw / 2.0**BITS)).max() < 5e-4
    assert cost.messages == 0


@pytest.mark.parametrize(
    ("name", "stock", "stock_error"), [("gelu", STOCK, 2e-2), ("exp", ("SEMI2K", "ABY3"), 0.2), ("reciprocal", ("SEMI2K",), 2e-3)]
)
def test_meanings_agree(name, stock, stock_error):
    named = NAMED[name]
    raw = held(np.linspace(named.low, named.high, 12).reshape(4, 3), BITS, named.low, named.high)
    function = jax.vmap(lambda x: lookup(x, named.table), in_axes=1, out_axes=1)
    for meaning, found in meanings(function, Fixed(raw, BITS), stock=stock).items():
        off = np.abs(found.raw / 2.0**found.bits - named.numpy(raw / 2.0**BITS)).max()
        assert off < (stock_error if meaning in STOCK else MAX_ERROR), meaning


def test_plaintext_is_the_table():
    x = np.linspace(-8, 7.5, 100)
    found = run_plain(lambda x: lookup(x, SIGMOID), Fixed(encode(x, 30), 30))
    assert np.abs(found.raw / 2.0**found.bits - SIGMOID.evaluate(x)).max() < 1e-7


@pytest.mark.parametrize("table", [SIGMOID, functions.power_of_two(1024, -3)])
@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_nothing(table, shape):
    found, cost = run_dealt(lambda x: lookup(x, table), Fixed(np.zeros(shape, np.int64), BITS))
    assert (found.raw.shape, found.bits) == (shape, table.output_bits)
    assert (cost.messages, sum(cost.dealer_bytes)) == (0, 0)


@pytest.mark.parametrize(("bits", "modulus"), [(10, 64), (59, 64), (20, 25)])
def test_refuses_a_scale_without_room(bits, modulus):
    with pytest.raises(ValueError) as caught:
        lookup(Fixed(np.zeros(3, np.int64), bits, modulus), SIGMOID)
    assert str(caught.value) == (
        f"a lookup of {bits} fraction bits modulo 2^{modulus} has no room for 32 segments of width 2^-1 with 10 bits within; "
        "change the scale or the table"
    )


@pytest.mark.parametrize(("bits", "modulus"), [(11, 64), (58, 64), (20, 26)])
def test_takes_the_tightest_room(bits, modulus):
    """Least scale, and least bits above the table's period."""
    x = np.linspace(-8, 7.5, 500)
    raw = garbled(np.clip(encode(x, bits), encode(-8, bits), encode(7.5, bits)), modulus, 12345)
    found, _ = run_dealt(lambda x: lookup(x, SIGMOID), Fixed(raw, bits, modulus))
    assert np.abs(found.raw / 2.0**found.bits - special.expit(x)).max() < 6e-4


def check_ranges(raw, table):
    """Look values up, and have their ranges checked."""
    with Session(ProtocolConfig()) as session:
        assisted = Assisted(session)
        session.share("x", raw, "client")
        slots = (Fixed(Slot(raw.shape, np.int64), BITS),)
        program = assisted.compile("lookup", lambda x: (lookup(x, table).raw,), slots, (None,))
        assisted.run(program, (Fixed("x", BITS),), ["y"])
        assisted.check_ranges()


@pytest.mark.parametrize("table", [SIGMOID, functions.silu(), functions.exponential(-9.0, 2.0, 16, 0, 5)])
def test_ranges_are_checked(table):
    inside = held(places(table, table.low, table.high, 400), BITS, table.low, table.high)
    check_ranges(inside, table)
    period = table.segments * table.width
    for outside in (table.low - period - 0.01, table.high + table.width + period + 0.01, 2.0**30):
        raw = inside.copy()
        raw[7] = encode(outside, BITS)
        with pytest.raises(UserError, match="range check: a value left its table during this pass"):
            check_ranges(raw, table)


def test_exponential_is_cut_at_its_largest():
    table = functions.exponential(-10.0, 3.0, 32, 0, 5)
    assert isinstance(table, ExponentialTable)
    x = np.linspace(4, table.high, 300)
    found, _ = run_dealt(lambda x: lookup(x, table), Fixed(encode(x, BITS), BITS))
    reals = found.raw / 2.0**found.bits
    assert np.exp(3 - 1.1) < reals.min() and reals.max() < np.exp(3 + 1.1)
