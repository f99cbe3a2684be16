"""Compares making rows of skipped heads at once with putting them off, for each protocol's costs and several networks.

python experiments/comet_cache/policies.py --text results/post_models/texts/held_out.txt --out experiments/comet_cache
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from spu_llm.bench.sparsity_leakage import read_scores
from spu_llm.comet.blocks import best_of
from spu_llm.comet.prepared import Prepared
from spu_llm.comet.refill import RowCost, at_once, refill
from spu_llm.experiment.schema import CONFIGS, load_model, load_network
from spu_llm.models import load_checkpoint
from spu_llm.models.sequences import cut_sequences
from spu_llm.post.align import read_tokens

MODEL = "kjv-relu"
LENGTHS = (1, 4, 16, 64)  # tokens of an answer, whose rows may be put off
PROMPT = 63
TEXTS = 48
NETWORKS = ("100mbps", "wan", "lan", "5gbps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    active, width = _active(arguments.text)
    costs = {
        # scaling and opening a key and a value, 8 bytes a number; asked for in the message that opens q, k and v
        "plugin": RowCost(2 * 2 * width * 8, 0),
        # by SPU's own operations on SEMI2K: the stream's opening once more, and a truncation, 8 bytes a number
        "stock SEMI2K": RowCost(2 * width * 8, 2),
    }
    rows = []
    for length in LENGTHS:
        for stack, cost in costs.items():
            found = refill(active[:, PROMPT : PROMPT + length], cost)
            better = {name: at_once(found, cost, *_prices(name)) for name in NETWORKS}
            rows.append({"tokens": length, "stack": stack, **asdict(found), "at_once_is_better": better})
    result = {"texts": len(active), "layers": active.shape[2], "heads": active.shape[3], "rows": rows}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    _draw(rows, arguments.out / "plot.png")
    for row in rows:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})


def _active(path: Path) -> tuple[np.ndarray, int]:
    """bool [texts, tokens, layers that skip, heads] and a head's width."""
    config = load_model(MODEL)
    checkpoint = load_checkpoint(config.locate())
    prepared = Prepared.load(CONFIGS / "comet" / f"{MODEL}.safetensors")
    texts = cut_sequences(np.asarray(read_tokens([path], checkpoint)), PROMPT + max(LENGTHS))[:TEXTS]
    scores = read_scores(checkpoint.decoder, tuple(config.prefix), prepared, texts)
    masks = [
        best_of(found.reshape(-1, found.shape[-1]), layer.active_heads).reshape(found.shape)
        for layer, found in zip(prepared.layers, scores.heads, strict=True)
        if found is not None
    ]
    return np.stack(masks, 2), checkpoint.decoder.config.head_width


def _prices(name: str) -> tuple[float, float]:
    """Seconds of a byte and of a message."""
    network = load_network(name)
    return network.seconds(0, 0, 1), network.seconds(0, 1, 0)


def _draw(rows: list[dict], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    plugin = [row for row in rows if row["stack"] == "plugin"]
    axes.plot(LENGTHS, [row["bytes_at_once"] for row in plugin], marker="o", label="made at once")
    axes.plot(LENGTHS, [row["bytes"] for row in plugin], marker="o", label="put off, asked for when needed")
    axes.set(
        xscale="log", xlabel="tokens of the answer", ylabel="bytes a layer and token", title="rows of skipped heads, plugin", ylim=0
    )
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
