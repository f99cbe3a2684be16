"""Sparse decoding with a dealer against a float64 model that computes what is chosen: logits, traffic, orders, openings."""

import dataclasses
from itertools import pairwise

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.experimental import enable_x64
from opt_reference import run, tiny
from sparse_cases import calibrated, chooser, separated

from spu_llm.comet import assisted_variable
from spu_llm.comet.assisted import SparseAssistedDecoder
from spu_llm.comet.assisted_variable import VariableAssistedDecoder, buckets, filled_up
from spu_llm.comet.prepared import LayerSparsity
from spu_llm.comet.renewal import SHUFFLE
from spu_llm.comet.sparse_plain import SparseReader
from spu_llm.errors import UserError
from spu_llm.models import Decoder, PlainDecoder
from spu_llm.models.calibration import Calibration, LayerRanges
from spu_llm.primitives import active, dealing, disclose
from spu_llm.primitives.active import active_contract
from spu_llm.primitives.clear import ClearDealing, ClearRecorder
from spu_llm.primitives.compare import chunk_widths
from spu_llm.primitives.dealing import Request, share_of, with_material
from spu_llm.primitives.fixed import Fixed
from spu_llm.runtime import ProtocolConfig, Session
from spu_llm.runtime.emulation import EmulatedSession, ReplayedSupply, SeededSupply, WitnessedSupply
from spu_llm.runtime.supply import LiveSupply

PREFIX = (7, 8)
PROMPT = [5, 17, 26, 2, 30]
LATER = [11, 12, 3, 9, 14, 20]
TOKENS = [*PREFIX, *PROMPT, *LATER]
CAPACITY = len(TOKENS)
ERROR = 0.1  # of logits up to 12: mostly 0.01
MESSAGES = 17  # of a dense OPT layer whose softmax is plain


@dataclasses.dataclass
class Case:
    """A model with its predictors, what a float64 model computes with them, and programs: those of all emulated decoders."""

    decoder: Decoder
    layers: tuple[LayerSparsity, ...]
    calibration: Calibration
    prefix: tuple[int, ...] = PREFIX
    tokens: list[int] = dataclasses.field(default_factory=lambda: TOKENS)
    programs: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.logits = run(self.decoder, np.array(self.tokens), chooser(self.layers, len(self.prefix)))[0]

    def sparse(self, session, supply, programs, decoder=SparseAssistedDecoder, **options):
        found = decoder(
            session,
            self.decoder,
            self.calibration,
            len(self.tokens),
            self.prefix,
            supply=supply,
            sparsity=self.layers,
            **options,
        )
        found._programs = programs
        found.place_weights()
        return found

    def emulated(self, seed=1, **options):
        """A decoder whose parties are played by one process, bit by bit as they would under the same masks."""
        supply = SeededSupply(seed)
        return self.sparse(EmulatedSession(supply), supply, self.programs, **options)

    def off(self, found, start):
        """By how much the logits after the tokens from `start` on are off at most."""
        return np.abs(found - self.logits[start : start + len(found)]).max()


@pytest.fixture(scope="module")
def usual():
    """Two layers and three heads, 2 of 6 blocks and 2 heads predicted."""
    decoder = tiny()
    return Case(decoder, separated(decoder, np.array(TOKENS), len(PREFIX), 6, 2, 2), calibrated(decoder, PREFIX))


# Orders


def places(decoder):
    """By layer and kind, which of the owner's heads or blocks stands at each place; the same for every part that is shuffled."""
    found = {}
    for i, kinds in enumerate(decoder._shuffled):
        for kind, parts in kinds.items():
            orders = {place_of(decoder.session, f"{kind}.{i}.{name}", name, part) for name, part in parts.items()}
            (found[i, kind],) = orders
    return found


def place_of(session, variable, name, part):
    plain = name in ("query_bias", "key_value_bias", "slopes", "second_bias", "up_bias")
    now = np.sum(session.words(variable if plain else f"{variable}.share"), 0, dtype=np.int64)
    own, moved = (np.moveaxis(raw, part.axis, 0) for raw in (part.raw, now))
    numbers = {row.tobytes(): i for i, row in enumerate(own)}
    assert len(numbers) == len(own)
    return tuple(numbers[row.tobytes()] for row in moved)


