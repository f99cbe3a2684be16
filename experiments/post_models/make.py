"""Makes the models of this folder, each by one seeded and resumable command (see run.sh for their order).

    python experiments/post_models/make.py COMMAND --out FOLDER

texts: the corpora. kjv: a GPT-2 target, its draft before alignment, their tokenizer. tuned: SmolLM2 fine-tuned on King James.
small: a small Llama with SmolLM2's tokenizer, before it is distilled. ship: what is committed, in float16. speed: tokens a
second of drafting. collect: result.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from texts import write_texts
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from spu_llm.errors import UserError
from spu_llm.experiment.schema import CONFIGS, load_model
from spu_llm.generation import SamplingConfig
from spu_llm.models import Decoder, DecoderConfig, PlainDecoder, Tokenizer, load_checkpoint
from spu_llm.models.losses import Batch, next_token_loss, perplexity
from spu_llm.models.save import save_checkpoint
from spu_llm.models.sequences import cut_sequences, sequence_weights
from spu_llm.models.training import Kept, Trained, TrainingConfig, fresh, rows_of, train
from spu_llm.post.draft import ModelDraft
from spu_llm.progress import bar

HERE = Path(__file__).parent
SEED = 6
VOCABULARY = 2048
END = "<|endoftext|>"

KJV = DecoderConfig(
    family="gpt2", vocabulary=VOCABULARY, width=256, layers=3, heads=4, kv_heads=4, ffn=1024, positions=576, epsilon=1e-5,
    tied_head=True, end_tokens=(0,), start_token=0,
)  # fmt: skip
KJV_DRAFT = replace(KJV, width=96, layers=2, ffn=384)


class Corpus:
    """A text as the sequences of a step."""

    def __init__(self, path: Path, tokenizer: Tokenizer, length: int, prefix: tuple[int, ...]):
        self.sequences = cut_sequences(np.asarray(tokenizer.encode(path.read_text())), length, prefix)
        self.weights = sequence_weights(length, prefix)
        self.name = path.name

    def batch(self, size: int, step: int) -> Batch:
        return Batch(self.sequences[rows_of(step, size, len(self.sequences), SEED)], self.weights)


def learn(decoder: Decoder, corpus: Corpus, config: TrainingConfig, size: int, kept: Path) -> Trained:
    """Train on the next tokens of a corpus, `size` sequences a step."""
    label = f"{corpus.name} {corpus.sequences.shape} {size} {SEED}"
    return train(decoder, lambda step: corpus.batch(size, step), next_token_loss, config, Kept(kept, label), bar)


def report(path: Path, trained: Trained, config: TrainingConfig, tokens: int, **more: object) -> None:
    found = {
        "steps": config.steps,
        "tokens_a_step": tokens,
        "seconds": trained.seconds,
        "loss": [float(np.mean(trained.losses[:10])), float(np.mean(trained.losses[-10:]))],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **more,
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(path.name, json.dumps(found))


# Pair (c): a GPT-2 small enough to ship


def kjv_tokenizer(texts: list[Path]) -> Tokenizer:
    """Byte-level BPE trained on public text; token 0 begins and ends a text."""
    inner = HFTokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=sorted(alphabet), show_progress=False
    )
    inner.train([str(path) for path in texts], trainer)
    return Tokenizer(inner)


def make_kjv(out: Path) -> None:
    """The target learns private King James text, the draft general English; alignment comes after."""
    tokenizer = kjv_tokenizer([out / "texts/public.txt", out / "texts/brown.txt"])
    held = Corpus(out / "texts/held_out.txt", tokenizer, KJV.positions, (0,))
    plans = {
        "kjv": (KJV, "private.txt", 2, TrainingConfig(steps=420, rate=1.5e-3, warmup=40)),
        "kjv-draft-unaligned": (KJV_DRAFT, "brown.txt", 4, TrainingConfig(steps=150, rate=3e-3, warmup=20)),
    }
    for name, (shape, text, size, config) in plans.items():
        corpus = Corpus(out / "texts" / text, tokenizer, shape.positions, (0,))
        trained = learn(fresh(shape, SEED), corpus, config, size, out / f"{name}.training.safetensors")
        save_checkpoint(out / name, trained.decoder, tokenizer)
        found = perplexity(trained.decoder, held.sequences, held.weights)
        report(
            out / f"{name}.json", trained, config, size * shape.positions, perplexity=found, parameters=parameters(trained.decoder)
        )


def parameters(decoder: Decoder) -> int:
    return sum(leaf.size for leaf in jax.tree_util.tree_leaves(decoder.params))


# Pair (a): SmolLM2 as an owner may have tuned it


def make_tuned(out: Path) -> None:
    model = load_model("smollm2")
    checkpoint = load_checkpoint(model.locate())
    assert checkpoint.tokenizer is not None
    length, size = 128, 4
    held = Corpus(out / "texts/held_out.txt", checkpoint.tokenizer, length, model.prefix)
    corpus = Corpus(out / "texts/private.txt", checkpoint.tokenizer, length, model.prefix)
    config = TrainingConfig(steps=24, rate=2e-4, warmup=3)
    some = held.sequences[:: len(held.sequences) // 16]
    before = perplexity(checkpoint.decoder, some, held.weights)
    trained = learn(checkpoint.decoder, corpus, config, size, out / "smollm2-tuned.training.safetensors")
    save_checkpoint(out / "smollm2-tuned", trained.decoder, checkpoint.tokenizer, np.float16)
    found = {"before": before, "after": perplexity(trained.decoder, some, held.weights)}
    report(out / "smollm2-tuned.json", trained, config, size * length, perplexity=found)


# Pair (b): a small Llama that speaks SmolLM2's tokens


def make_small(out: Path) -> None:
    """SmolLM2's first and last layers with its table and last norm: 7 million weights besides the table, to be distilled."""
    checkpoint = load_checkpoint(load_model("smollm2").locate())
    whole = checkpoint.decoder
    params = whole.params | {"layers": [whole.params["layers"][0], whole.params["layers"][-1]]}
    small = Decoder(replace(whole.config, layers=len(params["layers"])), params)
    save_checkpoint(out / "smollm2-small-undistilled", small, checkpoint.tokenizer, np.float16)


