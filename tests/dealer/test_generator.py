"""Dealer and parties agree on every kind of deal; messages are as long as foretold; runs share nothing."""

from dataclasses import replace
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from spu_llm.dealer import dpf
from spu_llm.dealer.generator import Dealer, mask_position, message_bytes, receive
from spu_llm.dealer.material import Derived, Looked, Operand, Pointed, Recorder, Specification, Uniform, shared_words
from spu_llm.dealer.table import ExponentialTable, Table

KEYS = b"a" * 16, b"b" * 16
ROWS = Table(special.expit, np.tanh, -4.0, 8, 0, 2)
SPREAD = Table(special.expit, np.tanh, -4.0, 1024, -7, 1)
EXPONENTIAL = ExponentialTable(np.exp, np.exp, -6.0, 8, 0, 3, largest=1.0)


def recorder():
    return Recorder(lambda count: np.zeros(count, np.int64))


def received(specification, run=1, keys=KEYS, **given):
    """(what the dealer remembers, each party's words) of a run."""
    dealt = Dealer(keys).deal(specification, run, **given)
    assert tuple(map(len, dealt.messages)) == message_bytes(specification)
    return dealt, [receive(specification, party, keys[party], run, dealt.messages[party]) for party in range(2)]


def parts(specification, words):
    """The sum of both parties' words, a piece a deal."""
    total, at, found = np.sum(words, axis=0, dtype=np.int64), 0, []
    for deal in specification.deals:
        found.append(total[at : at + shared_words(deal)])
        at += shared_words(deal)
    assert at == specification.words == len(total)
    return found


def rotated(table, segment, place):
    """The shared table by its definition: rows turned by the mask's segment, polynomials re-centred by its place."""
    a, back = table.coefficients.astype(object), [int(word) for word in table.payload(np.array(place))]
    if isinstance(table, ExponentialTable):
        return np.array([[int(table._scales[k - segment]) * word for word in back] for k in range(table.segments)], object)
    degree = table.degree
    return np.array(
        [
            [
                sum(comb(p, i) * a[(k - segment) % table.segments, p] * back[p - i] for p in range(i, degree + 1))
                for i in range(degree + 1)
            ]
            for k in range(table.segments)
        ],
        object,
    )


# Every kind of deal


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,), (3, 0)])
def test_uniform(shape):
    r = recorder()
    mask = r.uniform(shape)
    assert mask.shape == shape
    specification = r.specification()
    assert message_bytes(specification) == (0, 0)
    dealt, words = received(replace(specification, keep=(("mask", 0),)))
    assert (np.sum(words, 0) == dealt.operands["mask"].reshape(-1)).all()


@settings(deadline=None, max_examples=30)
@given(modulus=st.integers(1, 64), shape=st.sampled_from([(), (1,), (5,), (2, 3), (0,)]), run=st.integers(0, 2**64 - 1))
def test_derived(modulus, shape, run):
    """Of one or two earlier values; right modulo 2^modulus, in words of 1, 2, 4 or 8 bytes."""
    r = recorder()
    a, b = r.uniform(shape), r.uniform(shape)
    r.derive(lambda x, y: np.multiply(x, y) >> 3, a, b, modulus=modulus)
    specification = r.specification()
    _, words = received(specification, run)
    first, second, product = parts(specification, words)
    with np.errstate(over="ignore"):
        assert ((product - (first * second >> 3)) << (64 - modulus) == 0).all()
    size = next(size for size in (1, 2, 4, 8) if 8 * size >= modulus)
    assert sorted(message_bytes(specification)) == [0, size * first.size]
    narrow = [part[-first.size :] for part in words]
    assert size == 8 or all(part.min(initial=0) >= 0 and part.max(initial=0) < 2 ** (8 * size) for part in narrow)