# What is sent


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What the parties open of a layer, by its shape, in ring elements."""

    width: int
    heads: int
    ffn: int
    blocks: int
    rank: int
    learned: bool

    def layer(self, rows, active_heads, active_blocks, next_heads, refined):
        """One token over `rows` of the cache; next_heads: how many heads the next layer computes, None where it predicts none."""
        ranks = self.rank * (1 if next_heads is None else 2)
        per_head, all_rows = active_heads * self.width // self.heads, 2 * self.width
        units = active_blocks * self.ffn // self.blocks
        norm = self.width + 2  # x; sum of squares, inverse root
        scaled = ranks + all_rows + per_head + (active_heads if self.learned else 0)
        opened = ranks + all_rows + per_head  # scores' factors; keys and values, queries
        softmax = active_heads * (2 * rows + 4)  # relative, weights; sum, power, their product, its inverse
        softmax += active_heads * (rows + 1) if refined else 0
        softmax += 0 if self.learned else active_heads * 3 * 2  # the largest of three scores, there being no prefix
        mixed = 4 * per_head  # before and after the power of two; truncated, and opened for the product with `out`
        neurons = units * (1 + 3 + 1 + 1)  # scaled; three of ReLU; truncated; opened for the product with `down`
        # of blocks: scores, their comparison, bits, ranks, the chosen, these in their places; where all are, the last two
        blocks = self.blocks * (2 if active_blocks == self.blocks else 5 + len(chunk_widths(30)))
        heads = 0 if next_heads is None else self.best(self.heads, next_heads)
        return norm + scaled + opened + softmax + mixed + norm + neurons + blocks + heads

    @staticmethod
    def best(count, chosen):
        """Scores, comparisons of pairs, ranks, and the mask that is disclosed."""
        if chosen == count:
            return count  # the mask alone, of ones
        return 3 * count + len(chunk_widths(30)) * count * (count - 1) // 2

    def shuffle(self, capacity, predicted):
        """Renewing a layer's two orders: each part once, operands and cache to seal them, plain shares to permute them."""
        heads = self.width * (4 * self.width + (self.heads if self.learned else 0))  # q, k, v, out, references
        heads += 3 * self.width + (3 * self.heads if self.learned else 0)  # biases, references' slopes
        heads += (self.rank + 1) * self.heads if predicted else 0
        neurons = self.ffn * (2 * self.width + 1) + self.blocks**2  # the last: which block stands where
        return heads + neurons + 2 * capacity * self.width


def numbers(case):
    """Of each layer."""
    config = case.decoder.config
    sizes = ((layer.blocks, layer.neurons.first.shape[1]) for layer in case.layers)
    return [
        Numbers(config.width, config.heads, config.ffn, blocks, rank, case.calibration.reference == "learned")
        for blocks, rank in sizes
    ]


def opened_by_layers(case, decoder):
    """For one token, all layers."""
    after = [layer.active_heads if layer.heads else None for layer in case.layers[1:]]
    refined = [tables.softmax.refinement is not None for tables in decoder.plan.blocks]
    return sum(
        each.layer(len(case.tokens), layer.active_heads, layer.active_blocks, following, more)
        for each, layer, following, more in zip(numbers(case), case.layers, [*after, None], refined, strict=True)
    )


def opened_by_renewal(case):
    return sum(
        each.shuffle(len(case.tokens), layer.heads is not None) for each, layer in zip(numbers(case), case.layers, strict=True)
    )


def messages(decoder):
    """Of all layers, dense or sparse; where a reference is no maximum."""
    return [MESSAGES + (2 if tables.softmax.refinement is None else 4) for tables in decoder.plan.blocks]


