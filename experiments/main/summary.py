"""The main figure's runs as tables for lan and wan: python experiments/main/summary.py FOLDER, of lan.json and small.json.

Each is the metrics.json of one `spu-llm run`; one that is missing is left out. Their networks are formulas over measured compute,
messages and bytes, which prices the runs for either network. Writes result.json beside them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from spu_llm.experiment.schema import load_network
from spu_llm.network import NetworkProfile

NETWORKS = ("lan", "wan")
LAST = {"lan": "post_lookup", "small": "comet_and_post"}  # what the run itself adds, beside its variants
RUNGS = ("stock SPU", "soal_functions", "plugin", "soal", "comet", "post", "post_tuned", "post_lookup", "comet_and_post")


def seconds(network: NetworkProfile, cost: dict[str, Any], suffix: str = "") -> float:
    """Of a phase, or of a token in it, on a network."""
    return network.seconds(cost["compute_seconds" + suffix], cost["messages" + suffix], cost["bytes" + suffix])


def priced(metrics: dict[str, Any], network: NetworkProfile) -> dict[str, Any]:
    """What is told of a run: seconds a token and of the prompt on the network, compute, traffic, what is dealt, accuracy."""
    decode = metrics["decode"] | {"seconds_per_token": seconds(network, metrics["decode"], "_per_token")}
    return {
        "decode": decode,
        "prefill": seconds(network, metrics["prefill"]),
        "dealt": metrics["offline"]["bytes_per_token"],
        "accuracy": metrics["accuracy"],
        "tokens_a_pass": metrics.get("post", {}).get("tokens_per_round"),
        "text": metrics["text"],
        "trust": metrics["trust"],
    }


def ladder(metrics: dict[str, Any], last: str, network: NetworkProfile) -> dict[str, Any]:
    """The runs in the order of RUNGS, the run itself under the name of what it adds."""
    found = {"stock SPU": metrics["baseline"], **metrics["variants"], last: metrics}
    return {name: priced(found[name], network) for name in sorted(found, key=RUNGS.index)}


def rows(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Each run beside the first, the last rung on top."""
    (_, baseline), *others = runs.items()
    return [{"run": name, **run, "baseline": baseline} for name, run in reversed(others)]


def main(folder: Path) -> None:
    found = {name: json.loads(path.read_text()) for name in LAST if (path := folder / f"{name}.json").exists()}
    ladders = {
        name: {network: ladder(metrics, LAST[name], load_network(network)) for network in NETWORKS}
        for name, metrics in found.items()
    }
    tables = {name: {network: rows(runs) for network, runs in networks.items()} for name, networks in ladders.items()}
    result = {"ladders": ladders, "tables": tables}
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
