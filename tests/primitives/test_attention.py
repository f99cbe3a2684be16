"""Softmax and attention against JAX in float64: masks, references, grouped heads, a cache that grows and is rolled back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import run_dealt, run_plain
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import enable_x64
from meanings import meanings

from spu_llm.primitives import functions
from spu_llm.primitives.attention import Place, Refinement, RowCache, SoftmaxPlan, attend, softmax
from spu_llm.primitives.fixed import Fixed, encode
from spu_llm.runtime import ProtocolConfig, Session, Slot
from spu_llm.runtime.assisted import Assisted, OperandName, OperandSlot
from spu_llm.runtime.supply import LiveSupply

BITS = 14
EXP = functions.exponential(-24.0, 6.0, 32, 0, 5)
PLAN = SoftmaxPlan(EXP, functions.reciprocal(0.25, 127.0, 512, 3))
POWER = SoftmaxPlan(EXP, functions.reciprocal(0.05, 3.98, degree=3), functions.power_of_two(512, -2))
REFINED = SoftmaxPlan(
    EXP, functions.reciprocal(0.02, 3.98, degree=3), functions.power_of_two(512, -7), Refinement(EXP, functions.twice_log(512, -3))
)


def jax_softmax(scores, mask):
    with enable_x64():
        weights = jax.nn.softmax(jnp.where(mask == 1, jnp.asarray(scores, jnp.float64), -jnp.inf))
    return np.asarray(weights)


def causal(n, length):
    return (np.arange(length) <= np.arange(length - n, length)[:, None]).astype(np.int64)


def fixed(x, bits=20):
    return Fixed(encode(x, bits), bits)


def reals(x):
    return np.asarray(x.raw) / 2.0**x.bits


@settings(deadline=None, max_examples=8)
@given(lead=st.sampled_from([(), (1,), (3,), (2, 1, 3)]), length=st.sampled_from([1, 2, 3, 7, 13]), seed=st.integers(0, 99))
def test_softmax(lead, length, seed):
    """Of any shape, whatever is masked but position 0, which scores are taken relative to."""
    random = np.random.default_rng(seed)
    scores = random.uniform(-2, 2, (*lead, length))
    mask = random.integers(0, 2, length)
    mask[0] = 1
    found, cost = run_dealt(lambda s: softmax(s, mask, PLAN), fixed(scores))
    assert (found.bits, found.modulus) == (2 * BITS, 64)
    assert np.abs(reals(found) - jax_softmax(scores, mask)).max() < 2e-3
    assert not reals(found)[..., mask == 0].any()  # not little: nothing
    rows = scores.size // length
    assert (cost.messages, cost.bytes) == (3, 16 * scores.size + 16 * rows)


@pytest.mark.parametrize(("plan", "messages"), [(PLAN, 3), (POWER, 5), (REFINED, 7)])
def test_ways_to_the_inverse_sum(plan, messages):
    random = np.random.default_rng(0)
    scores = random.uniform(-3, 1.5, (6, 9))
    scores[:, 0] = 0
    if plan.refinement is not None:
        scores[:, 1:] += np.linspace(-6, 2, 6)[:, None]  # the first reference misses the sums by far
    found, cost = run_dealt(lambda s: softmax(s, np.ones(9, np.int64), plan), fixed(scores))
    assert np.abs(reals(found) - jax_softmax(scores, np.ones(9))).max() < 4e-3
    assert np.abs(reals(found).sum(-1) - 1).max() < 4e-3
    assert cost.messages == messages


def test_given_reference():
    random = np.random.default_rng(0)
    scores = random.uniform(20, 24, (4, 8))
    reference = fixed(np.log(np.exp(scores).sum(-1, keepdims=True)))
    found, _ = run_dealt(lambda s, r: softmax(s, np.ones(8, np.int64), PLAN, r), fixed(scores), reference)
    assert np.abs(reals(found) - jax_softmax(scores, np.ones(8))).max() < 2e-3


def test_softmax_meanings_and_vmap():
    random = np.random.default_rng(0)
    scores, mask = random.uniform(-2, 2, (5, 3)), np.array([1, 1, 0, 1, 1])
    function = jax.vmap(lambda s: softmax(s, mask, PLAN), in_axes=1)
    for name, found in meanings(function, fixed(scores), stock=("SEMI2K", "ABY3")).items():
        assert np.abs(reals(found) - jax_softmax(scores.T, mask)).max() < 6e-3, name


def test_softmax_of_nothing():
    found, cost = run_dealt(lambda s: softmax(s, np.ones(4, np.int64), PLAN), fixed(np.zeros((0, 4))))
    assert found.raw.shape == (0, 4)
    assert cost.messages == 0


# Attention


def attention(q, keys, values, mask):
    """q [n, groups, queries, d] (scaled), keys, values [length, groups, d] in float64."""
    weights = jax_softmax(np.einsum("ngqd,tgd->gqnt", q, keys), mask)
    return np.einsum("gqnt,tgd->ngqd", weights, values)


class Decoding:
    """A cache [capacity, groups, d] between two parties, and beside it what it should hold."""

    def __init__(self, session, capacity, groups, queries, d):
        self.session, self.supply = session, LiveSupply()
        self.assisted = Assisted(session, self.supply)
        self.shape, self.queries, self.random = (capacity, groups, d), queries, np.random.default_rng(0)
        self.kept = [np.zeros(self.shape), np.zeros(self.shape)]
        for name in ("keys", "values"):
            self.assisted.mask_operand(name, np.zeros(self.shape, np.int64), "owner", grows=True)

    def step(self, n, start, length=None):
        """(what n tokens from `start` on attend to, the same in float64, cost): new random queries, keys, values.

        They look at `length` rows, by default at as many as there are.
        """
        _, groups, d = self.shape
        q = self.random.uniform(-1, 1, (n, groups, self.queries, d)) / d**0.5
        rows = self.random.uniform(-1, 1, (2, n, groups, d))
        for kept, new in zip(self.kept, rows, strict=True):
            kept[start : start + n] = new
        mask = causal(n, start + n)
        mask = np.pad(mask, ((0, 0), (0, (length or start + n) - start - n)))
        want = attention(q, *(kept[: mask.shape[1]] for kept in self.kept), mask)
        new = {"q": q, "k": rows[0], "v": rows[1]}
        for name, value in new.items():
            self.session.share(name, encode(value, 20), "client")
        for name, value in {"start": np.int64(start), "mask": mask}.items():
            self.session.publish(name, value)
        cache = RowCache(*(Fixed(OperandSlot(name, self.shape), BITS, 58) for name in ("keys", "values")))
        place = Place(Slot((), np.int64, public=True), Slot(mask.shape, np.int64, public=True))
        slots = (*(Fixed(Slot(value.shape, np.int64), 20) for value in new.values()), cache, place)
        keeps = (None, cache.keys.raw, cache.values.raw)
        program = self.assisted.compile("attend", lambda *args: attend(*args, PLAN), slots, keeps)
        caches = [OperandName("keys"), OperandName("values")]
        names = (*(Fixed(name, 20) for name in new), RowCache(*(Fixed(name, BITS, 58) for name in caches)), Place("start", "mask"))
        with self.session.phase(f"{n} from {start}") as phase:
            self.assisted.run(program, names, ["out", *caches], {"start": start})
        self.assisted.check_ranges()
        return self.session.receive("out") / 2.0 ** (2 * BITS), want, phase

    def masks(self, start, stop):
        """The dealer's masks of cache rows, and what everyone sees of these rows."""
        masks = np.stack([self.supply.dealer.masks[name][start:stop] for name in ("keys", "values")])
        opened = np.stack([np.asarray(self.session.receive(f"{name}.opened"))[start:stop] for name in ("keys", "values")])
        return masks, opened