def test_followed():
    """The parties' own linear map of their shares: no words, no bytes; the dealer does it, too, at a place known to all."""
    r = recorder()
    mask = r.uniform((4,))
    moved = r.follow(lambda x, start: np.roll(x, start), mask.share, mask, publics=("start",))
    r.derive(lambda x: 3 * x, moved)
    r.retain("moved", moved)
    specification = r.specification()
    assert [shared_words(deal) for deal in specification.deals] == [4, 0, 4]
    dealt, words = received(specification, publics={"start": 3})
    mask_words, _, tripled = parts(specification, words)
    assert (tripled == 3 * np.roll(mask_words, 3)).all()
    assert (dealt.operands["moved"] == np.roll(mask_words, 3)).all()


@pytest.mark.parametrize("table", [ROWS, EXPONENTIAL, SPREAD], ids=["rows", "exponential", "spread"])
@pytest.mark.parametrize("modulus", [45, 64])
def test_looked(table, modulus):
    r = recorder()
    mask = r.uniform((3, 2))
    r.table(mask, table, 20, modulus)
    specification = r.specification()
    _, words = received(specification)
    masks, found = parts(specification, words)
    segments, payloads = mask_position(specification.deals[1], masks)
    places = (-masks >> 20) & ((1 << table.place_bits) - 1)
    assert (payloads == table.payload(places)).all()
    for row, segment, place, payload in zip(found.reshape(6, table.segments, -1), segments, places, payloads, strict=True):
        if table.spread:
            want = np.zeros((table.segments, table.payload_words), object)
            want[segment] = payload
            modulus = 64
        else:
            want = rotated(table, segment, place)
        assert ((row.astype(object) - want) % 2**modulus == 0).all()
    size = dpf.Correction.size(6, table.depth, table.payload_words)
    assert message_bytes(specification) == (size, size)


@settings(deadline=None, max_examples=20)
@given(size=st.integers(1, 70), shape=st.sampled_from([(), (1,), (4,), (2, 3), (0,)]), run=st.integers(0, 99))
def test_pointed(size, shape, run):
    r = recorder()
    mask = r.uniform(shape)
    r.one_hot(lambda x: (x & 0x7FFF) % size, size, mask)
    specification = r.specification()
    _, words = received(specification, run)
    masks, found = parts(specification, words)
    points = (masks & 0x7FFF) % size
    assert (found.reshape(-1, size) == (points[:, None] == np.arange(size))).all()


def test_operand():
    """A mask of an earlier run, or of a weight: the dealer is told its name, the parties have their shares."""
    r = recorder()
    mask = r.operand("weight", np.zeros((2, 3), np.int64))
    r.derive(lambda x: x.T @ x, mask)
    specification = r.specification()
    assert specification.words == 9
    weight = np.arange(6).reshape(2, 3)
    _, words = received(specification, operands={"weight": weight})
    assert (np.sum(words, 0).reshape(3, 3) == weight.T @ weight).all()
    with pytest.raises(KeyError):
        Dealer(KEYS).deal(specification, 1)


@settings(deadline=None, max_examples=25)
@given(kinds=st.lists(st.sampled_from(["uniform", "derived", "narrow", "looked", "pointed"]), max_size=8), n=st.integers(0, 3))
def test_any_mixture(kinds, n):
    r = recorder()
    mask = r.uniform((n,))
    for kind in kinds:
        if kind == "uniform":
            mask = r.uniform((n,))
        elif kind == "looked":
            r.table(mask, ROWS, 20, 64)
        elif kind == "pointed":
            r.one_hot(lambda x: x & 7, 8, mask)
        else:
            r.derive(lambda x: x + 1, mask, modulus=64 if kind == "derived" else 11)
    specification = r.specification()
    _, words = received(specification)
    values = parts(specification, words)
    for deal, value in zip(specification.deals, values, strict=True):
        if isinstance(deal, Derived):
            assert ((value - values[deal.sources[0]] - 1) << (64 - deal.modulus) == 0).all()
        elif isinstance(deal, Pointed):
            assert (value.reshape(n, 8).argmax(1) == values[deal.sources[0]] & 7).all()