# How fast they draft


def speed(out: Path) -> None:
    """Tokens a second of drafting 64 tokens after a prompt of 64, compiled before; the layer by layer decoder beside it."""
    found = {}
    for name in ("smollm2", "smollm2-small", "kjv-draft"):
        checkpoint = load_checkpoint(load_model(name).locate())
        assert checkpoint.tokenizer is not None
        text = (out / "texts/held_out.txt").read_text()[:4000]
        prompt = checkpoint.tokenizer.encode(text)[:64]
        seconds = {}
        for sampling in (SamplingConfig(), SamplingConfig(temperature=0.8, top_p=0.9)):
            draft = ModelDraft(checkpoint.decoder, 256, sampling)
            draft.propose(prompt, 2)
            seconds[f"temperature {sampling.temperature}"] = timed(partial(draft.propose, prompt, 64), 64)
        plain = PlainDecoder(checkpoint.decoder, 256)
        plain.advance(prompt)
        plain.advance([0])
        seconds["layer by layer"] = timed(lambda plain=plain: [plain.advance([0]) for _ in range(16)], 16)
        found[name] = {key: 1 / value for key, value in seconds.items()}
    (out / "speed.json").write_text(json.dumps({"tokens_per_second": found}, indent=1) + "\n")
    print(json.dumps(found))


def timed(work: Callable[[], object], tokens: int) -> float:
    """Seconds a token, the better of two runs: the machine has other work."""
    spent = []
    for _ in range(2):
        begun = time.perf_counter()
        work()
        spent.append((time.perf_counter() - begun) / tokens)
    return min(spent)


# What is committed


def ship(out: Path) -> None:
    """The GPT-2 pair in float16 to configs/weights, and passages of public text to calibrate it on."""
    for name, source in (("kjv", "kjv"), ("kjv-draft-unaligned", "kjv-draft-unaligned"), ("kjv-draft", "kjv-aligned/model")):
        checkpoint = load_checkpoint(out / source)
        save_checkpoint(CONFIGS / "weights" / name, checkpoint.decoder, checkpoint.tokenizer, np.float16)
    lines = (out / "texts/public.txt").read_text().splitlines()
    passages = [line for line in lines if 300 <= len(line) <= 600][::7][:72]
    (CONFIGS / "calibration/king_james.txt").write_text("\n".join(passages) + "\n")


def collect(out: Path) -> None:
    """Everything that was measured, in one file of this folder."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}
    found |= {path.parent.name: json.loads(path.read_text()) for path in sorted(out.glob("*/report.json"))}
    (HERE / "result.json").write_text(json.dumps(found, indent=1) + "\n")


COMMANDS = {
    "texts": lambda out: write_texts(out / "texts"),
    "kjv": make_kjv,
    "tuned": make_tuned,
    "small": make_small,
    "ship": ship,
    "speed": speed,
    "collect": collect,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=sorted(COMMANDS))
    parser.add_argument("--out", type=Path, default=Path("results/post_models"))
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    COMMANDS[chosen.command](chosen.out)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
