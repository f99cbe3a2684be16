"""The test of `flags` on SPU's own operations: SEMI2K, ABY3 and CHEETAH, without a dealer (see flags.py for what is tested).

The same logits relative to a learned log of their softmax's sum, so no maximum; SPU's exponential of each; a product with the
client's one-hot, which finds e(x) before the one comparison a position; a tree of ORs, so that what is opened to all parties is the
first rejection and nothing behind it. Trust and masking are those of SPU's protocol; the client shares one-hots, as for the ids
of a pass.

SPU has f fraction bits for everything, 18 in the 64-bit ring. exp and r q are scaled up by 2^4 each, so they resolve 2^-22 there,
which is 2^-18 of the least S. What is left is the error of SPU's exponential (EXP_PADE): up to 1.2e-4 of a value, 3e-5 mostly. So
the total variation distance of what is sampled from the exact distribution is below 6e-5 + 2^-22 V / S.
"""

from __future__ import annotations

from math import log
from typing import Any

import jax.numpy as jnp
import numpy as np
from spu.experimental import reveal

from ..generation.sampling import SamplingConfig
from ..models.centred_head import CentredHead
from ..primitives.stock import as_real, as_ring
from ..runtime import Program, Session, Slot
from .flags import FlagsPlan, first_rejection, plan_offset

EXTRA_BITS = 4
"""Fraction bits that exponentials, and r q, have beside SPU's."""

_USUAL, _LEAST = 10.0, -2.5  # where log S of the text ends and begins; r q S overflows 2.5 above

_STEP = 16  # of a truncation: products with smaller powers of two wrap early (primitives/stock.py)


def plan_stock(head: CentredHead, sampling: SamplingConfig) -> FlagsPlan:
    """The plan for a decoder whose head was centred for the sampling's temperature, not halved. UserError where it cannot serve."""
    if head.halved:
        raise ValueError("stock operations have no second reference; centre the head with `most` infinite")
    return plan_offset(head, sampling, _USUAL, _LEAST)


def scaled(plan: FlagsPlan, fraction_bits: int, logits: Any) -> Any:
    """z / T - offset as SPU's reals, of logits with twice the fraction bits: two truncations."""
    return as_real(logits) * 2.0**-_STEP * (2.0 ** (_STEP - fraction_bits) / plan.temperature) - plan.offset


def rejections(plan: FlagsPlan, fraction_bits: int, logits: Any, hot: Any, thresholds: Any) -> Any:
    """Whether each drafted token is rejected: secret bool [g].

    logits: int64 [g, vocabulary], twice the fraction bits; hot: one-hots of the drafted tokens, int64; thresholds: r q [g], int64
    with `fraction_bits` + EXTRA_BITS fraction bits.
    """
    weights = jnp.exp(scaled(plan, fraction_bits, logits) + EXTRA_BITS * log(2.0))
    chosen = jnp.sum(as_ring(weights) * hot, -1)
    product = as_real(thresholds) * jnp.sum(weights, -1)
    return as_ring(product) - chosen * 2**EXTRA_BITS > 0


def signals(rejected: Any, every: bool) -> Any:
    """int64 [g], public: 0 up to the first rejection and 1 from there on; with `every` 1 at each rejection."""
    step = 1
    while not every and step < len(rejected):
        earlier = jnp.concatenate([jnp.zeros(step, bool), rejected[:-step]])
        rejected = jnp.logical_or(rejected, earlier)
        step *= 2
    return reveal(rejected.astype(jnp.int64))


class StockVerifier:
    """The test on SPU's own operations, on the variable `logits` of a session. `every` opens all verdicts, as the paper does."""

    def __init__(self, session: Session, plan: FlagsPlan, every: bool = False):
        self.plan = plan
        self._session = session
        self._every = every

    def accepted(self, tokens: np.ndarray, thresholds: np.ndarray) -> int:
        """How many of the client's tokens are accepted; other parties' do not count."""
        session, bits = self._session, self._session.protocol.fraction_bits + EXTRA_BITS
        hot = (np.asarray(tokens)[:, None] == np.arange(self.plan.vocabulary)).astype(np.int64)
        session.share("flags.hot", hot, "client")
        session.share("flags.thresholds", np.floor(thresholds * 2.0**bits).astype(np.int64), "client")
        session.run(self.program(len(tokens)), ("logits", "flags.hot", "flags.thresholds"), "flags.signals")
        return int(first_rejection(session.words("flags.signals")[0]))  # public: each party's word is the value

    def program(self, count: int) -> Program:
        """The test of `count` drafted tokens."""
        rows = (count, self.plan.vocabulary)
        slots = Slot((count + 1, rows[1]), np.int64), Slot(rows, np.int64), Slot((count,), np.int64)
        return self._session.compile("flags", self._signals, slots)

    def _signals(self, logits: Any, hot: Any, thresholds: Any) -> Any:
        rejected = rejections(self.plan, self._session.protocol.fraction_bits, logits[:-1], hot, thresholds)
        return signals(rejected, self._every)
