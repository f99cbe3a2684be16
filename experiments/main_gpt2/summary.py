"""What run.sh measured, on two networks: result.json, a plot, and a table; a baseline that was not run is null.

python experiments/main_gpt2/summary.py results/main_gpt2/run/metrics.json experiments/main_gpt2
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
COUNTS = ("compute_seconds", "messages", "bytes")

PARTS = ("setup", "prompt", "token")
ERRORS = ("max_logit_error", "max_logit", "top1_agreement")
NOT_RUN = {
    **{part: dict.fromkeys((*COUNTS, *NETWORKS)) for part in PARTS},
    "offline": dict.fromkeys(("bytes_per_token", "seconds_per_token")),
    "accuracy": dict.fromkeys(ERRORS),
    "peak_rss_bytes": None,
}

Row = dict[str, Any]


def main(metrics: Path, out: Path) -> None:
    found = json.loads(metrics.read_text())
    result = {"plugin": _run(found), "stock": _run(found["baseline"]) if "baseline" in found else NOT_RUN}
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    made = {side: run for side, run in result.items() if run is not NOT_RUN}
    _draw(made, out / "plot.png")
    print(_table(made))


def _run(metrics: Row) -> Row:
    """Costs of set-up, prompt and a token, with what the dealer does ahead of a token, and how near plaintext it came."""
    prompt = metrics["prefill"]["tokens"]
    costs = {
        "setup": _cost({key: metrics["setup"][key] for key in COUNTS}),
        "prompt": _cost({key: metrics["prefill"][key] for key in COUNTS}),
        "token": _cost({key: metrics["decode"][f"{key}_per_token"] for key in COUNTS}),
    }
    kept = ("accuracy", "tokens", "text", "trust", "peak_rss_bytes", "failure_probability_per_token")
    return {"prompt_tokens": prompt, **costs, "offline": metrics["offline"], **{key: metrics[key] for key in kept}}


def _cost(cost: Row) -> Row:
    return {**cost, **{name: load_network(name).seconds(*(cost[key] for key in COUNTS)) for name in NETWORKS}}


def _draw(result: dict[str, Row], path: Path) -> None:
    panels = {"lan": "seconds on lan", "wan": "seconds on wan", "messages": "messages", "bytes": "bytes that one party sends"}
    figure, axes = plt.subplots(1, len(panels), figsize=(14, 3.2), layout="constrained")
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        for i, (side, run) in enumerate(result.items()):
            axis.bar([at + 0.4 * i for at in range(2)], [run[part][key] for part in ("prompt", "token")], 0.38, label=side)
        axis.set(title=title, yscale="log")
        axis.set_xticks([0.2, 1.2], ["prompt", "a token"])
    axes[0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _table(result: dict[str, Row]) -> str:
    runs = list(result.values())
    lines = ["|  | " + " | ".join(result) + " |", "|---" * (1 + len(result)) + "|"]
    for part in PARTS:
        for key, scale in (("lan", 1), ("wan", 1), ("compute_seconds", 1), ("messages", 1), ("bytes", 1e-6)):
            lines.append(_line(f"{part}: {'MB' if key == 'bytes' else key}", [run[part][key] * scale for run in runs]))
    lines += [_line(key, [run["accuracy"][key] for run in runs]) for key in ERRORS]
    lines.append(_line("dealt a token, MB", [run["offline"]["bytes_per_token"] / 1e6 for run in runs]))
    lines.append(_line("dealing a token, s", [run["offline"]["seconds_per_token"] for run in runs]))
    lines.append(_line("peak memory, GB", [run["peak_rss_bytes"] / 1e9 for run in runs]))
    return "\n".join(lines)


def _line(name: str, values: list[float]) -> str:
    return f"| {name} | " + " | ".join(f"{value:,.4g}" for value in values) + " |"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
