"""Sessions: variables that stay, programs compiled once, weights opened once, traffic counted exactly."""

import os
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError
from spu.experimental import reveal

from spu_llm.runtime import ProtocolConfig, Session, Slot
from spu_llm.runtime.workspace import workspace

PROTOCOLS = [
    ProtocolConfig(name=name, ring=ring)
    for name, ring in (("SEMI2K", "FM64"), ("SEMI2K", "FM128"), ("ABY3", "FM64"), ("ABY3", "FM128"), ("CHEETAH", "FM64"))
]


def product(x, w):
    return x @ w


@pytest.fixture
def operands():
    random = np.random.default_rng(0)
    return random.standard_normal((3, 20)).astype(np.float32), random.standard_normal((20, 50)).astype(np.float32)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: f"{p.name}-{p.ring}")
def test_values_stay_and_programs_are_reused(protocol, operands):
    x, w = operands
    with Session(protocol) as session:
        session.share("x", x, "client")
        session.share("w", w, "owner")
        program = session.compile("product", product, (Slot(x.shape), Slot(w.shape)))
        assert session.compile("product", product, (Slot(x.shape), Slot(w.shape))) is program
        assert session.compile("product", product, (Slot((1, 20)), Slot(w.shape))) is not program
        for _ in range(2):
            session.run(program, ("x", "w"), "y")
            assert np.abs(session.receive("y") - x @ w).max() < 1e-3


@pytest.mark.parametrize(("ring", "size"), [("FM64", 8), ("FM128", 16)])
def test_static_operand_is_opened_once(ring, size, operands):
    """When it is marked, and by no matrix product: with SPU that would draw the operand's mask a second time."""
    x, w = (np.round(value * 100).astype(np.int64) for value in operands)
    with Session(ProtocolConfig(ring=ring)) as session:
        session.share("x", x, "client")
        session.share("w", w, "owner")
        with session.phase("opening") as opening:
            session.keep_opened("w", Slot(w.shape, w.dtype))
        program = session.compile("product", product, (Slot(x.shape, x.dtype), Slot(w.shape, w.dtype)))
        costs = []
        for name in ("first", "second", "third"):
            with session.phase(name) as phase:
                session.run(program, ("x", "w"), "y")
            costs.append((phase.bytes, phase.messages))
        assert np.array_equal(session.receive("y"), x @ w)
    assert opening.bytes >= size * w.size
    assert costs == [(size * x.size, 1)] * 3


def test_marking_an_operand_costs_other_protocols_nothing(operands):
    with Session(ProtocolConfig(name="ABY3")) as session:
        session.share("w", operands[1], "owner")
        with session.phase("opening") as opening:
            session.keep_opened("w", Slot(operands[1].shape))
        assert opening.messages == 0


def test_shares_of_inputs_and_outputs_are_counted(operands):
    x, _ = operands
    with Session(ProtocolConfig()) as session:
        with session.phase("in") as phase:
            session.share("x", x, "client")
        assert phase.sent[0].messages == 1
        assert phase.sent[0].bytes == pytest.approx(8 * x.size, abs=200)
        assert phase.sent[1].messages == 0
        with session.phase("out") as phase:
            assert np.allclose(session.receive("x"), x, atol=1e-5)
        assert (phase.sent[0].messages, phase.sent[1].messages) == (0, 1)


def test_public_values_cost_nothing_and_reveals_are_counted():
    with Session(ProtocolConfig()) as session:
        with session.phase("publish") as phase:
            session.publish("i", np.int32(2))
        assert phase.bytes == 0
        session.share("x", np.arange(4.0), "client")
        program = session.compile("open", lambda x, i: reveal(x) * i, (Slot((4,)), Slot((), np.int32, public=True)))
        assert program.reveals == 1
        session.run(program, ("x", "i"), "y")
        assert np.allclose(session.receive("y"), 2 * np.arange(4.0))


def test_working_directory_and_beaver_cache(operands):
    x, w = operands
    here, before = os.getcwd(), set(Path.cwd().iterdir())
    with Session(ProtocolConfig()) as session:
        session.share("x", x, "client")
        session.share("w", w, "owner")
        session.keep_opened("w", Slot(w.shape))
        session.run(session.compile("product", product, (Slot(x.shape), Slot(w.shape))), ("x", "w"), "y")
        assert os.getcwd() == here
        assert len(list(workspace().glob("BeaverCache.*"))) == 2
        assert set(Path.cwd().iterdir()) == before
    assert not list(workspace().glob("BeaverCache.*"))


def test_failure_in_a_party_reaches_the_caller():
    with Session(ProtocolConfig()) as session:
        program = session.compile("double", lambda x: x + x, (Slot((2,)),))
        with pytest.raises(Exception, match="nothing here"):
            session.run(program, ("nothing here",), "y")
        with pytest.raises(RuntimeError, match="has ended"):
            session.publish("x", np.zeros(2))


def test_failure_of_one_party_does_not_hang():
    started = time.monotonic()
    with Session(ProtocolConfig()) as session:
        session.share("x", np.zeros(2), "client")
        session.parties[1].submit(session.parties[1].runtime.del_var, "x").result()
        with pytest.raises(Exception, match="x"):
            session.receive("x")
    assert time.monotonic() - started < 10


def test_two_sessions_at_once(operands):
    x, w = operands
    with Session(ProtocolConfig()) as one, Session(ProtocolConfig(ring="FM128")) as two:
        for session in (one, two):
            session.share("x", x, "client")
            session.share("w", w, "owner")
            session.keep_opened("w", Slot(w.shape))
            program = session.compile("product", product, (Slot(x.shape), Slot(w.shape)))
            for _ in range(2):
                session.run(program, ("x", "w"), "y")
        for session in (one, two):
            assert np.abs(session.receive("y") - x @ w).max() < 1e-3


@pytest.mark.parametrize("score", [0.0, -30.0, -600.0, -1e4])
def test_exp_is_right_at_every_mask(score):
    with Session(ProtocolConfig()) as session:
        session.share("x", np.array([score], np.float32), "client")
        session.run(session.compile("exp", jnp.exp, (Slot((1,)),)), ("x",), "y")
        assert session.receive("y")[0] == pytest.approx(np.exp(score), abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "ABY3", "parties": 2}, "ABY3 runs between 3 parties, not 2"),
        ({"name": "CHEETAH", "parties": 3}, "CHEETAH runs between 2 parties, not 3"),
        ({"fraction_bits": 30}, "FM64 needs a value from 8 to 24"),
        ({"name": "SPDZ"}, "name"),
        ({"rnig": "FM64"}, "rnig"),
    ],
)
def test_protocols_that_cannot_run(settings, message):
    with pytest.raises(ValidationError, match=message):
        ProtocolConfig.model_validate(settings)
