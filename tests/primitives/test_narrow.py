"""Narrowed functions: what the coefficients promise, in plaintext and on SPU's three protocols, beside SPU's own functions."""

from contextlib import ExitStack
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from spu_llm.primitives.narrow import fit
from spu_llm.primitives.narrow.activation import activation, activation_plan
from spu_llm.primitives.narrow.chain import Chain, evaluate
from spu_llm.primitives.narrow.coefficients import chains
from spu_llm.primitives.narrow.exponential import exponential, exponential_plan
from spu_llm.primitives.narrow.inverse_root import inverse_root, inverse_root_plan
from spu_llm.primitives.narrow.maximum import largest
from spu_llm.primitives.narrow.pieces import BASE, Pieces, last_weights, steps_for
from spu_llm.primitives.narrow.reciprocal import reciprocal, reciprocal_plan
from spu_llm.primitives.narrow.softmax import conformant_maximum, inverse_sum, softmax, softmax_plan, softmax_weights
from spu_llm.runtime import ProtocolConfig, Session, Slot

PROTOCOLS = ["SEMI2K", "ABY3", "CHEETAH"]
NOISE = 3e-4
"""Of SPU's truncations, carried through a chain."""
TARGETS = list(fit.targets())


@pytest.fixture(scope="module")
def sessions():
    """One session a protocol and format, opened when it is wanted: CHEETAH takes seconds to open one."""
    with ExitStack() as stack:

        @cache
        def opened(protocol="SEMI2K", ring="FM64", fraction_bits=18):
            return stack.enter_context(Session(ProtocolConfig(name=protocol, ring=ring, fraction_bits=fraction_bits)))

        yield opened


def run(session, name, function, *inputs, public=()):
    """function(*inputs) on SPU, and messages and bytes of one party: of three passes the least, as CHEETAH makes triples for many
    passes in one of them."""
    names = [f"in{i}" for i in range(len(inputs))]
    for i, value in enumerate(inputs):
        session.publish(names[i], value) if i in public else session.share(names[i], value, "client")
    slots = tuple(Slot(value.shape, value.dtype, public=i in public) for i, value in enumerate(inputs))
    program = session.compile(name, lambda *args: function(*args), slots)
    phases = []
    for i in range(3):
        with session.phase(f"{name} {i}") as phase:
            session.run(program, tuple(names), "out")
        phases.append((phase.messages, phase.bytes))
    return np.asarray(session.receive("out"), np.float64), *min(phases)


def spread(low, high, *shape):
    return np.linspace(low, high, int(np.prod(shape))).reshape(shape).astype(np.float32)


def spread_evenly_in_log(low, high, *shape):
    return np.exp(np.linspace(np.log(low), np.log(high), int(np.prod(shape)))).reshape(shape).astype(np.float32)


# Coefficients


@pytest.mark.parametrize("number", range(len(TARGETS)), ids=[f"{name} to {target.high:g}" for name, target in TARGETS])
def test_coefficients_keep_what_they_say(number):
    """Held exactly by SPU, small enough to lose no bits, and as near as written, against float64 over the whole range."""
    name, target = TARGETS[number]
    (chain,) = (chain for chain in chains(name) if serves(chain, target))
    numbers = [chain.scale, chain.shift, chain.offset, *chain.constants, *chain.weights]
    assert all(abs(value) < 64 and value * 2.0**18 == round(value * 2.0**18) for value in numbers)
    assert chain.error == pytest.approx(fit.error(chain, target))
    assert chain.error < 7e-4
    assert chain.scale > 0
    x = np.linspace(chain.low, chain.high, 1001)
    want = fit.exact(name)(x)
    size = target.size(x)
    with jax.experimental.enable_x64():
        assert np.abs((np.asarray(evaluate(jnp.asarray(x), chain)) - want) / size).max() <= chain.error * 1.001


def serves(chain, target):
    """Whether a chain has the target's range, or for powers one of the same ratio."""
    if target.kind == "power law":
        return abs(chain.high / chain.low / (target.high / target.low) - 1) < 1e-3
    return (chain.low, chain.high) == (target.low, target.high)


def test_fit_is_deterministic_and_finds_what_a_quadratic_can(monkeypatch):
    monkeypatch.setattr(fit, "_STARTS", 40)
    monkeypatch.setattr(fit, "_REFINED", 4)
    target = fit.Target(fit.exact("reciprocal"), fit.exact("reciprocal"), 0.25, 1.0, 1, "power law", -1.0)
    found = fit.fit(target)
    assert found == fit.fit(target)
    assert found.scale == 1
    assert found.high / found.low == pytest.approx(4, rel=1e-4)
    # one squaring and two weights are a quadratic, of which the best has this relative error (Chebyshev)
    half, middle = 0.75 / 2, 1.25 / 2
    best = 1 / np.cosh(3 * np.arccosh(middle / half))
    assert found.error == pytest.approx(best, rel=0.02)


