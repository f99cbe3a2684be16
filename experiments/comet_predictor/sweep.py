"""Recall by active share, and quality by active share: result.json and plot.png (see run.sh for the command).

Recall is measured on the sequences of the public text that no predictor learned from or was chosen by; quality on text that nobody
learned from. Everything is plaintext float32.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from waste import waste

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from spu_llm.comet.activity import LayerActivity, activity, masses
from spu_llm.comet.blocks import cluster, in_blocks
from spu_llm.comet.gate import best_thresholds, gate_curve
from spu_llm.comet.predictor import Objective, PredictorConfig, Split, recall_curve, threshold, train_predictor
from spu_llm.comet.prepare import Rule, split_rows
from spu_llm.comet.prepared import LayerSparsity, Prepared
from spu_llm.comet.sparse_plain import How, Setting, measure_quality
from spu_llm.errors import UserError
from spu_llm.experiment.schema import load_model
from spu_llm.models import Checkpoint, load_checkpoint
from spu_llm.models.sequences import cut_sequences
from spu_llm.models.source import ModelConfig, content_digest
from spu_llm.post.align import read_tokens
from spu_llm.progress import bar

BLOCKS = (32, 64, 128)
RANKS = (8, 16, 32)
OBJECTIVES: tuple[Objective, ...] = ("shares", "masses")
RECALLS = (0.9, 0.95, 0.97, 0.98, 0.99)
COUNTS = (4, 6, 8, 10, 12, 16, 24)  # of 64 blocks
HEADS = (7, 6, 5, 4, 2)  # of 8
HOWS: tuple[How, ...] = ("predicted", "best", "oracle")
SWEPT = 12288  # tokens of the public text that variants are trained and measured on
EVERY = 3  # layers that variants are tried in: the first and every third
HELD_OUT = 6144  # tokens that quality is measured on
VARYING = 0.97  # recall of the thresholds by which the number of blocks varies, where waste is measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--kept", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    begun = time.perf_counter()
    model = load_model(chosen.model)
    checkpoint, prepared = load_checkpoint(model.locate()), Prepared.load(chosen.prepared)
    prepared.check(chosen.prepared, checkpoint.decoder.config, content_digest(model.locate()))
    chosen.kept.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(chosen.prepared.read_bytes()).hexdigest()[:16]
    recalls = kept(chosen.kept / f"recall-{name}.json", lambda: sweep_recall(model, checkpoint, prepared, chosen.text))
    quality = sweep_quality(model, checkpoint, prepared, recalls["thresholds"], chosen.held_out)
    sequences = text_sequences(model, checkpoint, chosen.held_out, HELD_OUT, Rule.length)
    levels = [each[RECALLS.index(VARYING)] for each in recalls["thresholds"]]
    idle = waste(checkpoint.decoder, prepared.layers, levels, sequences, len(model.prefix), bar)
    result = {
        "model": prepared.model,
        "prepared": {
            "facts": asdict(prepared.facts) if prepared.facts else None,
            "blocks": [layer.blocks for layer in prepared.layers],
            "active_blocks": [layer.active_blocks for layer in prepared.layers],
            "recall": [layer.measured and layer.measured.recall for layer in prepared.layers],
            "neuron_recall": [layer.measured and layer.measured.neuron_recall for layer in prepared.layers],
            "active_heads": [layer.active_heads for layer in prepared.layers],
            "head_recall": [layer.measured and layer.measured.head_recall for layer in prepared.layers],
            "bytes": chosen.prepared.stat().st_size,
        },
        "layers": [asdict(layer.measured) for layer in prepared.layers if layer.measured],
        **recalls,
        "quality": quality,
        "waste": idle,
        "seconds": recalls["seconds"] + time.perf_counter() - begun,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    (chosen.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, chosen.out / "plot.png")
    print(table(result))
    for name, rule in idle.items():
        print(name, {key: [round(each, 4) for each in values] for key, values in rule.items()})


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """What an earlier run measured, or what is measured now."""
    if not path.is_file():
        part = path.with_suffix(".part")
        part.write_text(json.dumps(make()))
        part.replace(path)
    return json.loads(path.read_text())


def text_sequences(model: ModelConfig, checkpoint: Checkpoint, path: Path, tokens: int, length: int) -> np.ndarray:
    ids = read_tokens([path], checkpoint)[:tokens]
    return cut_sequences(ids, min(length, checkpoint.decoder.config.positions), model.prefix)


# Recall


def sweep_recall(model: ModelConfig, checkpoint: Checkpoint, prepared: Prepared, text: Path) -> dict[str, Any]:
    """Curves of recall, means over layers, with each count's best threshold: by blocks, by rank, by objective, by what is read.

    thresholds: of the prepared file, for each of RECALLS.
    """
    begun, rule, decoder = time.perf_counter(), Rule(), checkpoint.decoder
    sequences = text_sequences(model, checkpoint, text, SWEPT, rule.length)
    skipped = len(model.prefix)
    rows = split_rows(len(sequences), sequences.shape[1] - skipped, rule)
    curves: dict[str, list[np.ndarray]] = {}
    thresholds = []
    for i, found in enumerate(activity(decoder, sequences, skipped, bar)):
        weights, layer = masses(decoder.params["layers"][i], found.hidden), prepared.layers[i]
        for name, curve in (layer_curves(found, weights, layer, rows) if i % EVERY == 0 else {}).items():
            curves.setdefault(name, []).append(curve)
        sums, scores = in_blocks(weights, layer.order, layer.blocks), layer.neurons.scores(found.normed)
        thresholds.append([threshold(scores[rows.choose], sums[rows.choose], recall) for recall in RECALLS])
    means = {name: np.mean(each, axis=0).round(5).tolist() for name, each in curves.items()}
    return {"curves": means, "thresholds": thresholds, "seconds": time.perf_counter() - begun}


def layer_curves(found: LayerActivity, weights: np.ndarray, layer: LayerSparsity, rows: Split) -> dict[str, np.ndarray]:
    """Recall of 1, 2, ... blocks on the rows to report on, by what was varied; the others as the prepared file has them."""
    blocks, rank, active = layer.blocks, layer.neurons.first.shape[1], layer.active_blocks

    def curve(y: np.ndarray, order: np.ndarray, count: int, config: PredictorConfig) -> np.ndarray:
        sums = in_blocks(weights, order, count)
        targets, inputs = (Split(*(each[part] for part in rows)) for each in (sums, y))
        found = train_predictor(inputs, targets, max(1, active * count // blocks), config)
        thresholds, _ = best_thresholds(found.scores(inputs.choose), targets.choose)
        scores = found.scores(inputs.report)
        return np.array([gate_curve(scores, targets.report, level)[i] for i, level in enumerate(thresholds)])

    def oracle(order: np.ndarray, count: int) -> np.ndarray:
        sums = in_blocks(weights, order, count)[rows.report]
        return recall_curve(sums, sums)

    usual, curves = PredictorConfig(rank), {}
    for count in (each for each in BLOCKS if weights.shape[1] % each == 0):
        order = cluster(weights[rows.learn], count, max(1, active * count // blocks))
        curves[f"blocks {count}"] = curve(found.normed, order, count, usual)
        curves[f"blocks {count}, oracle"] = oracle(order, count)
        curves[f"blocks {count}, unclustered, oracle"] = oracle(np.arange(weights.shape[1]), count)
    for each in RANKS:
        curves[f"rank {each}"] = curve(found.normed, layer.order, blocks, replace(usual, rank=each))
    for objective in OBJECTIVES:
        curves[f"objective {objective}"] = curve(found.normed, layer.order, blocks, replace(usual, objective=objective))
    curves["read attention_norm"] = curve(found.normed, layer.order, blocks, usual)
    curves["read ffn_norm"] = curve(found.ffn_normed, layer.order, blocks, usual)
    curves["full rank"] = curve(found.normed, layer.order, blocks, replace(usual, rank=blocks))
    return curves


# Quality


def sweep_quality(
    model: ModelConfig, checkpoint: Checkpoint, prepared: Prepared, thresholds: list[list[float]], text: Path
) -> list[dict[str, Any]]:
    """The dense model, then each setting: blocks and heads as prepared; counts of blocks, predicted and true; counts of heads."""
    sequences = text_sequences(model, checkpoint, text, HELD_OUT, Rule.length)
    decoder, skipped, blocks = checkpoint.decoder, len(model.prefix), prepared.layers[0].blocks
    counts = [count * blocks // 64 for count in COUNTS]
    heads = [count * decoder.config.heads // 8 for count in HEADS]
    settings = [Setting(skip_heads=False), Setting()]
    settings += [Setting(how, count, skip_heads=False) for how in HOWS for count in counts]
    settings += [Setting(blocks=blocks, heads=count) for count in heads]
    found = measure_quality(decoder, prepared.layers, sequences, skipped, settings, bar)
    results = [{"setting": None, **asdict(found[0])}]
    results += [{"setting": asdict(setting), **asdict(each)} for setting, each in zip(settings, found[1:], strict=True)]
    for i, recall in enumerate(RECALLS):
        layers = [replace(layer, threshold=levels[i]) for layer, levels in zip(prepared.layers, thresholds, strict=True)]
        setting = Setting("threshold", skip_heads=False)
        each = measure_quality(decoder, layers, sequences, skipped, [setting], bar)[1]
        results.append({"setting": {**asdict(setting), "recall": recall}, **asdict(each)})
    return results


# Showing


def table(result: dict[str, Any]) -> str:
    names = ("active_share", "head_share", "caught", "perplexity", "accuracy", "agreement")
    lines = ["".join(f"{name:>14}" for name in names) + "   setting"]
    for row in result["quality"]:
        lines.append("".join(f"{row[name]:14.4f}" for name in names) + f"   {row['setting']}")
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    figure, (recall, blocks, quality, heads) = plt.subplots(1, 4, figsize=(19, 4), layout="constrained")
    share = lambda curve: np.arange(1, len(curve) + 1) / len(curve)  # noqa: E731
    curves, own = result["curves"], result["prepared"]["blocks"][0]
    labels = {"by_threshold": "by threshold: mass", "neurons_by_threshold": "by threshold: firing neurons"}
    labels |= {"by_score": "best-scoring: mass", "oracle": "best: mass", "unclustered": "best, checkpoint's order: mass"}
    labels |= {"still": "the same blocks always: mass"}
    for name, label in labels.items():
        curve = np.mean([layer[name] for layer in result["layers"]], axis=0)
        recall.plot(share(curve), curve, label=label)
    recall.set(title=f"{own} blocks, means over layers", xlabel="blocks computed", ylabel="recall", xlim=(0, 0.5), ylim=(0.4, 1))
    recall.legend(fontsize=8)
    for name in (name for name in curves if name.startswith("blocks ") and "," not in name):
        line = blocks.plot(share(curves[name]), curves[name], label=name)[0]
        blocks.plot(share(curves[name]), curves[f"{name}, oracle"], "--", color=line.get_color())
    blocks.set(
        title="predicted (dashed: best blocks)", xlabel="blocks computed", ylabel="recall of mass", xlim=(0, 0.5), ylim=(0.4, 1)
    )
    blocks.legend(fontsize=8)
    draw_quality(result["quality"], quality, heads)
    figure.savefig(path, dpi=120)


def draw_quality(rows: list[dict[str, Any]], quality: Any, heads: Any) -> None:
    dense = rows[0]
    for how in (*HOWS, "threshold"):
        of = [row for row in rows[3:] if row["setting"]["how"] == how and row["head_share"] == 1]
        of.sort(key=lambda row: row["active_share"])
        x = [row["active_share"] for row in of]
        quality.plot(x, [100 * (row["perplexity"] / dense["perplexity"] - 1) for row in of], marker=".", label=f"perplexity, {how}")
    quality.set(title="what it costs", xlabel="blocks computed", ylabel="perplexity added, %", ylim=(-0.5, 15), xlim=(0, 0.5))
    quality.axhline(1.5, color="grey", linewidth=0.8)
    quality.legend(fontsize=8)
    of = [row for row in rows[3:] if row["setting"]["skip_heads"]]
    x = [row["head_share"] for row in of]
    heads.plot(x, [100 * (row["perplexity"] / dense["perplexity"] - 1) for row in of], marker=".", label="perplexity added, %")
    heads.plot(x, [100 * (dense["accuracy"] - row["accuracy"]) for row in of], marker=".", label="accuracy lost, points")
    heads.set(title="heads skipped, all blocks computed", xlabel="heads computed", ylabel="%", ylim=(-0.5, 15))
    heads.legend(fontsize=8)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
