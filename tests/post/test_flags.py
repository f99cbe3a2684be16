"""The secure test of drafted tokens: against float64, in law over many tokens, for what it opens, costs and refuses."""

from types import SimpleNamespace

import numpy as np
import pytest
from conftest import LLAMA, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import logsumexp, softmax

from spu_llm.bench.sampling import random_positions
from spu_llm.errors import UserError
from spu_llm.generation.assisted import LOGIT_BITS, AssistedDecoder
from spu_llm.generation.sampling import SamplingConfig
from spu_llm.models import PlainDecoder, load_checkpoint
from spu_llm.models.calibration import calibrate
from spu_llm.models.centred_head import CentredHead, centred_head
from spu_llm.post.distribution import Distribution
from spu_llm.post.draft import Draft
from spu_llm.post.flags import (
    MOST_SPAN,
    DealtPlan,
    DealtVerifier,
    Flags,
    check_sampling,
    encode_draft,
    first_rejection,
    plan_dealt,
    signals,
)
from spu_llm.post.flags_stock import StockVerifier, plan_stock
from spu_llm.post.naive import DealtNaive, NaiveDraft, StockNaive
from spu_llm.post.residual import draw, residual
from spu_llm.primitives.fixed import Fixed, encode
from spu_llm.runtime import ProtocolConfig, Session, Slot
from spu_llm.runtime.assisted import Assisted
from spu_llm.runtime.emulation import EmulatedSession, SeededSupply

LEAST_P = 1e-4  # of a chi-square test with fixed seeds
ERROR = 3e-4  # of p(x) where a verdict may differ from float64's: the exponential's 1.2e-4, and roundings
STOCK_ERROR = 2e-3


REFINED = [None, 128]


def plan(vocabulary, half_segments=None, temperature=1.0, offset=0.0, segments=64):
    return DealtPlan(vocabulary, temperature, offset, segments, half_segments)


def emulated(seed=0):
    supply = SeededSupply(seed)
    session = EmulatedSession(supply)
    return session, Assisted(session, supply)


def run_signals(assisted, made, logits, tokens, thresholds, every=False):
    """Opened signals [..., g] for logits [..., g, vocabulary]."""
    session = assisted.session
    session.share("logits", encode(logits, LOGIT_BITS), "owner")
    session.share("draft", encode_draft(tokens, thresholds), "client")

    def test(z, draft):
        return signals(made, Fixed(z, LOGIT_BITS), Fixed(draft, 0), every)

    slots = Slot(logits.shape, np.int64), Slot((2, *tokens.shape), np.int64)
    program = assisted.compile("tested", test, slots, (None,))
    assisted.run(program, ["logits", "draft"], ["signals"])
    assisted.check_ranges()
    return session.words("signals")[0]


def margins(p, tokens, thresholds):
    """r q - p of the drafted tokens: rejected where it is above 0."""
    return thresholds - np.take_along_axis(p, tokens[..., None], -1)[..., 0]


def assert_as_plaintext(opened, margin, error=ERROR):
    """Opened signals against the margins of float64, wherever these are not too near to 0 to tell."""
    sure = np.abs(margin) > error
    rejected = opened != 0
    for row, margin_row, sure_row in zip(
        rejected.reshape(-1, opened.shape[-1]), *(x.reshape(-1, opened.shape[-1]) for x in (margin, sure)), strict=True
    ):
        first = next((i for i in range(len(row)) if not sure_row[i] or margin_row[i] > 0), len(row))
        assert not row[:first].any()
        if first < len(row) and sure_row[first]:
            assert row[first:].all()


@settings(deadline=None, max_examples=12)
@given(
    vocabulary=st.sampled_from([2, 3, 33]),
    length=st.sampled_from([1, 5]),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    half_segments=st.sampled_from(REFINED),
    missed=st.floats(0, 1),
    offset=st.sampled_from([0.0, 4.25, -17.5]),
    seed=st.integers(0, 999),
)
def test_verdicts_are_those_of_float64(vocabulary, length, temperature, half_segments, missed, offset, seed):
    """At any temperature, offset and error of the predicted sum, in a batch of drafts."""
    random = np.random.default_rng(seed)
    z = 3 * random.standard_normal((50, length, vocabulary))
    p = softmax(z / temperature, -1)
    power, least, most = (1, -3.0, 5.0) if half_segments is None else (2, 0.0, 14.5)
    found = power * logsumexp(z / temperature / power, -1, keepdims=True)
    z += temperature * (offset + least + (most - least) * missed - found)
    tokens, thresholds = random.integers(0, vocabulary, (50, length)), random.random((50, length)) ** 3
    _, assisted = emulated(seed)
    made = plan(vocabulary, half_segments, temperature, offset, 256)
    margin = margins(p, tokens, thresholds)
    assert_as_plaintext(run_signals(assisted, made, z, tokens, thresholds), margin)
    every = run_signals(assisted, made, z, tokens, thresholds, every=True)
    sure = np.abs(margin) > ERROR
    assert ((every == 1) == (margin > 0))[sure].all() and set(np.unique(every)) <= {0, 1}


