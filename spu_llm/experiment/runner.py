"""Runs an experiment: one secure generation, checked against plaintext, and measured."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..generation import AssistedDecoder, Sampler, SecureDecoder, Step, TextStream, generate
from ..generation.material import Facts, open_material
from ..models import Checkpoint, PlainDecoder, load_checkpoint
from ..models.calibration import Calibration
from ..models.calibration_file import calibration_for
from ..models.narrow import narrow_decoder
from ..models.plan_check import RangeReport
from ..models.source import content_digest
from ..models.tokenizer import Tokenizer
from ..progress import Progress, silent
from ..runtime import Phase, Session
from ..runtime.assisted import offline
from ..runtime.workspace import workspace
from ..soal.prepared import Prepared, load_prepared
from .schema import Experiment

SCHEMA = 1
_PATIENCE = 60.0  # seconds to wait for material that its dealer is still making
_DISK_FACTOR = 2.5  # LevelDB writes each opened weight to its log and to a table, and merges tables now and then


def run_experiment(
    main: Experiment,
    baseline: Experiment | None,
    out: Path,
    progress: Progress = silent,
    stream: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run an experiment, and its baseline if it has one; write metrics.json and return what it holds.

    A part that was finished before under the same settings is not run again. `stream` receives the main run's text.
    """
    for experiment in filter(None, (main, baseline)):
        _prepare(experiment)  # whatever is wrong with a config shows before anything is run or written
    make_folder(out)
    metrics = _resumed(main, out, "main", progress, stream)
    if baseline is not None:
        metrics["baseline"] = _resumed(baseline, out, "baseline", progress, lambda text: None)
        ours, theirs = (m["decode"]["seconds_per_token"] for m in (metrics, metrics["baseline"]))
        metrics["speedup"] = theirs / ours if ours and theirs else None
    write_whole(out / "metrics.json", json.dumps(metrics, indent=1))
    return metrics


def measure(
    experiment: Experiment, progress: Progress = silent, stream: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Generate once, and once more in plaintext along the same tokens; returns the metrics (see README)."""
    _reset_peak_memory()
    checkpoint, tokenizer, prompt, capacity = _prepare(experiment)
    text, steps = TextStream(tokenizer), []
    with Session(experiment.protocol) as session:
        secure = _decoder(session, experiment, checkpoint, capacity, len(prompt), progress)
        secure.set_up(len(prompt), progress)
        sampler = Sampler(experiment.generation.sampling)
        count = experiment.generation.new_tokens
        found = generate(secure, prompt, count, sampler, checkpoint.decoder.config.end_tokens, session.phase)
        for _, step in zip(progress(range(count), "generating", "token"), found, strict=False):
            steps.append(step)
            stream(text.push(step.token))
        stream(text.finish())
        phases = dict(session.phases)
    metrics = _metrics(experiment, secure, phases, prompt, steps)
    metrics["text"] = text.text
    metrics["accuracy"] = _accuracy(checkpoint, experiment, prompt, steps)
    metrics["peak_rss_bytes"] = _peak_memory()
    return metrics


def _decoder(
    session: Session, experiment: Experiment, checkpoint: Checkpoint, capacity: int, prompt_tokens: int, progress: Progress
) -> SecureDecoder | AssistedDecoder:
    if experiment.ops == "stock":
        return SecureDecoder(session, checkpoint.decoder, capacity, experiment.prefix)
    calibration, ranges = _measured(experiment, checkpoint, progress)
    if experiment.ops == "generic":
        narrow = narrow_decoder(checkpoint.decoder, calibration, capacity, len(experiment.prefix))
        return SecureDecoder(session, checkpoint.decoder, capacity, experiment.prefix, narrow)
    supply = None
    if experiment.material is not None:
        new_tokens = experiment.generation.new_tokens
        facts = Facts(experiment.model.name, len(experiment.prefix), prompt_tokens, new_tokens, capacity)
        supply = open_material(experiment.material, facts, _PATIENCE)
    rows = None if experiment.soal is None else _prepared(experiment).prefix_rows
    return AssistedDecoder(session, checkpoint.decoder, calibration, capacity, experiment.prefix, ranges, supply, rows)


def _measured(experiment: Experiment, checkpoint: Checkpoint, progress: Progress) -> tuple[Calibration, RangeReport]:
    """What the owner measured: from the prepared file if there is one."""
    if experiment.soal is None:
        return calibration_for(experiment.model, checkpoint, progress)
    prepared = _prepared(experiment)
    return prepared.calibration, prepared.ranges


def _prepared(experiment: Experiment) -> Prepared:
    assert experiment.soal is not None
    return load_prepared(experiment.soal, content_digest(experiment.model.locate()))


def _ranges(decoder: SecureDecoder | AssistedDecoder) -> dict[str, Any] | None:
    """How the plugin's tables and truncations fared on the calibration text; stock SPU has no such bounds."""
    report = decoder.ranges if isinstance(decoder, AssistedDecoder) else None
    return None if report is None else {**asdict(report), "outside_share_at_most": report.bound}


def make_folder(folder: Path) -> None:
    """Make a folder that files can be written to. Raises UserError if that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{folder}: cannot be made or written to ({error.strerror}); choose another --out") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another --out") from None


def _resumed(experiment: Experiment, out: Path, name: str, progress: Progress, stream: Callable[[str], None]) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(_identity(experiment)).encode()).hexdigest()
    kept = out / f"{name}.{digest[:12]}.json"
    metrics = _finished(kept)
    if metrics is not None:
        print(f"{kept}: this run was finished before; remove the file to run it again", file=sys.stderr)
        stream(metrics["text"])
        return metrics
    metrics = measure(experiment, progress, stream)
    write_whole(kept, json.dumps(metrics))
    return metrics


def _identity(experiment: Experiment) -> list[Any]:
    """What makes a run the same run: its settings, the checkpoint's files, the version of this package."""
    checkpoint = experiment.model.locate()
    files = sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]
    files += [] if experiment.soal is None else [experiment.soal]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return [experiment.without_baseline().model_dump_json(), stats, version("spu_llm")]


