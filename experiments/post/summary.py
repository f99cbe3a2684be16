"""Collects what run.sh measured so far into result.json, and draws it.

python experiments/post/summary.py results/post experiments/post
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RUNS = ("lan", "wan", "lan_4", "lan_16", "wan_16", "lan_unaligned", "flags", "greedy", "cheetah")
POST = ("draft_model", "draft_length", "disclosure", "acceptance_rate", "tokens_per_round", "sampling_share", "draft_share")


def main(folder: Path, out: Path) -> None:
    files = {name: folder / name / "metrics.json" for name in RUNS}
    runs = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
    for name in ("lan", "wan"):
        if name in runs:
            (out / f"{name}.json").write_text(json.dumps(runs[name], indent=1) + "\n")
    result = {
        "runs": {name: _run(run, runs[name.split("_")[0]] if "_" in name else run) for name, run in runs.items()},
        "greedy_tokens": len(runs["greedy"]["tokens"]) if "greedy" in runs else None,
        "greedy_equal": runs["greedy"]["tokens"] == runs["greedy"]["baseline"]["tokens"] if "greedy" in runs else None,
        "passes": json.loads((folder / "passes.json").read_text()) if (folder / "passes.json").is_file() else None,
        "sampling": {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("sampling_*.json"))},
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    _draw(result, out / "plot.png")
    for name, run in result["runs"].items():
        speed = f"{run['seconds_per_token']:7.2f} s a token, {run['speedup']:5.2f} x"
        print(f"{name:12} {speed}, {run['tokens_per_round']:.2f} tokens a round")
    if "greedy" in runs:
        print(f"{result['greedy_tokens']} greedy tokens equal: {result['greedy_equal']}")


def _run(run: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
    """`beside`: the run whose baseline is this one's too."""
    seconds = run["decode"]["seconds_per_token"]
    found = {key: run["post"][key] for key in POST} | {"rounds": len(run["post"]["rounds"]), "tokens": len(run["tokens"])}
    without = beside["baseline"]["decode"]["seconds_per_token"]
    costs = {key: run["decode"][key] for key in ("compute_seconds_per_token", "bytes_per_token", "messages_per_token")}
    return {
        "model": run["model"],
        "protocol": run["protocol"],
        "network": run["network"]["name"],
        "seconds_per_token": seconds,
        "baseline_seconds_per_token": without,
        "speedup": without / seconds,
        **costs,
        "dealt_bytes_per_token": run["offline"]["bytes_per_token"],
        "dealing_seconds_per_token": run["offline"]["seconds_per_token"],
        **found,
    }


def _draw(result: dict[str, Any], path: Path) -> None:
    figure, (speeds, growth) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    names = list(result["runs"])
    bars = speeds.bar(names, [run["speedup"] for run in result["runs"].values()])
    labels = [f"{run['speedup']:.2f}\n{run['tokens_per_round']:.1f} a round" for run in result["runs"].values()]
    speeds.bar_label(bars, labels, fontsize=8)
    speeds.axhline(1, color="grey", linewidth=1)
    speeds.margins(y=0.2)
    speeds.set(title="POST over token by token", ylabel="times as fast")
    speeds.tick_params(axis="x", rotation=30)
    rows = result["passes"]["rows"] if result["passes"] else []
    for key, label in (("lan", "lan"), ("wan", "wan"), ("seconds", "compute alone")):
        growth.plot([row["positions"] for row in rows], [row["growth"][key] for row in rows], marker="o", label=label)
    growth.set(title="A pass by its positions (SmolLM2)", xlabel="positions", ylabel="seconds, of one position's", ylim=0)
    growth.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
