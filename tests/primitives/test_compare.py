"""Comparisons against numpy, on every width and at the ends of the ring; what they send; the narrow words they are dealt."""

from functools import partial

import harness
import jax
import numpy as np
import pytest
from harness import run_dealt, run_plain, run_stock
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from spu_llm.dealer.generator import Dealer, message_bytes, receive
from spu_llm.dealer.material import Recorder
from spu_llm.primitives.compare import chunk_widths, is_negative, less, maximum, relu
from spu_llm.primitives.fixed import Fixed
from spu_llm.runtime import ProtocolConfig

EXTREME = np.array([0, 1, -1, 2**61, -(2**61), 2**62 - 1, -(2**62), 2**63 - 1, -(2**63), 2**32, -(2**32)])
SHAPES = st.sampled_from([(), (1,), (7,), (3, 1, 5), (2, 3)])


def random_raw(bits, count=500):
    """Numbers of |raw| < 2^bits, the ends and both sides of 0 among them."""
    raw = np.random.default_rng(bits).integers(-(2**bits), 2**bits, count)
    raw[:4] = -(2**bits), 2**bits - 1, 0, -1
    return raw


@pytest.mark.parametrize("bits", [0, 1, 2, 5, 6, 7, 11, 19, 24, 31, 37, 41, 50, 61, 62, 63])
def test_every_plan(bits):
    raw = random_raw(bits)
    (sign, positive), _ = run_dealt(lambda x: (is_negative(x, bits), relu(x, bits)), Fixed(raw, 3))
    assert (sign.raw == (raw < 0)).all()
    assert (positive.raw == np.maximum(raw, 0)).all()
    assert (sign.bits, positive.bits) == (0, 3)


@pytest.mark.parametrize("bits", [29, 62, 63])
def test_the_128_bit_ring_gives_the_same(bits, monkeypatch):
    """Opened numbers have random upper halves there, and a sign of their own."""
    monkeypatch.setattr(harness, "ProtocolConfig", partial(ProtocolConfig, ring="FM128"))
    raw = random_raw(bits)
    (sign, positive), _ = run_dealt(lambda x: (is_negative(x, bits), relu(x, bits)), Fixed(raw, 3))
    assert (sign.raw == (raw < 0)).all()
    assert (positive.raw == np.maximum(raw, 0)).all()


@settings(deadline=None, max_examples=15)
@given(data=st.data(), shape=SHAPES)
@example(data=None, shape=EXTREME.shape)
def test_any_shape_and_value(data, shape):
    raw = EXTREME if data is None else data.draw(arrays.arrays(np.int64, shape, elements=st.integers(-(2**63), 2**63 - 1)))
    (sign, positive), _ = run_dealt(lambda x: (is_negative(x), relu(x)), Fixed(raw, 0))
    assert sign.raw.shape == shape
    assert (sign.raw == (raw < 0)).all()
    assert (positive.raw == np.maximum(raw, 0)).all()


@settings(deadline=None, max_examples=10)
@given(modulus=st.integers(2, 63), data=st.data())
def test_garbage_above_the_modulus(modulus, data):
    """Of a number known modulo 2^modulus, what is above does not matter."""
    raw = data.draw(arrays.arrays(np.int64, 5, elements=st.integers(-(2 ** (modulus - 1)), 2 ** (modulus - 1) - 1)))
    garbage = data.draw(arrays.arrays(np.int64, 5, elements=st.integers(0, 2 ** (63 - modulus))))
    (sign, positive), _ = run_dealt(lambda x: (is_negative(x), relu(x)), Fixed(raw + (garbage << modulus), 0, modulus))
    assert (sign.raw == (raw < 0)).all()
    assert (positive.raw == np.maximum(raw, 0)).all()


def test_two_operands_of_other_scales_and_shapes():
    a, b = np.array([[3], [-5], [2**40]]), np.array([12, -21, 2**42, -(2**42)])
    (found, larger), _ = run_dealt(lambda x, y: (less(x, y, 50), maximum(x, y, 50)), Fixed(a, 2), Fixed(b, 4))
    assert (found.raw == (4 * a < b)).all()
    assert (larger.raw == np.maximum(4 * a, b)).all()
    assert larger.bits == 4


