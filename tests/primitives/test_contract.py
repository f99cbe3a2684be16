"""Sums of products of opened operands: exact modulo 2^64 for any subscripts, truncated as they are opened, what they send."""

import jax
import numpy as np
import pytest
from harness import run_dealt, run_plain
from hypothesis import given, settings
from hypothesis import strategies as st
from meanings import garbled, meanings

from spu_llm.primitives.contract import contract
from spu_llm.primitives.fixed import Fixed

SUBSCRIPTS = [
    "nk,km->nm",
    "nk,mk->nm",
    "n,n->n",
    "n,n->",
    "nd,nd->n",
    "n,m->nm",
    "nk,k->n",
    "ngqd,tgd->gqnt",
    "gqnt,tgd->gqnd",
    "ab,cab->bc",
]


def anything(random, *shape):
    """Any ring integers."""
    return random.integers(-(2**63), 2**63 - 1, shape)


def shapes_of(subscripts, sizes):
    return [tuple(sizes[letter] for letter in part) for part in subscripts.split("->")[0].split(",")]


@settings(deadline=None, max_examples=20)
@given(
    subscripts=st.sampled_from(SUBSCRIPTS),
    sizes=st.lists(st.sampled_from([0, 1, 2, 3, 5, 7]), min_size=14, max_size=14),
    seed=st.integers(0, 99),
)
def test_any_subscripts_and_shapes(subscripts, sizes, seed):
    shapes = shapes_of(subscripts, dict(zip("nkmdgqtabc", sizes, strict=False)))
    x, y = (anything(np.random.default_rng(seed + i), *shape) for i, shape in enumerate(shapes))
    found, cost = run_dealt(lambda x, y: contract(subscripts, x, y), Fixed(x, 3), Fixed(y, 4))
    want = np.einsum(subscripts, x, y)
    assert found.raw.shape == want.shape
    assert (found.raw == want).all()
    assert (found.bits, found.modulus) == (7, 64)
    assert (cost.messages, cost.bytes) == (int(x.size + y.size > 0), 8 * (x.size + y.size))
    assert sum(cost.dealer_bytes) == 8 * want.size


@pytest.mark.parametrize("subscripts", ["nk,km->nm", "nk,mk->nm", "gqnt,tgd->gqnd", "ngqd,tgd->gqnt", "abk,kbm->mab"])
@pytest.mark.parametrize("operands", [(), (1,)])
def test_few_rows_and_a_large_matrix(subscripts, operands):
    """What SPU is given row by row."""
    sizes = dict(zip("nkmdgqtab", (5, 130, 70, 33, 2, 2, 130, 3, 1), strict=True))
    x, y = (anything(np.random.default_rng(i), *shape) for i, shape in enumerate(shapes_of(subscripts, sizes)))
    found, _ = run_dealt(lambda x, y: contract(subscripts, x, y), Fixed(x, 0), Fixed(y, 0), operands=operands)
    assert (found.raw == np.einsum(subscripts, x, y)).all()


@settings(deadline=None, max_examples=12)
@given(moduli=st.tuples(st.integers(8, 64), st.integers(8, 64)), data=st.data())
def test_rounded_as_they_are_opened(moduli, data):
    """Right modulo what is left of both moduli, each operand 0 or 1 unit too large, whatever is above."""
    shifts = [data.draw(st.integers(0, modulus - 2)) for modulus in moduli]
    left = min(modulus - shift for modulus, shift in zip(moduli, shifts, strict=True))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    raws = [random.integers(-(2 ** (modulus - 1)), 2 ** (modulus - 1), (3, 4)) for modulus in moduli]
    multiple = data.draw(st.integers(0, 2**61))
    args = [Fixed(garbled(raw, m, multiple), 70, m) for raw, m in zip(raws, moduli, strict=True)]
    found, cost = run_dealt(lambda x, y: contract("nd,nd->nd", x, y, 70 - shifts[0], 70 - shifts[1]), *args)
    assert (found.bits, found.modulus) == (140 - sum(shifts), left)
    x, y = (raw >> shift for raw, shift in zip(raws, shifts, strict=True))
    candidates = [
        (found.raw - (x + i) * (y + j)) << (64 - left) == 0 for i in range(1 + (shifts[0] > 0)) for j in range(1 + (shifts[1] > 0))
    ]
    assert np.any(candidates, axis=0).all()
    assert (cost.messages, cost.bytes) == (1, 8 * 24)


