"""A planned table keeps its error under every mask, by the very integers that two parties add up, at the least cost found."""

import json
from itertools import product

import numpy as np
import pytest
from click.testing import CliRunner

from spu_llm.cli.plan_table import plan_table_command
from spu_llm.dealer import dpf, plan
from spu_llm.dealer.generator import Dealer, receive
from spu_llm.dealer.material import Recorder
from spu_llm.dealer.plan import Shape, continue_from, emulate, errors, plan_table, table_of, worst_error
from spu_llm.dealer.table import Table
from spu_llm.errors import UserError
from spu_llm.primitives.functions import exponential
from spu_llm.primitives.named import MAX_ERROR, NAMED


def dealt_lookup(table, x):
    """The dealer's messages expanded by both parties, and the row of the sum looked up: the protocol without its program."""
    bits = table.place_bits - table.width_bits + 8
    recorder = Recorder(lambda count: np.zeros(count, np.int64))
    mask = recorder.uniform(x.shape)
    recorder.table(mask, table, bits + table.width_bits - table.place_bits, table.modulus)
    specification, keys = recorder.specification(), (bytes(16), bytes([1] * 16))
    messages = Dealer(keys).deal(specification, 7).messages
    shares = [receive(specification, party, keys[party], 7, messages[party]) for party in (0, 1)]
    r, rows = np.split(shares[0] + shares[1], [x.size])
    raw = np.round(x * 2.0**bits).astype(np.int64)
    c = (raw * table.factor - r - round(table.low * table.factor * 2.0**bits)) >> (bits + table.width_bits - table.place_bits)
    place, segment = c & ((1 << table.place_bits) - 1), (c >> table.place_bits) & (table.segments - 1)
    row = rows.reshape(x.size, table.segments, table.payload_words)[np.arange(x.size), segment]
    total = sum(row[:, i] * factor for i, factor in enumerate(table.factors(place)))
    unused = 64 - table.modulus
    return (total << unused >> unused) / 2.0**table.output_bits, -r


@pytest.mark.parametrize("name", ["gelu", "rsqrt"])
def test_emulation_is_the_protocol_to_the_last_bit(name):
    function = NAMED[name]
    x = np.linspace(*function.span, 2048)
    found, masks = dealt_lookup(function.table, x)
    held, emulated = emulate(function.table, x, masks)
    assert np.array_equal(found, emulated)
    assert np.abs(held - x).max() < 1e-5 and np.abs(found - function.numpy(x)).max() < MAX_ERROR


EXPONENTIALS = [(-49.0, 6.0, 64), (-241.0, 6.0, 256), (-18.0, 3.0, 32), (-112.0, 6.0, 64, 1), (-6.0, 4.0, 64, -2, 3)]


@pytest.mark.parametrize("arguments", EXPONENTIALS)
def test_an_exponential_under_random_masks(arguments):
    """By the dealer's own messages, and by its emulation to the last bit: in proportion over the whole range, then cut."""
    table, largest = exponential(*arguments), arguments[1]
    x = np.concatenate([np.linspace(table.low, table.high, 1500), np.linspace(-1, min(largest, table.high), 500)])
    found, masks = dealt_lookup(table, x)
    held, emulated = emulate(table, x, masks)
    assert np.array_equal(found, emulated)
    off, want = np.abs(found - np.exp(held)), np.exp(held)
    uncut = held <= largest
    assert (off <= 2.0**-table.bits * np.e**table.width + 1.5e-3 * want)[uncut].all()
    assert (found <= np.exp(largest + table.width) * 1.002).all()
    assert (found[held > largest + table.width] >= np.exp(largest - table.width) * 0.998).all()


@pytest.mark.parametrize("arguments", EXPONENTIALS)
def test_the_worst_masks_of_an_exponential(arguments):
    """Each word is rounded by half a unit of 1 / e^width or more, the factor by a few units; then coefficients by their bits."""
    table = exponential(*arguments)
    unit = 2.0**-table.place_bits
    relative = (0.5 * np.e**table.width + table.degree + 1) * unit
    for top in (0.0, min(arguments[1], table.high)):
        error = worst_error(table, np.exp, (table.low, top))
        assert error <= relative * np.exp(top) + 2.0 ** -(table.bits + 1) * np.e**table.width
        assert error >= 0.2 * unit * np.exp(top)  # it was searched for


@pytest.mark.parametrize("name", sorted(NAMED))
def test_named_tables_keep_their_error(name):
    function = NAMED[name]
    table = function.table
    assert table.low == function.low and table.high >= function.high
    assert table.modulus <= 64 and not table.spread
    assert worst_error(table, function.numpy, function.span) < MAX_ERROR