def test_between_parties(usual):
    """Logits, one pass after the other and renewals in between; bytes by the formula, messages a dense layer's; and the emulated
    run under the same masks gives the same numbers bit by bit, so that the other tests may emulate."""
    witnessed = WitnessedSupply(LiveSupply())

    def passes(session, supply, programs):
        secure = usual.sparse(session, supply, programs, renew=6)
        orders, logits = [places(secure)], []
        for tokens in (PROMPT, LATER[:5]):
            logits.append(secure.advance(tokens, last_only=False))
            orders.append(places(secure))
        secure.roll_back(7)
        secure.embed(PROMPT)
        return secure, orders, np.concatenate(logits)

    with Session(ProtocolConfig()) as session:
        secure, orders, logits = passes(session, witnessed, {})
        assert usual.off(logits, len(PREFIX)) < ERROR
        assert [a == b for a, b in pairwise(orders)] == [True, False]
        shuffle = session.phases[SHUFFLE]
        assert (shuffle.bytes, shuffle.messages) == (3 * 8 * opened_by_renewal(usual), 3 * 2 * len(usual.layers))
        with session.phase("layers") as phase:
            secure.run_layers(5)
        assert phase.bytes == 5 * 8 * opened_by_layers(usual, secure)
        assert phase.messages == sum(messages(secure))
        reveals = {program.reveals for program in session.programs if program.name in ("layer 0", "layer 1")}
        assert reveals == set(messages(secure)), "an opening beside those of messages"
        found = [np.sum(session.words(name), 0) for name in ("logits", "x")]
    replayed = ReplayedSupply(witnessed)
    again, others, _ = passes(EmulatedSession(replayed), replayed, usual.programs)
    again.run_layers(5)
    assert orders == others
    for name, value in zip(("logits", "x"), found, strict=True):
        np.testing.assert_array_equal(np.sum(again.session.words(name), 0), value)


@pytest.mark.parametrize("renew", [None, 1, 2])
def test_orders_are_renewed_and_change_nothing(usual, renew):
    """Every `renew` tokens, though never within a pass; logits are the same in any order but for roundings."""
    runs = []
    for seed in (1, 2):
        secure = usual.emulated(seed, renew=renew)
        orders = [places(secure)]
        for at, size in ((2, 1), (3, 1), (4, 5), (9, 1)):
            assert usual.off(secure.advance(TOKENS[at : at + size], last_only=False), at) < ERROR
            orders.append(places(secure))
        changes = {None: [False] * 4, 1: [False, True, True, True], 2: [False, False, True, True]}[renew]
        assert [a != b for a, b in pairwise(orders)] == changes
        runs.append(orders)
    assert all(a != b for a, b in zip(*runs, strict=True))


def test_every_order_is_as_likely(usual):
    """Of three heads all six orders come up, each about as often, whatever the one before."""
    secure, seen = usual.emulated(), []
    for _ in range(120):
        secure.assisted.run_all([secure._shuffle(0, "heads")])
        seen.append(place_of(secure.session, "heads.0.query", "query", secure._shuffled[0]["heads"]["query"]))
    counts = [seen.count(order) for order in set(seen)]
    assert len(counts) == 6 and min(counts) >= 5 and max(counts) <= 40  # 20 each; outside with a chance of 1e-4
    assert sum(a == b for a, b in pairwise(seen)) <= 40


def test_cache_rows_move_with_their_heads(usual):
    """A renewal leaves keys and values as they are, each at its head's new place and under a new mask; later tokens find them."""
    secure = usual.emulated()
    secure.advance(PROMPT)

    def rows():
        hidden = [np.sum(secure.session.words(f"cache.1.{part}.share"), 0) for part in ("keys", "values")]
        seen = [np.asarray(secure.session.receive(f"cache.1.{part}.opened")) for part in ("keys", "values")]
        return [(a + b) << 14 >> 14 for a, b in zip(hidden, seen, strict=True)], seen  # right modulo 2^50

    (before, shown), order = rows(), places(secure)[1, "heads"]
    while (moved := places(secure)[1, "heads"]) == order:
        secure.renew()
    after, shown_now = rows()
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new, old[:, [order.index(head) for head in moved]])
    assert not np.isin(shown_now, shown).any()
    assert usual.off(secure.advance(LATER[:1]), 7) < ERROR