@pytest.mark.parametrize("half_segments", REFINED)
def test_extreme_drafts(half_segments):
    """A token that the target never takes, one that it always takes, a probability at the resolution, and a draft that is sure."""
    p = np.array([1 - 2.0**-16, 2.0**-16, 1e-15])
    z = np.log(np.broadcast_to(p, (2000, 1, 3)))
    r = (np.arange(2000) / 2000)[:, None]

    def accepted(token, q):
        _, assisted = emulated()
        return (run_signals(assisted, plan(3, half_segments), z, np.full((2000, 1), token), r * q) == 0).mean()

    assert accepted(0, 0.5) == 1
    assert abs(accepted(0, 1.0) - 1) <= 1 / 2000
    assert accepted(1, 2.0**-15) == pytest.approx(0.5, abs=0.03)
    assert accepted(1, 2.0**-12) == pytest.approx(2.0**-4, abs=0.01)
    assert accepted(2, 1.0) <= 1 / 2000


# In law

ROUNDS = 9000
TARGETS = np.random.default_rng(5).dirichlet(np.full(8, 0.8), 4)  # of three drafted positions and the bonus
DRAFTS = 0.6 * TARGETS[:3] + 0.4 * np.random.default_rng(6).dirichlet(np.full(8, 0.8), 3)


def sample(assisted, rounds, seed, half_segments=None, wrong=False):
    """Tokens by position of many rounds that are verified in one program; `wrong`: r in place of r q."""
    random = np.random.default_rng(seed)
    tokens = np.stack([random.choice(8, rounds, p=q) for q in DRAFTS], -1)
    chosen = DRAFTS[np.arange(3), tokens]
    missed = 0.7 * random.standard_normal((rounds, 3, 1))
    z = np.log(TARGETS[:3]) + missed
    thresholds = random.random((rounds, 3)) * (1 if wrong else chosen)
    accepted = first_rejection(run_signals(assisted, plan(8, half_segments), z, tokens, thresholds))
    found = [[], [], [], []]
    for drafted, count in zip(tokens, accepted, strict=True):
        for i in range(count):
            found[i].append(drafted[i])
        p = TARGETS[count]
        found[count].append(draw(random, residual(DRAFTS[count], p) if count < 3 else p))
    return [np.array(part) for part in found]


def far_from_target(found):
    """Positions whose tokens do not follow the target: by chi-square, or by KL divergence four times what chance gives."""
    far = []
    for i, tokens in enumerate(found):
        counts = np.bincount(tokens, minlength=8)
        share = counts / counts.sum()
        divergence = np.sum(share * np.log(np.maximum(share, 1e-300) / TARGETS[i]))
        usual = (len(share) - 1) / (2 * counts.sum())
        if stats.chisquare(counts, counts.sum() * TARGETS[i]).pvalue < LEAST_P or divergence > 4 * usual:
            far.append(i)
    return far


@pytest.mark.parametrize("half_segments", REFINED)
def test_tokens_follow_the_target(half_segments):
    _, assisted = emulated()
    found = sample(assisted, ROUNDS, 1, half_segments)
    assert sum(map(len, found)) > 20000
    assert far_from_target(found) == []


def test_a_wrong_rule_is_seen():
    _, assisted = emulated()
    assert 0 in far_from_target(sample(assisted, ROUNDS, 1, wrong=True))


def test_between_parties_too():
    """The same verdicts as float64's over real messages, and all of the tokens together in law."""
    with Session(ProtocolConfig()) as session:
        assert far_from_target(sample(Assisted(session), 400, 2)) == []


# Between parties


