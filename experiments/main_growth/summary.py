"""Collects what run.sh measured into result.json, draws it, and prints tables; layers.json and prompts.json are the charts' data.

python experiments/main_growth/summary.py results/main_growth experiments/main_growth experiments/soal_crypten/result.json
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

NETWORKS = ("lan", "wan")
SIDES = ("plugin", "stock")
X_NAMES = {"layers": "cached positions", "prompts": "tokens of the prompt"}
PANELS = {"lan": "seconds on lan", "wan": "seconds on wan", "messages": "messages", "bytes": "bytes that one party sends"}
UNITS = {"lan": "s", "wan": "s", "messages": "", "bytes": "B"}

Row = dict[str, Any]


def main(folder: Path, out: Path, others: Path | None) -> None:
    result = {"layers": _layers(folder), "prompts": _prompts(folder, others)}
    pictures = {kind: _pictures(kind, rows) for kind, rows in result.items() if rows}
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "result.json", result)
    for kind, drawn in pictures.items():
        _write(out / f"{kind}.json", drawn)
    _draw(pictures, out / "plot.png")
    for kind, rows in result.items():
        print(_table(kind, rows), end="\n\n")


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def _layers(folder: Path) -> list[Row]:
    """One new token in a layer: a row a shape and number of cached positions."""
    rows = []
    for path in folder.glob("layer.*.json"):
        _, shape, context, _ = path.name.split(".")
        found = json.loads(path.read_text())
        rows.append({"shape": shape, "size": int(context), "plugin": _cost(found), "stock": _cost(found["stock"])})
    return sorted(rows, key=_order)


def _prompts(folder: Path, others: Path | None) -> list[Row]:
    """A layer over a prompt: a row a shape and length. Lengths not measured here come from `others`, soal_crypten's result."""
    sides: dict[tuple[str, int], Row] = {}
    for case, runs in ({} if others is None else json.loads(others.read_text())["runs"]).items():
        shape, tokens = case.split()
        sides[shape, int(tokens)] = {side: runs[side] for side in SIDES}
    for path in folder.glob("prompt.*.json"):
        _, shape, size, side, _ = path.name.split(".")
        sides.setdefault((shape, int(size)), {})[side] = json.loads(path.read_text())
    whole = {case: runs for case, runs in sides.items() if all(side in runs for side in SIDES)}
    rows = [
        {"shape": shape, "size": size, **{side: _layer_cost(runs[side]) for side in SIDES}} for (shape, size), runs in whole.items()
    ]
    return sorted(rows, key=_order)


def _layer_cost(found: Row) -> Row:
    return _cost({**found["parts"]["total"], "max_error": found["max_error"]})


def _order(row: Row) -> tuple[str, int]:
    return row["shape"], row["size"]


def _cost(found: Row) -> Row:
    """Compute, traffic, seconds on each network; what a dealer sends and computes ahead, None where there is none."""
    dealt = {key: found.get(key) or None for key in ("dealer_bytes", "dealer_seconds")}
    counts = {key: found[key] for key in ("seconds", "messages", "bytes", "max_error")}
    modelled = {name: load_network(name).seconds(counts["seconds"], counts["messages"], counts["bytes"]) for name in NETWORKS}
    return {**counts, **dealt, **modelled}


def _pictures(kind: str, rows: list[Row]) -> dict[str, Row]:
    """By shape, what a chart of kind `growth` takes."""
    shapes = dict.fromkeys(row["shape"] for row in rows)
    return {shape: _picture(kind, [row for row in rows if row["shape"] == shape]) for shape in shapes}


def _picture(kind: str, rows: list[Row]) -> Row:
    return {
        "x": [row["size"] for row in rows],
        "x_name": X_NAMES[kind],
        "panels": [
            {"title": title, "unit": UNITS[key], "series": {side: [row[side][key] for row in rows] for side in SIDES}}
            for key, title in PANELS.items()
        ],
    }


def _draw(pictures: dict[str, dict[str, Row]], path: Path) -> None:
    """A row of panels for each kind and shape."""
    lines = [(f"{shape}, {picture['x_name']}", picture) for shapes in pictures.values() for shape, picture in shapes.items()]
    figure, axes = plt.subplots(len(lines), len(PANELS), figsize=(14, 3 * len(lines)), layout="constrained", squeeze=False)
    for row, (name, picture) in zip(axes, lines, strict=True):
        for panel, data in zip(row, picture["panels"], strict=True):
            for side, values in data["series"].items():
                panel.plot(picture["x"], values, "o-", label=side)
            panel.set(title=data["title"], xlabel=name, xscale="log", yscale="log", xticks=picture["x"])
            panel.set_xticklabels(map(str, picture["x"]))
            panel.minorticks_off()
        row[0].legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _table(kind: str, rows: list[Row]) -> str:
    heads = ["shape", X_NAMES[kind], *(f"{name}: plugin, stock, s (ratio)" for name in NETWORKS)]
    heads += ["compute, s", "messages", "KB", "dealt, KB", "largest error"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        plugin, stock = (row[side] for side in SIDES)
        cells = [row["shape"], str(row["size"])]
        cells += [f"{plugin[name]:.2f}, {stock[name]:.2f} ({stock[name] / plugin[name]:.1f})" for name in NETWORKS]
        cells += [f"{plugin['seconds']:.2f}, {stock['seconds']:.2f}", f"{plugin['messages']}, {stock['messages']}"]
        cells += [f"{plugin['bytes'] / 1e3:,.0f}, {stock['bytes'] / 1e3:,.0f}", f"{plugin['dealer_bytes'] / 1e3:,.0f}"]
        cells.append(f"{plugin['max_error']:.1e}, {stock['max_error']:.1e}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
