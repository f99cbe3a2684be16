"""A cache of opened rows: what is written stands where it should, each row is opened once, under a mask of its own."""

import jax
import numpy as np
import pytest
from harness import run_dealt, run_plain
from hypothesis import given, settings
from hypothesis import strategies as st
from meanings import meanings

from spu_llm.primitives.contract import contract
from spu_llm.primitives.fixed import Fixed
from spu_llm.primitives.rows import append, first_rows, seal
from spu_llm.runtime import ProtocolConfig, Session, Slot
from spu_llm.runtime.assisted import Assisted, OperandName, OperandSlot
from spu_llm.runtime.supply import LiveSupply

CAPACITY, WIDTH = 7, 3
CACHE = OperandName("cache")


class Growing:
    """A cache [CAPACITY, WIDTH] of whole numbers between two parties."""

    def __init__(self, session, initial=None):
        self.session, self.supply = session, LiveSupply()
        self.assisted = Assisted(session, self.supply)
        self.writes = 0
        self.assisted.mask_operand(
            "cache", np.zeros((CAPACITY, WIDTH), np.int64) if initial is None else initial, "owner", grows=True
        )

    def write(self, rows, start, shift=0):
        """Write rows and sum up the cache as far as they reach; (sums, cost)."""
        slot = OperandSlot("cache", (CAPACITY, WIDTH))
        count = min(start + len(rows), CAPACITY)

        def function(cache, rows, start):
            cache = append(cache, rows, start)
            ones = Fixed(np.ones((1, count), np.int64), 0)
            return cache.raw, contract("nt,td->nd", ones, first_rows(cache, count)).raw

        slots = Fixed(slot, 4), Fixed(Slot(rows.shape, np.int64), 4 + shift), Slot((), np.int64, public=True)
        program = self.assisted.compile(f"write {shift}, {count}", function, slots, (slot, None))
        self.session.share("rows", rows, "client")
        self.session.publish("start", np.int64(start))
        self.writes += 1
        with self.session.phase(f"write {self.writes}") as phase:
            self.assisted.run(program, (Fixed(CACHE, 4), Fixed("rows", 4 + shift), "start"), [CACHE, "sums"], {"start": start})
        return self.session.receive("sums")[0], phase

    @property
    def masks(self):
        """What the dealer knows."""
        return self.supply.dealer.masks["cache"].copy()

    @property
    def opened(self):
        """What everyone sees."""
        return np.asarray(self.session.receive("cache.opened"))

    @property
    def mask_shares(self):
        return sum(np.asarray(part) for part in self.session.words("cache.share"))


@settings(deadline=None, max_examples=5)
@given(
    writes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, CAPACITY)), min_size=2, max_size=5),
    shift=st.sampled_from([0, 14]),
    seed=st.integers(0, 99),
)
def test_any_order_of_writes(writes, shift, seed):
    """Further on, over what is there, and back: values right, and no mask of a row ever serves another."""
    random = np.random.default_rng(seed)
    kept = random.integers(-(2**40), 2**40, (CAPACITY, WIDTH))
    with Session(ProtocolConfig()) as session:
        cache = Growing(session, kept.copy())
        seen = [cache.masks.reshape(-1)]
        for n, start in writes:
            start = min(start, CAPACITY - n)
            rows = random.integers(-(2**45), 2**45, (n, WIDTH))
            before, before_opened = cache.masks, cache.opened
            sums, phase = cache.write(rows, start, shift)
            assert phase.bytes == 8 * (rows.size + start + n)  # the rows, and what multiplies the cache
            assert phase.messages == 1
            found = cache.opened + cache.masks << 14 >> 14  # right modulo 2^(64 - shift)
            assert np.isin(found[start : start + n] - (rows >> shift), (0, 1) if shift else 0).all()
            kept[start : start + n] = found[start : start + n]
            assert (found == kept).all()
            assert (sums << 14 >> 14 == kept[: start + n].sum(0)).all()
            assert (cache.mask_shares == cache.masks).all()
            others = np.delete(np.arange(CAPACITY), np.s_[start : start + n])
            assert (cache.masks[others] == before[others]).all()
            assert (cache.opened[others] == before_opened[others]).all()
            seen.append(cache.masks[start : start + n].reshape(-1))
        masks = np.concatenate(seen)
        assert len(np.unique(masks)) == len(masks)


def test_the_same_row_again_differs_by_masks_only():
    """Rolled back and written again, a place gives away nothing of what changed, nor that nothing did."""
    row = np.array([[5, -7, 2**40]])
    with Session(ProtocolConfig()) as session:
        cache = Growing(session)
        seen = []
        for value in (row, row, row + 1):
            cache.write(value, 2)
            seen.append((cache.opened[2], cache.masks[2]))
        (first, first_mask), (again, again_mask), (more, more_mask) = seen
        assert (first - again == again_mask - first_mask).all()
        assert (more - again == again_mask - more_mask + 1).all()
        for difference in (first - again, more - again):
            assert np.abs(difference.astype(np.float64)).min() > 2**40