def verified(positions, r, session, verifier, bits):
    """Accepted tokens by a verifier, and the margins of float64."""
    tokens, q = np.array(positions.draft.tokens), positions.draft.probabilities
    thresholds = r * q[np.arange(len(tokens)), tokens]
    session.share("logits", encode(positions.logits, bits), "owner")
    with session.phase(f"{r[0]}"):
        found = verifier.accepted(tokens, thresholds)
    return found, margins(softmax(positions.logits[:-1], -1), tokens, thresholds)


def assert_accepted(found, margin, error):
    unsure = np.flatnonzero(np.abs(margin) <= error)
    wanted = first_rejection((margin > 0).astype(int))
    assert found == wanted or (len(unsure) and unsure[0] <= wanted)


@pytest.mark.parametrize(("vocabulary", "length", "half_segments"), [(33, 5, None), (33, 5, 64), (2, 1, 128)])
def test_messages_and_bytes(vocabulary, length, half_segments):
    """5 or 7 openings beside the client's shares and what the client is given; 8 bytes for each element that is opened."""
    random = np.random.default_rng(0)
    made = plan(vocabulary, half_segments)
    with Session(ProtocolConfig()) as session:
        verifier = DealtVerifier(Assisted(session), made)
        for seed in range(4):
            positions = random_positions(vocabulary, length, seed)
            r = random.random(length)
            assert_accepted(*verified(positions, r, session, verifier, LOGIT_BITS), ERROR)
        client, owner = session.phases[f"{r[0]}"].sent
        rows, scalars = (1, 7) if half_segments is None else (2, 8)
        opened = 8 * length * (rows * vocabulary + scalars)
        rounds = 5 if half_segments is None else 7
        assert (owner.messages, owner.bytes) == (rounds + 1, opened + 8)
        assert client.messages == rounds + 1 and 0 <= client.bytes - opened - 16 * length < 200  # what goes with SPU's shares
        every = DealtVerifier(Assisted(session), made, every=True)
        assert_accepted(*verified(positions, r / 2, session, every, LOGIT_BITS), ERROR)


@pytest.mark.parametrize("half_segments", REFINED)
def test_in_the_128_bit_ring(half_segments):
    random = np.random.default_rng(0)
    with Session(ProtocolConfig(ring="FM128")) as session:
        verifier = DealtVerifier(Assisted(session), plan(5, half_segments))
        for seed in range(3):
            positions = random_positions(5, 3, seed)
            assert_accepted(*verified(positions, random.random(3), session, verifier, LOGIT_BITS), ERROR)


@pytest.mark.parametrize(
    ("protocol", "ring", "every"),
    [
        ("SEMI2K", "FM64", False),
        ("SEMI2K", "FM64", True),
        ("SEMI2K", "FM128", False),
        ("ABY3", "FM64", False),
        ("CHEETAH", "FM64", False),
    ],
)
def test_stock_operations(protocol, ring, every):
    config = ProtocolConfig(name=protocol, ring=ring, fraction_bits=18 if ring == "FM64" else 26)
    random = np.random.default_rng(0)
    with Session(config) as session:
        verifier = StockVerifier(session, plan(33), every)
        for seed in range(3):
            positions = random_positions(33, 5, seed)
            assert_accepted(*verified(positions, random.random(5), session, verifier, 2 * config.fraction_bits), STOCK_ERROR)


def test_stock_probabilities():
    """The test accepts p(x) / q(x) of uniform r, down to 2^-16, for any error of the predicted sum."""
    p = np.array([0.5, 0.25 - 2.0**-12, 0.25, 2.0**-12])
    random = np.random.default_rng(0)
    tokens = random.integers(0, 4, 3000)
    thresholds = random.random(3000) * np.array([0.6, 0.3, 0.2, 2.0**-11])[tokens]
    z = np.log(p) + random.uniform(-2.5, 12, (3000, 1))
    with Session(ProtocolConfig()) as session:
        session.share("logits", encode(np.concatenate([z, z[:1]]), 36), "owner")
        verifier = StockVerifier(session, plan(4), every=True)
        verifier.accepted(tokens, thresholds)
        rejected = session.words("flags.signals")[0]
    margin = thresholds - p[tokens]
    sure = np.abs(margin) > 2.0**-16 + STOCK_ERROR * p[tokens]
    assert ((rejected == 1) == (margin > 0))[sure].all() and sure.mean() > 0.95


