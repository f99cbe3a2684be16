"""Training of our decoders in plaintext: next tokens of a text, or a teacher's probabilities (distillation).

AdamW with warm-up and a cosine. A run is decided by its seed, goes on where it was broken off, and gives bit by bit what one
without a break gives on the same machine. A ReLU decoder may be taught to leave most of its hidden units at 0 (taught_sparsity.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..errors import UserError
from ..progress import Progress, silent
from .config import DecoderConfig, Params
from .decoder import Decoder, path_name
from .losses import Batch, Loss
from .sequences import hidden_block, sequence_logits, sequence_pass, stacked, unstacked
from .taught_sparsity import Sparsity, sparsity_penalty

_DEVIATION = 0.02  # of fresh weights, as GPT-2 has it


@dataclass(frozen=True)
class TrainingConfig:
    """rate: the largest learning rate, reached after `warmup` steps and then lowered along a cosine to a tenth.

    decay: AdamW's weight decay, on matrices only. clip: largest norm of a step's gradient. frozen: endings of names of weights that
    stay as they are, such as "table". save_seconds: between checkpoints. sparsity: of hidden units, where it is to be taught.
    """

    steps: int
    rate: float
    warmup: int = 20
    decay: float = 0.01
    clip: float = 1.0
    frozen: tuple[str, ...] = ()
    save_seconds: float = 60.0
    sparsity: Sparsity | None = None


@dataclass(frozen=True)
class Trained:
    """The decoder, the loss of each step (penalties left out), and the seconds of all steps, those before a break included."""

    decoder: Decoder
    losses: list[float]
    seconds: float


@dataclass(frozen=True)
class Kept:
    """Where work in progress is kept to go on from, and of what it is: what lies there under another label is not used."""

    path: Path
    label: str


def train(
    decoder: Decoder,
    batch_of: Callable[[int], Batch],
    loss: Loss,
    config: TrainingConfig,
    kept: Kept | None = None,
    progress: Progress = silent,
) -> Trained:
    """Train on batch_of(0), batch_of(1), ...

    `kept` is a file, whose label must say what the batches and the loss are; config and first weights are compared here. Raises
    UserError where the loss is no number any more, and where sparsity is asked of a decoder without ReLU.
    """
    if config.sparsity is not None and decoder.config.family != "opt":
        raise UserError(f"family {decoder.config.family} has no ReLU, so none of its units is 0; teach sparsity to a family opt")
    optimizer = _optimizer(config)
    params = stacked(decoder.params)
    run = _Run(params, optimizer.init(params), 0, [], 0.0)
    identity = "" if kept is None else _identity(decoder, config, kept.label)
    if kept is not None:
        run = _restore(kept.path, identity, run) or run
    step = _compiled_step(decoder.config, loss, config)
    saved, begun = time.monotonic(), time.monotonic()
    for i in progress(range(run.step, config.steps), "training", "step"):
        asked = 1.0 if config.sparsity is None else config.sparsity.asked(i / config.steps)
        params, state, value = step(run.params, run.state, batch_of(i), asked)
        losses = [*run.losses, float(value)]
        if not np.isfinite(losses[-1]):
            raise UserError(f"step {i}: the loss is {losses[-1]}; train with a rate below {config.rate}")
        now = time.monotonic()
        run = _Run(params, state, i + 1, losses, run.seconds + now - begun)
        begun = now
        if kept is not None and (now - saved > config.save_seconds or run.step == config.steps):
            _save(kept.path, identity, run)
            saved = begun = time.monotonic()
    return Trained(Decoder(decoder.config, unstacked(run.params, decoder.config.layers)), run.losses, run.seconds)


def rows_of(step: int, batch: int, count: int, seed: int) -> np.ndarray:
    """Which of `count` sequences step `step` has: each once an epoch, in an order drawn from the seed."""
    places = step * batch + np.arange(batch)
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(count) for epoch in set(places // count)}
    return np.array([orders[place // count][place % count] for place in places])


def fresh(config: DecoderConfig, seed: int) -> Decoder:
    """A decoder with random weights: deviation 0.02, less where a layer writes the residual stream, as GPT-2 is initialised."""
    random = np.random.default_rng(seed)

    def drawn(path: Any, leaf: np.ndarray) -> np.ndarray:
        name = path_name(path)
        if name.endswith("scale"):
            return np.ones_like(leaf)
        if name.endswith("bias"):
            return np.zeros_like(leaf)
        writes = name.endswith(("out.kernel", "down.kernel"))
        deviation = _DEVIATION / np.sqrt(2 * config.layers) if writes else _DEVIATION
        return (deviation * random.standard_normal(leaf.shape)).astype(np.float32)

    return Decoder(config, jax.tree_util.tree_map_with_path(drawn, Decoder.blind(config).params))


# One step, and what is kept between steps


class _Run(NamedTuple):
    params: Params
    state: Any
    step: int
    losses: list[float]
    seconds: float


def _optimizer(config: TrainingConfig) -> optax.GradientTransformation:
    warmup = max(1, min(config.warmup, config.steps // 2))
    rate = optax.warmup_cosine_decay_schedule(0.0, config.rate, warmup, max(config.steps, warmup + 1), config.rate / 10)

    def marked(endings: tuple[str, ...], params: Params) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: path_name(path).endswith(endings), params)

    adamw = optax.adamw(rate, b2=0.95, weight_decay=config.decay, mask=partial(marked, ("kernel", "table")))
    learned = optax.chain(optax.clip_by_global_norm(config.clip), adamw)
    if not config.frozen:
        return learned
    return optax.multi_transform({False: learned, True: optax.set_to_zero()}, partial(marked, config.frozen))


@lru_cache(maxsize=2)
def _compiled_step(decoder: DecoderConfig, loss: Loss, config: TrainingConfig) -> Callable[..., tuple[Params, Any, jax.Array]]:
    """One step as a function of parameters, the optimizer's state, a batch, and what part of the hidden units may be used.

    The first two are consumed.
    """
    optimizer = _optimizer(config)

    def step(params: Params, state: Any, batch: Batch, asked: float) -> tuple[Params, Any, jax.Array]:
        def cost(weights: Params) -> tuple[jax.Array, jax.Array]:
            if config.sparsity is None:
                value = loss(sequence_logits(decoder, weights, batch.tokens), batch)
                return value, value
            logits, inputs = sequence_pass(decoder, weights, batch.tokens, hidden_block(decoder, keep="inputs"))
            value = loss(logits, batch)
            return value + sparsity_penalty(inputs, config.sparsity, asked), value

        (_, value), gradient = jax.value_and_grad(cost, has_aux=True)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1))


def _identity(decoder: Decoder, config: TrainingConfig, label: str) -> str:
    """What decides a training run: its settings, its batches and the weights it begins from."""
    settings = {**asdict(config), "save_seconds": None}
    digest = hashlib.sha256(json.dumps([label, settings, asdict(decoder.config)]).encode())
    for leaf in jax.tree_util.tree_leaves(decoder.params):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def _named(run: _Run) -> Iterator[tuple[str, Any]]:
    for part, tree in (("params", run.params), ("state", run.state)):
        for i, leaf in enumerate(jax.tree_util.tree_leaves(tree)):
            yield f"{part}.{i}", leaf


def _save(path: Path, identity: str, run: _Run) -> None:
    """One file, whole or not at all, for this user alone: a model under training may be its owner's secret."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.touch(mode=0o600)
    facts = json.dumps({"identity": identity, "step": run.step, "losses": run.losses, "seconds": run.seconds})
    save_file({name: np.asarray(leaf) for name, leaf in _named(run)}, part, {"training": facts})
    part.replace(path)


def _restore(path: Path, identity: str, like: _Run) -> _Run | None:
    """What was kept of this very run; None where there is nothing of it, or nothing whole."""
    try:
        with safe_open(path, "numpy") as file:
            facts = json.loads(file.metadata()["training"])
            if facts["identity"] != identity:
                return None
            leaves = {name: jnp.array(file.get_tensor(name)) for name, _ in _named(like)}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None

    def filled(part: str, tree: Any) -> Any:
        structure = jax.tree_util.tree_structure(tree)
        return jax.tree_util.tree_unflatten(structure, [leaves[f"{part}.{i}"] for i in range(structure.num_leaves)])

    params, state = filled("params", like.params), filled("state", like.state)
    return _Run(params, state, facts["step"], facts["losses"], facts["seconds"])
