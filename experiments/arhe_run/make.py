"""Encrypted decoding of the character model: tokens, bootstraps, seconds, errors by layer, near-ties (see run.sh for the order).

    python experiments/arhe_run/make.py PART --out FOLDER

timed: eight characters, nothing decrypted before the end. errors: two characters, every layer's result decrypted and compared.
prompts: the simulator from speeches' beginnings, to see how often a near-tie is met and reported. cutmax: as timed, by CutMax in
place of the league. report: result.json, cutmax.json, plot.png.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
MODEL = ["--model", "shakespeare-tiny", "--parameters", "toy", "--passages", "200", "--reciprocal", "119"]
MODEL += ["--argmax", "league", "--json"]
PROMPT = "My lord, "
LINES = Path(__file__).parents[2] / "configs/calibration/shakespeare.txt"
PROMPTS, LETTERS, TOKENS = 25, 9, 8


def run(command: str, *arguments: str) -> dict[str, Any]:
    """What `spu-llm arhe COMMAND` prints, and the command."""
    words = ["arhe", command, *MODEL, *arguments]
    done = subprocess.run([sys.executable, "-m", "spu_llm", *words], check=True, stdout=subprocess.PIPE, text=True)
    return {"command": " ".join(["spu-llm", *words]), **json.loads(done.stdout)}


def timed() -> Any:
    return run("run", "--prompt", PROMPT, "--tokens", str(TOKENS))


def errors() -> Any:
    return run("run", "--prompt", PROMPT, "--tokens", "2", "--errors")


def prompts() -> Any:
    """From the beginnings of the last calibration lines."""
    begun = [line[:LETTERS] for line in LINES.read_text().splitlines()[-PROMPTS:]]
    return [{"text": text, **run("simulate", "--quiet", "--prompt", text, "--tokens", str(TOKENS))} for text in begun]


def cutmax() -> Any:
    return run("run", "--prompt", PROMPT, "--tokens", str(TOKENS), "--argmax", "cutmax")


def report(out: Path) -> None:
    parts = {part.__name__: json.loads((out / f"{part.__name__}.json").read_text()) for part in (timed, errors, prompts)}
    found = {"timed": parts["timed"], "errors": parts["errors"], "prompts": counted(parts["prompts"])}
    (HERE / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    shutil.copy(out / "cutmax.json", HERE)
    draw(found, HERE / "plot.png")
    print(json.dumps(found, indent=1))


def counted(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens up to the first near-tie of a prompt, and whether they are the plaintext model's."""
    first = [min(one["near_ties"], default=TOKENS) for one in runs]
    return {
        "prompts": len(runs),
        "tokens_each": TOKENS,
        "prompts_with_a_near_tie": sum(place < TOKENS for place in first),
        "tokens_before_near_ties": sum(first),
        "of_them_wrong": sum(max(0, place - one["agree"]) for place, one in zip(first, runs, strict=True)),
        "tokens_wrong_after_near_ties": sum(TOKENS - max(place, one["agree"]) for place, one in zip(first, runs, strict=True)),
        "predicted_is_performed": all(one["predicted"] == one["performed"] for one in runs),
        "resolved_gap": runs[0]["resolved_gap"],
    }


def draw(found: dict[str, Any], path: Path) -> None:
    run, by_layer = found["timed"], found["errors"]["errors"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    numbers = range(1, len(run["performed"]) + 1)
    left.bar([n - 0.2 for n in numbers], run["predicted"], 0.4, label="bootstraps, predicted")
    left.bar([n + 0.2 for n in numbers], run["performed"], 0.4, label="performed")
    left.plot(numbers, run["seconds_tokens"], "k.-", label="seconds")
    left.set(xlabel="token", title="encrypted decoding, ring 2^11 (not secure)")
    left.legend()
    names = list(by_layer["whole"])
    right.semilogy(names, [by_layer["largest_value"][name] for name in names], "k:", label="largest value")
    right.semilogy(names, [by_layer["whole"][name] for name in names], "o-", label="error")
    right.semilogy(names, [by_layer["noise"][name] for name in names], "s-", label="of it by encryption")
    right.set(title="largest errors of the last row")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {part.__name__: part for part in (timed, errors, prompts, cutmax)}
    parser.add_argument("part", choices=[*parts, "report"])
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.part == "report":
        report(chosen.out)
    else:
        (chosen.out / f"{chosen.part}.json").write_text(json.dumps(parts[chosen.part](), indent=1) + "\n")


if __name__ == "__main__":
    main()