# Messages


def several():
    """One deal of each kind that is sent."""
    r = recorder()
    mask = r.uniform((3,))
    r.derive(lambda x: x * x, mask)
    r.derive(lambda x: x & 1, mask, modulus=8)
    r.table(mask, ROWS, 20, 64)
    r.one_hot(lambda x: x & 7, 8, mask)
    return r.specification()


def test_work_is_shared_between_the_parties():
    r = recorder()
    mask = r.uniform((10,))
    for _ in range(6):
        r.derive(lambda x: x, mask)
    assert message_bytes(r.specification()) == (240, 240)
    assert abs(np.subtract(*message_bytes(several()))) <= 24


@pytest.mark.parametrize("party", [0, 1])
@pytest.mark.parametrize("change", [-1, 1, -24, 8])
def test_message_of_another_length_is_refused(party, change):
    specification = several()
    message = Dealer(KEYS).deal(specification, 1).messages[party]
    wrong = message[:change] if change < 0 else message + bytes(change)
    with pytest.raises(ValueError, match=r"the dealer's message is too (short|long)|a correction of"):
        receive(specification, party, KEYS[party], 1, wrong)


def test_messages_are_for_a_program_and_a_party():
    specification = several()
    messages = Dealer(KEYS).deal(specification, 1).messages
    with pytest.raises(ValueError, match=r"the dealer's message is too|a correction of"):
        receive(specification, 0, KEYS[0], 1, messages[1])
    shorter = Specification(specification.deals[:-1])
    with pytest.raises(ValueError, match="the dealer's message is too long"):
        receive(shorter, 0, KEYS[0], 1, messages[0])
    with pytest.raises(ValueError):
        receive(specification, 0, KEYS[0], 1, b"")


# Runs


def test_the_same_run_gives_the_same_and_another_nothing_alike():
    specification = several()
    (first, words), (again, same), (second, other) = (received(specification, run) for run in (7, 7, 8))
    assert first.messages == again.messages
    assert all((a == b).all() for a, b in zip(words, same, strict=True))
    for a, b in zip(words, other, strict=True):
        wide = np.delete(np.arange(len(a)), np.s_[6:9])  # but words of a byte
        assert not np.intersect1d(a[wide], b[wide]).size
    assert not set(chunks(first.messages[0])) & set(chunks(second.messages[0]))


def chunks(message):
    """Eight bytes at each place of a message."""
    return [message[i : i + 8] for i in range(len(message) - 7)]


def test_keys_decide():
    specification = several()
    _, words = received(specification)
    _, other = received(specification, keys=(KEYS[0], b"c" * 16))
    assert (words[0][:3] == other[0][:3]).all()  # from party 0's seed
    assert not np.intersect1d(words[1][:3], other[1][:3]).size


def test_a_party_alone_knows_nothing_of_a_mask():
    """Its share of a mask, and of what is derived from it, is as far from the value as can be: a word of the other's key."""
    r = recorder()
    mask = r.uniform((4000,))
    r.derive(lambda x: x * 0, mask)
    specification = r.specification()
    _, words = received(specification)
    for share in words:
        for part in (share[:4000], share[4000:]):
            counts = np.bincount(part.view(np.uint8), minlength=256)
            expected = counts.sum() / 256
            assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * 510**0.5


@pytest.mark.parametrize("run", [-1, 2**64])
def test_run_numbers_have_64_bits(run):
    with pytest.raises(OverflowError):
        Dealer(KEYS).deal(Specification((Uniform((1,)),)), run)


def test_words_of_each_kind():
    deals = Uniform((2, 3)), Operand((5,), "w"), Looked((4,), (0,), ROWS, 20, 64), Pointed((4,), (0,), np.abs, 9)
    assert [shared_words(deal) for deal in deals] == [6, 0, 4 * 8 * 3, 36]
    assert Specification(deals).words == 6 + 96 + 36