def test_meanings_agree():
    random = np.random.default_rng(0)
    cache, rows = Fixed(random.integers(-99, 99, (5, 2)), 4), Fixed(random.integers(-(2**20), 2**20, (2, 2)), 12)

    def function(cache, rows):
        return first_rows(append(cache, rows, np.int64(0)), 4)

    want = np.concatenate([rows.raw >> 8, cache.raw[2:4]])
    for name, found in meanings(function, cache, rows, dealer=False).items():
        assert np.abs(found.raw - want).max() <= (0 if name in ("plaintext", "jit") else 1), name
    moved = run_plain(lambda c, r: append(c, r, np.int64(3)), cache, rows)
    assert (moved.raw[3:] == rows.raw >> 8).all() and (moved.raw[:3] == cache.raw[:3]).all()


def test_scale_and_modulus():
    """Rows rounded as they are opened are known modulo less."""
    cache = Fixed(np.zeros((4, 2), np.int64), 14)
    for rows, modulus in ((Fixed(np.zeros((1, 2), np.int64), 28), 50), (Fixed(np.zeros((1, 2), np.int64), 14, 40), 40)):
        found = run_plain(lambda c, r: append(c, r, np.int64(0)), cache, rows)
        assert (found.bits, found.modulus) == (14, modulus)
    narrow = Fixed(cache.raw, 14, 30)
    assert run_plain(lambda c, r: append(c, r, np.int64(0)), narrow, rows).modulus == 30
    with pytest.raises(ValueError, match=r"12 fraction bits modulo 2\^64 cannot be rounded to 14; use 0 to 12"):
        append(cache, Fixed(np.zeros((1, 2), np.int64), 12), np.int64(0))


def test_rows_beyond_the_capacity_are_refused():
    """By the dealer, before it deals."""
    with Session(ProtocolConfig()) as session:
        cache = Growing(session)
        before = cache.opened
        with pytest.raises(ValueError, match="could not broadcast"):
            cache.write(np.ones((2, WIDTH), np.int64), CAPACITY - 1)
        assert (cache.opened == before).all()


def test_first_rows_open_nothing():
    cache = Fixed(np.arange(12).reshape(6, 2), 4)
    found, cost = run_dealt(lambda c: first_rows(c, 3), cache, operands=[0])
    assert (found.raw == cache.raw[:3]).all()
    assert (cost.messages, sum(cost.dealer_bytes)) == (0, 0)


def test_vmap_is_refused():
    cache, rows = Fixed(np.zeros((2, 4, 3), np.int64), 4), Fixed(np.zeros((2, 1, 3), np.int64), 4)
    for function, args in ((lambda c, r: append(c, r, 0), (cache, rows)), (lambda c: first_rows(c, 1), (cache,))):
        with pytest.raises(NotImplementedError, match="vmap over a cache: put the batch among the row's own axes"):
            jax.vmap(function)(*args)


@pytest.mark.parametrize("modulus", [64, 40])
def test_what_is_sealed_serves_later_programs(modulus):
    """Opened once, under a mask that is new each time, also of the same value; later programs send nothing for it."""
    random, shape, shift = np.random.default_rng(0), (3, 2), 64 - modulus
    value = random.integers(-(2**38), 2**38, shape)
    with Session(ProtocolConfig()) as session:
        supply = LiveSupply()
        assisted = Assisted(session, supply)
        slot = Fixed(Slot(shape, np.int64), 4, modulus)
        sealing = assisted.compile("seal", lambda x: seal(x).raw, (slot,), (OperandSlot("kept", shape),))
        slots = Fixed(Slot((1, 3), np.int64), 0), slot.with_raw(OperandSlot("y", shape))
        using = assisted.compile("use", lambda x, y: contract("nt,td->nd", x, y).raw, slots, (None,))
        seen = []
        for i, each in enumerate((value, value, value + 1)):
            session.share("x", each, "client")
            with session.phase(f"seal {i}") as phase:
                assisted.run(sealing, (slot.with_raw("x"),), [OperandName("sealed")])
            assert (phase.messages, phase.bytes) == (1, 8 * each.size)
            mask, opened = supply.dealer.masks["sealed"], np.asarray(session.receive("sealed.opened"))
            assert (opened + mask - each << shift == 0).all()
            seen.append(mask)
            for use in range(2):
                session.share("ones", np.ones((1, 3), np.int64), "client")
                with session.phase(f"use {i}, {use}") as phase:
                    assisted.run(using, (Fixed("ones", 0), slot.with_raw(OperandName("sealed"))), ["sums"])
                assert (session.receive("sums") - each.sum(0) << shift == 0).all()
                assert phase.bytes == 8 * 3  # the ones
    assert len(np.unique(seen)) == 3 * value.size


def test_sealing_shares_an_opening():
    """With whatever else opens the value; an operand is opened already, and stays under its mask."""
    x = Fixed(np.arange(-3, 3).reshape(3, 2), 4)
    (found, squares), cost = run_dealt(lambda x: (seal(x), contract("td,td->t", x, x)), x)
    assert (found.raw == x.raw).all() and (squares.raw == (x.raw**2).sum(1)).all()
    assert (cost.messages, cost.bytes) == (1, 8 * x.raw.size)
    found, cost = run_dealt(seal, x, operands=[0])
    assert (found.raw == x.raw).all()
    assert (cost.messages, sum(cost.dealer_bytes)) == (0, 0)


def test_sealing_changes_nothing():
    x = Fixed(np.random.default_rng(0).integers(-(2**40), 2**40, (4, 3)), 12)
    for name, found in meanings(seal, x, stock=["SEMI2K"]).items():
        assert (found.raw == x.raw).all() and (found.bits, found.modulus) == (12, 64), name
