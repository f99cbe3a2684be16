"""Configurations in which models are small: one layer with random weights, of the family of the model they stand for.

Tokenizers are the models' own, so that prompts have as many tokens.
"""

import shutil
from pathlib import Path

import yaml
from commands import ROOT
from conftest import GPT2, LLAMA, OPT, write_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse

PASSAGES = 12
LETTERS = "My lord,"  # those of the prompt that the documentation has for it
CHARACTERS = GPT2 | {"vocab_size": len(LETTERS), "n_embd": 8, "n_layer": 1, "n_head": 2}
WORDS = {"vocab_size": 2048, "max_position_embeddings": 512, "num_hidden_layers": 1}
FAMILIES = {
    "smollm2": LLAMA | WORDS,
    "kjv": GPT2 | {"vocab_size": 2048, "n_positions": 512, "n_layer": 1},
    "kjv-relu": OPT | WORDS,
    "shakespeare-tiny": CHARACTERS,
}
"""By the beginning of a model's name."""


def small_configs(out: Path) -> None:
    """A copy of configs/ at `out` with small models, which read the beginning of each calibration text."""
    shutil.copytree(ROOT / "configs", out, ignore=shutil.ignore_patterns("weights"))
    for seed, path in enumerate(sorted((out / "model").glob("*.yaml"))):
        shown = yaml.safe_load(path.read_text())
        family = FAMILIES[max((each for each in FAMILIES if path.stem.startswith(each)), key=len)]
        write_model(out / "weights" / path.stem, family, seed)
        kept = {key: shown[key] for key in ("name", "prefix", "calibration") if key in shown}
        path.write_text(yaml.safe_dump(kept | {"path": f"../weights/{path.stem}"}))
    for path in (out / "calibration").glob("*.txt"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:PASSAGES]))


def write_model(folder: Path, config: dict, seed: int) -> None:
    write_checkpoint(folder, config, seed)
    if config is not CHARACTERS:
        shutil.copy(ROOT / "configs" / "weights" / "kjv" / "tokenizer.json", folder)
        return
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token=" "))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
