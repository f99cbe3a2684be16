"""Speculative sampling's rule on the client: what is drawn follows the target's distribution p, whatever the draft's q was.

A drafted x, drawn from q, is accepted with probability min(1, p(x) / q(x)); instead of a rejected one a token is drawn from
[p - q]_+ / sum [p - q]_+ (Leviathan, Kalman, Matias, ICML 2023; POST, ICML 2025). Everything here is local and in the clear:
`distribution` decides by it, `flags` has the verdict from the secure test and draws here what takes a rejected token's place.
"""

from __future__ import annotations

import numpy as np

_STREAM = 1  # the draft's is another (draft.py)


def verdict(random: np.random.Generator, token: int, q: np.ndarray, p: np.ndarray) -> int | None:
    """None where a drafted token is accepted, else the token that takes its place.

    q: the distribution [vocabulary] that it was drawn from, one-hot where it was not drawn; p: the target's. Takes one number
    of `random`, and a second one after a rejection.
    """
    if random.random() * q[token] < p[token]:
        return None
    return draw(random, residual(q, p))


def residual(q: np.ndarray, p: np.ndarray) -> np.ndarray:
    """The distribution [vocabulary] of what takes a rejected token's place: where p exceeds q.

    Where it does so nowhere, rejections come from rounding alone, and p serves.
    """
    rest = np.maximum(p - q, 0.0)
    total = rest.sum()
    return rest / total if total > 0 else p


def target_random(seed: int, position: int) -> np.random.Generator:
    """The numbers by which a position is accepted or drawn anew; both disclosures take the same, a draft has its own."""
    return np.random.default_rng([seed, _STREAM, position])


def draw(random: np.random.Generator, p: np.ndarray) -> int:
    """A token from a distribution [vocabulary], float64: one number of `random`."""
    return int(random.choice(len(p), p=p / p.sum()))
