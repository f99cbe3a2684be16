"""What predictions cost: against the next token, or a teacher's probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..progress import Progress, silent
from .decoder import Decoder
from .sequences import Reader


class Teacher(NamedTuple):
    """Probabilities to learn at each position: of tokens `ids` [batch, n, k], or of all (ids None, k = vocabulary)."""

    ids: Any
    probabilities: Any


class Batch(NamedTuple):
    """tokens [batch, n]; weights [n] of what is predicted at each position; the teacher, where there is one."""

    tokens: Any
    weights: Any
    teacher: Teacher | None = None


Loss = Callable[[jax.Array, Batch], jax.Array]
"""Logits [batch, n, vocabulary] to a mean a position."""


@jax.jit
def next_token_loss(logits: jax.Array, batch: Batch) -> jax.Array:
    """Cross-entropy of each position's next token."""
    wanted = jnp.asarray(batch.tokens)[:, 1:]
    found = jnp.take_along_axis(logits[:, :-1], wanted[..., None], axis=-1)[..., 0]
    return _mean(jax.nn.logsumexp(logits[:, :-1], axis=-1) - found, batch.weights[:-1])


@jax.jit
def distillation_loss(logits: jax.Array, batch: Batch) -> jax.Array:
    """Cross-entropy against the teacher's probabilities (POST's alignment).

    Of a teacher that tells its k best tokens only, all others are one more token: the student learns what mass they have.
    """
    assert batch.teacher is not None
    ids, p = batch.teacher
    logs = jax.nn.log_softmax(logits, axis=-1)
    if ids is None:
        return _mean(-(p * logs).sum(-1), batch.weights)
    chosen = jnp.take_along_axis(logs, jnp.asarray(ids).astype(jnp.int32), axis=-1)
    rest = jnp.log(jnp.maximum(1.0 - jnp.exp(chosen).sum(-1), 1e-6))
    return _mean(-(p * chosen).sum(-1) - jnp.maximum(1.0 - p.sum(-1), 0.0) * rest, batch.weights)


def perplexity(decoder: Decoder, sequences: np.ndarray, weights: np.ndarray, batch: int = 4, progress: Progress = silent) -> float:
    """exp of the mean cross-entropy of the next tokens of sequences [count, n], which are read `batch` at a time."""
    reader, total = Reader(decoder), 0.0
    for at in progress(range(0, len(sequences), batch), "reading", "batch"):
        rows = sequences[at : at + batch]
        total += float(next_token_loss(reader(rows), Batch(rows, weights))) * len(rows)
    return float(np.exp(total / len(sequences)))


def _mean(values: jax.Array, weights: Any) -> jax.Array:
    return (values * weights).sum() / (values.shape[0] * jnp.sum(jnp.asarray(weights)))
