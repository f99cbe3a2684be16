"""The cost model's times beside those measured over emulated links: prefill, and decoding of a token.

    python experiments/network_model/compare.py results/network_model experiments/network_model/result.json

One run with the parties as processes and no network between them gives compute, messages and bytes; the model makes of them times
for every network.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from spu_llm.experiment.schema import CONFIGS, read_yaml
from spu_llm.network import NetworkProfile

NETWORKS = ("lan", "wan", "100mbps", "5gbps")
PHASES = {"prefill": "", "decode": "_per_token"}


def main(folder: Path, out: Path) -> None:
    rows, emulation = [], {}
    for ops in ("plugin", "stock"):
        modelled = _metrics(folder / "bare", ops)
        for name in NETWORKS:
            linked = _metrics(folder / f"{name}_link", ops)
            emulation[f"{ops} {name}"] = linked["network"]["emulation"]
            rows += [_row(modelled, linked, name, phase) for phase in PHASES]
    worst = max(abs(row["relative_error"]) for row in rows)
    model, prompt = modelled["model"], modelled["prefill"]["tokens"]
    result = {"model": model, "prompt_tokens": prompt, "max_relative_error": worst, "rows": rows, "emulation": emulation}
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'ops':8} {'network':8} {'phase':8} {'compute s':>10} {'messages':>9} {'MB':>8} {'model s':>9} {'link s':>9}  error")
    for row in rows:
        print(
            f"{row['ops']:8} {row['network']:8} {row['phase']:8} {row['compute_seconds']:10.2f} {row['messages']:9.0f} "
            f"{row['bytes'] / 1e6:8.2f} {row['model_seconds']:9.2f} {row['link_seconds']:9.2f}  {row['relative_error']:+.1%}"
        )
    print(f"largest error {worst:.1%}")


def _row(modelled: dict[str, Any], linked: dict[str, Any], name: str, phase: str) -> dict[str, Any]:
    """One phase over one network. The shipped model profile of that name is what is tested."""
    profile = NetworkProfile.model_validate(read_yaml(CONFIGS / "network" / f"{name}.yaml"))
    cost, suffix = modelled[phase], PHASES[phase]
    compute, messages, sent = (cost[key + suffix] for key in ("compute_seconds", "messages", "bytes"))
    seconds, measured = profile.seconds(compute, messages, sent), linked[phase]["seconds" + suffix]
    return {
        "ops": modelled["ops"],
        "network": name,
        "phase": phase,
        "compute_seconds": compute,
        "messages": messages,
        "bytes": sent,
        "model_seconds": seconds,
        "link_seconds": measured,
        "relative_error": seconds / measured - 1,
    }


def _metrics(folder: Path, ops: str) -> dict[str, Any]:
    """A run's metrics, stock SPU's being the baseline."""
    found: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return found if ops == found["ops"] else found["baseline"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
