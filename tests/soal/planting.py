"""Tiny models with outliers planted where a test wants them."""

import json
from pathlib import Path

import numpy as np
from conftest import write_checkpoint, write_tokenizer
from safetensors.numpy import load_file, save_file

from spu_llm.models import load_checkpoint


def planted(folder: Path, config: dict, tensor: str, rows: list[int], factor: float = 300.0) -> Path:
    """A checkpoint with some rows of one tensor enlarged."""
    write_checkpoint(folder, config)
    arrays = load_file(folder / "model.safetensors")
    arrays[tensor][rows] *= factor
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def model_file(folder: Path, checkpoint: Path, lengths: list[int], seed: int = 0) -> Path:
    """The YAML of a model whose calibration text has lines of about so many random tokens."""
    write_tokenizer(checkpoint, 97)
    tokenizer = load_checkpoint(checkpoint).tokenizer
    random = np.random.default_rng(seed)
    lines = [tokenizer.decode(random.integers(0, 97, length).tolist()).replace("\n", " ") for length in lengths]
    (folder / "text.txt").write_text("\n".join(lines))
    path = folder / "tiny.yaml"
    path.write_text(json.dumps({"name": "tiny", "path": str(checkpoint), "calibration": "text.txt"}))
    return path
