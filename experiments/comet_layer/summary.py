"""Collects what run.sh measured so far into result.json, draws it, and prints tables.

python experiments/comet_layer/summary.py results/comet_layer experiments/comet_layer
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

STACKS = ("plugin_SEMI2K", "stock_SEMI2K", "stock_ABY3", "stock_CHEETAH")
PARTS = {
    "attention_linear": ("attention, linear", "tab:blue"),
    "attention_nonlinear": ("attention, nonlinear", "lightskyblue"),
    "ffn_linear": ("FFN, linear", "tab:green"),
    "ffn_nonlinear": ("FFN, nonlinear", "lightgreen"),
    "predictor": ("predictor", "tab:red"),
}
WAYS = {"disclosed": "disclosed", "units": "secret gather of units", "weights": "secret gather of weights"}
NETWORK = "lan"  # of the second panel

Row = dict[str, Any]


def main(folder: Path, out: Path) -> None:
    layers, indexing = _read(folder, "layer"), _read(folder, "indexing")
    first = next(iter(layers.values()))
    result = {
        "model": first["model"],
        "digest": first["digest"],
        "passes": [row for layer in layers.values() for row in layer["passes"]],
        "indexing": list(indexing.values()),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    _draw(result, out / "plot.png")
    print(_layer_table(result))
    print()
    print(_indexing_table(result))


def _read(folder: Path, what: str) -> dict[str, Row]:
    """By stack."""
    files = {stack: folder / f"{what}_{stack}.json" for stack in STACKS}
    return {stack: json.loads(file.read_text()) for stack, file in files.items() if file.is_file()}


def _name(row: Row) -> str:
    return f"{row['ops']} {row['protocol']}"


def _layer_table(result: Row) -> str:
    """A line a pass: KB, messages and compute dense -> sparse, and ratios."""
    networks = list(result["passes"][0]["dense"]["layer"]["modelled"])
    heads = ["stack", "tokens", "KB", "messages", "compute, s", *(f"{name}: layer, FFN, predictor" for name in networks)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in result["passes"]:
        dense, sparse = row["dense"]["layer"], row["sparse"]["layer"]
        cells = [_name(row), str(row["tokens"]), f"{dense['bytes'] / 1e3:.1f} -> {sparse['bytes'] / 1e3:.1f}"]
        cells += [f"{dense['messages']} -> {sparse['messages']}", f"{dense['seconds']:.3f} -> {sparse['seconds']:.3f}"]
        for name in networks:
            cells.append(f"{row['speedup'][name]:.2f}x, {row['ffn_speedup'][name]:.2f}x, {row['predictor_share'][name]:.1%}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _indexing_table(result: Row) -> str:
    heads = ["stack", *(f"{label}: KB, messages, s" for label in WAYS.values()), "shuffle: KB, s", "bytes saved after, tokens"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in result["indexing"]:
        cells = [_name(row)]
        cells += [f"{row[way]['bytes'] / 1e3:.1f}, {row[way]['messages']}, {row[way]['seconds']:.3f}" for way in WAYS]
        cells.append(f"{row['shuffle']['bytes'] / 1e3:.1f}, {row['shuffle']['seconds']:.3f}")
        cells.append(", ".join("never" if tokens is None else f"{tokens:.0f}" for tokens in row["break_even_tokens"].values()))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _draw(result: Row, path: Path) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(13, 8), layout="constrained")
    single = [row for row in result["passes"] if row["tokens"] == min(each["tokens"] for each in result["passes"])]
    _stacked(axes[0, 0], single, lambda cost: cost["bytes"], "bytes, of the dense layer's")
    _stacked(axes[0, 1], single, lambda cost: cost["modelled"][NETWORK], f"seconds on {NETWORK}, of the dense layer's")
    axes[0, 0].legend(fontsize=8, ncols=3, loc="upper center")
    _speedups(axes[1, 0], result["passes"])
    _ways(axes[1, 1], result["indexing"])
    figure.savefig(path, dpi=110)


def _stacked(panel: Axes, rows: list[Row], figure: Any, title: str) -> None:
    """Two bars a stack, dense and sparse, as parts of the dense layer."""
    labels, at = [], 0
    for row in rows:
        whole = figure(row["dense"]["layer"])
        for side in ("dense", "sparse"):
            bottom = 0.0
            for part, (label, colour) in PARTS.items():
                if part in row[side]:
                    height = max(0.0, figure(row[side][part]) / whole)  # a difference of two measurements can be below 0
                    panel.bar(at, height, 0.8, bottom, color=colour, label=label if at == 1 else None)
                    bottom += height
            labels.append(f"{row['ops']}\n{row['protocol']}\n{side}")
            at += 1
    panel.set_xticks(range(at), labels, fontsize=7)
    panel.set(title=f"One layer, {rows[0]['tokens']} token: {title}")
    panel.margins(y=0.2)


def _speedups(panel: Axes, rows: list[Row]) -> None:
    """FFN speed-up by network: a line a stack and size of pass."""
    networks = list(rows[0]["dense"]["layer"]["modelled"])
    for row in rows:
        values = [row["ffn_speedup"][key] for key in (*networks, "seconds", "bytes")]
        panel.plot(range(len(values)), values, marker="o", markersize=3, label=f"{_name(row)}, {row['tokens']}")
    panel.set_xticks(range(len(networks) + 2), [*networks, "compute", "bytes"])
    panel.axhline(1, color="grey", linewidth=1)
    panel.set(title="FFN, dense over sparse", ylim=0)
    panel.legend(fontsize=7, ncols=2)


def _ways(panel: Axes, rows: list[Row]) -> None:
    """Bytes of taking active blocks, as multiples of the disclosed way's."""
    for i, (way, label) in enumerate(WAYS.items()):
        heights = [row[way]["bytes"] / row["disclosed"]["bytes"] for row in rows]
        bars = panel.bar([at + 0.27 * (i - 1) for at in range(len(rows))], heights, 0.27, label=label)
        panel.bar_label(bars, [f"{height:.1f}" for height in heights], fontsize=7)
    panel.set_xticks(range(len(rows)), [_name(row).replace(" ", "\n") for row in rows])
    panel.set(title="Taking active blocks: bytes, of the disclosed way's", yscale="log")
    panel.margins(y=0.25)
    panel.legend(fontsize=8, ncols=3, loc="upper center")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
