"""Three argmaxes on logits alone: levels, bootstraps, operations and the gap they resolve, on the simulator; then encrypted.

python experiments/arhe_argmax/measure.py resolve --vocabulary 2048 --out results/arhe_argmax
OMP_NUM_THREADS=1 python experiments/arhe_argmax/measure.py encrypt --log-ring 11 --vocabulary 64 --out results/arhe_argmax
python experiments/arhe_argmax/measure.py join --from results/arhe_argmax --out experiments/arhe_argmax
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from spu_llm.arhe import PAPER, CkksParameters, Degrees, Meaning, Options, Simulator
from spu_llm.arhe.calibrate import with_argmax
from spu_llm.arhe.executor import Server
from spu_llm.arhe.graph import END
from spu_llm.arhe.meaning import Ranges
from spu_llm.arhe.parameters import TOY
from spu_llm.arhe.report import schedule_of
from spu_llm.arhe.schedule import Schedule, prompt_span
from spu_llm.arhe.shapes import random_decoder
from spu_llm.arhe.slots import rotation_steps
from spu_llm.errors import UserError
from spu_llm.experiment.schema import load_model
from spu_llm.models import DecoderConfig, PlainDecoder, load_checkpoint

VOCABULARIES = (32, 64, 2048, 50257)
MARGIN = 1.25
FITTED, TRIED = 64, 10  # rows of logits that ranges come from; other rows, on which gaps are measured
SURE, ERROR = 0.9, 0.01
GAPS = 2.0 ** -np.arange(3, 14, 0.5)  # of the range of logits
ROUNDS = {
    "shares 5 2 2, flat 2": Degrees(),
    "shares 5 2, flat 2": Degrees(shares=(5, 2)),
    "shares 5 2, steep 1, flat 2": Degrees(shares=(5, 2), cut_steep=1),
    "shares 5 2 2, steep 1, flat 2": Degrees(cut_steep=1),
    "one cut, shares 5 2 2, flat 2": Degrees(cuts=(4,)),
}


class Counting(Simulator):
    """Counts calls."""

    def __init__(self, parameters: CkksParameters):
        super().__init__(parameters)
        self.calls: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("multiply", "multiply_constant", "rotate", "linear"):
            self.calls[name] += 1
        return super().__getattribute__(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("resolve", "encrypt", "join"))
    parser.add_argument("--log-ring", type=int, default=11)
    parser.add_argument("--vocabulary", type=int, default=64)
    parser.add_argument("--argmax", default="tournament,league,cutmax", help="of those encrypted")
    parser.add_argument("--from", dest="source", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.what == "resolve":
        _save(arguments.out / f"resolve_{arguments.vocabulary}.json", resolve(arguments.vocabulary))
    elif arguments.what == "encrypt":
        found = encrypt(arguments.vocabulary, arguments.log_ring, arguments.argmax.split(","))
        _save(arguments.out / f"encrypt_{arguments.log_ring}_{arguments.vocabulary}.json", found)
    else:
        parts = {path.stem: json.loads(path.read_text()) for path in sorted(arguments.source.glob("*_*.json"))}
        _save(arguments.out / "result.json", parts)
        _draw(parts, arguments.out / "plot.png")


def resolve(vocabulary: int) -> list[dict]:
    """Every argmax on the same logits, with the paper's parameters."""
    rows, source = logits_of(vocabulary, FITTED + (TRIED if vocabulary < 2**15 else TRIED // 2))
    found, largest = [], rows.max(1)
    for argmax, name, degrees in choices():
        schedule = schedule_for(vocabulary, PAPER, degrees, argmax)
        ranges = with_argmax(Ranges(), schedule.program, rows[:FITTED], MARGIN)
        backend = Counting(PAPER)
        _, performed, _ = perform(schedule, ranges, backend, rows[0])
        gap, exact = resolved(schedule, ranges, rows[FITTED:])
        row = {
            "vocabulary": vocabulary, "logits": source, "argmax": argmax, "name": name, "largest_varies": _spread(largest),
            "largest_over_deviation_varies": _spread(largest / rows.std(1)),
            "levels": levels(schedule), "bootstraps": performed, "predicted": schedule.counts(prompt_span(schedule, 1))["argmax"],
            **backend.calls,
            "resolved": gap, "one_hot_as_is": exact, "groups": schedule.program.groups,
        }  # fmt: skip
        print(row, flush=True)
        found.append(row)
    return found


def choices() -> list[tuple[str, str, Degrees]]:
    """Each argmax with polynomials for several resolved gaps."""
    found = [(argmax, f"{steep} steep", Degrees(steep=steep)) for argmax in ("tournament", "league") for steep in (2, 3, 4)]
    return found + [("cutmax", name, degrees) for name, degrees in ROUNDS.items()]


def encrypt(vocabulary: int, log_ring: int, names: list[str]) -> list[dict]:
    """Every argmax once, encrypted by OpenFHE under the same keys, on one row of logits."""
    from spu_llm.arhe import ckks

    parameters = replace(TOY, log_ring=log_ring, slots=0)
    began = time.process_time()
    context = ckks.make_context(parameters)
    pair = ckks.make_keys(context, rotation_steps(parameters.slots))
    keys = time.process_time() - began
    backend = ckks.OpenFheBackend(parameters, context, pair.publicKey, pair.secretKey)
    rows, source = logits_of(vocabulary, FITTED + 1)
    took = [_timed(lambda: backend.bootstrap(backend.lower(backend.encrypt(rows[0] / 100), 1))) for _ in range(4)]
    found = []
    for argmax in names:
        schedule = schedule_for(vocabulary, parameters, Degrees(), argmax)
        ranges = with_argmax(Ranges(), schedule.program, rows[:FITTED], MARGIN)
        one_hot, performed, seconds = perform(schedule, ranges, backend, rows[-1])
        twin, predicted, _ = perform(schedule, ranges, Simulator(parameters), rows[-1])
        ordered = np.sort(rows[-1])
        row = {
            "log_ring": log_ring, "vocabulary": vocabulary, "logits": source, "argmax": argmax, "levels": levels(schedule),
            "bootstraps": performed, "predicted": predicted, "seconds": seconds, "seconds_a_bootstrap": float(np.median(took[1:])),
            "keys_seconds": keys, "gap": float(ordered[-1] - ordered[-2]) / float(np.subtract(*ranges.logits[::-1])),
            "error": float(np.abs(one_hot - np.eye(vocabulary)[np.argmax(rows[-1])]).max()),
            "noise": float(np.abs(one_hot - twin).max()), "right": bool(np.argmax(one_hot) == np.argmax(rows[-1])),
            "groups": schedule.program.groups,
        }  # fmt: skip
        print(row, flush=True)
        found.append(row)
    return found


def logits_of(vocabulary: int, count: int) -> tuple[np.ndarray, str]:
    """Rows of mean 0: kjv's on King James for its vocabulary, else random ones."""
    rows = np.random.default_rng(vocabulary).standard_normal((count, vocabulary)) * 4
    source = "normal"
    if vocabulary == 2048:
        model, source = load_model("kjv"), "kjv"
        loaded = load_checkpoint(model.locate())
        lines = model.calibration.read_text().splitlines()[:16]
        tokens = [[*model.prefix, *loaded.tokenizer.encode(line)][:48] for line in lines]
        every = np.concatenate([np.asarray(PlainDecoder(loaded.decoder, 48).advance(line))[1:] for line in tokens])
        rows = np.random.default_rng(0).permutation(every.astype(np.float64))[:count]
    return rows - rows.mean(1, keepdims=True), source


def schedule_for(vocabulary: int, parameters: CkksParameters, degrees: Degrees, argmax: str) -> Schedule:
    """Of a model that is small but for its vocabulary."""
    config = DecoderConfig("gpt2", vocabulary, 8, 1, 2, 2, 8, 16, 1e-5, True)
    return schedule_of(config, parameters, degrees, Options(argmax=argmax))


def levels(schedule: Schedule) -> int:
    """On the longest path from the logits to the next step."""
    spent = {"logits": 0}
    for op in schedule.program.ops:
        if any(value in spent for value in op.inputs):
            spent[op.output] = max(spent[value] for value in op.inputs if value in spent) + op.depth
    return spent[END]


def perform(schedule: Schedule, ranges: Ranges, backend: Any, logits: np.ndarray) -> tuple[np.ndarray, int, float]:
    """The one-hot vector, nearly; bootstraps; the processor's seconds (one thread), encryption and decryption left out."""
    program, slots = schedule.program, schedule.parameters.slots
    server = Server(Meaning(_decoder(program.config), program, ranges), schedule, backend)
    server.state.prompt = 1
    server.done = 1 + next(i for i, op in enumerate(program.ops) if op.output == "logits")
    written = np.full(program.candidates, ranges.beyond)
    written[: len(logits)] = (logits - ranges.zero) / ranges.unit
    fresh = [backend.encrypt(written[begun : begun + slots]) for begun in range(0, len(written), slots)]
    server.values = {"logits": [backend.lower(x, schedule.levels["logits"]) for x in fresh]}
    before, began = backend.bootstraps, time.process_time()
    token = server.step()
    seconds = time.process_time() - began
    return np.concatenate([backend.decrypt(x) for x in token])[: len(logits)], backend.bootstraps - before, seconds


def resolved(schedule: Schedule, ranges: Ranges, rows: np.ndarray) -> tuple[float | None, float]:
    """The least gap of the two largest logits, over the range of logits, at which nine rows of ten give a one-hot vector within 1%
    (bisected: a larger gap is taken to be easier); and the share of rows that do so as they are."""
    span, places, every = ranges.logits[1] - ranges.logits[0], np.argsort(rows, 1), np.arange(len(rows))

    def told(gap: float) -> bool:
        moved = rows.copy()
        moved[every, places[:, -2]] = rows[every, places[:, -1]] - gap * span
        return bool(np.mean([_right(schedule, ranges, row) for row in moved]) >= SURE)

    good, bad = -1, len(GAPS)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if told(GAPS[middle]) else (good, middle)
    as_they_are = float(np.mean([_right(schedule, ranges, row) for row in rows]))
    return float(GAPS[good]) if good >= 0 else None, as_they_are


def _right(schedule: Schedule, ranges: Ranges, row: np.ndarray) -> bool:
    try:
        one_hot = perform(schedule, ranges, Simulator(schedule.parameters), row)[0]
    except UserError:  # a value left its range
        return False
    return bool(np.abs(one_hot - np.eye(len(row))[np.argmax(row)]).max() <= ERROR + 1e-3)


def _spread(values: np.ndarray) -> float:
    return float(values.max() / values.min())


_decoders: dict[int, Any] = {}


def _decoder(config: DecoderConfig) -> Any:
    if config.vocabulary not in _decoders:
        _decoders[config.vocabulary] = random_decoder(config)
    return _decoders[config.vocabulary]


def _timed(work: Any) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _save(path: Path, found: Any) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n")


def _draw(parts: dict[str, list[dict]], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    colours = dict(zip(("tournament", "league", "cutmax"), plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    markers = dict(zip(VOCABULARIES, "os^D", strict=True))
    for argmax, colour in colours.items():
        for vocabulary, marker in markers.items():
            rows = [row for row in parts.get(f"resolve_{vocabulary}", []) if row["argmax"] == argmax and row["resolved"]]
            gaps, counts = [1 / row["resolved"] for row in rows], [row["bootstraps"] for row in rows]
            left.plot(gaps, counts, marker, color=colour, label=f"{argmax}, {vocabulary}")
    left.set(xscale="log", yscale="log", ylim=(2, 250), xlabel="range of logits over the resolved gap", ylabel="bootstraps")
    left.set_title("2^15 slots, 10 levels (simulator)")
    left.legend(ncols=3, fontsize=7)
    runs = {name: rows for name, rows in parts.items() if name.startswith("encrypt")}
    for place, (argmax, colour) in enumerate(colours.items()):
        seconds = [next(row["seconds"] for row in rows if row["argmax"] == argmax) for rows in runs.values()]
        bars = right.bar(np.arange(len(runs)) + 0.27 * (place - 1), seconds, 0.27, color=colour, label=argmax)
        right.bar_label(bars, fmt="%.0f", fontsize=8)
    names = [f"{rows[0]['vocabulary']} logits\nring 2^{rows[0]['log_ring']}" for rows in runs.values()]
    right.set_xticks(range(len(runs)), names)
    right.set(ylabel="seconds of one core", title="encrypted by OpenFHE, toy rings (not secure)")
    right.legend()
    figure.savefig(path, dpi=120, facecolor="white")


if __name__ == "__main__":
    main()
