"""The owner's offline step: what fires on public text, neurons in blocks, predictors, how much to compute (Comet).

All of it is plaintext float32 on the owner's machine: nobody else takes part, and no byte is sent.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..models.checkpoint import load_checkpoint
from ..models.config import Params
from ..models.decoder import Decoder
from ..models.sequences import cut_sequences
from ..models.source import ModelConfig, cache_folder, content_digest
from ..models.tokenizer import need_tokenizer
from ..post.align import read_tokens
from ..progress import Progress, silent
from .activity import LayerActivity, activity, masses, refuse_family
from .blocks import check_blocks, cluster, in_blocks
from .gate import best_thresholds, gate_recalls
from .predictor import (
    Objective,
    PredictorConfig,
    Split,
    bucket,
    few_sizes,
    recall_curve,
    smallest,
    train_predictor,
)
from .prepared import VERSION, Curve, Facts, LayerSparsity, Measured, Prepared

_CLUSTERINGS = 2  # the second for the number of blocks that the first needs
_DIGITS = 5  # of a measured share


@dataclass(frozen=True)
class Rule:
    """What to prepare. recall, head_recall: shares of mass that the computed blocks and heads are to catch; a head_recall of 1
    computes all heads. neuron_recall: share of the firing neurons that is to be in computed blocks. length: tokens of a sequence,
    the model's prefix included; tokens: of the text, at most. held: share of sequences to stop by, and again to report on. sizes:
    different numbers of blocks, and of heads, that layers may have. fresh: begin anew, whatever was kept.
    """

    blocks: int = 64
    rank: int = 32
    recall: float = 0.97
    head_recall: float = 0.8
    neuron_recall: float = 0.93
    length: int = 128
    tokens: int = 98304
    held: float = 0.1
    sizes: int = 3
    objective: Objective = "best"
    seed: int = 0
    fresh: bool = False


def prepare(model: ModelConfig, texts: Sequence[Path], rule: Rule, progress: Progress = silent) -> Prepared:
    """Prepare a model, going on where an earlier run of the same was cut short. No texts: the model's calibration.

    Raises UserError for a model without ReLU or tokenizer, a text that is missing or too short, blocks of unequal size.
    """
    begun = time.perf_counter()
    checkpoint, digest = load_checkpoint(model.locate()), content_digest(model.locate())
    decoder = checkpoint.decoder
    refuse_family(decoder.config)
    check_blocks(decoder.config.ffn, rule.blocks)
    need_tokenizer(checkpoint.tokenizer, model)
    if not texts and model.calibration is None:
        raise UserError(f"model {model.name}: names no calibration text; give --text FILE")
    ids = read_tokens(texts or [model.calibration], checkpoint)[: rule.tokens]  # type: ignore[list-item]  # None was refused
    length = min(rule.length, decoder.config.positions)
    sequences = cut_sequences(ids, length, model.prefix)
    text = hashlib.sha256(ids.tobytes()).hexdigest()
    kept = _folder(digest, text, rule)
    layers = prepare_layers(decoder, sequences, len(model.prefix), rule, kept, progress)
    seconds = time.perf_counter() - begun
    facts = Facts(text, len(ids), rule.recall, rule.head_recall, rule.seed, seconds, rule.neuron_recall)
    return Prepared(layers, model.name, digest, facts)


def prepare_layers(
    decoder: Decoder, sequences: np.ndarray, skipped: int, rule: Rule, kept: Path | None = None, progress: Progress = silent
) -> tuple[LayerSparsity, ...]:
    """Each layer's blocks and predictors, from sequences [count, n] that begin with a prefix of `skipped` tokens.

    kept: a folder of finished layers of the same run, to go on from and to add to. Raises UserError where sequences are too few.
    """
    rows = split_rows(len(sequences), sequences.shape[1] - skipped, rule)
    before, layers = None, []
    for i, found in enumerate(activity(decoder, sequences, skipped, progress)):
        file = None if kept is None else kept / f"{i}.safetensors"
        layer = None if file is None else _load(file)
        if layer is None:
            layer = prepare_layer(decoder.params["layers"][i], before, found, rows, rule)
            if file is not None:
                Prepared((layer,), f"layer {i}", "").save(file)
        before = found.normed
        layers.append(layer)
    blocks = few_sizes([layer.active_blocks for layer in layers], rule.sizes)
    heads = few_sizes([layer.active_heads for layer in layers], rule.sizes)
    return tuple(layer.computing(*sizes) for layer, *sizes in zip(layers, blocks, heads, strict=True))


def prepare_layer(params: Params, before: np.ndarray | None, found: LayerActivity, rows: Split, rule: Rule) -> LayerSparsity:
    """One layer's blocks, predictors and how much to compute. before: `normed` of the layer before, None in the first."""
    config = PredictorConfig(rule.rank, rule.objective, seed=rule.seed)
    weights, y = masses(params, found.hidden), _split(found.normed, rows)
    order, needed = needed_blocks(weights[rows.learn], rule)
    sums, firing = (_split(in_blocks(each, order, rule.blocks), rows) for each in (weights, _fires(found.hidden)))
    neurons = train_predictor(y, sums, needed, config)
    scores = neurons.scores(y.choose)
    thresholds, recalls = best_thresholds(scores, sums.choose)
    caught = gate_recalls(scores, firing.choose, thresholds)
    step = bucket(rule.blocks)
    active = max(smallest(recalls, rule.recall, step), smallest(caught, rule.neuron_recall, step))
    heads, active_heads = None, found.heads.shape[1]
    if before is not None and rule.head_recall < 1:
        norms, y_before = _split(found.heads, rows), _split(before, rows)
        heads = train_predictor(y_before, norms, max(1, active_heads // 2), config)
        active_heads = smallest(recall_curve(heads.scores(y_before.choose), norms.choose), rule.head_recall)
    layer = LayerSparsity(order, neurons, active, heads, active_heads)
    layer = replace(layer, measured=measure(layer, thresholds, weights, before, found, rows.report))
    return layer.computing(active)


def needed_blocks(weights: np.ndarray, rule: Rule) -> tuple[np.ndarray, int]:
    """An order [ffn] of neurons with masses [rows, ffn], and how many blocks of it hold the wanted share if the best are chosen."""
    needed = max(1, rule.blocks // 4)
    for _ in range(_CLUSTERINGS):
        order = cluster(weights, rule.blocks, needed, rule.seed)
        sums = in_blocks(weights, order, rule.blocks)
        needed = smallest(recall_curve(sums, sums), rule.recall)
    return order, needed


def measure(
    layer: LayerSparsity,
    thresholds: np.ndarray,
    weights: np.ndarray,
    before: np.ndarray | None,
    found: LayerActivity,
    report: np.ndarray,
) -> Measured:
    """What a layer's blocks and predictors hold of the rows `report`. thresholds: those for 1, 2, ... blocks."""
    seen, hidden = weights[report], found.hidden[report]
    blocks, order = layer.blocks, layer.order
    sums, counts = (in_blocks(each, order, blocks) for each in (seen, _fires(hidden)))
    scores = layer.neurons.scores(found.normed[report])
    plain = in_blocks(seen, np.arange(len(order)), blocks)
    heads: dict[str, Any] = {}
    if layer.heads is not None and before is not None:
        norms, head_scores = found.heads[report], layer.heads.scores(before[report])
        heads = {"heads_by_score": _curve(recall_curve(head_scores, norms)), "head_oracle": _curve(recall_curve(norms, norms))}

    return Measured(
        zeros=float((hidden == 0).mean()),
        recall=1.0,  # both are set with the number of active blocks, by `computing`
        neuron_recall=1.0,
        thresholds=tuple(map(float, thresholds)),
        by_threshold=_curve(gate_recalls(scores, sums, thresholds)),
        neurons_by_threshold=_curve(gate_recalls(scores, counts, thresholds)),
        by_score=_curve(recall_curve(scores, sums)),
        oracle=_curve(recall_curve(sums, sums)),
        neuron_oracle=_curve(recall_curve(sums, counts)),
        still=_curve(recall_curve(-np.broadcast_to(np.arange(blocks), sums.shape), sums)),
        unclustered=_curve(recall_curve(plain, plain)),
        **heads,
    )


def _fires(hidden: np.ndarray) -> np.ndarray:
    """1 where a unit of hidden [rows, ffn] fires."""
    return (hidden > 0).astype(np.float32)


def _curve(shares: Sequence[float] | np.ndarray) -> Curve:
    return tuple(round(float(share), _DIGITS) for share in shares)


def _split(values: np.ndarray, rows: Split) -> Split:
    return Split(*(values[part] for part in rows))


def _load(file: Path) -> LayerSparsity | None:
    """A layer that an earlier run finished; None where there is none, or none whole."""
    try:
        return Prepared.load(file).layers[0]
    except UserError:
        return None


def _folder(digest: str, text: str, rule: Rule) -> Path:
    """Where finished layers of a run are kept."""
    parts = [VERSION, digest, text, asdict(replace(rule, fresh=False))]
    folder = cache_folder() / f"comet-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"
    if rule.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    return folder


def default_path(prepared: Prepared) -> Path:
    """Where a model's prepared file is kept where none is named."""
    return cache_folder() / f"comet-{prepared.digest[:16]}.safetensors"


def split_rows(count: int, length: int, rule: Rule) -> Split:
    """Rows of the text, `count` sequences of `length`: each sequence belongs to one part, drawn by the seed."""
    held = max(1, round(rule.held * count))
    if count < 3 * held:
        raise UserError(
            f"the text gives {count} sequences of {length} tokens, too few to learn from and to measure on; give more text"
        )
    order = np.random.default_rng(rule.seed).permutation(count)
    parts = order[2 * held :], order[:held], order[held : 2 * held]
    return Split(*((np.sort(part)[:, None] * length + np.arange(length)).reshape(-1) for part in parts))


__all__ = ["Rule", "default_path", "measure", "prepare", "prepare_layer", "prepare_layers", "split_rows"]