@pytest.mark.parametrize(("groups", "queries", "d"), [(2, 2, 3), (1, 1, 5), (3, 1, 4), (1, 4, 2)])
def test_cache_grows_and_is_rolled_back(groups, queries, d):
    with Session(ProtocolConfig()) as session:
        decoding = Decoding(session, 9, groups, queries, d)
        masks = []
        for n, start in ((3, 0), (1, 3), (1, 4), (3, 2), (1, 5), (3, 5)):  # rolled back from 5 to 2, and from 6 to 5
            found, want, _ = decoding.step(n, start, 9)
            assert found.shape == (n, groups, queries, d)
            assert np.abs(found - want).max() < 4e-3
            masks.append(decoding.masks(start, start + n)[0].reshape(-1))
        written = np.concatenate(masks)
        assert len(np.unique(written)) == len(written)  # no mask served two rows, whatever their places
        # What everyone sees of a row and what the dealer knows of it add up to the row.
        all_masks, opened = decoding.masks(0, 9)
        assert np.abs((opened + all_masks << 6 >> 6) / 2.0**BITS - np.stack(decoding.kept)).max() < 2 * 2.0**-BITS


def test_a_row_written_again_gives_away_no_difference():
    """Written twice with the same content the opened rows differ all the same, as their masks do."""
    with Session(ProtocolConfig()) as session:
        decoding = Decoding(session, 4, 2, 1, 64)
        seen = []
        for _ in range(2):
            decoding.random = np.random.default_rng(5)
            decoding.step(3, 1)
            seen.append(decoding.masks(1, 4))
    (first_masks, first), (second_masks, second) = seen
    assert np.abs(first + first_masks - second - second_masks << 6 >> 6).max() <= 1
    assert np.abs((first - second).astype(np.float64)).min() > 2**30  # 384 differences, none of them small
    top = (first - second >> 40) & 0xFF  # of the 58 bits that count
    assert np.abs(np.mean(top / 255.0) - 0.5) < 6 * 12**-0.5 / first.size**0.5


