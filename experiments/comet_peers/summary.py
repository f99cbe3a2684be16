"""Collects what run.sh measured into result.json, draws it, and prints README's tables.

python experiments/comet_peers/summary.py results/comet_peers experiments/comet_peers
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

NETWORKS = ("100mbps", "wan", "lan", "5gbps")
COUNTS = ("compute_seconds", "messages", "bytes")
PARTS = ("prompt", "token")
BASE = "plugin, Comet"  # what the others' seconds and bytes are held against
NOTES = {"dense": "", "quadratic": ", MPCFormer's functions"}

Row = dict[str, Any]


def main(folder: Path, out: Path) -> None:
    rows = _rows(folder)
    for row in rows.values():
        row["seconds"] = {part: {network: _seconds(row[part], network) for network in NETWORKS} for part in PARTS}
    base = rows[BASE]
    for row in rows.values():
        row["over_comet"] = {
            part: {network: row["seconds"][part][network] / base["seconds"][part][network] for network in NETWORKS}
            | {"bytes": row[part]["bytes"] / base[part]["bytes"]}
            for part in PARTS
        }
    quality = json.loads((folder / "quality.json").read_text())
    crypten = {kind: json.loads((folder / f"crypten_{kind}.json").read_text()) for kind in NOTES}
    out.mkdir(parents=True, exist_ok=True)
    result = {"base": BASE, "runs": rows, "quality": quality, "crypten": crypten}
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    _draw(rows, out / "plot.png")
    print(_cost_table(rows))
    print()
    print(_time_table(rows))
    print(quality)


def _rows(folder: Path) -> dict[str, Row]:
    """By name, a run's costs of the prompt and of a token, what was dealt for a token, and how near plaintext it came."""
    rows = {f"CrypTen{note}": _crypten(kind, folder) for kind, note in NOTES.items()}
    for path in sorted(folder.glob("stock_*.json"), reverse=True):
        for kind, metrics in json.loads(path.read_text()).items():
            rows[f"stock {path.stem.removeprefix('stock_')}{NOTES[kind]}"] = _spu(metrics)
    for renew, name in (("64", BASE), ("token", "plugin, Comet, fresh orders")):
        metrics = json.loads((folder / f"plugin_{renew}/metrics.json").read_text())
        rows.setdefault("plugin", _spu(metrics["baseline"]))
        rows[name] = _spu(metrics)
    return rows


def _crypten(kind: str, folder: Path) -> Row:
    """CrypTen's triples are drawn in the pass; `bytes` of dealt are what its third-party provider would send."""
    found = json.loads((folder / f"crypten_{kind}.json").read_text())
    parts = {part: found["parts"][f"{part} pass"] for part in PARTS}
    costs = {part: {"compute_seconds": cost["seconds"], **{key: cost[key] for key in COUNTS[1:]}} for part, cost in parts.items()}
    dealt = {"bytes": parts["token"]["dealer_bytes"], "seconds": parts["token"]["triple_seconds"], "in_the_pass": True}
    return {**costs, "dealt": dealt, "accuracy": found["accuracy"]}


def _spu(metrics: Row) -> Row:
    prefill, decode, offline = metrics["prefill"], metrics["decode"], metrics["offline"]
    return {
        "prompt": {key: prefill[key] for key in COUNTS},
        "token": {key: decode[f"{key}_per_token"] for key in COUNTS},
        "dealt": {"bytes": offline["bytes_per_token"], "seconds": offline["seconds_per_token"], "in_the_pass": False},
        "accuracy": metrics["accuracy"],
    }


def _seconds(cost: Row, network: str) -> float:
    return load_network(network).seconds(*(cost[key] for key in COUNTS))


def _cost_table(rows: dict[str, Row]) -> str:
    heads = [
        "",
        "prompt: messages",
        "MB",
        "compute, s",
        "a token: messages",
        "MB",
        "compute, s",
        "dealt a token, MB",
        "logit error",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, row in rows.items():
        cells = [name]
        for part in PARTS:
            cost = row[part]
            cells += [f"{cost['messages']:,.0f}", f"{cost['bytes'] / 1e6:.2f}", f"{cost['compute_seconds']:.2f}"]
        cells += [f"{row['dealt']['bytes'] / 1e6:.1f}", f"{row['accuracy']['max_logit_error']:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _time_table(rows: dict[str, Row]) -> str:
    """Seconds of the prompt and of a token on each network, and in brackets how often Comet's go into them."""
    heads = ["", *NETWORKS]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, row in rows.items():
        cells = [name]
        for network in NETWORKS:
            pair = [f"{row['seconds'][part][network]:.2f} ({row['over_comet'][part][network]:.1f})" for part in PARTS]
            cells.append("; ".join(pair))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _draw(rows: dict[str, Row], path: Path) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(13, 5), layout="constrained", sharey=True)
    titles = ("seconds on lan (1 Gbps, 10 ms)", "bytes that one party sends")
    places = range(len(rows))
    for panel, title in zip(panels, titles, strict=True):
        smallest = float("inf")
        for i, part in enumerate(PARTS):
            values = [row["seconds"][part]["lan"] if panel is panels[0] else row[part]["bytes"] for row in rows.values()]
            panel.barh([at + 0.4 * i for at in places], values, 0.38, label=part)
            smallest = min(smallest, *values)
        panel.set(title=title, xscale="log")
        panel.set_xlim(left=smallest / 3)
        panel.set_yticks([at + 0.2 for at in places], list(rows))
    panels[0].invert_yaxis()
    panels[0].legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
