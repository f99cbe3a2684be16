"""Runs one layer of the character model at 128 bits of security and compares it with the simulator and with exact functions.

    python experiments/arhe_secure/make.py [--characters N]

Prints, and writes to result.json: what each operation took, bootstraps predicted and performed, errors, memory. Rings too small for
the level of security are asked for as well, with what the library says of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from spu_llm.arhe import Degrees, Meaning, Options, Simulator, calibrate
from spu_llm.arhe.calibrate import exact_values
from spu_llm.arhe.ckks import OpenFheBackend, make_context, make_keys
from spu_llm.arhe.executor import Server, encrypted
from spu_llm.arhe.graph import build_program
from spu_llm.arhe.parameters import SECURE
from spu_llm.arhe.report import schedule_of
from spu_llm.arhe.schedule import Schedule, prompt_span
from spu_llm.arhe.slots import places, rotation_steps
from spu_llm.errors import UserError
from spu_llm.experiment.schema import load_model
from spu_llm.models import load_checkpoint
from spu_llm.progress import bar

HERE = Path(__file__).parent
MODEL, TEXT, PASSAGES = "shakespeare-tiny", "My lord, ", 200
CONTEXT = 16  # characters of a calibration passage
RESULT = "layer0.out"
SMALLER_RINGS = (14, 15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--characters", type=int, default=4, help="of the prompt (default: 4)")
    chosen = parser.parse_args()
    found = {"model": MODEL, "security": "128 bits (HEStd_128_classic)", "parameters": asdict(SECURE)}
    found |= {"modulus_bits": SECURE.modulus_bits, "threads": int(os.environ["OMP_NUM_THREADS"]), "smaller_rings": refused()}
    found |= layer(chosen.characters)
    (HERE / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def refused() -> dict[str, str]:
    """Why no smaller ring will do."""
    found = {}
    for log_ring in SMALLER_RINGS:
        try:
            make_context(replace(SECURE, log_ring=log_ring), secure=True)
            found[f"2^{log_ring}"] = "admitted"
        except UserError as error:
            found[f"2^{log_ring}"] = str(error)
    return found


def layer(characters: int) -> dict[str, Any]:
    described = load_model(MODEL)
    model = load_checkpoint(described.locate())
    encode = model.tokenizer.encode
    schedule = schedule_of(model.decoder.config, SECURE, Degrees(), Options())
    passages = [encode(line)[:CONTEXT] for line in described.calibration.read_text().splitlines()[:PASSAGES]]
    meaning = Meaning(model.decoder, schedule.program, calibrate(model.decoder, schedule.program, passages))
    prompt = encode(TEXT)[:characters]

    began = time.perf_counter()
    context = make_context(SECURE, secure=True)
    pair = make_keys(context, rotation_steps(SECURE.slots, SECURE.few_keys))
    found: dict[str, Any] = {"seconds_keys": time.perf_counter() - began, "rotation_keys": len(rotation_steps(SECURE.slots, True))}
    backend = OpenFheBackend(SECURE, context, pair.publicKey, pair.secretKey)
    found["bytes_keys"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    server, twin = Server(meaning, schedule, backend), Server(meaning, schedule, Simulator(SECURE))
    seconds: Counter[str] = Counter()
    for number, one in enumerate((twin, server)):
        one.take(encrypted(one.backend, model.decoder.config, prompt), characters)
        one.begin()
        count = [op.name for op in schedule.program.ops].index(RESULT) + 1
        for op in bar(schedule.program.ops[:count], ("simulated", "encrypted")[number], "operation"):
            before, began = getattr(one.backend, "bootstrap_seconds", 0.0), time.perf_counter()
            one.perform()
            if one is server:
                seconds["bootstrap"] += backend.bootstrap_seconds - before
                seconds[op.kind] += time.perf_counter() - began - (backend.bootstrap_seconds - before)
    rows = [rows_of(schedule, one, characters) for one in (server, twin)]
    full = build_program(model.decoder.config, schedule.program.degrees, Options(skip=False), SECURE.slots)
    exact = exact_values(model.decoder, full, prompt)[RESULT]
    return found | {
        "characters": characters,
        "bootstraps_predicted": schedule.counts(prompt_span(schedule, characters))["layer0"],
        "bootstraps_performed": backend.bootstraps,
        "seconds": dict(seconds) | {"all": sum(seconds.values())},
        "seconds_bootstrap": backend.bootstrap_seconds / backend.bootstraps,
        "error_encryption": float(np.abs(rows[0] - rows[1]).max()),
        "error_whole": float(np.abs(rows[0] - exact).max()),
        "largest_value": float(np.abs(exact).max()),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def rows_of(schedule: Schedule, server: Server, characters: int) -> np.ndarray:
    """The layer's result [rows, 1, width], decrypted."""
    where = places(schedule.program.layouts[RESULT], prompt_span(schedule, characters), SECURE.slots)
    return where.read(np.concatenate([server.backend.decrypt(x) for x in server.values[RESULT]]))


if __name__ == "__main__":
    main()