def test_the_plaintext_sparse_run_chooses_alike(usual):
    found = SparseReader(usual.decoder, usual.layers, len(PREFIX))(np.array([TOKENS])).logits[0]
    np.testing.assert_allclose(found, usual.logits, atol=1e-3)


# What is opened


class Openings:
    """What an emulated session opens: how many messages and numbers, those that no mask hides, and the masks of all others."""

    def __init__(self, monkeypatch):
        self.messages, self.bare = 0, []
        self._masks, self._dealt, self._value = [], [], None
        for module in (dealing, active, disclose):
            monkeypatch.setattr(module, "share_of", self._share_of)
            monkeypatch.setattr(module, "Request", self._request)
        flush, uniform = ClearDealing.flush, ClearRecorder.uniform

        def counted(dealing):
            self.messages += 1
            flush(dealing)

        def noted(recorder, shape):
            hidden = uniform(recorder, shape)
            self._dealt.append(np.asarray(hidden.share).reshape(-1))
            return hidden

        monkeypatch.setattr(ClearDealing, "flush", counted)
        monkeypatch.setattr(ClearRecorder, "uniform", noted)

    def _share_of(self, value):
        self._value = share_of(value)
        return self._value

    def _request(self, masked, result=None):
        """A request is a value's share, taken right before, less a mask."""
        if masked is not None and not isinstance(masked, jax.core.Tracer):  # else an operand, or a program being traced
            mask = np.asarray(self._value) - np.asarray(masked)
            self._masks.append(mask.reshape(-1)) if mask.any() else self.bare.append(np.asarray(masked))
        return Request(masked, result)

    @property
    def count(self):
        return sum(mask.size for mask in self._masks) + sum(value.size for value in self.bare)

    def check(self):
        """That every mask is a number of a uniform deal, and no number of a deal hides two values."""
        masks, dealt = np.concatenate(self._masks), np.concatenate(self._dealt)
        assert len(np.unique(dealt)) == len(dealt)
        assert np.isin(masks, dealt).all()
        assert len(np.unique(masks)) == len(masks), "a mask hides two values"


@pytest.fixture
def openings(monkeypatch):
    return Openings(monkeypatch)


def test_nothing_but_masks_is_disclosed(usual, openings):
    """Over several passes, roll-backs and renewals: what no mask hides are ones at the active heads and blocks, as many for every
    token; everything else is hidden by a number that hides nothing else."""
    secure = usual.emulated(renew=4)
    secure.advance(PROMPT)
    secure.advance(LATER[:1])
    secure.roll_back(4)
    secure.score(PROMPT)
    secure.advance(LATER[:1])
    disclosed = sorted((len(bare), bare.shape[1], *np.unique(bare.sum(-1))) for bare in openings.bare)
    assert disclosed == sorted((n, count, 2) for n in (5, 1, 5, 1) for count in (6, 3, 6))  # blocks and next heads; blocks
    assert all(np.isin(bare, (0, 1)).all() for bare in openings.bare)
    openings.check()


def test_a_mask_that_hid_two_values_would_be_found(openings):
    """The block of a place that is asked for twice has one mask for both."""
    for index, fails in (([0, 1], False), ([1, 1], True)):
        with enable_x64():
            dealt = with_material(
                lambda x, y, index=index: active_contract("nbs,dbs->nd", Fixed(x, 0), Fixed(y, 0), np.array([index])).raw,
                [jax.ShapeDtypeStruct(shape, np.int64) for shape in ((1, 2, 3), (4, 2, 3))],
                {1: "y"},
                {},
            )
            recorder = ClearRecorder(SeededSupply(int(fails)).uniform)
            dealt.evaluate(ClearDealing(recorder), [np.ones((1, 2, 3), np.int64), (np.ones((4, 2, 3), np.int64),) * 2])
        if fails:
            with pytest.raises(AssertionError, match="a mask hides two values"):
                openings.check()
        else:
            openings.check()


# A count that varies


