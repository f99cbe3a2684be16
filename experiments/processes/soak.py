"""Memory and file handles of every process over a long generation: whether they stay flat.

    python experiments/processes/soak.py results/network_model/soak.yaml 200 experiments/processes/soak.json

Starts `spu-llm run` with the parties as processes and samples each of them once a second. Growth is the least-squares slope over
the second half of the time in which tokens are generated, times its length.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

PERIOD = 1.0


def processes(parent: int) -> dict[str, int]:
    """Role -> process id of the children of `parent`."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            ppid = int(stat.read_text().rsplit(")", 1)[1].split()[1])
            words = stat.with_name("cmdline").read_text().split("\0")
        except (OSError, ValueError):
            continue  # it has just ended
        if ppid == parent and "spu_llm" in words:
            role = words[words.index("--role") + 1] if "--role" in words else words[words.index("spu_llm") + 1]
            found[role] = int(stat.parent.name)
    return found


def sample(pid: int) -> tuple[int, int]:
    """Resident bytes and open file handles."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024, len(list(Path(f"/proc/{pid}/fd").iterdir()))


def tokens_so_far(folder: Path) -> int:
    """What the client has kept, in the run's scratch folder."""
    kept = list(folder.glob("spu_llm.*/client/out/tokens.json"))
    try:
        return len(json.loads(kept[0].read_text())["tokens"]) if kept else 0
    except ValueError:
        return 0


def main(config: str, count: int, out: Path) -> None:
    samples: dict[str, list[tuple[int, int, int]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "spu_llm", "run", config, "--out", f"{scratch}/out", "--quiet"]
        changes = ["--set", f"generation.new_tokens={count}", "--set", "processes=true"]
        run = subprocess.Popen([*command, *changes], env=os.environ | {"TMPDIR": scratch})
        while run.poll() is None:
            tokens = tokens_so_far(Path(scratch))
            for role, pid in processes(run.pid).items():
                try:
                    samples.setdefault(role, []).append((tokens, *sample(pid)))
                except (OSError, StopIteration):
                    continue
            time.sleep(PERIOD)
        metrics = json.loads(Path(f"{scratch}/out/metrics.json").read_text())
    result = {"model": metrics["model"], "tokens": len(metrics["tokens"]), "top1_agreement": metrics["accuracy"]["top1_agreement"]}
    result["roles"] = {role: growth(found, count) for role, found in samples.items()}
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def growth(found: list[tuple[int, int, int]], count: int) -> dict[str, float]:
    """Of the second half of the tokens: bytes and handles at its beginning and end, and the growth along the fitted line."""
    half = np.array([each for each in found if count / 2 <= each[0]], np.float64)
    tokens, memory, handles = half.T
    moved = tokens.max() > tokens.min()
    slope = np.polyfit(tokens, memory, 1)[0] if moved else 0.0
    return {
        "rss_bytes": float(np.median(memory)),
        "rss_growth_bytes": float(slope * (tokens.max() - tokens.min())),
        "handles_first": float(handles[0]),
        "handles_last": float(handles[-1]),
        "handles_most": float(handles.max()),
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
