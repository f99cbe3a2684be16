"""Speculative sampling written down as it is defined, under encryption: what `flags` is measured against (POST, Table 2).

Softmax by maximum and division over the vocabulary; p / q by division, for each word; r < p / q for each word, of which the
verdict of the drafted one is picked after; at the first rejected position [p - q]_+ over its sum by division, running sums, and a
comparison with each, whose count is the token that the client gets. The client gets the verdicts and tells the owner the first
rejection.

On the plugin's primitives (`Dealt`) and on SPU's own operations (`Stock`), each as its kind of operations does it best. A draft's
probabilities are raised to LEAST_DRAFTED, which a quotient needs; fixed-point quotients make the result less exact than `flags`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ..generation.assisted import LOGIT_BITS
from ..primitives import functions
from ..primitives.attention import SoftmaxPlan, divide
from ..primitives.compare import less, maximum, relu
from ..primitives.contract import contract
from ..primitives.fixed import Fixed, encode
from ..primitives.lookup import lookup
from ..primitives.truncate import truncate
from ..runtime import Session, Slot
from ..runtime.assisted import Assisted, DealtProgram
from .flags import FlagsPlan, first_rejection
from .flags_stock import scaled

LEAST_DRAFTED = 2.0**-11

_SCORE_BITS, _SCORE_RANGE = 16, 7  # of z / T: fraction bits, and log2 of what two of them differ by at most
_SHARE_BITS = 28  # of p and q
_QUOTIENT_BITS = 12  # log2 of the largest p / q
_INVERSE = functions.reciprocal(0.06, 3.96, 128, 3)


@dataclass(frozen=True)
class NaiveDraft:
    """What the client has for g drafted tokens: one-hots and q, both [g, vocabulary], and g + 1 uniform numbers."""

    hot: np.ndarray
    q: np.ndarray
    random: np.ndarray

    @property
    def raised(self) -> np.ndarray:
        """q with no zeros."""
        return np.maximum(self.q, LEAST_DRAFTED)


class Naive(Protocol):
    """One pass: verdicts, and the token that follows the accepted ones."""

    def verify(self, draft: NaiveDraft) -> tuple[int, int]:
        """(accepted tokens, the token after them), which the client learns."""


class DealtNaive:
    """By dealer protocols, on the variable `logits` of a session."""

    def __init__(self, assisted: Assisted, plan: FlagsPlan):
        self.plan = plan
        self._assisted = assisted
        self._programs: dict[Any, DealtProgram] = {}
        columns = plan.vocabulary
        self._exp = functions.exponential(2.0 - (1 << _SCORE_RANGE), 1.0, 1 << _SCORE_RANGE)
        self._softmax = SoftmaxPlan(self._exp, _INVERSE, functions.power_of_two(*((4096, -2) if columns < 1024 else (8192, -1))))
        self._quotient = SoftmaxPlan(self._exp, _INVERSE, functions.power_of_two(512, -8))

    def verify(self, draft: NaiveDraft) -> tuple[int, int]:
        """Raises UserError, at the client, where a value left its table."""
        session, count = self._assisted.session, len(draft.hot)
        columns = self.plan.vocabulary
        rows, numbers = Slot((count, columns), np.int64), Slot((count,), np.int64)
        session.share("naive.hot", draft.hot.astype(np.int64), "client")
        session.share("naive.q", encode(draft.raised, _SHARE_BITS), "client")
        session.share("naive.random", encode(draft.random[:count], _SHARE_BITS), "client")
        slots = Slot((count + 1, columns), np.int64), rows, rows, numbers
        program = self._program("naive verdicts", self._verdicts, slots, 2)
        self._assisted.run(program, ["logits", "naive.hot", "naive.q", "naive.random"], ["naive.p", "naive.verdicts"])
        accepted = int(first_rejection(1 - session.give(session.words("naive.verdicts"))))
        session.broadcast(str(accepted).encode(), "client")
        session.publish("naive.accepted", np.int64(accepted))
        session.share("naive.row", encode(draft.q[accepted] if accepted < count else np.zeros(columns), _SHARE_BITS), "client")
        session.share("naive.draw", encode(draft.random[count], _SHARE_BITS), "client")
        row = Slot((columns,), np.int64)
        slots = slots[0], Slot((), np.int64, public=True), row, Slot((), np.int64)
        program = self._program("naive token", self._token, slots, 1)
        self._assisted.run(program, ["naive.p", "naive.accepted", "naive.row", "naive.draw"], ["naive.token"])
        self._assisted.check_ranges()
        return accepted, min(int(session.give(session.words("naive.token"))), columns - 1)

    def _program(self, name: str, function: Callable, slots: tuple, results: int) -> DealtProgram:
        key = (name, slots[0].shape)
        if key not in self._programs:
            self._programs[key] = self._assisted.compile(name, function, slots, (None,) * results)
        return self._programs[key]

    def _verdicts(self, logits: Any, hot: Any, q: Any, random: Any) -> tuple[Any, Any]:
        x = truncate(Fixed(logits * self.plan.factor, LOGIT_BITS + 16), _SCORE_BITS)
        weights = lookup(x - _largest(x), self._exp, modulus=64)
        p = divide(weights, weights.sum(-1, keepdims=True), self._softmax)
        ratio = divide(p[:-1], Fixed(q, _SHARE_BITS), self._quotient)
        verdicts = less(Fixed(random, _SHARE_BITS).reshape(-1, 1), ratio, _SHARE_BITS + _QUOTIENT_BITS)
        return p.raw, contract("gv,gv->g", verdicts, Fixed(hot, 0)).raw

    def _token(self, p: Any, accepted: Any, q: Any, random: Any) -> Any:
        row = jax.lax.dynamic_slice(p, (accepted, jnp.zeros((), accepted.dtype)), (1, p.shape[1]))[0]
        rest = relu(Fixed(row - q, _SHARE_BITS), _SHARE_BITS + 1)
        shares = divide(rest, rest.sum(-1, keepdims=True), self._quotient)
        sums = shares.with_raw(running_sums(shares.raw))
        return less(sums, Fixed(random, _SHARE_BITS), _SHARE_BITS + 2).sum(-1).raw


class StockNaive:
    """On SPU's own operations, on the variable `logits` of a session."""

    def __init__(self, session: Session, plan: FlagsPlan):
        self.plan = plan
        self._session = session

    def verify(self, draft: NaiveDraft) -> tuple[int, int]:
        """(accepted tokens, the token after them), which the client learns."""
        session, count, columns = self._session, len(draft.hot), self.plan.vocabulary
        session.share("naive.hot", draft.hot.astype(np.float32), "client")
        session.share("naive.q", draft.raised.astype(np.float32), "client")
        session.share("naive.random", draft.random[:count].astype(np.float32), "client")
        slots = Slot((count + 1, columns), np.int64), Slot((count, columns)), Slot((count, columns)), Slot((count,))
        program = session.compile("naive verdicts", self._verdicts, slots)
        session.run(program, ("logits", "naive.hot", "naive.q", "naive.random"), ("naive.p", "naive.verdicts"))
        accepted = int(first_rejection(session.receive("naive.verdicts") < 0.5))
        session.broadcast(str(accepted).encode(), "client")
        session.publish("naive.accepted", np.int32(accepted))
        row = draft.q[accepted] if accepted < count else np.zeros(columns)
        session.share("naive.row", row.astype(np.float32), "client")
        session.share("naive.draw", np.asarray(draft.random[count], np.float32), "client")
        slots = Slot((count + 1, columns)), Slot((), np.int32, public=True), Slot((columns,)), Slot(())
        program = session.compile("naive token", _stock_token, slots)
        session.run(program, ("naive.p", "naive.accepted", "naive.row", "naive.draw"), "naive.token")
        return accepted, min(int(session.receive("naive.token")), columns - 1)

    def _verdicts(self, logits: Any, hot: Any, q: Any, random: Any) -> tuple[Any, Any]:
        x = scaled(self.plan, self._session.protocol.fraction_bits, logits).astype(jnp.float32)
        weights = jnp.exp(x - jnp.max(x, -1, keepdims=True))
        p = weights / jnp.sum(weights, -1, keepdims=True)
        verdicts = random[:, None] < p[:-1] / q
        return p, jnp.sum(jnp.where(verdicts, hot, 0.0), -1)


def _stock_token(p: Any, accepted: Any, q: Any, random: Any) -> Any:
    row = jax.lax.dynamic_slice(p, (accepted, jnp.int32(0)), (1, p.shape[1]))[0]
    rest = jnp.maximum(row - q, 0.0)
    sums = running_sums(rest / jnp.sum(rest))
    return jnp.sum((sums < random).astype(jnp.int32))


def running_sums(x: Any) -> Any:
    """Sums of the first 1, 2, ... numbers of x [n], in log2 n steps that shares allow."""
    step = 1
    while step < len(x):
        x = x + jnp.concatenate([jnp.zeros(step, x.dtype), x[:-step]])
        step *= 2
    return x


def _largest(x: Fixed) -> Fixed:
    """[..., n] -> [..., 1], by a tree of comparisons."""
    while (count := x.shape[-1]) > 1:
        half = count // 2
        larger = maximum(x[..., :half], x[..., half : 2 * half], x.bits + _SCORE_RANGE)
        x = x.with_raw(jnp.concatenate([larger.raw, x.raw[..., 2 * half :]], -1))
    return x
