"""Training of our decoders in plaintext: next tokens of a text, or a teacher's probabilities (distillation).

Whole sequences without a cache, all layers in one scanned function, AdamW with warm-up and a cosine. A run is decided by its
seed, goes on where it was broken off, and gives bit by bit what one without a break gives on the same machine. A ReLU decoder
may be taught to leave most of its hidden units at 0 (`Sparsity`).
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
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..errors import UserError
from ..progress import Progress, silent
from .cache import LayerCache, Window, cache_shape, window
from .config import DecoderConfig, Params
from .decoder import Decoder, path_name

_DEVIATION = 0.02  # of fresh weights, as GPT-2 has it
_TINY = 1e-12  # added where 0 would be divided by, or have a root of infinite slope


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


Block = Callable[[Any, jax.Array, LayerCache, Window], tuple[jax.Array, Any]]
"""(a layer's weights, x [n, width], an empty cache, where the n tokens stand) -> (x after the layer, what is kept of it)."""

Change = Callable[[jax.Array, jax.Array], jax.Array]
"""(hidden units [n, hidden], what the first kernel gave them [n, columns]) -> the units that the second kernel is applied to."""


@dataclass(frozen=True)
class Sparsity:
    """Asks that a token use at most the part `active` of each layer's hidden units, which count `group` neighbours at a time.

    Where a token uses more, it pays `strength` x the excess (1: twice what is asked) x the norms of its groups: ProSparse's L1
    penalty, over groups (of 1: single units), which ends when enough of them are 0. So tokens come to use about equally many. A
    group pays in proportion to how often it is used, lest a few be used by all tokens and the rest by none (as in ReMoE). What is
    asked falls from everything to `active`, by equal factors, between the parts `begin` and `end` of a training's steps.

    tail: a token pays for its groups beyond those that it may use, by norm, and 1 in place of the excess. Those that it may use,
    the largest, are free, so that no unit of theirs is pressed down. Where all pay, most units of used groups come to be 0 always.
    rare: a unit that fires at less than this part of the tokens whose free groups have its own is drawn up at these tokens, by what
    it lacks; so no unit stays silent for ever, and no token comes to use more groups (of a tail only).
    """

    active: float
    strength: float
    group: int = 1
    begin: float = 0.1
    end: float = 0.6
    tail: bool = False
    rare: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for what no training can follow."""
        if not 0 < self.active <= 1 or not 0 <= self.begin < self.end <= 1:
            raise ValueError(f"active {self.active}, begin {self.begin}, end {self.end}: give parts of 1, and begin below end")
        if self.strength < 0 or self.group < 1:
            raise ValueError(f"strength {self.strength} below 0 or group {self.group} below 1")
        if not 0 <= self.rare < 1 or (self.rare and not self.tail):
            raise ValueError(f"rare {self.rare}: give a part of 1, and tail")

    def asked(self, done: float) -> float:
        """The part of a layer's units that may be used when the part `done` of the steps is behind us."""
        return float(self.active ** np.clip((done - self.begin) / (self.end - self.begin), 0, 1))


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
    return Trained(Decoder(decoder.config, _unstacked(run.params, decoder.config.layers)), run.losses, run.seconds)


@partial(jax.jit, static_argnums=0)
def sequence_logits(config: DecoderConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Logits [batch, n, vocabulary] of whole sequences [batch, n]. `params` has its layers `stacked`."""

    def block(weights: Params, x: jax.Array, cache: LayerCache, place: Window) -> tuple[jax.Array, None]:
        return Decoder(config, {}).block(weights, x, cache, place)[0], None

    return sequence_pass(config, params, tokens, block)[0]


def sequence_pass(config: DecoderConfig, params: Params, tokens: jax.Array, block: Block) -> tuple[jax.Array, Any]:
    """Logits of whole sequences [batch, n] through layers that `block` computes, and what it keeps, as [layers, batch, ...].

    `block` is given one layer of params["layers"], whatever that holds, stacked.
    """
    n = tokens.shape[1]
    place = window(config, 0, n, n)
    empty = LayerCache(*(jnp.zeros(cache_shape(config, n)) for _ in range(2)))
    x = params["embed"]["table"][tokens]
    if "positions" in params["embed"]:
        x = x + params["embed"]["positions"][:n]

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, Any]:
        return jax.vmap(lambda row: block(weights, row, empty, place))(x)

    x, kept = jax.lax.scan(layer, x, params["layers"])
    table = params["embed" if config.tied_head else "head"]["table"]
    return Decoder(config, {}).final(params["final"], x) @ table.T, kept


def hidden_block(config: DecoderConfig, change: Change | None = None, keep: Literal["units", "inputs"] = "units") -> Block:
    """A decoder's own layer, which keeps its hidden units [n, hidden], after `change` where one is given, or what the first kernel
    gave them.

    Raises UserError for a mixture of experts, whose units are many small layers'.
    """
    if config.experts is not None:
        raise UserError(f"family {config.family}: hidden units of experts are not read; use a decoder without experts")

    def block(weights: Params, x: jax.Array, cache: LayerCache, place: Window) -> tuple[jax.Array, jax.Array]:
        seen: dict[str, jax.Array] = {}

        def intercept(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
            name = context.module.name
            if name == "down":
                seen["units"] = args[0] if change is None else change(args[0], seen["inputs"])
                return call(seen["units"])
            found = call(*args, **kwargs)
            if name in ("up", "gate_up"):
                seen["inputs"] = found
            return found

        with nn.intercept_methods(intercept):
            x, _ = Decoder(config, {}).block(weights, x, cache, place)
        return x, seen[keep]

    return block


class Reader:
    """Reads whole sequences with a decoder: logits [batch, n, vocabulary] as a JAX array."""

    def __init__(self, decoder: Decoder):
        self._config, self._params = decoder.config, stacked(decoder.params)

    def __call__(self, tokens: np.ndarray) -> jax.Array:
        return sequence_logits(self._config, self._params, tokens)


# Losses


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


def sparsity_penalty(inputs: jax.Array, sparsity: Sparsity, asked: Any) -> jax.Array:
    """What `Sparsity` has units, ReLU of inputs [layers, batch, n, hidden], pay while the part `asked` of them may be used.

    Norms count relative to their layer's usual one, so that smaller units and a larger second kernel are no way out.
    """
    inputs = inputs.reshape(*inputs.shape[:-1], -1, sparsity.group)
    groups = jax.nn.relu(inputs)
    norms = jnp.sqrt(jnp.sum(groups**2, -1) + _TINY)
    used = jnp.any(groups != 0, -1)
    often = used.mean((1, 2))
    usual = norms.sum((1, 2, 3)) / jnp.maximum(used.sum((1, 2, 3)), 1)
    price = often / jnp.maximum(often.mean(-1, keepdims=True), _TINY) / usual[:, None]
    due = norms * jax.lax.stop_gradient(price)[:, None, None]
    if sparsity.tail:
        free = jnp.argsort(jnp.argsort(-norms)) < asked * norms.shape[-1]
        lacked = _lacked(inputs / jax.lax.stop_gradient(usual)[:, None, None, None, None], free & used, sparsity.rare)
        return sparsity.strength * ((due * ~free).mean() + lacked) / asked
    excess = jnp.maximum(used.mean(-1) / asked - 1, 0)
    return sparsity.strength * (jax.lax.stop_gradient(excess) * due.mean(-1) / asked).mean()


def _lacked(inputs: jax.Array, open_: jax.Array, rare: float) -> jax.Array:
    """What units that fire too rarely lack of firing, by inputs [layers, batch, n, groups, size], where their groups are open."""
    fires = jnp.sum((inputs > 0) & open_[..., None], (1, 2)) / jnp.maximum(open_.sum((1, 2)), 1)[..., None]
    drawn = (fires < rare)[:, None, None] & open_[..., None]
    return (jax.nn.relu(-inputs) * drawn).mean()


def _mean(values: jax.Array, weights: Any) -> jax.Array:
    return (values * weights).sum() / (values.shape[0] * jnp.sum(jnp.asarray(weights)))


def perplexity(decoder: Decoder, sequences: np.ndarray, weights: np.ndarray, batch: int = 4, progress: Progress = silent) -> float:
    """exp of the mean cross-entropy of the next tokens of sequences [count, n], which are read `batch` at a time."""
    reader, total = Reader(decoder), 0.0
    for at in progress(range(0, len(sequences), batch), "reading", "batch"):
        rows = sequences[at : at + batch]
        total += float(next_token_loss(reader(rows), Batch(rows, weights))) * len(rows)
    return float(np.exp(total / len(sequences)))


# Texts as sequences


def cut_sequences(ids: np.ndarray, length: int, prefix: tuple[int, ...] = ()) -> np.ndarray:
    """A text's tokens as sequences [count, length], each after a model's prefix; what is left at the end is dropped."""
    own = length - len(prefix)
    count = len(ids) // own if own > 0 else 0
    if count == 0:
        raise UserError(
            f"a text of {len(ids)} tokens gives no sequence of {length} with a prefix of {len(prefix)}; give a longer one"
        )
    body = np.asarray(ids[: count * own], np.int32).reshape(count, own)
    return np.concatenate([np.tile(np.asarray(prefix, np.int32), (count, 1)), body], axis=1)


def sequence_weights(length: int, prefix: tuple[int, ...] = ()) -> np.ndarray:
    """1 where a position predicts a token of the text, 0 inside the prefix."""
    return (np.arange(length) >= len(prefix) - 1).astype(np.float32)


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


def stacked(params: Params) -> Params:
    """The parameters with those of all layers as arrays [layers, ...], in memory of their own."""
    layers = jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *params["layers"])
    others = {name: jax.tree_util.tree_map(jnp.array, part) for name, part in params.items() if name != "layers"}
    return {**others, "layers": layers}


def _unstacked(params: Params, layers: int) -> Params:
    whole = jax.tree_util.tree_map(np.asarray, params)
    return {**whole, "layers": [jax.tree_util.tree_map(lambda leaf, i=i: leaf[i], whole["layers"]) for i in range(layers)]}


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