@pytest.mark.parametrize("ops", ["plugin", "SEMI2K", "ABY3"])
def test_naive_sampling(ops):
    """Its verdicts and tokens are those of float64, but near the edges."""
    random, error = np.random.default_rng(0), 0.02
    config = ProtocolConfig(name="SEMI2K" if ops == "plugin" else ops)
    with Session(config) as session:
        naive = DealtNaive(Assisted(session), plan(33)) if ops == "plugin" else StockNaive(session, plan(33))
        for seed in range(3):
            positions = random_positions(33, 5, seed)
            session.share("logits", encode(positions.logits, LOGIT_BITS if ops == "plugin" else 36), "owner")
            r, draft = random.random(6), positions.draft
            accepted, token = naive.verify(NaiveDraft(np.eye(33)[draft.tokens], draft.probabilities, r))
            p, tokens = softmax(positions.logits, -1), np.array(draft.tokens)
            ratio = (p[:-1] / draft.probabilities)[np.arange(5), tokens]
            assert_accepted(accepted, r[:5] - ratio, error)
            sums = np.cumsum(residual(draft.probabilities[accepted], p[accepted]) if accepted < 5 else p[5])
            assert (0 if token == 0 else sums[token - 1]) - error <= r[5] <= sums[token] + error


# What is opened


def test_signals_tell_the_first_rejection_and_nothing_else():
    """After it they are uniform, whatever the verdicts there."""
    random = np.random.default_rng(0)
    p = np.full(4, 0.25)
    z = np.log(np.broadcast_to(p, (1500, 4, 4)))
    tokens = random.integers(0, 4, (1500, 4))
    for verdicts in ([1, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1]):
        _, assisted = emulated(3)
        thresholds = np.where(np.array(verdicts), 0.9, 0.1) * np.ones((1500, 1))
        opened = run_signals(assisted, plan(4), z, tokens, thresholds)
        first = verdicts.index(1)
        assert (opened[:, :first] == 0).all()
        rest = opened[:, first:]
        top = rest.view(np.uint64) >> np.uint64(60)
        low = rest.view(np.uint64) & np.uint64(15)
        for nibbles in (top, low):
            for column in nibbles.T:
                assert stats.chisquare(np.bincount(column.astype(int), minlength=16)).pvalue > LEAST_P
        assert len(np.unique(rest)) == rest.size


def test_a_sum_out_of_range_is_reported():
    _, assisted = emulated()
    tokens, thresholds = np.zeros((1, 1), int), np.full((1, 1), 0.5)
    z = np.zeros((1, 1, 20))
    run_signals(assisted, plan(20), z + 1, tokens, thresholds)
    with pytest.raises(UserError, match="range check"):
        run_signals(assisted, plan(20), z + 4, tokens, thresholds)  # a sum of 1092, where 512 has room
    with pytest.raises(UserError, match="range check"):
        run_signals(assisted, plan(20), z - 130, tokens, thresholds)  # below the table, by more than its period


# Plans


def head(log_sum=(-1.0, 1.0), least=-30.0, halved=False, fall=-35.0):
    decoder = SimpleNamespace(config=SimpleNamespace(vocabulary=97))
    return CentredHead(decoder, 1.0, halved, log_sum, 0.3, least, fall)


SAMPLING = SamplingConfig(temperature=1.0)


def test_plans():
    assert plan_dealt(head((4.0, 6.1)), SAMPLING) == plan(97, None, offset=2.75)
    assert plan_dealt(head(least=-80.0), SAMPLING).segments == 128
    assert plan_dealt(head((4.0, 15.1), halved=True), SAMPLING) == plan(97, 64, offset=2.75)
    assert plan_dealt(head((0.0, 10.0), -180.0, True, -200.0), SAMPLING) == plan(97, 128, offset=-2.5, segments=256)
    assert plan_stock(head((-5.0, 5.0)), SAMPLING).offset == -5.0
    widest = head((0.0, MOST_SPAN))
    assert plan_dealt(widest, SAMPLING).half_segments is None


