"""A constant number of places, those above 0 first, against a count by numpy; what it sends."""

import jax
import numpy as np
import pytest
from harness import run_dealt, run_plain
from hypothesis import given, settings
from hypothesis import strategies as st
from meanings import meanings

from spu_llm.primitives.choose import choose
from spu_llm.primitives.fixed import Fixed


def chosen(raw, k):
    """The first k of the numbers above 0, and then of the others."""
    order = np.argsort(raw <= 0, -1, kind="stable")
    mask = np.zeros_like(raw)
    np.put_along_axis(mask, order[..., :k], 1, -1)
    return mask


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 40), lead=st.sampled_from([(), (3,), (2, 3)]), data=st.data())
def test_plaintext(n, lead, data):
    raw = np.random.default_rng(data.draw(st.integers(0, 999))).integers(-2, 3, (*lead, n))
    k = data.draw(st.integers(0, n))
    assert (run_plain(lambda x: choose(x, k), Fixed(raw, 3)).raw == chosen(raw, k)).all()


@settings(deadline=None, max_examples=12)
@given(
    n=st.sampled_from([1, 2, 3, 8, 17]),
    lead=st.sampled_from([(), (3,)]),
    span=st.sampled_from([1, 2**18, 2**61]),
    sign=st.sampled_from([-1, 0, 1]),
    data=st.data(),
)
def test_between_parties(n, lead, span, sign, data):
    """Numbers of either sign, or all of one."""
    raw = np.random.default_rng(data.draw(st.integers(0, 999))).integers(-span, span + 1, (*lead, n))
    raw = sign * np.abs(raw) if sign else raw
    k = data.draw(st.integers(0, n))
    found, _ = run_dealt(lambda x: choose(x, k), Fixed(raw, 7))
    assert (found.raw == chosen(raw, k)).all()


def test_in_every_meaning():
    raw = np.random.default_rng(1).integers(-9, 10, (2, 9))
    for name, found in meanings(lambda x: choose(x, 4), Fixed(raw, 5)).items():
        assert (found.raw == chosen(raw, 4)).all(), name


@pytest.mark.parametrize(("bits", "messages", "each"), [(19, 4, 32), (38, 5, 40)])
def test_what_it_sends(bits, messages, each):
    raw = np.random.default_rng(2).integers(-99, 100, (3, 32))
    found, cost = run_dealt(lambda x: choose(x, 5, bits), Fixed(raw, 0))
    assert (found.raw == chosen(raw, 5)).all()
    assert (cost.messages, cost.bytes) == (messages, each * raw.size)


def test_under_vmap():
    raw = np.random.default_rng(3).integers(-9, 10, (4, 6))
    found, _ = run_dealt(jax.vmap(lambda x: choose(x, 2, 10), in_axes=1), Fixed(raw, 0))
    assert (found.raw == chosen(raw.T, 2)).all()
