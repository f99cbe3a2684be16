"""Products of active blocks against numpy's einsum, in every meaning; what they send; what is thrown away of the masks."""

from functools import partial

import harness
import numpy as np
import pytest
from harness import run_dealt, run_plain
from hypothesis import given, settings
from hypothesis import strategies as st
from meanings import meanings

from spu_llm.primitives.active import active_contract
from spu_llm.primitives.disclose import disclose, places
from spu_llm.primitives.fixed import Fixed
from spu_llm.runtime import ProtocolConfig

SHAPES = {  # of x and y, for n tokens, k of b blocks, and two other sizes
    "nd,bsd->nbs": lambda n, k, b, s, d: ((n, d), (b, s, d)),
    "nbs,dbs->nd": lambda n, k, b, s, d: ((n, k, s), (d, b, s)),
    "nbd,tbd->nbt": lambda n, k, b, s, d: ((n, k, d), (s, b, d)),
    "nbt,tbd->nbd": lambda n, k, b, s, d: ((n, k, s), (s, b, d)),
}


def case(subscripts, n=2, k=2, b=5, s=3, d=4, span=2**20, seed=0):
    """x, y, the active blocks of each token, and the product by numpy."""
    random = np.random.default_rng(seed)
    x, y = (random.integers(-span, span, shape) for shape in SHAPES[subscripts](n, k, b, s, d))
    index = np.stack([np.sort(random.permutation(b)[:k]) for _ in range(n)])
    left, right, out = subscripts.replace("->", ",").split(",")
    rows = []
    for i in range(n):
        active = np.take(y, index[i], axis=right.index("b"))
        rows.append(np.einsum(f"{left[1:]},{right}->{out[1:]}", x[i], active))
    return x, y, index, np.stack(rows)


def product(subscripts, index, blocks, x_bits=None):
    """The product whose active blocks come out of a secret mask, as they do in a model."""

    def function(x, y, mask):
        return active_contract(subscripts, x, y, places(disclose(mask), index.shape[1]), x_bits)

    mask = np.zeros((len(index), blocks), np.int64)
    np.put_along_axis(mask, index, 1, -1)
    return function, Fixed(mask, 0)


@pytest.mark.parametrize("subscripts", SHAPES)
@settings(deadline=None, max_examples=10)
@given(n=st.integers(1, 3), b=st.integers(1, 6), s=st.integers(1, 3), d=st.integers(1, 3), data=st.data())
def test_between_parties(subscripts, n, b, s, d, data):
    k = data.draw(st.integers(1, b))
    x, y, index, want = case(subscripts, n, k, b, s, d, 2**61, data.draw(st.integers(0, 99)))
    function, mask = product(subscripts, index, b)
    found, _ = run_dealt(function, Fixed(x, 7), Fixed(y, 9), mask, operands={1})
    assert (found.raw == want).all()
    assert (found.bits, found.modulus) == (16, 64)


@pytest.mark.parametrize("subscripts", SHAPES)
def test_in_every_meaning(subscripts):
    x, y, index, want = case(subscripts, span=2**10)
    function, mask = product(subscripts, index, 5)
    for name, found in meanings(function, Fixed(x, 4), Fixed(y, 3), mask).items():
        assert (found.raw == want).all(), name


@pytest.mark.parametrize("subscripts", SHAPES)
def test_only_active_blocks_are_opened(subscripts):
    x, y, index, _ = case(subscripts, n=3, k=2, b=8)
    function, mask = product(subscripts, index, 8)
    _, cost = run_dealt(function, Fixed(x, 0), Fixed(y, 0), mask, operands={1})
    assert cost.messages <= 2
    assert cost.bytes == 8 * (x.size + mask.raw.size)


@pytest.mark.parametrize("subscripts", ["nd,bsd->nbs", "nbs,dbs->nd"])
def test_truncating_as_it_opens(subscripts):
    x, y, index, _ = case(subscripts, span=2**16)
    function, mask = product(subscripts, index, 5, x_bits=4)
    found, _ = run_dealt(function, Fixed(x, 12), Fixed(y, 3), mask, operands={1})
    least, most = (run_plain(function, Fixed(x + offset, 12), Fixed(np.abs(y), 3), mask).raw for offset in (0, 256))
    found_abs, _ = run_dealt(function, Fixed(x, 12), Fixed(np.abs(y), 3), mask, operands={1})
    assert (least <= found_abs.raw).all() and (found_abs.raw <= most).all()
    assert (found.bits, found.modulus) == (7, 56)


def test_the_128_bit_ring_gives_the_same(monkeypatch):
    """Also which blocks are active: a disclosed number has a random upper half there."""
    monkeypatch.setattr(harness, "ProtocolConfig", partial(ProtocolConfig, ring="FM128"))
    x, y, index, want = case("nd,bsd->nbs")
    function, mask = product("nd,bsd->nbs", index, 5)
    found, _ = run_dealt(function, Fixed(x, 7), Fixed(y, 9), mask, operands={1})
    assert (found.raw == want).all()


def test_places_of_ones():
    mask = np.array([[0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]])
    assert (run_plain(lambda m: places(m.raw, 2), Fixed(mask, 0)) == [[1, 3], [0, 1], [2, 3]]).all()
