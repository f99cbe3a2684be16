"""Runs functions of `Fixed` numbers between two real parties with a dealer, and says what they cost."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from spu_llm.dealer.generator import message_bytes
from spu_llm.primitives.fixed import RING_BITS, Fixed
from spu_llm.runtime import ProtocolConfig, Session, Slot
from spu_llm.runtime.assisted import OFFLINE, Assisted, OperandSlot


@dataclass(frozen=True)
class Cost:
    """Of one run: what each party sends in the program, what the dealer sends to each, words of material, seconds."""

    messages: int
    bytes: int
    dealer_bytes: tuple[int, int]
    words: int
    seconds: float
    offline_seconds: float


def run_dealt(function: Callable, *args: Fixed, operands: Collection[int] = (), runs: int = 1) -> tuple[Any, Cost]:
    """function(*args) between two parties: its `Fixed` results with their integers revealed, and the cost of the last run.

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
        shapes = tuple(arg.with_raw(jax.ShapeDtypeStruct(np.shape(arg.raw), np.int64)) for arg in args)
        with jax.experimental.enable_x64():
            leaves, tree = jax.tree_util.tree_flatten(jax.eval_shape(function, *shapes))
        outputs = [f"out{i}" for i in range(len(leaves))]
        program = assisted.compile("tested", lambda *flat: jax.tree_util.tree_leaves(function(*flat)), tuple(slots), (None,) * len(leaves))
        for number in range(runs):
            before = session.phases[OFFLINE].seconds
            with session.phase(f"online {number}") as online:
                assisted.run(program, tuple(names), outputs)
            offline = session.phases[OFFLINE].seconds - before
        found = [np.asarray(session.receive(name)) for name in outputs]
    dealer_bytes = message_bytes(program.specification)
    cost = Cost(online.messages, online.bytes, dealer_bytes, program.specification.words, online.seconds, offline)
    return jax.tree_util.tree_map(_signed, tree.unflatten(found), is_leaf=lambda x: isinstance(x, Fixed)), cost


def _signed(x: Fixed) -> Fixed:
    shift = RING_BITS - x.modulus
    return x.with_raw(x.raw << shift >> shift)