# Plans


def test_cheapest_plan_that_reaches():
    assert exponential_plan(-10, 1).levels < exponential_plan(-100, 1).levels
    assert not activation_plan("silu", 7.0).tail
    assert activation_plan("silu", 20.0).tail
    assert activation_plan("silu", 7.0).chain.levels < activation_plan("silu", 15.0).chain.levels
    assert isinstance(inverse_root_plan(27.0), Chain)
    assert inverse_root_plan(4.0).steps == 0
    assert inverse_root_plan(1000.0).steps == 4
    for low, high in ((0.3, 0.5), (0.25, 16.0), (1.0, 1e4), (2.0**-9, 2.0**8)):
        plan = reciprocal_plan(low, high)
        assert plan.low <= low < 2 * plan.low and high <= plan.high <= 9 * high


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (partial(exponential_plan, -300, 0), "exp from -300 to 0: the widest plan reaches from -128 to 8"),
        (partial(activation_plan, "gelu", 40), "gelu up to 40: the widest plan reaches 32"),
        (partial(inverse_root_plan, 1e9), "takes 14 comparisons; at most 8 are held exactly"),
        (partial(softmax_plan, (-9, 9), (-60, 60), 8), "span too much"),
    ],
)
def test_a_range_beyond_every_plan_is_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        plan()


# In plaintext, wherever the range lies


