"""Sampling of drafted tokens under encryption: the paper's naive way and `flags`, in one run, on random logits (POST, Table 2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from ..errors import UserError
from ..generation.assisted import LOGIT_BITS
from ..network import NetworkProfile
from ..post.draft import Draft
from ..post.flags import LARGEST_VOCABULARY, DealtPlan, DealtVerifier, Verifier
from ..post.flags_stock import StockVerifier
from ..post.naive import DealtNaive, Naive, NaiveDraft, StockNaive
from ..post.residual import draw, residual
from ..primitives.fixed import encode
from ..progress import Progress, silent
from ..runtime import ProtocolConfig, Session
from ..runtime.assisted import TRUST, Assisted, offline

_SPREAD = 2.5  # deviation of random logits: perplexities like those of language models
_DRIFT = 0.8  # of the draft's logits from the target's
_MISSED = 0.5  # deviation of the log of the softmax's sum from its prediction


@dataclass(frozen=True)
class Positions:
    """What is sampled from: logits [g + 1, vocabulary] less their reference, and the draft."""

    logits: np.ndarray
    draft: Draft


def random_positions(vocabulary: int, length: int, seed: int = 0) -> Positions:
    """Targets and drafts that agree about as well as a model and its distillate."""
    random = np.random.default_rng(seed)
    logits = _SPREAD * random.standard_normal((length + 1, vocabulary))
    drafted = logits[:-1] + _DRIFT * random.standard_normal((length, vocabulary))
    q = np.exp(drafted - drafted.max(-1, keepdims=True))
    q /= q.sum(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True)) + _MISSED * random.standard_normal((length + 1, 1))
    return Positions(logits, Draft([draw(random, row) for row in q], q))


def bench_sampling(
    vocabulary: int,
    length: int,
    ops: str,
    protocol: ProtocolConfig,
    networks: Sequence[NetworkProfile] = (),
    repeats: int = 3,
    refined: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """`naive` and `optimised`: of one pass, after one that warms up, what one party sends and median compute; with a dealer what it
    sends to the party that gets more, and the compute of dealing; `modelled`: seconds on each network. `ratio`: naive over
    optimised. `refined`: with a second reference, as where predictions of the log sum are poor (plugin only).

    Raises UserError for a vocabulary that `flags` refuses.
    """
    if vocabulary > LARGEST_VOCABULARY:
        raise UserError(f"--vocabulary {vocabulary}: flags serves vocabularies up to {LARGEST_VOCABULARY}; give at most that")
    plan = DealtPlan(vocabulary, 1.0, 0.0, 64, 64 if refined else None)
    positions, costs = random_positions(vocabulary, length), {}
    for name in progress(["naive", "optimised"], "sampling", "way"):
        costs[name] = _cost(ops, protocol, plan, positions, name == "naive", repeats, networks)
    naive, ours = costs["naive"], costs["optimised"]
    ratio = {key: naive[key] / ours[key] for key in ("seconds", "messages", "bytes")}
    ratio |= {name: naive["modelled"][name] / seconds for name, seconds in ours["modelled"].items()}
    return {
        "vocabulary": vocabulary,
        "draft_length": length,
        "refined": refined,
        "ops": ops,
        "protocol": protocol.name,
        "trust": TRUST if ops == "plugin" else protocol.trust,
        **costs,
        "ratio": ratio,
    }


def _cost(
    ops: str,
    protocol: ProtocolConfig,
    plan: DealtPlan,
    positions: Positions,
    naive: bool,
    repeats: int,
    networks: Sequence[NetworkProfile],
) -> dict[str, Any]:
    with Session(protocol) as session:
        bits = LOGIT_BITS if ops == "plugin" else 2 * protocol.fraction_bits
        session.share("logits", encode(positions.logits, bits), "owner")
        once = (_naive if naive else _optimised)(session, ops, plan, positions, bits)
        phases = []
        for i in range(repeats + 1):
            with session.phase(f"pass {i}") as phase:
                once(np.random.default_rng(i))
            phases.append((phase, session.phases[offline(f"pass {i}")]))
    online, dealt = phases[-1]
    seconds, dealing = (median(each.seconds for each in kind) for kind in zip(*phases[1:], strict=True))
    return {
        "seconds": seconds,
        "messages": online.messages,
        "bytes": online.bytes,
        "dealer_bytes": dealt.bytes,
        "dealer_seconds": dealing,
        "modelled": {each.name: each.seconds(seconds, online.messages, online.bytes) for each in networks},
    }


def _naive(session: Session, ops: str, plan: DealtPlan, positions: Positions, bits: int) -> Callable[[np.random.Generator], int]:
    """A pass that gives the number of accepted tokens."""
    way: Naive = DealtNaive(Assisted(session), plan) if ops == "plugin" else StockNaive(session, plan)
    hot, q = np.eye(plan.vocabulary)[positions.draft.tokens], positions.draft.probabilities
    return lambda random: way.verify(NaiveDraft(hot, q, random.random(len(q) + 1)))[0]


def _optimised(
    session: Session, ops: str, plan: DealtPlan, positions: Positions, bits: int
) -> Callable[[np.random.Generator], int]:
    """A pass as `Flags` makes it, that gives the number of accepted tokens."""
    verifier: Verifier = DealtVerifier(Assisted(session), plan) if ops == "plugin" else StockVerifier(session, plan)
    tokens, q = np.array(positions.draft.tokens), positions.draft.probabilities
    chosen = q[np.arange(len(q)), tokens]

    def once(random: np.random.Generator) -> int:
        accepted = verifier.accepted(tokens, random.random(len(q)) * chosen)
        p = plan.probabilities(session.receive_narrow("logits", bits, accepted))
        draw(random, residual(q[accepted], p) if accepted < len(q) else p)
        return accepted

    return once
