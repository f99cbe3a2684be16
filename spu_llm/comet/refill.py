"""Keys and values of heads that a token skips: made at once, or when a later token needs them (Comet, "KV coherence").

A row is the key and value of one head and token. Made at once it costs `row` bytes. Put off, it costs nothing if the head is not
active again in this text, and else its bytes and a share of a request: all rows that a token finds missing in a layer are asked for
in one merged request of `messages` more messages. So a row is better made at once where

    row < hit (row + messages * delay * bandwidth / rows of a request),

hit being the chance that it is needed. On the plugin a request travels in the message that opens q, k and v anyway, so messages are
0 and putting off never loses; by SPU's own operations a message weighs as much as megabytes, and rows are best made at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RowCost:
    """row: bytes of a key and value of one head; messages: what a request takes beyond a token's own messages."""

    row: float
    messages: int


@dataclass(frozen=True)
class Refill:
    """Per layer and token. skipped: rows of heads that were not active. hit: share of these that a later token needs.

    requests: tokens that find rows missing, as a share; missing: rows asked for; bytes, messages: of rows put off, beyond those of
    active heads; bytes_at_once: of the same rows made at once.
    """

    skipped: float
    hit: float
    requests: float
    missing: float
    bytes: float
    messages: float
    bytes_at_once: float


def refill(active: np.ndarray, cost: RowCost) -> Refill:
    """What putting off costs on texts whose active heads are known: bool [texts, tokens, layers, heads]."""
    texts, tokens, layers, heads = active.shape
    missing = np.zeros((texts, layers, heads), np.int64)
    asked = requests = 0
    for t in range(tokens):
        needed = np.where(active[:, t], missing, 0)
        asked += int(needed.sum())
        requests += int((needed.sum(-1) > 0).sum())
        missing = np.where(active[:, t], 0, missing + 1)
    runs, skipped = texts * tokens * layers, int((~active).sum())
    return Refill(
        skipped / runs,
        asked / max(1, skipped),
        requests / runs,
        asked / runs,
        asked * cost.row / runs,
        requests * cost.messages / runs,
        skipped * cost.row / runs,
    )


def at_once(found: Refill, cost: RowCost, byte_seconds: float, message_seconds: float) -> bool:
    """Whether rows are better made at once, by the rule above, on a network where a byte and a message take so long."""
    per_request = found.missing / found.requests if found.requests else 1.0
    later = found.hit * (cost.row * byte_seconds + cost.messages * message_seconds / per_request)
    return cost.row * byte_seconds < later