def _finished(kept: Path) -> dict[str, Any] | None:
    """The metrics that a finished run left; None where there are none, or not whole."""
    try:
        metrics = json.loads(kept.read_text())
    except (OSError, ValueError):
        return None
    return metrics if isinstance(metrics, dict) and metrics.get("schema") == SCHEMA else None


def _prepare(experiment: Experiment) -> tuple[Checkpoint, Tokenizer, list[int], int]:
    """Checkpoint, tokenizer, prompt and cache capacity of a run. Raises UserError for what cannot be run."""
    checkpoint = load_checkpoint(experiment.model.locate())
    tokenizer = _tokenizer(checkpoint, experiment)
    prompt = tokenizer.encode(experiment.generation.prompt)
    if not prompt:
        raise UserError(f"generation.prompt {experiment.generation.prompt!r} has no token in this model; write another")
    vocabulary = checkpoint.decoder.config.vocabulary
    for token in (*experiment.prefix, *prompt):
        if not 0 <= token < vocabulary:
            raise UserError(
                f"model {experiment.model.name}: token {token} of prefix or prompt is outside its vocabulary of {vocabulary}; "
                "correct the prefix or the tokenizer"
            )
    capacity = _capacity(experiment, checkpoint, prompt)
    if experiment.soal is not None:
        _prepared(experiment)
    _check_disk(experiment, checkpoint)
    return checkpoint, tokenizer, prompt, capacity


def _reset_peak_memory() -> None:
    """Let the kernel measure the peak from here on, so that a baseline's peak is its own."""
    with suppress(OSError):  # some sandboxes forbid it; the figure is then the peak since the process began
        Path("/proc/self/clear_refs").write_text("5")


