"""Calibrations on disk: measured once for a checkpoint, a text and a prefix, then kept in the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..errors import UserError
from ..progress import Progress, silent
from .calibration import Calibration, LayerRanges, calibrate
from .checkpoint import Checkpoint
from .decoder import Decoder
from .plan import plan_model
from .plan_check import RangeReport, check_plan
from .source import ModelConfig, cache_folder
from .tokenizer import need_tokenizer

_FORMAT = 3
_LONGEST = 160  # tokens of one text; longer ones are cut
_CHECKED = 48  # tokens that the fixed-point layers are tried on


def calibration_for(model: ModelConfig, checkpoint: Checkpoint, progress: Progress = silent) -> tuple[Calibration, RangeReport]:
    """The calibration of a model on its config's text and how its plan fared, measured now if that was not done before.

    Raises UserError where the model names no text, the text cannot be read, or a value leaves its bound on it.
    """
    text, texts = read_passages(model, checkpoint)
    kept = cache_folder() / f"calibration-{_digest(model, text)}.safetensors"
    found = _load(kept)
    if found is None:
        calibration = calibrate(checkpoint.decoder, texts, model.prefix, progress)
        found = calibration, plan_and_check(checkpoint.decoder, calibration, texts, model.prefix, progress)
        _save(kept, *found)
    return found


def read_passages(model: ModelConfig, checkpoint: Checkpoint) -> tuple[str, list[list[int]]]:
    """The model's calibration text, and its lines as token ids, long ones cut. Raises UserError where there is none."""
    if model.calibration is None:
        raise UserError(
            f"model {model.name}: ops plugin needs a text to calibrate its tables on; set calibration in the model's config"
        )
    try:
        text = model.calibration.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{model.calibration}: the calibration text cannot be read ({error}); correct calibration") from None
    tokenizer = need_tokenizer(checkpoint.tokenizer, model)
    passages = [tokenizer.encode(line)[:_LONGEST] for line in text.splitlines() if line.strip()]
    found = [passage for passage in passages if passage]
    if not found:
        raise UserError(f"{model.calibration}: holds no token of model {model.name}; give it ordinary text, one passage a line")
    return text, found


def plan_and_check(
    decoder: Decoder,
    calibration: Calibration,
    texts: Sequence[Sequence[int]],
    prefix: Sequence[int],
    progress: Progress = silent,
) -> RangeReport:
    """Try the plan of a calibration on the beginning of the longest text. Raises UserError where a value leaves its bound."""
    plan = plan_model(decoder.config, calibration)
    return check_plan(decoder, calibration, plan, max(texts, key=len)[:_CHECKED], prefix, progress)


def _digest(model: ModelConfig, text: str) -> str:
    path = model.locate()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([_FORMAT, stats, list(model.prefix), text]).encode()).hexdigest()[:16]


def _save(path: Path, calibration: Calibration, report: RangeReport) -> None:
    """Write the file whole or not at all. The references in it are the owner's secret, as the model is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.touch(mode=0o600)  # for the owner alone, as the model is
    ranges = [astuple(layer) for layer in calibration.layers]
    facts = json.dumps(
        {"layers": ranges, "final": calibration.final_squares, "tokens": calibration.tokens, "report": astuple(report)}
    )
    save_file({f"reference.{i}": value for i, value in enumerate(calibration.references)}, part, {"calibration": facts})
    part.replace(path)


def _load(path: Path) -> tuple[Calibration, RangeReport] | None:
    """What was kept; None where there is nothing, or nothing whole."""
    try:
        with safe_open(path, "numpy") as file:
            facts = json.loads(file.metadata()["calibration"])
            references = tuple(file.get_tensor(f"reference.{i}") for i in range(len(facts["layers"])))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    layers = tuple(LayerRanges(*(tuple(pair) for pair in layer)) for layer in facts["layers"])
    return Calibration(layers, references, tuple(facts["final"]), facts["tokens"]), RangeReport(*facts["report"])
