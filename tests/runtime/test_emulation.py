"""The emulated session against parties: the same bits under the same masks, and others under other masks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from conftest import GPT2, LLAMA, OPT, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import enable_x64

from spu_llm.dealer.material import Hidden, Specification
from spu_llm.dealer.table import Table
from spu_llm.errors import UserError
from spu_llm.generation import AssistedDecoder
from spu_llm.models import PlainDecoder, load_checkpoint
from spu_llm.models.calibration import calibrate
from spu_llm.primitives import functions
from spu_llm.primitives.clear import ClearDealing, ClearRecorder, Factors
from spu_llm.primitives.contract import contract
from spu_llm.primitives.dealing import Opened, with_material
from spu_llm.primitives.fixed import Fixed
from spu_llm.primitives.lookup import lookup
from spu_llm.runtime import ProtocolConfig, Session, Slot
from spu_llm.runtime.emulation import EmulatedSession, ReplayedSupply, SeededSupply, WitnessedSupply
from spu_llm.runtime.supply import LiveSupply, Run

PREFIX = (7, 8)
PASSES = [[5, 17, 96], [11], [12, 13, 14]]
ONE_TOKEN = [[5], [11], [17]]
ONE_HEAD = LLAMA | {"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 20, "intermediate_size": 33}


def calibrated(config, folder):
    decoder = load_checkpoint(write_checkpoint(folder / "model", config)).decoder
    random = np.random.default_rng(0)
    texts = [random.integers(0, decoder.config.vocabulary, length).tolist() for length in [18] * 30 + [2] * 30]
    return decoder, calibrate(decoder, texts, PREFIX)


def logits(session, decoder, calibration, supply, passes):
    """The ring's logits after each pass, and what the client is given; the last pass takes the second one's rows."""
    assisted = AssistedDecoder(session, decoder, calibration, 20, PREFIX, supply=supply)
    assisted.set_up(len(passes[0]))
    found, given = [], []
    for i, tokens in enumerate(passes):
        if i == len(passes) - 1:
            assisted.roll_back(len(PREFIX) + len(passes[0]))
        given.append(assisted.advance(tokens, last_only=False))
        found.append(np.sum(session.words("logits"), 0))
    return found, given


@dataclass
class SecureRun:
    """A run between parties, and the masks it had."""

    decoder: Any
    calibration: Any
    passes: list[list[int]]
    witnessed: WitnessedSupply
    logits: list[np.ndarray]
    received: list[np.ndarray]

    def emulated(self):
        supply = ReplayedSupply(self.witnessed)
        return logits(EmulatedSession(supply), self.decoder, self.calibration, supply, self.passes)


def secure_run(config, folder, passes):
    decoder, calibration = calibrated(config, folder)
    witnessed = WitnessedSupply(LiveSupply())
    with Session(ProtocolConfig()) as session:
        return SecureRun(decoder, calibration, passes, witnessed, *logits(session, decoder, calibration, witnessed, passes))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return secure_run(LLAMA, tmp_path_factory.mktemp("llama"), PASSES)


def assert_equal(run):
    found, given = run.emulated()
    for a, b in zip(run.logits, found, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(run.received, given, strict=True):  # the client's are cut, share by share: a unit less at times
        assert np.abs(a - b).max() <= 2.0**-16


def test_logits_are_the_secure_runs_bit_by_bit(llama):
    assert_equal(llama)


@pytest.mark.parametrize("config", [GPT2 | {"n_layer": 1}, OPT | {"num_hidden_layers": 1}, ONE_HEAD], ids=["gpt2", "opt", "1head"])
def test_other_families_too(config, tmp_path):
    assert_equal(secure_run(config, tmp_path, ONE_TOKEN))


def test_other_masks_give_other_roundings(llama):
    supply = SeededSupply(1)
    found, _ = logits(EmulatedSession(supply), llama.decoder, llama.calibration, supply, PASSES)
    for a, b in zip(llama.logits, found, strict=True):
        assert (a != b).mean() > 0.9
        assert np.abs(a - b).max() < 0.05 * 2.0**33


def test_a_wrong_mask_is_seen(llama):
    masks = llama.witnessed.runs[1][1]  # of the first layer; the first one is of its input
    right = masks[0]
    try:
        masks[0] = right + np.random.default_rng(0).integers(0, 1 << 60, right.shape)
        found, _ = llama.emulated()
    finally:
        masks[0] = right
    assert any((a != b).any() for a, b in zip(llama.logits, found, strict=True))


def test_another_run_is_refused():
    witnessed = WitnessedSupply(SeededSupply(0))
    witnessed.runs.append((b"of another run", []))
    with pytest.raises(ValueError, match="not the one whose masks were witnessed"):
        ReplayedSupply(witnessed).provide(None, Run(Specification(()), {}, {}, {}), "material")


def test_what_is_not_emulated_is_refused():
    session = EmulatedSession(SeededSupply(0))
    with pytest.raises(ValueError, match="x: only ring integers"):
        session.share("x", np.ones(2), "client")
    with pytest.raises(ValueError, match="program f: only programs with a dealer"):
        session.compile("f", lambda x: x, (Slot((2,)),))


def test_seeded_masks_are_uniform_and_repeat():
    a, b, c = (SeededSupply(seed).uniform((4000,)) for seed in (5, 5, 6))
    assert (a == b).all() and (a != c).all()
    bits = np.unpackbits(a.view(np.uint8)).reshape(4000, 64).mean(0)
    assert np.abs(bits - 0.5).max() < 0.05


# Short cuts against the protocols they stand for


def in_the_clear(function, *args, shortcuts, seed=0):
    """function(*args) under masks of a seed: its results, and how many values the range check reported."""
    shapes = [arg.with_raw(np.empty(arg.raw.shape, np.int64)) for arg in args]
    supply = SeededSupply(seed)
    with enable_x64():
        dealt = with_material(
            lambda *raw: [out.raw for out in function(*(x.with_raw(r) for x, r in zip(shapes, raw, strict=True)))],
            [arg.raw for arg in args], {}, {}, True,
        )  # fmt: skip
        *found, reported = dealt.evaluate(
            ClearDealing(ClearRecorder(supply.uniform), shortcuts=shortcuts), [arg.raw for arg in args]
        )
    return [np.asarray(each) for each in found], int(reported)


TABLES = {
    "gelu": functions.gelu(-8.0, 64),
    "silu": functions.silu(-52.0, 32),  # its widths are thirds
    "exp": functions.exponential(-112.0, 6.0, 64, 1),
    "reciprocal": functions.reciprocal(0.05, 3.98, degree=3),
    "turned in the program": functions.power_of_two(1024, -3),
    "of degree 0": Table(np.tanh, None, -2.0, 16, -2, 0),
}


@pytest.mark.parametrize("name", TABLES)
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 9]), st.booleans())
def test_a_lookup_picks_the_row_of_the_turned_table(name, seed, count, outside):
    table = TABLES[name]
    random = np.random.default_rng(seed)
    reals = random.uniform(table.low, table.high, count)
    reals[0] = random.choice([table.low, table.high, table.high + (40 if outside else 0) * table.width * table.segments])
    bits = max(18, table.place_bits - table.width_bits)
    x = Fixed(np.round(reals * 2.0**bits).astype(np.int64), bits)
    (found,), reported = in_the_clear(lambda x: [lookup(x, table, 64)], x, shortcuts=True, seed=seed)
    (want,), weighed = in_the_clear(lambda x: [lookup(x, table, 64)], x, shortcuts=False, seed=seed)
    np.testing.assert_array_equal(found, want)
    assert (reported != 0) == (weighed != 0)  # the protocol's is a random sum of them


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(33, 64), st.integers(-3, 3))
def test_the_range_check_reports_what_the_protocols_does(seed, b, modulus, widths):
    """Around either end of the range, where the masks decide."""
    raw = np.asarray([(widths << b) + int(np.random.default_rng(seed).integers(-(1 << b), 1 << b))], np.int64)
    table = Table(np.tanh, None, 0.0, 2, b - 1, 0, place_bits=0)  # its period is the range
    function, x = (lambda x: [lookup(x, table)]), Fixed(raw, 0, modulus)
    (_, reported), (_, weighed) = (in_the_clear(function, x, shortcuts=shortcuts, seed=seed) for shortcuts in (True, False))
    assert (reported != 0) == (weighed != 0)


SUBSCRIPTS = ["nk,km->nm", "nk,nk->n", "ngqd,tgd->gqnt", "gqnt,tgd->gqnd", "nd,vd->nv", "nb,nbd->nd", "nf,nf->nf", "nd,d->nd"]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(SUBSCRIPTS), st.integers(0, 2**32), st.integers(1, 64), st.integers(1, 64), st.integers(0, 40))
def test_products_are_exact_modulo_the_ring(subscripts, seed, left_bits, right_bits, size):
    random = np.random.default_rng(seed)
    left, right = subscripts.split("->")[0].split(",")
    sizes = {letter: int(random.integers(1, 4)) for letter in left + right} | {"k": size + 1, "d": size + 1}
    x, y = (
        random.integers(-(1 << 63), 1 << 63, [sizes[letter] for letter in side]) >> (64 - bits)
        for side, bits in ((left, left_bits), (right, right_bits))
    )
    hidden = random.integers(-(1 << 63), 1 << 63, y.shape)
    a, b = Opened(x, Hidden(0, np.zeros_like(x))), Opened(y - hidden, Hidden(0, hidden))
    factors = Factors()
    factors.keep(b.public)
    want = np.einsum(subscripts, x, y)
    for _ in range(2):  # the second time from what was kept
        np.testing.assert_array_equal(factors.einsum(subscripts, a, b), want)


def test_a_contraction_rounds_its_operands_as_the_protocol_does():
    random = np.random.default_rng(0)
    x, y = (Fixed(random.integers(-(1 << 40), 1 << 40, shape), 28, 60) for shape in ((3, 5), (5, 7)))

    def function(x, y):
        return [contract("nk,km->nm", x, y, 14, 12)]

    (found,), _ = in_the_clear(function, x, y, shortcuts=True)
    (want,), _ = in_the_clear(function, x, y, shortcuts=False)
    unused = 64 - function(x, y)[0].modulus
    np.testing.assert_array_equal(found << unused, want << unused)


def test_a_value_out_of_its_table_ends_the_pass(tmp_path):
    decoder, calibration = calibrated(LLAMA, tmp_path)
    plain = PlainDecoder(decoder, 20)
    plain.advance(PREFIX)
    decoder.params["layers"][0]["down"]["kernel"] = 100 * decoder.params["layers"][0]["down"]["kernel"]
    supply = SeededSupply(0)
    assisted = AssistedDecoder(EmulatedSession(supply), decoder, calibration, 20, PREFIX, supply=supply)
    assisted.set_up()
    with pytest.raises(UserError, match="range check"):
        assisted.advance([3])
