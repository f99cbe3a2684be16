"""Runs functions of `Fixed` numbers between two real parties with a dealer, and says what they cost."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import enable_x64

from spu_llm.dealer.generator import message_bytes
from spu_llm.primitives.fixed import RING_BITS, Fixed
from spu_llm.runtime import ProtocolConfig, Session, Slot
from spu_llm.runtime.assisted import Assisted, OperandSlot


@dataclass(frozen=True)
class Cost:
    """Of one run: what each party sends in the program, what the dealer sends to each, words of material.

    `seconds` and `offline` (dealing, sending and expanding material) are the least of the runs made.
    """

    messages: int
    bytes: int
    dealer_bytes: tuple[int, int]
    words: int
    seconds: float
    offline: float


def run_dealt(function: Callable, *args: Fixed, operands: Collection[int] = (), runs: int = 1) -> tuple[Any, Cost]:
    """function(*args) between two parties: its `Fixed` results with their integers revealed (of the last run), and the cost.

    `operands` numbers the arguments that are masked operands. Integers known modulo 2^m come back in [-2^(m-1), 2^(m-1)).
    """
    with Session(ProtocolConfig()) as session:
        assisted = Assisted(session)
        names, slots = [], []
        for i, arg in enumerate(args):
            name, raw = f"in{i}", np.asarray(arg.raw, np.int64)
            if i in operands:
                names.append(assisted.mask_operand(name, raw, "owner"))
                slots.append(arg.with_raw(OperandSlot(name, raw.shape)))
            else:
                session.share(name, raw, "client")
                names.append(name)
                slots.append(arg.with_raw(Slot(raw.shape, np.int64)))
        tree = _result_tree(function, args)
        outputs = [f"out{i}" for i in range(tree.num_leaves)]
        keeps = (None,) * tree.num_leaves
        program = assisted.compile("tested", lambda *flat: jax.tree_util.tree_leaves(function(*flat)), tuple(slots), keeps)
        online, offline = [], []
        for number in range(runs):
            before = _offline(session)
            with session.phase(f"online {number}") as phase:
                assisted.run(program, tuple(names), outputs)
            online.append(phase.seconds)
            offline.append(_offline(session) - before)
        found = tree.unflatten([np.asarray(session.receive(name)) for name in outputs])
    words, dealer_bytes = program.specification.words, message_bytes(program.specification)
    cost = Cost(phase.messages, phase.bytes, dealer_bytes, words, min(online), min(offline))
    return jax.tree_util.tree_map(_signed, found, is_leaf=lambda x: isinstance(x, Fixed)), cost


def run_stock(function: Callable, *args: Fixed) -> Any:
    """function(*args) as stock SPU computes it, without a dealer; its `Fixed` results with their integers revealed."""
    with Session(ProtocolConfig()) as session:
        slots = tuple(arg.with_raw(Slot(np.shape(arg.raw), np.int64)) for arg in args)
        program = session.compile("tested", lambda *flat: jax.tree_util.tree_leaves(function(*flat)), slots)
        names = []
        for i, arg in enumerate(args):
            session.share(f"in{i}", np.asarray(arg.raw, np.int64), "client")
            names.append(arg.with_raw(f"in{i}"))
        tree = _result_tree(function, args)
        outputs = [f"out{i}" for i in range(tree.num_leaves)]
        session.run(program, tuple(names), outputs)
        return tree.unflatten([np.asarray(session.receive(name)) for name in outputs])


def run_plain(function: Callable, *args: Fixed) -> Any:
    """function(*args) in plaintext."""
    with enable_x64():
        return jax.tree_util.tree_map(np.asarray, function(*args))


def _result_tree(function: Callable, args: tuple[Fixed, ...]) -> Any:
    shapes = tuple(arg.with_raw(jax.ShapeDtypeStruct(np.shape(arg.raw), np.int64)) for arg in args)
    with enable_x64():
        return jax.tree_util.tree_structure(jax.eval_shape(function, *shapes))


def _offline(session: Session) -> float:
    return sum(phase.seconds for name, phase in session.phases.items() if "offline" in name)


def _signed(x: Fixed) -> Fixed:
    shift = RING_BITS - x.modulus
    return x.with_raw(x.raw << shift >> shift)
