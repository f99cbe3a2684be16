"""Sweeps the share of zeros that thresholds give SmolLM2-135M, and draws what perplexity makes of it (see run.sh)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from spu_llm.comet.thresholds import Rule, ThresholdedReader, calibrate, largest_share
from spu_llm.errors import UserError
from spu_llm.experiment.schema import load_model
from spu_llm.models import Tokenizer, load_checkpoint
from spu_llm.models.losses import perplexity
from spu_llm.models.sequences import cut_sequences, sequence_weights
from spu_llm.progress import bar

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
LENGTH = 128  # of a sequence, the prefix included
LOSS = 0.01  # of perplexity, which a user may take for none
WHO = {"gate": "CATS: |silu(gate)|", "hidden": "TEAL: |hidden|"}


def spread(rows: np.ndarray, count: int) -> np.ndarray:
    """`count` of the rows, evenly spread."""
    return rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int)]


def read(path: Path, tokenizer: Tokenizer, prefix: tuple[int, ...], tokens: int) -> np.ndarray:
    ids = np.asarray(tokenizer.encode(path.read_text()))
    return spread(cut_sequences(ids, LENGTH, prefix), max(1, tokens // (LENGTH - len(prefix))))


def sweep(calibration: Path, texts: Sequence[Path], tokens: int) -> dict[str, Any]:
    model = load_model("smollm2")
    checkpoint = load_checkpoint(model.locate())
    decoder, tokenizer = checkpoint.decoder, checkpoint.tokenizer
    assert tokenizer is not None
    passages = [tokenizer.encode(line) for line in calibration.read_text().splitlines() if line.strip()]
    rows = {path.stem: read(path, tokenizer, model.prefix, tokens) for path in texts}
    weights = sequence_weights(LENGTH, model.prefix)
    found: dict[str, Any] = {
        "model": model.name,
        "calibration": {"file": str(calibration), "tokens": sum(map(len, passages))},
        "shares": SHARES,
        "tokens": {name: int(part[:, len(model.prefix) :].size) for name, part in rows.items()},
        "baseline": {name: perplexity(decoder, part, weights) for name, part in rows.items()},
        "rules": {},
    }
    for rule in get_args(Rule):
        begun = time.perf_counter()
        thresholds = calibrate(decoder, passages, SHARES, rule, model.prefix, bar)
        seconds = time.perf_counter() - begun
        reader, parts = ThresholdedReader(decoder, rule), {}
        for name, part in rows.items():
            results = [reader.perplexity(part, weights, row) for row in bar(thresholds, f"{rule}, {name}", "share")]
            parts[name] = summary([value for value, _ in results], [zeros for _, zeros in results])
        found["rules"][rule] = {"calibration_seconds": seconds, "thresholds": thresholds.round(5).tolist(), **parts}
    return found


def summary(perplexities: list[float], zeros: list[np.ndarray]) -> dict[str, Any]:
    """One rule on one text: perplexity by share, and zeros as they came out there, in mean, in the least and the most layer."""
    means = [float(layers.mean()) for layers in zeros]
    return {
        "perplexity": perplexities,
        "ratio": [value / perplexities[0] for value in perplexities],
        "zeros": means,
        "zeros_of_layers": [[float(layers.min()), float(layers.max())] for layers in zeros],
        "zeros_at_loss": largest_share(means, perplexities, LOSS),
        "loss": LOSS,
    }


def draw(found: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    for i, rule in enumerate(found["rules"]):
        for name, style in zip(found["tokens"], ("-", "--"), strict=True):
            part = found["rules"][rule][name]
            label = f"{WHO[rule]}, {name}: 1% at {100 * part['zeros_at_loss']:.0f}% zeros"
            excess = 100 * (np.array(part["ratio"]) - 1)
            axes.plot(np.multiply(100, part["zeros"]), excess, style, marker="o", markersize=4, color=f"C{i}", label=label)
    axes.axhline(100 * LOSS, color="grey", linewidth=1)
    axes.set(title="SmolLM2-135M, thresholds fitted on Brown", xlabel="% of hidden units at 0", ylabel="perplexity above dense, %")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=-1)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--tokens", type=int, required=True, help="to read of each text")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    found = sweep(chosen.calibration, chosen.text, chosen.tokens)
    (chosen.out / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, chosen.out / "plot.png")
    for rule, part in found["rules"].items():
        for name in found["tokens"]:
            print(f"{WHO[rule]}, {name}: {100 * part[name]['zeros_at_loss']:.1f}% zeros cost {100 * LOSS:g}% of perplexity")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