@given(st.floats(-100, -1), st.floats(0, 6), st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_exponential_in_plaintext(low, high, count):
    plan = exponential_plan(low, high)
    x = spread(low, high, count)
    want = np.exp(x.astype(np.float64))
    assert np.abs((exponential(x, plan) - want) / np.maximum(want, 2**-6)).max() < plan.error + 1e-4


@given(st.sampled_from(["silu", "gelu", "gelu_tanh"]), st.floats(1, 30))
@settings(max_examples=25, deadline=None)
def test_activation_in_plaintext(name, size):
    plan = activation_plan(name, size)
    x = spread(-size, size, 7, 11)
    assert np.abs(activation(x, plan) - fit.exact(name)(x.astype(np.float64))).max() < plan.chain.error + 1e-4


@given(st.floats(-9, 4), st.floats(0.1, 11), st.sampled_from([1.0, 0.02, 30.0]))
@settings(max_examples=12, deadline=None)
def test_powers_in_plaintext(low, span, factor):
    """Over every decade they are made for, at the edges of pieces too; a norm's factor goes into the last weights."""
    plan = reciprocal_plan(np.exp(low), np.exp(low + span))
    edges = [plan.low * 1.02 * BASE**j for j in range(plan.steps + 2)]
    x = np.concatenate([spread_evenly_in_log(np.exp(low), np.exp(low + span), 50), np.float32(edges[:-1])])
    assert np.abs(reciprocal(x, plan) * x - 1).max() < plan.error + 1e-5
    root = inverse_root_plan(np.exp(span))
    assert root.high / root.low >= np.exp(span)
    x = spread_evenly_in_log(root.low, root.high, 5, 10)
    found = inverse_root(x, root, np.array(last_weights(root)) * factor)
    assert np.abs(found * np.sqrt(x) / factor - 1).max() < root.error + 1e-5


def test_steps():
    assert [steps_for(ratio) for ratio in (1.0, 4.0, 4.1, 16.0, 17.0, 1000.0)] == [0, 0, 1, 1, 2, 4]


@given(st.integers(1, 33), st.floats(-3, 3), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_softmax_in_plaintext(length, shift, far, seed):
    """Whatever is subtracted, and whatever hidden scores hold; where sums span too much, by way of square roots."""
    random = np.random.default_rng(seed)
    scores = random.uniform(-8, 4, (3, length)).astype(np.float32)
    mask = np.arange(length) <= random.integers(0, length, (3, 1))
    reference = scores.max(-1, keepdims=True, where=mask, initial=-99) + np.float32(shift)
    plan = softmax_plan((-16, 4), (-9.0, 9.0) if far else (-3.5, 3 + np.log(length)), length)
    assert (plan.halved is not None) == far
    found = np.asarray(softmax(np.where(mask, scores, 1e5).astype(np.float32), mask, reference, plan))
    want = special.softmax(np.where(mask, scores, -np.inf), axis=-1)
    assert np.abs(found - want).max() < 4e-3
    assert (found[~mask] == 0).all()


@given(st.integers(1, 9), st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_largest(count, seed):
    x = np.random.default_rng(seed).normal(size=(2, 3, count)).astype(np.float32)
    assert (np.asarray(largest(x)) == x.max(-1, keepdims=True)).all()


def test_conformant_maximum():
    scores = np.float32([[[5, 1, 2, 9, 3, 4], [0, 7, 2, 8, 6, 1]]])
    columns = np.int32([[0, 1, 4], [0, 4, 5]])
    assert np.asarray(conformant_maximum(scores, columns)).tolist() == [[[5], [6]]]


# On SPU

ROOT, WIDE_ROOT = inverse_root_plan(27.5), inverse_root_plan(100.0)
FUNCTIONS = {
    "exponential": (partial(exponential, plan=exponential_plan(-60, 4)), jnp.exp, np.exp, spread(-60, 4, 3, 31), 1.0),
    "silu": (partial(activation, plan=activation_plan("silu", 16)), jax.nn.silu, fit.exact("silu"), spread(-16, 16, 97), 1.0),
    "wide silu": (partial(activation, plan=activation_plan("silu", 45)), jax.nn.silu, fit.exact("silu"), spread(-45, 45, 97), 1.0),
    "gelu": (
        partial(activation, plan=activation_plan("gelu", 8)),
        partial(jax.nn.gelu, approximate=False),
        fit.exact("gelu"),
        spread(-8, 8, 97),
        1.0,
    ),
    "gelu_tanh": (
        partial(activation, plan=activation_plan("gelu_tanh", 6)),
        jax.nn.gelu,
        fit.exact("gelu_tanh"),
        spread(-6, 6, 1, 97),
        1.0,
    ),
    "reciprocal": (
        partial(reciprocal, plan=reciprocal_plan(0.25, 16)),
        lambda x: 1.0 / x,
        fit.exact("reciprocal"),
        spread_evenly_in_log(0.25, 16, 97),
        4.0,
    ),
    "inverse root": (
        partial(inverse_root, plan=ROOT),
        jax.lax.rsqrt,
        fit.exact("inverse_root"),
        spread_evenly_in_log(ROOT.low, ROOT.high, 97, 1),
        4.2,
    ),
    "wide inverse root": (
        partial(inverse_root, plan=WIDE_ROOT),
        jax.lax.rsqrt,
        fit.exact("inverse_root"),
        spread_evenly_in_log(WIDE_ROOT.low, WIDE_ROOT.high, 97),
        WIDE_ROOT.low**-0.5,
    ),
}
"""narrowed, SPU's own, exact, inputs, and the largest result that counts as 1."""


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_spu(name, protocol, sessions):
    """As near as in real arithmetic but for truncations, and for fewer messages and bytes than SPU's own function."""
    narrowed, own, exact, x, size = FUNCTIONS[name]
    found, messages, sent = run(sessions(protocol), name, narrowed, x)
    _, own_messages, own_sent = run(sessions(protocol), f"own {name}", own, x)
    want = exact(x.astype(np.float64))
    size = np.maximum(1, want) if name == "exponential" else size
    assert np.abs((found - want) / size).max() < 7e-4 + NOISE
    compared = name in ("reciprocal", "wide inverse root")
    assert messages < (1.3 if compared else 0.5) * own_messages
    assert sent < (0.9 if compared else 0.5) * own_sent


@pytest.mark.parametrize(("levels", "messages", "sent"), [(5, 12, 108), (6, 14, 128)])
def test_traffic_is_what_the_docstring_says(levels, messages, sent, sessions):
    x = spread(-6, 6, 64)
    plan = next(chain for chain in chains("gelu") if chain.levels == levels)
    assert run(sessions(), f"{levels}", partial(evaluate, chain=plan), x)[1:] == (messages, sent * 64)


def test_traffic_of_pieces(sessions):
    plan = Pieces(chains("reciprocal")[0], -1.0, 2)
    x = spread_evenly_in_log(plan.low, plan.high, 64)
    _, messages, sent = run(sessions(), "pieces", partial(reciprocal, plan=plan), x)
    assert (messages, sent) == (2 * 3 + 13, (89 * 2 + 20 * 3 + 12) * 64)


@pytest.mark.parametrize("format", [("SEMI2K", "FM128", 26), ("ABY3", "FM64", 18), ("CHEETAH", "FM64", 18)])
def test_softmax_on_spu(format, sessions):
    random = np.random.default_rng(0)
    scores = random.uniform(-9, 3, (2, 3, 17)).astype(np.float32)
    mask = np.arange(17) <= np.array([[2], [9], [16]])
    columns = np.int32([[0, 1, 2], [0, 8, 9], [0, 15, 16]])
    plan = softmax_plan((-16, 12), (0.0, 12 + np.log(17)), 17)

    def narrowed(scores, columns, mask):
        weights = softmax_weights(scores - conformant_maximum(scores, columns), mask, plan)
        return jnp.stack([weights, weights * inverse_sum(weights, plan)])

    (weights, found), *_ = run(sessions(*format), "softmax", narrowed, scores, columns, mask, public=(1, 2))
    assert np.abs(found - special.softmax(np.where(mask, scores, -np.inf), axis=-1)).max() < 3e-3
    assert (weights[:, ~mask] == 0).all()