def test_a_named_table_is_what_the_planner_finds():
    function = NAMED["erf"]
    table = plan_table(function.numpy, *function.span, 5.5e-4).table
    ours, theirs = ((t.segments, t.width, t.degree, t.bits, t.place_bits) for t in (table, function.table))
    assert ours == theirs


def test_fewest_bytes():
    planned = plan_table(np.tanh, -8.0, 8.0, 1e-3)
    table = planned.table
    assert planned.max_error <= 1e-3 and planned.key_bytes == dpf.key_bytes(table.depth, table.degree + 1)
    for segments, factor, degree in product((2, 4, 8, 16, 32), (1, 3, 5, 7), range(10)):
        if dpf.key_bytes(segments.bit_length() - 1, degree + 1) < planned.key_bytes:
            shape = Shape(segments, int(np.ceil(np.log2(16 / (segments - 1) * factor))), degree, factor)
            cheaper = table_of(shape, np.tanh, np.asarray, (-8.0, 8.0), 18, 16)
            assert errors(cheaper, np.tanh, (-8.0, 8.0), 1 << 11)[2].max() > 1e-3


def test_prefers_seconds():
    by_bytes, by_seconds = (plan_table(np.tanh, -3.0, 3.0, 5e-2, prefer) for prefer in ("bytes", "seconds"))
    assert by_seconds.seconds <= by_bytes.seconds and by_seconds.key_bytes >= by_bytes.key_bytes


def test_the_last_segment_is_not_usable():
    """Beyond `high` a mask that borrows selects the first segment: the error found is that of a wrong value."""
    table = Table(np.exp, np.asarray, -4.0, 16, -1, 4)
    inside, beyond = (-4.0, table.high), (-4.0, table.high + 2.0**table.width_bits)
    assert worst_error(table, np.exp, inside) < 0.05
    assert worst_error(table, np.exp, beyond) > 20


def test_every_kind_of_mask_is_measured():
    """A table whose polynomials are bad at one end of each segment only: random masks would nearly always miss it."""

    class Bad(Table):
        @property
        def coefficients(self):
            return np.tile(np.array([[0, 0, 0, 0, 0, 0, 0, 0, 0, 1 << self.bits]]), (self.segments, 1))

    _, _, error = errors(Bad(np.zeros_like, np.asarray, 0.0, 8, 0, 9), np.zeros_like, (0.0, 7.0), 1 << 11)
    assert error.max() > 0.95


def test_continued_where_the_function_has_a_pole():
    smooth = continue_from(lambda x: 1 / x, (0.25, 16.0), 0.25, 5)
    x = np.linspace(-1, 18, 1001)
    inside = (x >= 0.25) & (x <= 16)
    assert np.array_equal(smooth(x)[inside], 1 / x[inside])
    assert np.all(np.isfinite(smooth(x))) and smooth(np.array([0.2]))[0] == pytest.approx(5, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((np.tanh, 1.0, 1.0, 1e-3), "a table from 1 to 1: give a lower end below the higher one"),
        ((np.tanh, 0.0, 1.0, 0.0), "within an error of 0: give an error above 0"),
        ((np.log, -1.0, 1.0, 1e-3), r"the function is not finite at -1; move the range"),
    ],
)
def test_says_what_is_wrong(arguments, line):
    with pytest.raises(UserError, match=line):
        plan_table(*arguments)


def test_says_how_near_it_came(monkeypatch):
    monkeypatch.setattr(plan, "_SEGMENTS", (2, 4))
    with pytest.raises(
        UserError, match=r"no table of up to 4 segments on \[-8, 8\] is within 1e-06 \(best: .+\); narrow the range"
    ):
        plan_table(np.tanh, -8.0, 8.0, 1e-6)


def test_a_table_without_a_stock_meaning_says_so():
    with pytest.raises(UserError, match="planned without a JAX function"):
        plan_table(np.tanh, -1.0, 1.0, 1e-2).table.stock(0.5)


def test_command(tmp_path):
    plot = tmp_path / "error.svg"
    options = ["--function", "erf", "--low", "-3", "--error", "5e-2"]
    done = CliRunner().invoke(plan_table_command, [*options, "--json", "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert (found["low"], found["high"]) == (-3.0, 4.0) and found["max_error"] <= 5e-2 and found["usable_to"] >= 4
    assert "<svg" in plot.read_text()
    assert "key_bytes" in CliRunner().invoke(plan_table_command, options).output
    with pytest.raises(UserError, match="cannot be written"):
        CliRunner().invoke(plan_table_command, [*options, "--plot", str(tmp_path / "no" / "x.svg")], catch_exceptions=False)
