"""Runs an experiment: one secure generation, checked against plaintext, and measured."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..generation import AssistedDecoder, Sampler, SecureDecoder, TextStream, generate
from ..generation.material import Facts, open_material
from ..models import Checkpoint, load_checkpoint
from ..models.narrow import narrow_decoder
from ..models.tokenizer import Tokenizer, need_tokenizer
from ..progress import Progress, silent
from ..runtime import Session
from ..runtime.workspace import workspace
from .decoding import draft_files, post_decoder, post_metrics, post_phases, scored_passes, target_model
from .files import make_folder, write_whole
from .launch import measure_apart
from .metrics import SCHEMA, accuracy, collect, peak_memory, reset_peak_memory
from .owner import measured, prepared_file
from .prompt import cache_capacity, check_tokens, encode_prompt
from .schema import Experiment, Runs
from .sparsity import (
    bucket_metrics,
    bytes_ratio,
    layer_shares,
    recall_metrics,
    sparse_assisted,
    sparse_metrics,
    sparse_secure,
    sparse_terms,
    sparsity_file,
)

_PATIENCE = 60.0  # seconds to wait for material that its dealer is still making
_DISK_FACTOR = 2.5  # LevelDB writes each opened weight to its log and to a table, and merges tables now and then


def run_experiment(
    runs: Runs,
    out: Path,
    progress: Progress = silent,
    stream: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run an experiment, its baseline and its variants; write metrics.json and return what it holds.

    A part that was finished before under the same settings is not run again. `stream` receives the main run's text. Raises
    UserError for what cannot be run, before anything is.
    """
    for experiment in runs:
        _prepare(experiment)  # whatever is wrong with a config shows before anything is run or written
    make_folder(out)
    metrics = _resumed(runs.main, out, "main", progress, stream)
    beside = {
        name: _resumed(variant, out, name, progress, lambda text: None)
        for name, variant in (runs.variants | ({} if runs.baseline is None else {"baseline": runs.baseline})).items()
    }
    if "baseline" in beside:
        metrics["baseline"] = beside.pop("baseline")
        for run in (metrics, *beside.values()):
            _compare(run, metrics["baseline"])
    if beside:
        metrics["variants"] = beside
    write_whole(out / "metrics.json", json.dumps(metrics, indent=1))
    return metrics


def _compare(run: dict[str, Any], baseline: dict[str, Any]) -> None:
    """Hold a run's decoding against the baseline's on the same network, and a sparse run's bytes against the same, dense."""
    ours, theirs = (m["decode"]["seconds_per_token"] for m in (run, baseline))
    run["speedup"] = theirs / ours if ours and theirs and run["network"]["name"] == baseline["network"]["name"] else None
    if "comet" in run:
        alike = all(run.get(key) == baseline.get(key) for key in ("ops", "protocol", "prompt")) and "comet" not in baseline
        run["comet"]["bytes_ratio"] = bytes_ratio(run, baseline) if alike and ("post" in run) == ("post" in baseline) else None


def measure(
    experiment: Experiment, progress: Progress = silent, stream: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Generate once, and once more in plaintext along the same tokens; returns the metrics (docs/guide-experimenter.md)."""
    if experiment.apart:
        return measure_apart(experiment, progress, stream)
    reset_peak_memory()
    checkpoint, tokenizer, prompt, capacity = _prepare(experiment)
    text, steps = TextStream(tokenizer), []
    with Session(experiment.protocol) as session:
        target = target_model(experiment, checkpoint, progress)
        served = replace(checkpoint, decoder=target.decoder)
        secure = _decoder(session, experiment, served, capacity, len(prompt), progress)
        post = None if experiment.decoding is None else post_decoder(secure, experiment, target, tokenizer)
        secure.set_up(len(prompt), progress, scored_passes(experiment))
        count, ends = experiment.generation.new_tokens, checkpoint.decoder.config.end_tokens
        if post is None:
            found = generate(secure, prompt, count, Sampler(experiment.generation.sampling), ends, session.phase)
        else:
            post.warm_up(prompt, experiment.prefix)
            found = post.generate(prompt, count, ends, experiment.prefix)
        for _, step in zip(progress(range(count), "generating", "token"), found, strict=False):
            steps.append(step)
            stream(text.push(step.token))
        stream(text.finish())
        phases = dict(session.phases)
    metrics = collect(experiment, secure, phases if post is None else post_phases(experiment, phases), prompt, steps)
    if post is not None:
        metrics["post"] = post_metrics(experiment, phases, post.rounds)
    if experiment.sparsity is not None:
        config = checkpoint.decoder.config
        metrics["comet"] = sparse_metrics(experiment, sparse_terms(experiment, config), phases, config)
        metrics["comet"] |= recall_metrics(experiment, config)
        metrics["comet"] |= bucket_metrics(secure)
        metrics["comet"] |= layer_shares(experiment, checkpoint, prompt, progress)
    metrics["text"] = text.text
    before, tokens = [*experiment.prefix, *prompt], [step.token for step in steps]
    metrics["accuracy"] = accuracy(target.decoder, before, tokens, [step.logits for step in steps])
    metrics["peak_rss_bytes"] = peak_memory()
    return metrics


def _decoder(
    session: Session, experiment: Experiment, checkpoint: Checkpoint, capacity: int, prompt_tokens: int, progress: Progress
) -> SecureDecoder | AssistedDecoder:
    decoder = checkpoint.decoder
    if experiment.ops == "stock" and experiment.sparsity is not None:
        return sparse_secure(session, experiment, decoder, capacity)
    if experiment.ops == "stock":
        return SecureDecoder(session, decoder, capacity, experiment.prefix)
    calibration, ranges = measured(experiment, checkpoint, progress)
    if experiment.ops == "generic":
        narrow = narrow_decoder(decoder, calibration, capacity, len(experiment.prefix))
        return SecureDecoder(session, decoder, capacity, experiment.prefix, narrow)
    supply = None
    if experiment.material is not None:
        new_tokens = experiment.generation.new_tokens
        facts = Facts(experiment.model.name, len(experiment.prefix), prompt_tokens, new_tokens, capacity)
        supply = open_material(experiment.material, facts, _PATIENCE)
    rows = None if experiment.soal is None else prepared_file(experiment).prefix_rows
    if experiment.sparsity is not None:
        return sparse_assisted(experiment, decoder, session, calibration, capacity, experiment.prefix, ranges)
    return AssistedDecoder(session, decoder, calibration, capacity, experiment.prefix, ranges, supply, rows)


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
    files += draft_files(experiment)
    files += [] if experiment.sparsity is None or experiment.sparsity.file is None else [experiment.sparsity.file]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return [experiment.alone().model_dump_json(), stats, version("spu_llm")]


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
    tokenizer = need_tokenizer(checkpoint.tokenizer, experiment.model)
    prompt = encode_prompt(experiment, tokenizer)
    check_tokens(experiment.model.name, checkpoint.decoder.config, [*experiment.prefix, *prompt])
    capacity = cache_capacity(experiment, checkpoint.decoder.config, len(experiment.prefix), len(prompt))
    if experiment.soal is not None:
        prepared_file(experiment)
    if experiment.sparsity is not None:
        sparsity_file(experiment, checkpoint.decoder.config)
    _check_disk(experiment, checkpoint)
    return checkpoint, tokenizer, prompt, capacity


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