@pytest.mark.parametrize(
    ("make", "bad", "message"),
    [
        (
            plan_dealt,
            head((-3.0, 3.0)),
            "temperature 1: .* span 6.0 around their prediction on the calibration text, more than",
        ),
        (plan_dealt, head((0.0, 12.0), halved=True), "more than the 11.5 of"),
        (plan_stock, head((0.0, 12.0)), "more than the 11.5 of"),
        (plan_dealt, head(least=-900.0), "down to -898 on the calibration text leave the widest table of exp, which reaches -503"),
        (plan_dealt, head(halved=True, fall=-900.0), "down to -900 on the calibration text leave the widest table"),
    ],
)
def test_what_no_plan_takes(make, bad, message):
    with pytest.raises(UserError, match=message) as raised:
        make(bad, SAMPLING)
    assert "set decoding.disclosure: distribution" in str(raised.value)


@pytest.mark.parametrize(
    ("sampling", "vocabulary", "message"),
    [
        (SamplingConfig(), 97, "temperature 0: disclosure flags does not take the best token"),
        (SamplingConfig(temperature=1.0, top_k=40), 97, "top_k 40: disclosure flags samples by temperature alone"),
        (SamplingConfig(temperature=1.0, top_p=0.9), 97, "top_p 0.9: disclosure flags samples by temperature alone"),
        (SAMPLING, 49152, "vocabulary of 49152 words: .* 0.81 GB of tables a party and round; it serves up to 4096;"),
    ],
)
def test_refusals(sampling, vocabulary, message):
    with pytest.raises(UserError, match=message) as raised:
        check_sampling(sampling, vocabulary)
    assert "set decoding.disclosure: distribution" in str(raised.value)
    assert "\n" not in str(raised.value)


# Decoding


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small decoder with its head centred for a temperature, and the calibration of its layers."""
    decoder = load_checkpoint(
        write_checkpoint(tmp_path_factory.mktemp("llama") / "model", LLAMA | {"num_hidden_layers": 1})
    ).decoder
    random = np.random.default_rng(0)
    texts = [random.integers(0, 97, 18).tolist() for _ in range(60)]
    made = centred_head(decoder, texts, 1.5, MOST_SPAN)
    return made, calibrate(made.decoder, texts)


def test_generates_what_the_other_disclosure_does(model):
    """The same seeds give the same tokens, all accepted or none, but where a number falls between two roundings."""
    made, calibration = model
    sampling = SamplingConfig(temperature=1.5, seed=4)
    supply = SeededSupply(0)
    session = EmulatedSession(supply)
    decoder = AssistedDecoder(session, made.decoder, calibration, 40, supply=supply)
    decoder.set_up()
    flags = Flags(decoder, sampling, DealtVerifier(decoder.assisted, plan_dealt(made, sampling)))
    other = Distribution(decoder, sampling)
    random, same, lengths = np.random.default_rng(0), 0, set()
    decoder.advance([1, 2, 3])
    plain = PlainDecoder(made.decoder, 40)
    for i in range(10):
        decoder.roll_back(3)
        tokens = random.integers(0, 97, 4).tolist()
        decoder.score(tokens)
        plain.length = 0
        logits = plain.advance([1, 2, 3, *tokens])[3:6]
        q = softmax(logits / 1.5 + 0.5 * random.standard_normal(logits.shape), -1)
        draft = Draft(tokens[1:] if i % 5 == 0 else [draw(random, row) for row in q], q)
        ours, theirs = (each.verify(draft, 10 * i, 9, ()) for each in (flags, other))
        same += [step.token for step in ours] == [step.token for step in theirs]
        lengths.add(len(ours))
        assert all(step.logits is None for step in ours[:-1]) and ours[-1].logits.shape == (97,)
        assert [step.token for step in flags.verify(draft, 10 * i, 1, ())] == [ours[0].token]
        assert len(flags.verify(draft, 10 * i, 9, {ours[0].token})) == 1
    assert same >= 9
    assert len(lengths) > 2
    assert len(flags.verify(Draft([], np.zeros((0, 97))), 3, 9, ())) == 1


def test_the_other_parties_follow():
    """They give rows and lengths as the client says, and learn the accepted tokens by the test itself."""
    given, said = [], iter([b"1", b"0", b"1"])
    session = SimpleNamespace(broadcast=lambda data, role: next(said))
    decoder = SimpleNamespace(session=session, row=given.append)
    verifier = SimpleNamespace(plan=plan(97), accepted=lambda tokens, thresholds: len(tokens) - 1)
    flags = Flags(decoder, SAMPLING, verifier)
    assert (flags.follow(3), flags.follow(3), flags.follow(0)) == (3, 2, 1)
    assert given == [2, 0]  # none behind the last token wanted
