"""Computed blocks in which nothing fires: a constant number a token, or one that varies and is rounded up to a capacity bucket.

Programs are compiled for a few numbers of blocks (comet/assisted_variable.py), so a number that varies is rounded up to the next of
them; what is added is filled by the gate's order (gate.py). It tells more of the text (docs/leakage.md): this says what it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spu_llm.comet.activity import activity, masses
from spu_llm.comet.assisted_variable import buckets
from spu_llm.comet.blocks import in_blocks
from spu_llm.comet.prepared import LayerSparsity
from spu_llm.models import Decoder
from spu_llm.progress import Progress


def waste(
    decoder: Decoder,
    layers: Sequence[LayerSparsity],
    levels: Sequence[float],
    sequences: np.ndarray,
    skipped: int,
    progress: Progress,
) -> dict[str, Any]:
    """By name of a rule, for each layer: blocks computed a token, share of them in which nothing fires, recall of mass and neurons.

    "constant" is what the prepared file says; "above" are the blocks above its threshold, "filled" these and others up to a bucket;
    "level" the same with each layer's threshold of `levels`.
    """
    found: dict[str, list[dict[str, float]]] = {}
    for i, seen in enumerate(activity(decoder, sequences, skipped, progress)):
        layer = layers[i]
        weights, fires = masses(decoder.params["layers"][i], seen.hidden), (seen.hidden > 0).astype(np.float32)
        sums, firing = (in_blocks(each, layer.order, layer.blocks) for each in (weights, fires))
        scores, sizes = layer.neurons.scores(seen.normed), np.array(buckets(layer.blocks))
        chosen = {"constant": places(scores, layer.threshold or 0.0) < layer.active_blocks}
        for name, level in (("", layer.threshold or 0.0), ("level, ", levels[i])):
            above = scores > level
            room = sizes[np.searchsorted(sizes, above.sum(1))]
            chosen |= {f"{name}above": above, f"{name}filled": places(scores, level) < room[:, None]}
        for name, blocks in chosen.items():
            found.setdefault(name, []).append(tally(blocks, sums, firing))
    return {name: {key: [each[key] for each in rows] for key in rows[0]} for name, rows in found.items()}


def places(scores: np.ndarray, level: float) -> np.ndarray:
    """[rows, blocks] each block's place in the gate's order: those above the level first."""
    return np.argsort(np.argsort(scores <= level, axis=1, kind="stable"), axis=1)


def tally(blocks: np.ndarray, sums: np.ndarray, firing: np.ndarray) -> dict[str, float]:
    """Of blocks [rows, blocks] bool with masses and numbers of firing neurons."""
    return {
        "blocks": float(blocks.sum(1).mean()),
        "idle": float((blocks & (firing == 0)).sum() / blocks.sum()),
        "recall": float(sums[blocks].sum() / sums.sum()),
        "neuron_recall": float(firing[blocks].sum() / firing.sum()),
    }
