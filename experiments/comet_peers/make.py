"""What the peers of Comet are measured with, but for CrypTen (see run.sh for the order).

    python experiments/comet_peers/make.py COMMAND --out FOLDER

distil: a student of the model with MPCFormer's quadratic functions. export: the weights of both and a generation's tokens, for
crypten_model.py. quality: what these cost, before and after. spu: a generation on stock SPU, dense, and of the student beside
it (CHEETAH: dense alone).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from quadratic import quadratic

from spu_llm.errors import UserError
from spu_llm.experiment.metrics import accuracy, collect
from spu_llm.experiment.prompt import cache_capacity, encode_prompt
from spu_llm.experiment.schema import CONFIGS, Experiment, load_experiment
from spu_llm.generation import SecureDecoder, generate
from spu_llm.models import Checkpoint, Decoder, PlainDecoder, load_checkpoint
from spu_llm.models.decoder import path_name
from spu_llm.models.layers import LayerNorm
from spu_llm.models.losses import Batch, Teacher, distillation_loss, perplexity
from spu_llm.models.plain import prefix_cache
from spu_llm.models.save import save_checkpoint
from spu_llm.models.sequences import Reader, cut_sequences, sequence_weights
from spu_llm.models.tokenizer import need_tokenizer
from spu_llm.models.training import Kept, TrainingConfig, rows_of, train
from spu_llm.progress import bar
from spu_llm.runtime import Session

CONFIG = CONFIGS / "experiment/comet_semi2k.yaml"
SEED = 11
SEQUENCES = 4  # of a step
TRAINING = TrainingConfig(steps=100, rate=2e-3, warmup=15)


def experiment(*settings: str) -> Experiment:
    """The dense experiment of Comet's first config, on stock SPU."""
    return load_experiment(CONFIG, ("ops=stock", "sparsity=null", "baseline=null", *settings)).main


def greedy(decoder: Decoder, before: list[int], count: int) -> tuple[list[int], np.ndarray]:
    """`count` tokens after `before` in plaintext, and the logits [count, vocabulary] that they were taken from."""
    plain = PlainDecoder(decoder, len(before) + count)
    logits = [plain.advance(before)[-1]]
    for _ in range(count - 1):
        logits.append(plain.advance([int(logits[-1].argmax())])[-1])
    return [int(row.argmax()) for row in logits], np.stack(logits)


def export(out: Path, new_tokens: int) -> None:
    """model.npz and student.npz: weights by name, the prefix's cache, prompt, tokens and logits that plaintext gives."""
    case = experiment(f"generation.new_tokens={new_tokens}")
    checkpoint = load_checkpoint(case.model.locate())
    prompt = _prompt(case, checkpoint)
    for name, decoder in (("model", checkpoint.decoder), ("student", student(out))):
        np.savez(out / f"{name}.npz", **arrays(case, decoder, prompt, new_tokens))


def arrays(case: Experiment, decoder: Decoder, prompt: list[int], new_tokens: int) -> dict[str, np.ndarray]:
    found, logits = greedy(decoder, [*case.prefix, *prompt], new_tokens)
    arrays = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(decoder.params)[0]}
    for i, rows in enumerate(prefix_cache(decoder, case.prefix, len(case.prefix))):
        arrays |= {f"cache.{i}.keys": np.swapaxes(rows.keys, 0, 1), f"cache.{i}.values": np.swapaxes(rows.values, 0, 1)}
    counts = {"prompt": np.int64(len(prompt)), "heads": np.int64(decoder.config.heads)}
    arrays["norm_scales"] = norm_scales(decoder, [*case.prefix, *prompt])
    return arrays | counts | {"tokens": np.array([*prompt, *found[:-1]]), "logits": logits}