def test_cost_does_not_grow_with_the_cache():
    """But for 16 bytes a score."""
    groups, queries, d = 2, 2, 4
    with Session(ProtocolConfig()) as session:
        decoding = Decoding(session, 12, groups, queries, d)
        for n, start in ((3, 0), (1, 9)):
            phase = decoding.step(n, start)[2]
            heads = groups * queries * n
            assert phase.messages == 4
            assert phase.bytes == 8 * (heads * d + 2 * n * groups * d) + 16 * heads * (start + n) + 8 * heads * d + 16 * heads


def test_reference_instead_of_position_0():
    """A unit further from the scores' own, it changes little."""
    random = np.random.default_rng(0)
    n, groups, queries, d, length = 2, 1, 3, 4, 5
    q, k, v = (
        random.uniform(-1, 1, (n, groups, queries, d)),
        random.uniform(-1, 1, (n, groups, d)),
        random.uniform(-1, 1, (n, groups, d)),
    )
    rows = random.uniform(-1, 1, (2, length, groups, d))
    place = Place(np.int64(3), causal(n, length))

    def function(q, k, v, keys, values, reference):
        return attend(q, k, v, RowCache(keys, values), place, PLAN, reference)[0]

    args = [fixed(q), fixed(k), fixed(v), fixed(rows[0], BITS), fixed(rows[1], BITS)]
    rows[:, 3:] = k, v
    scores = np.einsum("ngqd,tgd->ngqt", q, rows[0])
    found = run_plain(function, *args, fixed(scores.max(-1)))
    assert np.abs(reals(found) - attention(q, *rows, place.mask)).max() < 2e-3
    moved = run_plain(function, *args, fixed(scores.max(-1) + 1))
    assert np.abs(reals(found) - reals(moved)).max() < 1e-2
