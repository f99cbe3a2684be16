"""Collects what run.sh measured into result.json and prints the tables of docs/arhe.md.

python experiments/arhe_service/summary.py results/arhe_service experiments/arhe_service
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

KEYS = ("few_11", "few_12", "few_13", "few_14", "all_11", "all_12", "secure")


def main(folder: Path, out: Path) -> None:
    runs = {name: _read(folder, name) for name in ("whole", "killed")}
    result = {
        "keys": {name: _client(folder, name) for name in KEYS},
        "answers": {name: _read(folder, f"{name}.answer") for name in runs},
        "whole": _life(runs["whole"][0]),
        "killed": _killed(runs["whole"][0], *runs["killed"]),
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    for name, client in result["keys"].items():
        sizes = [f"{size:.3g}" for size in client["megabytes"].values()]
        print(f"| {name} | {client['automorphism_keys']} | " + " | ".join(sizes) + " |")
    print(json.dumps({name: result[name] for name in ("answers", "whole", "killed")}, indent=1))


def _life(run: dict[str, Any]) -> dict[str, Any]:
    """A server's process. Starting: the interpreter and imports; loading: digests, keys, the context, calibration."""
    tokens = [sum(parts.values()) for parts in run["seconds"]]
    return {
        "seconds_tokens": tokens,
        "seconds_parts": run["seconds"],
        "bootstraps": run["bootstraps"],
        "seconds_loading": run["loading_seconds"],
        "seconds_saving": run["saving_seconds"],
        "seconds_elapsed": run["elapsed_seconds"],
        "seconds_on_core": run["core_seconds"],
        "state_megabytes": run["state_bytes"] / 1e6,
        "peak_megabytes": run["peak_rss_bytes"] / 1e6,
    }


def _killed(whole: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """What a kill within a token cost: the time of both lives beside that of a server that was left alone."""
    return {
        "resumed_at": {"tokens": second["tokens"], "operations": second["operations"]},
        "seconds_lives": [life["elapsed_seconds"] for life in (first, second)],
        "seconds_on_core_lives": [life["core_seconds"] for life in (first, second)],
        "seconds_on_core_more": first["core_seconds"] + second["core_seconds"] - whole["core_seconds"],
        "second_life": _life(second),
    }


def _client(folder: Path, name: str) -> dict[str, Any]:
    keys, request = _read(folder, f"{name}.keys"), _read(folder, f"{name}.request")
    files = keys["bytes"] | {f"request/{file}": size for file, size in request["bytes"].items()}
    return {
        "automorphism_keys": round(files["public/automorphism.key"] / files["public/relinearisation.key"]),
        "megabytes": {file: size / 1e6 for file, size in files.items()},
        "seconds": {"keys": keys["seconds"], "request": request["seconds"]},
    }


def _read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