def _peak_memory() -> int:
    """The largest resident set since the reset, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _tokenizer(checkpoint: Checkpoint, experiment: Experiment) -> Tokenizer:
    if checkpoint.tokenizer is None:
        raise UserError(f"model {experiment.model.name}: its folder has no tokenizer.json, nor vocab.json and merges.txt; add one")
    return checkpoint.tokenizer


def _capacity(experiment: Experiment, checkpoint: Checkpoint, prompt: list[int]) -> int:
    """The cache rows to keep. Raises UserError if the text cannot fit them, or they the model."""
    wanted, positions = experiment.generation, checkpoint.decoder.config.positions
    needed = len(experiment.prefix) + len(prompt) + wanted.new_tokens
    parts = f"the prompt's {len(prompt)} tokens, {len(experiment.prefix)} of prefix and {wanted.new_tokens} new ones"
    if needed > positions:
        raise UserError(f"{parts} exceed the model's {positions} positions; shorten generation.prompt or generation.new_tokens")
    capacity = wanted.capacity or needed
    if needed > capacity:
        raise UserError(f"{parts} exceed generation.capacity {capacity}; raise it to {needed} or more")
    if capacity > positions:
        raise UserError(f"generation.capacity {capacity} exceeds the model's {positions} positions; lower it")
    return capacity


def _check_disk(experiment: Experiment, checkpoint: Checkpoint) -> None:
    """Raise UserError before anything starts if the opened weights cannot fit the disk."""
    if experiment.protocol.name != "SEMI2K" or experiment.ops == "plugin":
        return
    config = checkpoint.decoder.config
    tables = (1 if config.tied_head else 2) * 2 * config.vocabulary * config.width
    kernels = sum(
        np.size(leaf["kernel"]) for layer in checkpoint.decoder.params["layers"] for leaf in layer.values() if "kernel" in leaf
    )
    needed = int((tables + kernels) * experiment.protocol.ring_bits // 8 * experiment.protocol.world_size * _DISK_FACTOR)
    free = shutil.disk_usage(workspace()).free
    if free < needed:
        raise UserError(
            f"{workspace().parent}: {free / 1e9:.1f} GB free, but the opened weights need up to {needed / 1e9:.1f} GB; "
            "make room or point TMPDIR to a larger disk"
        )


def _metrics(
    experiment: Experiment, secure: SecureDecoder | AssistedDecoder, phases: dict[str, Phase], prompt: list[int], steps: list[Step]
) -> dict[str, Any]:
    network = experiment.network
    setup, prefill, decode = (phases.get(name, Phase()) for name in ("setup", "prefill", "decode"))
    dealt = phases.get(offline("decode"), Phase())
    passes = max(1, len(steps) - 1)

    def seconds(phase: Phase) -> float:
        return network.seconds(phase.seconds, phase.messages, phase.bytes)

    def cost(phase: Phase) -> dict[str, Any]:
        return {"seconds": seconds(phase), "compute_seconds": phase.seconds, "bytes": phase.bytes, "messages": phase.messages}

    return {
        "schema": SCHEMA,
        "model": experiment.model.name,
        "protocol": experiment.protocol.name,
        "ring": experiment.protocol.ring,
        "fraction_bits": experiment.protocol.fraction_bits,
        "ops": experiment.ops,
        "trust": secure.trust,
        "network": {
            "name": network.name,
            "bandwidth_mbps": network.bandwidth_mbps,
            "delay_ms": network.delay_ms,
            "mode": network.mode,
        },
        "prompt": experiment.generation.prompt,
        "text": "",
        "tokens": [step.token for step in steps],
        "setup": cost(setup),
        "prefill": {"tokens": len(prompt), **cost(prefill)},
        "decode": {
            "tokens": len(steps) - 1,
            "seconds_per_token": seconds(decode) / passes,
            "compute_seconds_per_token": decode.seconds / passes,
            "bytes_per_token": decode.bytes / passes,
            "messages_per_token": decode.messages / passes,
        },
        "operations": {
            name: {
                op: vars(cost) for op, cost in sorted(phase.ops.items(), key=lambda item: -item[1].seconds) if cost.seconds > 1e-3
            }
            for name, phase in (("setup", setup), ("prefill", prefill), ("decode", decode))
        },
        # stock SPU has no offline phase: its triples are made inside the online programs and counted there
        "offline": {"bytes_per_token": dealt.bytes / passes, "seconds_per_token": dealt.seconds / passes},
        "failure_probability_per_token": secure.failure_probability,
        "ranges": _ranges(secure),
    }


def _accuracy(checkpoint: Checkpoint, experiment: Experiment, prompt: list[int], steps: list[Step]) -> dict[str, Any]:
    """Compare with plaintext float32 decoding fed the same tokens."""
    tokens = [*experiment.prefix, *prompt, *(step.token for step in steps[:-1])]
    plain = PlainDecoder(checkpoint.decoder, len(tokens)).advance(tokens)[-len(steps) :]
    secure = np.stack([step.logits for step in steps])
    assert plain.shape == secure.shape
    return {
        "max_logit_error": float(np.abs(plain - secure).max()),
        "max_logit": float(np.abs(plain).max()),
        "top1_agreement": float((plain.argmax(-1) == secure.argmax(-1)).mean()),
    }