@pytest.mark.parametrize(
    ("blocks", "sizes"), [(64, [2, 4, 8, 16, 32, 64]), (6, [1, 2, 4, 6]), (1, [1]), (40, [1, 2, 4, 8, 16, 32, 40])]
)
def test_buckets(blocks, sizes):
    assert buckets(blocks) == sizes


@given(arrays(np.int64, st.tuples(st.integers(1, 5), st.integers(1, 70)), elements=st.integers(0, 1)))
def test_what_is_active_is_computed_whatever_the_bucket(mask):
    places = filled_up(mask)
    assert places.shape[1] in buckets(mask.shape[1])
    assert np.all(np.diff(places) > 0) and places.min() >= 0 and places.max() < mask.shape[1]
    np.testing.assert_array_equal(np.take_along_axis(mask, places, 1).sum(1), mask.sum(1))
    assert not (smaller := [size for size in buckets(mask.shape[1]) if size < places.shape[1]]) or mask.sum(1).max() > smaller[-1]


def test_a_count_that_varies(usual, openings, monkeypatch):
    """Blocks above the threshold are disclosed, those of their bucket are computed, by messages of a constant count's."""
    seen = []

    def noted(mask):
        seen.append((mask, filled_up(mask)))
        return seen[-1][1]

    monkeypatch.setattr(assisted_variable, "filled_up", noted)
    secure = usual.emulated(decoder=VariableAssistedDecoder)
    secure._programs = {}  # others than a constant count's
    orders, found, sent = places(secure), [], []
    for tokens in (PROMPT, LATER[:1]):
        before = openings.messages
        found.append(secure.advance(tokens, last_only=False))
        sent.append(openings.messages - before)
    layers, usually = len(usual.layers), chooser(usual.layers, len(PREFIX))
    computed = [np.ones((len(TOKENS), layer.blocks), bool) for layer in usual.layers]
    above = [np.zeros((len(TOKENS), layer.blocks), bool) for layer in usual.layers]
    at = len(PREFIX)
    for number, (mask, index) in enumerate(seen):
        i, rows = number % layers, np.arange(at, at + len(mask))[:, None]
        order = np.array(orders[i, "neurons"])
        computed[i][rows] = False
        computed[i][rows, order[index]] = True
        above[i][rows, order] = mask == 1
        at += len(mask) if i == layers - 1 else 0

    def choose(i, y, before, hidden):
        chosen = above[i][len(PREFIX) : at], usual.layers[i].neurons.scores(y)[len(PREFIX) : at] > usual.layers[i].threshold
        np.testing.assert_array_equal(*chosen)
        return computed[i][:, usual.layers[i].block_of], usually(i, y, before, hidden)[1]

    logits = np.concatenate(found)
    expected = run(usual.decoder, np.array(TOKENS), choose)[0][len(PREFIX) : at]
    assert np.abs(logits - expected).max() < ERROR
    counts = {int(count) for mask, _ in seen for count in mask.sum(1)}
    assert len(counts) > 1 and secure.filled.needed == sum(mask.sum() for mask, _ in seen)
    assert secure.filled.computed == sum(index.size for _, index in seen)
    openings.check()
    constant = usual.emulated()
    before = openings.messages
    constant.advance(PROMPT, last_only=False)
    assert sent[0] == openings.messages - before


# Shapes and failures


def one_head():
    """Blocks of one neuron, predicted at rank 1; no prefix; the largest of a few scores as softmax's reference."""
    decoder, tokens = tiny(seed=1, layers=1, heads=1, width=5, ffn=7), [*PROMPT[:3], *LATER[:1]]
    layers = separated(decoder, np.array(tokens), 0, 7, 5, 1, 1)
    return Case(decoder, layers, calibrated(decoder, (), "maxima"), (), tokens)


def everything():
    """One block and all heads, always active, of layers with equal tables: only the first one's heads are not predicted."""
    decoder = tiny(layers=3)
    calibration, layers = calibrated(decoder, PREFIX), separated(decoder, np.array(TOKENS), len(PREFIX), 1, 1, 3)
    alike = (reach([vars(each) for each in calibration.layers]),) * 3
    return Case(decoder, layers, dataclasses.replace(calibration, layers=alike))