@pytest.mark.parametrize(
    ("bits", "messages", "dealer_bytes"),
    [(63, 3, 512 + 160), (39, 3, 256 + 64), (20, 2, 128 + 128), (4, 1, 256)],
)
def test_cost(bits, messages, dealer_bytes):
    n = 10
    _, cost = run_dealt(lambda x: is_negative(x, bits), Fixed(np.zeros(n, np.int64), 0))
    assert (cost.messages, cost.bytes, sum(cost.dealer_bytes)) == (messages, 8 * n * messages, n * dealer_bytes)
    _, times = run_dealt(lambda x: relu(x, bits), Fixed(np.zeros(n, np.int64), 0))
    assert (times.messages, times.bytes) == (messages, 8 * n * messages)  # the product costs neither
    _, pair = run_dealt(lambda x, y: maximum(x, y, bits), *[Fixed(np.zeros(n, np.int64), 0)] * 2)
    assert (pair.messages, pair.bytes) == (messages, 8 * n * messages)


def test_comparisons_share_messages_and_openings():
    raw = random_raw(30, 9)
    _, cost = run_dealt(lambda x: (is_negative(x, 39), relu(x, 39)), Fixed(raw, 0))
    assert (cost.messages, cost.bytes) == (3, 8 * 9 * 5)  # x is opened once
    _, opened = run_dealt(lambda x: relu(x, 39), Fixed(raw, 0), operands=[0])
    assert (opened.messages, opened.bytes) == (2, 8 * 9 * 2)


def test_never_more_than_asked_for():
    for width in range(1, 65):
        assert len(chunk_widths(width)) <= 2


@pytest.mark.parametrize("function", [is_negative, relu])
def test_plaintext_and_stock_spu_agree(function):
    x = Fixed(np.array([[3, -4, 0], [-1, 2**40, -(2**40)]]), 5)
    plain, stock = run_plain(function, x), run_stock(function, x)
    assert (plain.raw == stock.raw).all()
    assert (plain.raw == run_dealt(function, x)[0].raw).all()


def test_vmap():
    raw = random_raw(20, 12).reshape(3, 4)
    mapped, _ = run_dealt(jax.vmap(lambda x: relu(x, 20), in_axes=1), Fixed(raw, 0))
    assert (mapped.raw == np.maximum(raw, 0).T).all()


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_nothing(shape):
    (sign, positive), cost = run_dealt(lambda x: (is_negative(x), relu(x)), Fixed(np.zeros(shape, np.int64), 2))
    assert sign.raw.shape == positive.raw.shape == shape
    assert cost.messages == 0


def test_refuses_more_bits_than_are_known():
    with pytest.raises(ValueError, match=r"numbers of 30 bits that are known modulo 2\^30"):
        is_negative(Fixed(np.zeros(3, np.int64), 0, 30), 30)


@pytest.mark.parametrize(("modulus", "size"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 4), (32, 4), (33, 8), (64, 8)])
def test_dealt_words_are_as_long_as_they_must_be(modulus, size):
    """Shares of a value modulo 2^modulus add up to it, are sent in `size` bytes, and each looks uniform."""
    recorder = Recorder(lambda count: np.zeros(count, np.int64))
    n = 999
    mask = recorder.uniform((n,))
    recorder.derive(lambda r: r & 3, mask, modulus=modulus)
    specification = recorder.specification()
    keys = b"a" * 16, b"b" * 16
    dealt = Dealer(keys).deal(specification, 5)
    assert sorted(map(len, dealt.messages)) == [0, size * n] == sorted(message_bytes(specification))
    shares = [receive(specification, party, keys[party], 5, dealt.messages[party]) for party in range(2)]
    total = sum(shares)
    assert ((total[n:] - (total[:n] & 3)) << (64 - modulus) == 0).all()
    for share in shares:
        assert abs((share[n:] & 1).mean() - 0.5) < 0.1
        assert size == 8 or share[n:].min() >= 0
    told = max(range(2), key=lambda party: len(dealt.messages[party]))
    with pytest.raises(ValueError, match="too short"):
        receive(specification, told, keys[told], 5, dealt.messages[told][1:])
