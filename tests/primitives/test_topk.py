"""The k largest against numpy's stable sort: ties, odd lengths, batches; what it sends."""

import jax
import numpy as np
import pytest
from harness import run_dealt, run_plain, run_stock
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.dealer.table import Table
from spu_llm.primitives.fixed import Fixed
from spu_llm.primitives.lookup import lookup
from spu_llm.primitives.topk import differences, keep_top_k, top_k_mask


def largest(raw, k):
    order = np.argsort(-raw, -1, kind="stable")
    mask = np.zeros_like(raw)
    np.put_along_axis(mask, order[..., :k], 1, -1)
    return mask


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 40), lead=st.sampled_from([(), (3,), (2, 3)]), span=st.integers(1, 50), data=st.data())
def test_plaintext(n, lead, span, data):
    raw = np.random.default_rng(data.draw(st.integers(0, 999))).integers(-span, span, (*lead, n))
    k = data.draw(st.integers(0, n))
    assert (run_plain(lambda x: top_k_mask(x, k), Fixed(raw, 0)).raw == largest(raw, k)).all()


@settings(deadline=None, max_examples=12)
@given(
    n=st.sampled_from([1, 2, 3, 4, 7, 8, 16, 17]),
    lead=st.sampled_from([(), (1,), (3,)]),
    span=st.sampled_from([1, 4, 2**61]),
    data=st.data(),
)
def test_between_parties(n, lead, span, data):
    raw = np.random.default_rng(data.draw(st.integers(0, 999))).integers(-span, span + 1, (*lead, n))
    k = data.draw(st.integers(0, n))
    found, _ = run_dealt(lambda x: top_k_mask(x, k), Fixed(raw, 7))
    assert (found.raw == largest(raw, k)).all()
    assert found.bits == 0


@settings(deadline=None, max_examples=12)
@given(n=st.sampled_from([2, 5, 8]), lead=st.sampled_from([(), (3,)]), span=st.sampled_from([1, 2**60]), data=st.data())
def test_keeping_between_parties(n, lead, span, data):
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    x, y = (random.integers(-size, size + 1, (*lead, n)) for size in (span, 2**62))
    k = data.draw(st.integers(0, n))
    found, _ = run_dealt(lambda x, y: keep_top_k(y, x, k), Fixed(x, 7), Fixed(y, 20))
    assert (found.raw == y * largest(x, k)).all()
    assert (found.bits, found.modulus) == (20, 64)


def test_keeping_what_a_lookup_gives_costs_no_round_but_that():
    """One opening of x serves the lookup and the comparisons, and the lookup's result goes out with the first of these."""
    x = np.array([[3, 3, -2, 3, 9], [0, -1, 0, 5, 5]]) << 12
    table = Table(np.square, np.square, -16.0, 32, 0, 2)
    found, cost = run_dealt(lambda x: keep_top_k(lookup(x, table, modulus=64), x, 2, 39), Fixed(x, 12))
    want = (x >> 12) ** 2 * largest(x, 2)
    assert np.abs(found.raw / 2.0**found.bits - want).max() < 1e-2
    assert cost.messages == 4
    assert cost.bytes == 8 * 2 * (5 + (5 + 10) + 10 + 5)


def test_keeping_in_stock_spu_and_under_vmap():
    random = np.random.default_rng(0)
    x, y = random.integers(-9, 9, (5, 4)), random.integers(-99, 99, (5, 4))
    assert (run_stock(lambda x, y: keep_top_k(y, x, 2), Fixed(x, 0), Fixed(y, 0)).raw == y * largest(x, 2)).all()
    found, _ = run_dealt(jax.vmap(lambda x, y: keep_top_k(y, x, 2, 10), in_axes=(1, None)), Fixed(x, 0), Fixed(y[:, 0], 0))
    assert (found.raw == y[:, 0] * largest(x.T, 2)).all()
    with pytest.raises(ValueError, match="use equal shapes"):
        keep_top_k(Fixed(y, 0), Fixed(x[:1], 0), 2)


def test_a_hundred():
    raw = np.random.default_rng(0).integers(-30, 30, (1, 100))
    found, _ = run_dealt(lambda x: top_k_mask(x, 17, bits=6), Fixed(raw, 0))
    assert (found.raw == largest(raw, 17)).all()


@pytest.mark.parametrize(("n", "bits", "messages", "levels"), [(5, 39, 4, 2), (16, 39, 4, 2), (9, 20, 3, 1)])
def test_cost(n, bits, messages, levels):
    batch = 3
    _, cost = run_dealt(lambda x: top_k_mask(x, 2, bits), Fixed(np.zeros((batch, n), np.int64), 0))
    assert cost.messages == messages
    assert cost.bytes == 8 * batch * (2 * n + levels * n * (n - 1) // 2)


def test_stock_spu():
    raw = np.array([[3, 3, -2, 3, 9], [0, -1, 0, 5, 5]])
    assert (run_stock(lambda x: top_k_mask(x, 2), Fixed(raw, 0)).raw == largest(raw, 2)).all()


def test_vmap():
    raw = np.random.default_rng(0).integers(-9, 9, (5, 4))
    found, _ = run_dealt(jax.vmap(lambda x: top_k_mask(x, 2, 10), in_axes=1), Fixed(raw, 0))
    assert (found.raw == largest(raw.T, 2)).all()


@pytest.mark.parametrize("n", range(1, 20))
def test_differences_has_every_pair_once(n):
    found = differences(3 ** np.arange(n))
    assert len({abs(difference) for difference in found.tolist()}) == len(found) == n * (n - 1) // 2


def test_nothing_and_too_many():
    found, cost = run_dealt(lambda x: top_k_mask(x, 2), Fixed(np.zeros((0, 3), np.int64), 0))
    assert found.raw.shape == (0, 3)
    assert cost.messages == 0
    with pytest.raises(ValueError, match="the 4 largest of 3 numbers"):
        top_k_mask(Fixed(np.zeros((2, 3), np.int64), 0), 4)