def reach(ranges):
    """What is in one of the ranges."""
    return LayerRanges(
        **{name: (min(each[name][0] for each in ranges), max(each[name][1] for each in ranges)) for name in ranges[0]}
    )


@pytest.mark.parametrize("make", [one_head, everything])
def test_shapes(make, openings):
    """One token after the other until the cache is full; what is opened is as the formula says, whatever the shape."""
    case = make()
    secure, start = case.emulated(renew=2), len(case.prefix)
    found = [secure.advance([token])[0] for token in case.tokens[start:]]
    assert case.off(np.stack(found), start) < ERROR
    if make is everything:
        np.testing.assert_allclose(case.logits, PlainDecoder(case.decoder, CAPACITY).advance(TOKENS), atol=1e-3)
    with pytest.raises(UserError, match=f"{len(case.tokens) + 1} positions exceed the cache capacity {len(case.tokens)}"):
        secure.advance([1])
    secure.roll_back(len(case.tokens) - 1)
    secure.embed(case.tokens[-1:])
    before = openings.count, openings.messages
    secure.run_layers(1)
    assert openings.count - before[0] == opened_by_layers(case, secure)
    if case.calibration.reference == "learned":
        assert openings.messages - before[1] == sum(messages(secure))
    before = openings.count
    secure.renew()
    assert openings.count - before == opened_by_renewal(case)
    openings.check()


@pytest.mark.parametrize(("first", "second"), [(1e5, 1e-5), (1e-5, 1e5), (1, 0.01), (1, 20)])
def test_predictors_of_any_size(usual, first, second):
    """Scores below 2^9 choose what they choose in plaintext, however their size is parted between the two products."""

    def sized(predictor):
        a, b, c, d = predictor
        return predictor._replace(first=a * first, first_bias=b * first, second=c * second, second_bias=d * first * second)

    layers = [
        dataclasses.replace(
            layer,
            neurons=sized(layer.neurons),
            heads=None if layer.heads is None else sized(layer.heads),
            threshold=layer.threshold * first * second,
        )
        for layer in usual.layers
    ]
    case = dataclasses.replace(usual, layers=layers)
    assert usual.off(case.emulated().advance(PROMPT, last_only=False), 2) < ERROR


@pytest.mark.parametrize("appends", [False, True])
def test_drafts_are_scored_and_taken_back(usual, appends):
    """As POST has it: a pass whose logits are given row by row, of which a part is kept; renewals as they come."""
    secure = usual.emulated(renew=3, appends=appends)
    secure.advance(TOKENS[2:3])
    secure.score([*TOKENS[3:5], 29, 29, 29])
    assert usual.off(np.stack([secure.row(0), secure.row(1)]), 3) < ERROR
    secure.roll_back(5)
    secure.score(TOKENS[5:6])
    assert usual.off(secure.row(0)[None], 5) < ERROR
    assert secure.length == 6 and secure.rows.written == (9 if appends else 6)


def test_a_failed_pass_leaves_what_was_before(usual):
    """A token whose embedding leaves the tables voids its pass and no other, whether orders are renewed in between or not."""
    table = usual.decoder.params["embed"]["table"].copy()
    table[29] *= 40
    params = usual.decoder.params | {"embed": usual.decoder.params["embed"] | {"table": table}}
    wild = dataclasses.replace(usual, decoder=dataclasses.replace(usual.decoder, params=params))
    for renew in (None, 1):
        secure = wild.emulated(renew=renew)
        secure.advance(PROMPT)
        for fails in (lambda secure: secure.advance([*LATER[:4], 29]), lambda secure: secure.score([29])):
            with pytest.raises(UserError, match="range check"):
                fails(secure)
            assert secure.length == 7
        found = np.stack([secure.advance([token])[0] for token in LATER[:3]])
        assert np.abs(found - wild.logits[7:10])[:, :29].max() < ERROR
