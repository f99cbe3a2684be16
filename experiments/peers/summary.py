"""Collects what run.sh measured into result.json, with what others published, draws it, and prints tables.

python experiments/peers/summary.py results/peers experiments/peers
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import yaml

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from spu_llm.experiment.schema import load_network

NETWORKS = ("lan", "wan")
COUNTS = ("compute_seconds", "messages", "bytes")
PROTOCOLS = ("SEMI2K", "ABY3", "CHEETAH")
PUBLISHED = Path(__file__).with_name("published.yaml")

COSTS = (*COUNTS, *NETWORKS)
FACTS = (
    "shared_a_token_bytes",
    "setup_bytes",
    "dealt_bytes",
    "text",
    "right",
    "max_logit_error",
    "max_logit",
    "peak_rss_bytes",
    "ring",
)
NOT_RUN = {**dict.fromkeys((*COSTS, *FACTS)), "later": dict.fromkeys(COSTS)}

Row = dict[str, Any]


def main(folder: Path, out: Path) -> None:
    rows = _rows(folder)
    runs = {name: row for name, row in rows.items() if row is not None}
    smollm2 = _smollm2(folder) or NOT_RUN
    result = {
        "runs": {name: row or NOT_RUN for name, row in rows.items()},
        "smollm2": smollm2,
        "published": yaml.safe_load(PUBLISHED.read_text()),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    _draw(runs, out / "plot.png")
    print(_table(runs))


def _read(folder: Path, name: str) -> Row | None:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _rows(folder: Path) -> dict[str, Row | None]:
    """By name, what a token of each run cost, and how near plaintext it came; None where a run was not made."""
    found = {"plugin": _own(_read(folder, "own_plugin/metrics"))}
    found |= {f"stock with cache, {name}": _own(_read(folder, f"own_{name}/metrics")) for name in PROTOCOLS}
    for name in PROTOCOLS:
        found[f"example, {name}"] = _example(_read(folder, f"example_{name}_PADE"))
        found[f"example, {name}, exp as SPU has it"] = _example(_read(folder, f"example_{name}_DEFAULT"))
    found["example, enabled"] = _example(_read(folder, "example_enabled"))
    return found | {"CrypTen": _crypten(_read(folder, "crypten"))}


def _own(metrics: Row | None) -> Row | None:
    """A generation with a cache: the prompt's pass and the later tokens', over the number of tokens."""
    if metrics is None:
        return None
    prefill, decode, tokens = metrics["prefill"], metrics["decode"], len(metrics["tokens"])
    total = {key: prefill[key] + decode["tokens"] * decode[f"{key}_per_token"] for key in COUNTS}
    later = {key: decode[f"{key}_per_token"] for key in COUNTS}
    setup, agreed = metrics["setup"], metrics["accuracy"]["top1_agreement"]
    return {
        **_a_token(total, tokens),
        "later": {**later, **_modelled(later)},
        "setup_bytes": setup["bytes"],
        "shared_a_token_bytes": 0,
        "dealt_bytes": metrics["offline"]["bytes_per_token"],
        "text": metrics["text"],
        "right": "yes" if agreed == 1 else "no",
        **_errors(metrics),
    }


def _example(found: Row | None) -> Row | None:
    """The whole text for every token, and the weights' shares for every call."""
    if found is None:
        return None
    call, tokens = found["call"], found["new_tokens"]
    total = {
        "compute_seconds": call["compute_seconds"] + call["sharing_seconds"],
        "messages": call["messages"] + 1,  # the shares leave together
        "bytes": call["bytes"] + call["owner_shares_bytes"],
    }
    return {
        **_a_token(total, tokens),
        "later": None,
        "setup_bytes": 0,
        "shared_a_token_bytes": call["owner_shares_bytes"] / tokens,
        "dealt_bytes": call["dealt"]["bytes"] / tokens,
        "text": found["text"],
        "right": "yes" if found["text"] == found["plain_text"] else "no",
        **_errors(found),
    }


def _crypten(found: Row | None) -> Row | None:
    """With a cache; its triples are drawn in the passes, and `dealt` is what its third-party provider would send."""
    if found is None:
        return None
    first, later = (found["parts"][f"{part} pass"] for part in ("prompt", "token"))
    tokens = found["new_tokens"]
    names = {"compute_seconds": "seconds", "messages": "messages", "bytes": "bytes", "dealt_bytes": "dealer_bytes"}
    total = {ours: first[theirs] + (tokens - 1) * later[theirs] for ours, theirs in names.items()}
    token = {ours: later[theirs] for ours, theirs in names.items()}
    return {
        **_a_token(total, tokens),
        "later": {**token, **_modelled(token)},
        "setup_bytes": None,
        "shared_a_token_bytes": 0,
        "dealt_bytes": total["dealt_bytes"] / tokens,
        "text": None,
        "right": "yes" if found["accuracy"]["top1_agreement"] == 1 else "no",
        **_errors(found),
    }


def _a_token(total: Row, tokens: int) -> Row:
    mean = {key: total[key] / tokens for key in COUNTS}
    return {"new_tokens": tokens, **mean, **_modelled(mean)}


def _modelled(cost: Row) -> Row:
    return {name: load_network(name).seconds(*(cost[key] for key in COUNTS)) for name in NETWORKS}


def _errors(found: Row) -> Row:
    return {"max_logit_error": found["accuracy"]["max_logit_error"], "max_logit": found["accuracy"]["max_logit"]}


def _smollm2(folder: Path) -> Row | None:
    found = _read(folder, "example_smollm2")
    row = _example(found)
    return None if found is None or row is None else {**row, "peak_rss_bytes": found["peak_rss_bytes"], "ring": found["ring"]}


def _draw(runs: dict[str, Row], path: Path) -> None:
    panels = {
        "lan": "seconds a token on lan",
        "wan": "seconds a token on wan",
        "bytes": "bytes a token",
        "messages": "messages a token",
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(16, 5), layout="constrained", sharey=True)
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        values = [row[key] for row in runs.values()]
        axis.barh(list(runs), values, color=["tab:blue" if name == "plugin" else "tab:gray" for name in runs])
        axis.set(title=title, xscale="log")
        axis.set_xlim(left=min(values) / 3)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _table(runs: dict[str, Row]) -> str:
    heads = ["a token", "compute, s", "messages", "MB", "lan, s", "wan, s", "times the plugin's: lan, wan", "dealt, MB"]
    heads += ["text right", "logit error"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    base = runs["plugin"]
    for name, row in runs.items():
        cells = [name, f"{row['compute_seconds']:.2f}", f"{row['messages']:,.0f}", f"{row['bytes'] / 1e6:,.2f}"]
        cells += [f"{row[network]:,.1f}" for network in NETWORKS]
        cells.append(", ".join(f"{row[network] / base[network]:,.1f}" for network in NETWORKS))
        cells += [f"{row['dealt_bytes'] / 1e6:.1f}", row["right"], f"{row['max_logit_error']:.3g}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