def test_rounding_has_the_right_mean():
    raw = np.full(4000, 3 * 2**10 + 300)
    found, _ = run_dealt(lambda x, y: contract("n,n->n", x, y, 0), Fixed(raw, 10), Fixed(np.ones(4000, np.int64), 0))
    assert abs((found.raw - 3).mean() - 300 / 2**10) < 6 * 0.5 / 4000**0.5


@pytest.mark.parametrize(
    ("operands", "opened"),
    [((), 3 * 6 + 6 * 4), ((1,), 3 * 6), ((0,), 6 * 4), ((0, 1), 0)],
)
def test_operands_are_not_opened_again(operands, opened):
    random = np.random.default_rng(0)
    x, w = anything(random, 3, 6), anything(random, 6, 4)

    def function(x, w):
        turned = w.with_raw(w.raw.T.reshape(2, 2, 6))  # still opened
        return contract("nk,km->nm", x, w), contract("nk,abk->nab", x, turned)

    (found, again), cost = run_dealt(function, Fixed(x, 0), Fixed(w, 0), operands=operands)
    assert (found.raw == x @ w).all()
    assert (again.raw == (x @ w).reshape(3, 2, 2)).all()
    assert cost.messages == int(len(operands) < 2)
    assert cost.bytes == 8 * (opened + (0 if 1 in operands else 24))  # turned, what is no operand is another value to open


def test_operand_is_rounded_too():
    random = np.random.default_rng(0)
    x, w = random.integers(-99, 99, (3, 5)), random.integers(-(2**40), 2**40, (5, 2))
    found, cost = run_dealt(lambda x, w: contract("nk,km->nm", x, w, None, 2), Fixed(x, 0), Fixed(w, 12), operands=[1])
    assert np.abs(found.raw - x @ (w >> 10)).max() <= np.abs(x).sum(-1).max()
    assert found.bits == 2
    assert (cost.messages, cost.bytes) == (1, 8 * 15)


def test_squares_open_once():
    x = anything(np.random.default_rng(0), 4, 3)
    found, cost = run_dealt(lambda x: contract("nd,nd->n", x, x), Fixed(x, 0))
    assert (found.raw == (x * x).sum(-1)).all()
    assert (cost.messages, cost.bytes) == (1, 8 * 12)


def test_meanings_agree():
    """Stock SPU rounds an operand to nearest at random, too; CHEETAH may be off by one either way."""
    random = np.random.default_rng(0)
    x, y = Fixed(random.integers(-(2**30), 2**30, (3, 5)), 20), Fixed(random.integers(-(2**20), 2**20, (5, 2)), 14)

    def function(x, y):
        return contract("nk,km->nm", x, y), contract("nk,km->nm", x, y, 14)

    exact, rounded = x.raw @ y.raw, (x.raw >> 6) @ y.raw
    for name, (whole, found) in meanings(function, x, y).items():
        assert (whole.raw == exact).all(), name
        assert np.abs(found.raw - rounded).max() <= (0 if name in ("plaintext", "jit") else np.abs(y.raw).sum(0).max()), name


@pytest.mark.parametrize("axes", [(0, None), (None, 1), (1, 2)])
def test_vmap(axes):
    shapes = [(4, 3), (4, 2)]
    shapes = [shape if axis is None else (*shape[:axis], 5, *shape[axis:]) for shape, axis in zip(shapes, axes, strict=True)]
    args = [Fixed(anything(np.random.default_rng(i), *shape), 0) for i, shape in enumerate(shapes)]
    function = jax.vmap(lambda x, y: contract("kn,km->nm", x, y), axes)
    found, cost = run_dealt(function, *args)
    x, y = (
        np.moveaxis(arg.raw, axis, 0) if axis is not None else np.stack([arg.raw] * 5) for arg, axis in zip(args, axes, strict=True)
    )
    assert (found.raw == np.einsum("bkn,bkm->bnm", x, y)).all()
    assert (run_plain(function, *args).raw == found.raw).all()
    assert cost.bytes == 8 * sum(arg.raw.size for arg in args)  # what is not mapped is opened once


def test_refuses_more_bits_than_there_are():
    x = Fixed(np.zeros((2, 2), np.int64), 12, 30)
    with pytest.raises(ValueError, match=r"12 fraction bits modulo 2\^30 cannot be rounded to 14; use 0 to 12"):
        contract("nk,km->nm", x, x, 12, 14)
