"""Puts the runs of run.sh side by side: result.json, and two plots.   Usage: compare.py FOLDER_OF_RUNS FOLDER_OF_RESULT

Times are compute measured here plus messages x delay + bytes / bandwidth of a network profile of this project. CrypTen draws its
triples within the pass (its default provider has no other way); the plugin's material is dealt before the prompt is there. So
there are three comparisons, each with both sides counted alike: `as_run` (what a user waits for once there is a prompt: all of
CrypTen's pass, the plugin's without dealing), `without_randomness` (CrypTen without the seconds in which it draws triples, the
plugin without dealing) and `with_randomness` (CrypTen's pass, the plugin's with dealing and the sending of its material; what
CrypTen's own third-party provider would have to send is counted against it too). Bytes are those one party sends, `total` with
what the dealer sends to the party that gets more: to CrypTen's by its third-party provider, which rests on the plugin's kind of
trust (the default one lets rank 0 unmask rank 1). Where CrypTen was not run there is nothing to compare: headlines are null.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jmespath
from matplotlib.figure import Figure

from spu_llm.experiment.schema import CONFIGS, read_yaml
from spu_llm.network import NetworkProfile

PARTS = ("softmax", "norm", "activation", "total")
SIDES = ("crypten", "stock", "generic", "plugin")
NETWORKS = ("none", "lan", "wan")
HEADLINES = {
    "time_ratio_64": '"gpt2-small 64".time.lan.as_run',
    "time_ratio_512": '"gpt2-small 512".time.lan.as_run',
    "online_bytes_ratio_512": '"gpt2-small 512".online_bytes',
    "total_bytes_ratio_512": '"gpt2-small 512".total_bytes',
    "time_ratio_64_without_randomness": '"gpt2-small 64".time.lan.without_randomness',
    "time_ratio_512_without_randomness": '"gpt2-small 512".time.lan.without_randomness',
    "time_ratio_64_with_randomness": '"gpt2-small 64".time.lan.with_randomness',
    "time_ratio_512_with_randomness": '"gpt2-small 512".time.lan.with_randomness',
}
COLORS = {"crypten": "#8c6bb1", "stock": "#d95f02", "generic": "#1b9e77", "plugin": "#1f78b4"}


def main(runs: Path, out: Path) -> None:
    found = _read(runs)
    ratios = {f"{shape} {tokens}": _ratios(sides) for (shape, tokens), sides in found.items() if "crypten" in sides}
    result = {
        **{name: jmespath.search(path, ratios) for name, path in HEADLINES.items()},
        "command": "experiments/soal_crypten/run.sh",
        "network": "lan: 1 Gbps, 10 ms one way, modelled; time_ratio_* are as_run on it",
        "ratios": ratios,
        "softmax_growth": _growth(found),
        "runs": {f"{shape} {tokens}": sides for (shape, tokens), sides in found.items()},
    }
    (out / "result.json").write_text(json.dumps(result, indent=1))
    _plot_parts(found, out / "parts.svg")
    if len({tokens for shape, tokens in found if shape == "gpt2-small"}) > 1:
        _plot_growth(result["softmax_growth"], out / "softmax_growth.svg")
    print(json.dumps({name: value for name, value in result.items() if "ratio_" in name}, indent=1))


def _read(runs: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """By shape and tokens, each side's figures, with seconds of every part on each network."""
    networks = {name: NetworkProfile.model_validate(read_yaml(CONFIGS / "network" / f"{name}.yaml")) for name in NETWORKS}
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for path in sorted(runs.glob("*.*.*.json")):
        shape, tokens, side = path.name.split(".")[:3]
        figures = json.loads(path.read_text())
        for cost in figures["parts"].values():
            cost["seconds_on"] = {
                name: network.seconds(cost["seconds"], cost["messages"], cost["bytes"]) for name, network in networks.items()
            }
            cost["dealing_seconds_on"] = {
                name: network.seconds(cost.get("dealer_seconds", 0.0), 0, cost.get("dealer_bytes", 0))
                for name, network in networks.items()
            }
        found.setdefault((shape, int(tokens)), {})[side] = figures
    return found


def _ratios(sides: dict[str, Any]) -> dict[str, Any]:
    """CrypTen over the plugin, whole layer."""
    theirs, ours = (sides[side]["parts"]["total"] for side in ("crypten", "plugin"))

    def times(network: str) -> dict[str, float]:
        crypten, plugin = theirs["seconds_on"][network], ours["seconds_on"][network]
        return {
            "as_run": crypten / plugin,
            "without_randomness": (crypten - theirs["triple_seconds"]) / plugin,
            "with_randomness": (crypten + theirs["dealing_seconds_on"][network]) / (plugin + ours["dealing_seconds_on"][network]),
        }

    return {
        "time": {network: times(network) for network in NETWORKS},
        "online_bytes": theirs["bytes"] / ours["bytes"],
        "total_bytes": (theirs["bytes"] + theirs["dealer_bytes"]) / (ours["bytes"] + ours["dealer_bytes"]),
        "total_bytes_if_nobody_deals_for_crypten": theirs["bytes"] / (ours["bytes"] + ours["dealer_bytes"]),
    }


def _growth(found: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    """Softmax of the GPT-2 layer by length: bytes, messages, seconds on lan."""
    lengths = sorted(tokens for shape, tokens in found if shape == "gpt2-small")
    rows: dict[str, Any] = {}
    for side in SIDES:
        with_side = [tokens for tokens in lengths if side in found["gpt2-small", tokens]]
        costs = [found["gpt2-small", tokens][side]["parts"]["softmax"] for tokens in with_side]
        rows[side] = {
            "tokens": with_side,
            "bytes": [cost["bytes"] for cost in costs],
            "messages": [cost["messages"] for cost in costs],
            "lan_seconds": [cost["seconds_on"]["lan"] for cost in costs],
        }
    return rows


def _plot_parts(found: dict[tuple[str, int], dict[str, Any]], path: Path) -> None:
    most = max(len(sides) for sides in found.values())
    cases = [case for case in sorted(found) if len(found[case]) == most]
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, len(cases))
    for column, case in enumerate(cases):
        for row, (label, value) in enumerate((("seconds on lan", _lan), ("bytes one party sends", lambda cost: cost["bytes"]))):
            panel = axes[row][column]
            for offset, side in enumerate(side for side in SIDES if side in found[case]):
                heights = [value(found[case][side]["parts"][part]) for part in PARTS]
                panel.bar([i + 0.2 * offset for i in range(len(PARTS))], heights, 0.2, color=COLORS[side], label=side)
            panel.set_yscale("log")
            panel.set_xticks([i + 0.3 for i in range(len(PARTS))], PARTS, rotation=30)
            panel.set_title(f"{case[0]}, {case[1]} tokens" if row == 0 else "")
            panel.set_ylabel(label if column == 0 else "")
    axes[0][0].legend()
    figure.savefig(path, facecolor="white")


def _lan(cost: dict[str, Any]) -> float:
    return cost["seconds_on"]["lan"]


def _plot_growth(growth: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    for panel, (key, label) in zip(
        figure.subplots(1, 2), (("lan_seconds", "seconds on lan"), ("bytes", "bytes one party sends")), strict=True
    ):
        for side, rows in ((side, rows) for side, rows in growth.items() if rows["tokens"]):
            panel.plot(rows["tokens"], rows[key], "o-", color=COLORS[side], label=side)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("tokens of the prompt")
        panel.set_ylabel(label)
        panel.legend()
    figure.suptitle("Softmax of a GPT-2-small layer")
    figure.savefig(path, facecolor="white")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