def norm_scales(decoder: Decoder, tokens: list[int]) -> np.ndarray:
    """For each norm in turn, the power of two that brings the variance of its inputs near 1 on these tokens."""
    found = []

    def intercept(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        if isinstance(context.module, LayerNorm):
            found.append(2.0 ** -np.round(np.log2(np.median(np.std(args[0], axis=-1)))))
        return call(*args, **kwargs)

    with jax.disable_jit(), nn.intercept_methods(intercept):
        PlainDecoder(decoder, len(tokens)).advance(tokens)
    return np.array(found)


def _prompt(case: Experiment, checkpoint: Checkpoint) -> list[int]:
    return encode_prompt(case, need_tokenizer(checkpoint.tokenizer, case.model))


# MPCFormer's student


def texts(part: str, folder: Path, checkpoint: Checkpoint, case: Experiment) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of a text of experiments/post_models, and the weights of their positions."""
    tokenizer, length = need_tokenizer(checkpoint.tokenizer, case.model), checkpoint.decoder.config.positions
    ids = np.asarray(tokenizer.encode((folder / f"{part}.txt").read_text()))
    return cut_sequences(ids, length, case.prefix), sequence_weights(length, case.prefix)


def distil(out: Path, folder: Path) -> None:
    """The student learns the model's probabilities on the text that the model learned; resumable."""
    case = experiment()
    checkpoint = load_checkpoint(case.model.locate())
    rows, weights = texts("private", folder, checkpoint, case)
    teacher = Reader(checkpoint.decoder)

    def batch(step: int) -> Batch:
        part = rows[rows_of(step, SEQUENCES, len(rows), SEED)]
        return Batch(part, weights, Teacher(None, jax.nn.softmax(teacher(part))))

    kept = Kept(out / "student.training.safetensors", f"{case.model.name} {rows.shape} {SEQUENCES} {SEED}")
    trained = train(quadratic(checkpoint.decoder), batch, distillation_loss, TRAINING, kept, bar)
    like_teacher = Decoder(checkpoint.decoder.config, trained.decoder.params)
    save_checkpoint(out / "student", like_teacher, checkpoint.tokenizer)
    facts = {"steps": TRAINING.steps, "tokens_a_step": SEQUENCES * rows.shape[1], "seconds": trained.seconds}
    (out / "student.json").write_text(json.dumps(facts, indent=1) + "\n")


def student(out: Path) -> Decoder:
    return quadratic(load_checkpoint(out / "student").decoder)


def quality(out: Path, folder: Path) -> None:
    """Perplexity on text that neither saw."""
    case = experiment()
    checkpoint = load_checkpoint(case.model.locate())
    rows, weights = texts("held_out", folder, checkpoint, case)
    models = {"dense": checkpoint.decoder, "quadratic": quadratic(checkpoint.decoder), "distilled": student(out)}
    found = {name: perplexity(decoder, rows, weights, progress=bar) for name, decoder in models.items()}
    facts = json.loads((out / "student.json").read_text())
    (out / "quality.json").write_text(json.dumps({"perplexity": found, "distillation": facts}, indent=1) + "\n")
    print(found)


# Stock SPU


def spu(out: Path, protocol: str, new_tokens: int) -> None:
    """stock_PROTOCOL.json: the metrics of both, measured one after the other."""
    case = experiment(f"protocol.name={protocol}", f"generation.new_tokens={new_tokens}")
    checkpoint = load_checkpoint(case.model.locate())
    prompt, models = _prompt(case, checkpoint), {"dense": checkpoint.decoder}
    if protocol != "CHEETAH":
        models["quadratic"] = student(out)
    found = {name: generation(case, decoder, prompt) for name, decoder in models.items()}
    (out / f"stock_{protocol}.json").write_text(json.dumps(found, indent=1) + "\n")


def generation(case: Experiment, decoder: Decoder, prompt: list[int]) -> dict[str, Any]:
    """A generation's metrics, as metrics.json has them."""
    capacity = cache_capacity(case, decoder.config, len(case.prefix), len(prompt))
    with Session(case.protocol) as session:
        secure = SecureDecoder(session, decoder, capacity, case.prefix)
        secure.set_up(len(prompt), bar)
        steps = list(generate(secure, prompt, case.generation.new_tokens, lambda row: int(row.argmax()), phase=session.phase))
    metrics = collect(case, secure, session.phases, prompt, steps)
    metrics["accuracy"] = accuracy(
        decoder, [*case.prefix, *prompt], [step.token for step in steps], [step.logits for step in steps]
    )
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("export", "distil", "quality", "spu"))
    parser.add_argument("--out", type=Path, default=Path("results/comet_peers"))
    parser.add_argument("--texts", type=Path, default=Path("results/post_models/texts"))
    parser.add_argument("--protocol", default="SEMI2K", help="of spu")
    parser.add_argument("--new-tokens", type=int, default=5, help="of a generation")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    commands = {
        "export": partial(export, new_tokens=chosen.new_tokens),
        "distil": partial(distil, folder=chosen.texts),
        "quality": partial(quality, folder=chosen.texts),
        "spu": partial(spu, protocol=chosen.protocol, new_tokens=chosen.new_tokens),
    }
    commands[chosen.command](chosen.out)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
