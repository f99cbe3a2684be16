"""Collects what run.sh measured so far into result.json, draws it, and prints README's tables.

python experiments/comet/summary.py results/comet experiments/comet
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from spu_llm.experiment.schema import load_network

STACKS = ("plugin", "semi2k", "aby3", "cheetah")
RUNS = ("plugin", "plugin_fresh", "plugin_post", "semi2k", "semi2k_fresh", "aby3", "aby3_fresh", "cheetah")
NETWORKS = ("100mbps", "wan", "lan", "5gbps")
OUTPUTS = (1, 4, 16)  # tokens of an answer
COUNTS = ("compute_seconds", "messages", "bytes")


def main(folder: Path, out: Path) -> None:
    files = {name: folder / name / "metrics.json" for name in RUNS}
    runs = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
    result = {name: _run(run, runs[name.split("_")[0]]["baseline"]) for name, run in runs.items()}
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    _draw(result, out / "plot.png")
    for row in _rows(result):
        print("| " + " | ".join(row) + " |")


def _run(run: dict[str, Any], dense: dict[str, Any]) -> dict[str, Any]:
    """A run against the dense one of its stack, its own baseline where it has one."""
    dense = run.get("baseline") or dense
    ours, theirs = _costs(run), _costs(dense)
    return {
        "ops": run["ops"],
        "protocol": run["protocol"],
        "sparse": ours,
        "dense": theirs,
        "comet": run["comet"],
        "post": {key: run["post"][key] for key in ("draft_length", "acceptance_rate", "tokens_per_round")}
        if "post" in run
        else None,
        "accuracy": {"sparse": run["accuracy"], "dense": dense["accuracy"]},
        "bytes_ratio": {part: theirs[part]["bytes"] / ours[part]["bytes"] for part in ("prefill", "token")},
        "seconds": {
            side: {part: {network: _seconds(costs[part], network) for network in NETWORKS} for part in ("prefill", "token")}
            for side, costs in (("sparse", ours), ("dense", theirs))
        },
        "speedup": {part: _speedups(ours[part], theirs[part]) for part in ("prefill", "token")},
        "answers": {str(count): _answer(ours, theirs, count) for count in OUTPUTS},
    }


def _costs(run: dict[str, Any]) -> dict[str, dict[str, float]]:
    prefill, decode = run["prefill"], run["decode"]
    return {
        "prefill": {key: prefill[key] for key in COUNTS},
        "token": {key: decode[f"{key}_per_token"] for key in COUNTS},
        "dealt": {"bytes": run["offline"]["bytes_per_token"], "seconds": run["offline"]["seconds_per_token"]},
    }


def _seconds(cost: dict[str, float], network: str) -> float:
    return load_network(network).seconds(*(cost[key] for key in COUNTS))


def _speedups(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    return {network: _seconds(theirs, network) / _seconds(ours, network) for network in NETWORKS}


def _answer(ours: Any, theirs: Any, count: int) -> dict[str, Any]:
    """Prompt and `count` tokens: seconds, bytes, and dense over sparse."""

    def whole(costs: Any) -> dict[str, float]:
        return {key: costs["prefill"][key] + (count - 1) * costs["token"][key] for key in COUNTS}

    a, b = whole(ours), whole(theirs)
    return {
        "seconds": {network: _seconds(a, network) for network in NETWORKS},
        "dense_seconds": {network: _seconds(b, network) for network in NETWORKS},
        "speedup": _speedups(a, b),
        "bytes_ratio": b["bytes"] / a["bytes"],
    }


def _rows(result: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, run in result.items():
        token, dense = run["sparse"]["token"], run["dense"]["token"]
        answer = run["answers"]["4"]
        rows.append(
            [
                name,
                f"{dense['messages']:.0f} -> {token['messages']:.0f}",
                f"{dense['bytes'] / 1e6:.2f} -> {token['bytes'] / 1e6:.2f}",
                f"{run['bytes_ratio']['token']:.2f}, {run['bytes_ratio']['prefill']:.2f}",
                f"{dense['compute_seconds']:.2f} -> {token['compute_seconds']:.2f}",
                *(f"{run['speedup']['token'][network]:.2f}, {answer['speedup'][network]:.2f}" for network in NETWORKS),
            ]
        )
    return rows


def _draw(result: dict[str, Any], path: Path) -> None:
    figure, (bytes_, seconds) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    names = list(result)
    for at, part in enumerate(("prefill", "token")):
        places = [i + 0.4 * at for i in range(len(names))]
        bytes_.bar(places, [result[name]["bytes_ratio"][part] for name in names], 0.38, label=part)
    bytes_.set_xticks([i + 0.2 for i in range(len(names))], names, rotation=40, ha="right")
    bytes_.set(title="bytes, dense over sparse", ylabel="times")
    bytes_.axhline(1, color="grey", linewidth=1)
    bytes_.legend()
    for name in (name for name in STACKS if name in result):
        answer = result[name]["answers"]["4"]["speedup"]
        seconds.plot(NETWORKS, [answer[network] for network in NETWORKS], marker="o", label=name)
    seconds.axhline(1, color="grey", linewidth=1)
    seconds.set(title="prompt and 4 tokens: seconds, dense over sparse", ylabel="times")
    seconds.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
