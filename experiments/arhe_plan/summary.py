"""Tables and a plot of what run.sh planned and simulated.

python experiments/arhe_plan/summary.py results/arhe_plan experiments/arhe_plan
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PAPER = {"none": 11751, "cache": 1072}
RUNGS = ("none", "skip", "skip+cache", "skip+cache+pack", "skip+cache+pack+league", "skip+cache+pack+cutmax")
CONTEXT = 33


def main() -> None:
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    parts = _read(source)
    result = {
        "planned": [_planned(name, found) for name, found in parts if name[0] == "plan"],
        "performed": [_performed(name, found) for name, found in parts if name[0] == "run"],
        "ladder": {name[1]: _ladder(found) for name, found in parts if name[0] == "plan" and name[2:] == ["cache", str(CONTEXT)]},
        "paper": PAPER,
        "errors": {name[1]: _errors(found) for name, found in parts if name[0] == "errors"},
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    _draw(result, out / "plot.png")
    for key in ("planned", "performed"):
        for row in result[key]:
            print(key, row)
    print(result["ladder"])
    print(result["errors"])


def _read(source: Path) -> list[tuple[list[str], dict[str, Any]]]:
    """By the parts of their names."""
    return [(path.stem.split("_"), json.loads(path.read_text())) for path in sorted(source.glob("*.json"))]


def _planned(name: list[str], found: dict[str, Any]) -> dict[str, Any]:
    _, levels, rows, context = name
    kept = ("bootstraps_step", "bootstraps_prompt", "slots_refreshed_step", "slots_refreshed_prompt", "levels_step", "formula")
    row = {"levels": int(levels), "cache": rows == "cache", "context": int(context)} | {key: found[key] for key in kept}
    return row | {"shortest_path": {key: found["shortest_path"][key] for key in ("bootstraps_step", "bootstraps_prompt")}}


def _performed(name: list[str], found: dict[str, Any]) -> dict[str, Any]:
    _, model, ring, rows, prompt = name
    kept = ("predicted", "performed", "agree", "near_ties", "lowest_level")
    row = {"model": model, "log_ring": int(ring), "cache": rows == "cache", "prompt": int(prompt)}
    assert found["predicted"] == found["performed"], (name, found["predicted"], found["performed"])
    return row | {key: found[key] for key in kept} | {"tokens": len(found["tokens"])}


def _ladder(found: dict[str, Any]) -> dict[str, Any]:
    rungs = {rung: found["ladder"][rung]["bootstraps_step"] for rung in RUNGS}
    return rungs | {
        "argmax": found["argmax"],
        "rule": found["bootstraps_step"],
        "shortest_path": found["shortest_path"]["bootstraps_step"],
    }


def _errors(found: dict[str, Any]) -> dict[str, Any]:
    errors = found["errors"]
    return {
        layer: {
            "largest": errors["whole"][layer],
            "largest_value": errors["largest_value"][layer],
            "relative": errors["relative"][layer],
        }
        for layer in errors["whole"]
    }


def _draw(result: dict[str, Any], path: Path) -> None:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    _draw_contexts(left, result)
    _draw_ladder(middle, result)
    longest = max((list(layers) for layers in result["errors"].values()), key=len, default=[])
    right.plot(longest, [math.nan] * len(longest))  # layers in order, the logits last, whatever is drawn first
    for model, layers in result["errors"].items():
        right.plot(
            [longest.index(name) for name in layers], [layer["relative"] for layer in layers.values()], marker="o", label=model
        )
    right.set_xticks(range(len(longest)), [name.removesuffix(".out") for name in longest])
    right.set(yscale="log", ylabel="error / size, both root mean square", title="polynomials' error (simulator)")
    if longest:
        right.legend()
    figure.savefig(path, dpi=120, facecolor="white")


def _draw_contexts(axes: Any, result: dict[str, Any]) -> None:
    for cache, pass_, label in ((True, "step", "a step, cache"), (False, "step", "a step, no cache"), (True, "prompt", "prompt")):
        rows = sorted((r for r in result["planned"] if r["levels"] == 10 and r["cache"] == cache), key=lambda r: r["context"])
        style = "--" if pass_ == "prompt" else "-"
        axes.plot(
            [r["context"] for r in rows], [r[f"bootstraps_{pass_}"] for r in rows], style, marker=".", label=f"predicted, {label}"
        )
    done = [row for row in result["performed"] if row["model"] == "gpt2-small"]
    axes.plot([r["prompt"] for r in done], [r["performed"][0] for r in done], "x", color="black", label="performed, prompt")
    axes.plot([r["prompt"] + 1 for r in done], [r["performed"][1] for r in done], "+", color="black", label="performed, a step")
    axes.set(xscale="log", yscale="log", xlabel="context", ylabel="bootstraps", title="GPT-2 small, 2^15 slots, 10 levels")
    axes.legend()


def _draw_ladder(axes: Any, result: dict[str, Any]) -> None:
    for place, levels in enumerate(("7", "10")):
        counts = [result["ladder"][levels][rung] for rung in RUNGS] + [result["ladder"][levels]["shortest_path"]]
        bars = axes.bar([i + 0.4 * place - 0.2 for i in range(len(counts))], counts, 0.4, label=f"{levels} levels")
        axes.bar_label(bars, fontsize=7)
    names = ["nothing", "skip", "+ cache", "+ pack", "+ league", "or CutMax", "search"]
    axes.set_xticks(range(len(names)), names, rotation=30)
    axes.axhline(PAPER["none"], linestyle=":", color="black")
    axes.axhline(PAPER["cache"], linestyle=":", color="black")
    axes.text(6.5, PAPER["none"] * 1.05, "paper 11751", ha="right")
    axes.text(6.5, PAPER["cache"] * 1.05, "paper, cache 1072", ha="right")
    axes.set(yscale="log", ylabel="bootstraps a step", title=f"GPT-2 small, context {CONTEXT}")
    axes.legend(loc=(0.68, 0.6))


if __name__ == "__main__":
    main()
