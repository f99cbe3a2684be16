"""Low-rank predictors of what a token needs, and how good they are (Comet, "Predictor"; recipe: Deja Vu, ICML 2023).

A predictor reads y [rows, width] and scores blocks of neurons, or heads; the best ones are computed. It is trained on masses
[rows, outputs] of public text: how much each block or head adds. AdamW, early stop on recall of rows that it does not learn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .blocks import best_of
from .prepared import BUCKETS, LowRank

Objective = Literal["shares", "best", "masses"]
"""What scores learn.

shares: the log of each output's share of the row's mass, by cross-entropy over outputs. best: whether an output is among the row's
true best, by Deja Vu's weighted binary cross-entropy. masses: the mass itself, by least squares.
"""


class Split(NamedTuple):
    """Rows to learn from, to stop and choose by, and to report on."""

    learn: Any
    choose: Any
    report: Any


@dataclass(frozen=True)
class PredictorConfig:
    """rank: inner width. epochs: at most; patience: how many without a better recall are too many. batch: rows of a step. rate:
    AdamW's largest, lowered along a cosine; decay: its weight decay.
    """

    rank: int = 32
    objective: Objective = "best"
    epochs: int = 40
    patience: int = 4
    batch: int = 512
    rate: float = 3e-3
    decay: float = 1e-2
    seed: int = 0


def train_predictor(y: Split, masses: Split, active: int, config: PredictorConfig) -> LowRank:
    """The predictor of masses [rows, outputs] from y [rows, width] whose `active` best outputs caught most of `choose`."""
    mean, deviation = y.learn.mean(0), y.learn.std(0) + 1e-6
    inputs = Split(*(jnp.asarray((part - mean) / deviation) for part in y))
    targets = jnp.asarray(_target(config.objective, masses.learn, active))
    params = _fresh(inputs.learn.shape[1], masses.learn, config)
    batch = min(config.batch, len(inputs.learn))
    steps = len(inputs.learn) // batch
    optimizer = _optimizer(config, steps)
    state = optimizer.init(params)
    random = np.random.default_rng(config.seed)
    best, kept, waited = -1.0, params, 0
    for _ in range(config.epochs):
        rows = random.permutation(len(inputs.learn))[: steps * batch].reshape(steps, batch)
        params, state = _epoch(config, steps, params, state, (inputs.learn, targets), rows)
        found = recall_curve(np.asarray(params.scores(inputs.choose)), masses.choose)[active - 1]
        best, kept, waited = (found, params, 0) if found > best else (best, kept, waited + 1)
        if waited > config.patience:
            break
    return _unscaled(kept, mean, deviation)


def _fresh(width: int, masses: np.ndarray, config: PredictorConfig) -> LowRank:
    """Scores that say of every row what is so in the mean."""
    random = np.random.default_rng(config.seed)
    outputs = masses.shape[1]
    first = random.standard_normal((width, config.rank)) / np.sqrt(width)
    second = 0.1 * random.standard_normal((config.rank, outputs)) / np.sqrt(config.rank)
    mean = _target(config.objective, masses, max(1, outputs // 4)).mean(0)
    bias = mean if config.objective == "masses" else np.log(mean + 1e-4)
    arrays = (first, np.zeros(config.rank), second, bias)
    return LowRank(*(jnp.asarray(array, jnp.float32) for array in arrays))


def _unscaled(params: LowRank, mean: np.ndarray, deviation: np.ndarray) -> LowRank:
    """The same predictor of inputs as the model has them."""
    first = np.asarray(params.first) / deviation[:, None]
    found = LowRank(first, np.asarray(params.first_bias) - mean @ first, params.second, params.second_bias)
    return LowRank(*(np.asarray(part, np.float32) for part in found))


def _optimizer(config: PredictorConfig, steps: int) -> optax.GradientTransformation:
    rate = optax.cosine_decay_schedule(config.rate, config.epochs * steps, 0.05)
    return optax.adamw(rate, weight_decay=config.decay, mask=LowRank(True, False, True, False))


@partial(jax.jit, static_argnums=(0, 1))
def _epoch(config: PredictorConfig, steps: int, params: LowRank, state: Any, data: Any, rows: Any) -> tuple[LowRank, Any]:
    """Steps over rows [steps, batch] of data, inputs and targets."""
    optimizer, loss = _optimizer(config, steps), _LOSSES[config.objective]

    def step(carry: Any, row: jax.Array) -> tuple[Any, None]:
        params, state = carry
        x, wanted = data[0][row], data[1][row]
        gradient = jax.grad(lambda weights: loss(weights.scores(x), wanted))(params)
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, state), rows)[0]


# Objectives


def _target(objective: Objective, masses: np.ndarray, active: int) -> np.ndarray:
    if objective == "shares":
        return masses / np.maximum(masses.sum(1, keepdims=True), 1e-12)
    if objective == "best":
        return (best_of(masses, active) & (masses > 0)).astype(np.float32)
    return masses / max(float(masses.mean()), 1e-12)


def _shares_loss(scores: jax.Array, shares: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy(scores, shares).mean()


def _best_loss(scores: jax.Array, labels: jax.Array) -> jax.Array:
    p = labels.mean()
    weights = labels * (1 - p) + p
    return (weights * optax.sigmoid_binary_cross_entropy(scores, labels)).mean()


def _masses_loss(scores: jax.Array, masses: jax.Array) -> jax.Array:
    return jnp.square(scores - masses).mean()


_LOSSES: dict[Objective, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "shares": _shares_loss,
    "best": _best_loss,
    "masses": _masses_loss,
}


# What predictions catch


def recall_curve(scores: np.ndarray, masses: np.ndarray) -> np.ndarray:
    """[outputs] share of all masses [rows, outputs] that lies in the k = 1, 2, ... best-scoring outputs of each row."""
    sorted_masses = np.take_along_axis(masses, np.argsort(-scores, axis=1, kind="stable"), axis=1)
    caught = np.cumsum(sorted_masses.sum(0, dtype=np.float64))
    return caught / caught[-1] if caught[-1] > 0 else np.ones(len(caught))


def smallest(curve: np.ndarray, recall: float, step: int = 1) -> int:
    """The smallest multiple of `step` of outputs that catches `recall`, by a curve of `recall_curve`."""
    enough = int(np.argmax(curve >= recall)) + 1 if (curve >= recall).any() else len(curve)
    return min(len(curve), -(-enough // step) * step)


def bucket(blocks: int) -> int:
    """The step in which the number of active blocks grows."""
    return max(1, -(-blocks // BUCKETS))


def threshold(scores: np.ndarray, masses: np.ndarray, recall: float) -> float:
    """The score that outputs must be above, so that all rows together catch `recall` of masses [rows, outputs]."""
    order = np.argsort(-scores, axis=None, kind="stable")
    caught = np.cumsum(masses.reshape(-1)[order], dtype=np.float64)
    last = int(np.searchsorted(caught, recall * caught[-1]))
    return float(np.nextafter(scores.reshape(-1)[order[min(last, len(order) - 1)]], np.float32(-np.inf)))


def few_sizes(wanted: Sequence[int], most: int) -> tuple[int, ...]:
    """Each number raised to one of at most `most` of them, so that their sum grows least: every size is a program to compile."""
    sizes = sorted(set(wanted))
    kept = [(*chosen, sizes[-1]) for chosen in combinations(sizes[:-1], min(most, len(sizes)) - 1)]
    raised = [tuple(min(size for size in chosen if size >= each) for each in wanted) for chosen in kept]
    return min(raised, key=sum)
