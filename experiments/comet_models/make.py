"""Makes the ReLU decoder of Comet's experiments and measures how many of its hidden units are 0 (see run.sh for the order).

    python experiments/comet_models/make.py COMMAND --texts FOLDER --out FOLDER

narrow: trains with a penalty on all hidden units in use, which leaves each block few that ever fire. sparse: kjv-relu, which goes
on from there: silent units are revived and kept alive, and only blocks beyond those that a token may use pay. dense: narrow without
a penalty. ship: what is committed, in float16. measure: result.json and plot.png, on text that none saw.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from spu_llm.errors import UserError
from spu_llm.experiment.schema import CONFIGS
from spu_llm.models import Checkpoint, Decoder, DecoderConfig, Tokenizer, load_checkpoint
from spu_llm.models.losses import Batch, next_token_loss, perplexity
from spu_llm.models.revive import revived
from spu_llm.models.save import save_checkpoint
from spu_llm.models.sequences import cut_sequences, hidden_block, sequence_pass, sequence_weights, stacked
from spu_llm.models.taught_sparsity import Sparsity
from spu_llm.models.training import Kept, TrainingConfig, fresh, rows_of, train
from spu_llm.progress import bar

HERE = Path(__file__).parent
SEED = 7
START = 0  # the token before every text, as kjv has it
SEQUENCES = 4  # of a step
BLOCK = 16  # neighbouring neurons that are taught to be 0 together

SHAPE = DecoderConfig(
    family="opt", vocabulary=2048, width=256, layers=6, heads=8, kv_heads=8, ffn=1024, positions=256, epsilon=1e-5,
    tied_head=True, end_tokens=(0,), start_token=START,
)  # fmt: skip
DENSE = TrainingConfig(steps=800, rate=2e-3, warmup=40)
NARROW = replace(DENSE, sparsity=Sparsity(active=0.09, strength=1.0, group=BLOCK))
SPARSE = TrainingConfig(steps=440, rate=1e-3, sparsity=Sparsity(0.09, 1.0, BLOCK, begin=0, end=0.01, tail=True, rare=0.05))
PLANS = {"kjv-relu-narrow": NARROW, "kjv-relu": SPARSE, "kjv-relu-dense": DENSE}
SILENT = 1e-4  # share of tokens below which a unit is revived
NOISE = 0.3  # of its inputs, relative
READ = 12  # every so many-th sequence is read to find silent units
KEPT_BLOCKS = (0, 1, 2, 4, 6, 8, 10, 12, 16, 64)  # of a layer, for what a constant number of blocks costs
KEPT_UNITS = (1024, 896, 768, 512, 384, 256)  # of a layer, for what an owner loses who prunes the model


# Training


def kjv() -> Checkpoint:
    """The GPT-2 that learned the same text: its tokenizer is ours, and its tables are what ours begin as."""
    return load_checkpoint(CONFIGS / "weights/kjv")


def tokenizer() -> Tokenizer:
    found = kjv().tokenizer
    assert found is not None
    return found


def begun() -> Decoder:
    """Random weights, but for the tables of tokens and positions, which are kjv's."""
    embed = kjv().decoder.params["embed"]
    tables = {"table": embed["table"], "positions": embed["positions"][: SHAPE.positions]}
    return Decoder(SHAPE, fresh(SHAPE, SEED).params | {"embed": tables})


def sequences(text: Path) -> np.ndarray:
    return cut_sequences(np.asarray(tokenizer().encode(text.read_text())), SHAPE.positions, (START,))


def weights() -> np.ndarray:
    return sequence_weights(SHAPE.positions, (START,))


def widened(narrow: Path, rows: np.ndarray) -> Decoder:
    """The narrow model with its silent units revived."""
    decoder = load_checkpoint(narrow).decoder
    fires = fired(decoder, rows[::READ]).mean(1) >= SILENT
    return revived(decoder, fires, BLOCK, NOISE, SEED)


def make(name: str, texts: Path, out: Path) -> None:
    """One model, resumable; what is finished is not made again."""
    config, rows = PLANS[name], sequences(texts / "private.txt")
    goes_on = name == "kjv-relu"
    before = NARROW.steps if goes_on else 0

    def batch(step: int) -> Batch:
        return Batch(rows[rows_of(before + step, SEQUENCES, len(rows), SEED)], weights())

    kept = Kept(out / f"{name}.training.safetensors", f"private.txt {rows.shape} {SEQUENCES} {SEED} {before}")
    first = widened(out / "kjv-relu-narrow", rows) if goes_on else begun()
    trained = train(first, batch, next_token_loss, config, kept, bar)
    save_checkpoint(out / name, trained.decoder, tokenizer())
    facts = {
        "parameters": sum(leaf.size for leaf in jax.tree_util.tree_leaves(trained.decoder.params)),
        "steps": config.steps,
        "tokens_a_step": SEQUENCES * SHAPE.positions,
        "seconds": trained.seconds,
        "loss": [float(np.mean(trained.losses[:10])), float(np.mean(trained.losses[-10:]))],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    (out / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(name, json.dumps(facts))


def ship(out: Path) -> None:
    save_checkpoint(CONFIGS / "weights/kjv-relu", load_checkpoint(out / "kjv-relu").decoder, tokenizer(), np.float16)


# Measuring


def fired(decoder: Decoder, rows: np.ndarray) -> np.ndarray:
    """[layers, positions, ffn] bool: which hidden units are above 0 at the positions of text."""
    step = jax.jit(partial(sequence_pass, SHAPE, block=hidden_block(SHAPE)))
    params, units = stacked(decoder.params), []
    for at in range(0, len(rows), SEQUENCES):
        units.append(np.asarray(step(params, rows[at : at + SEQUENCES])[1][:, :, 1:] > 0))
    return np.concatenate(units, axis=1).reshape(SHAPE.layers, -1, SHAPE.ffn)


def used_blocks(decoder: Decoder, rows: np.ndarray) -> dict[str, Any]:
    """Which hidden units are 0 at the positions of text, by layer, as they are and in blocks of BLOCK neighbours."""
    used = fired(decoder, rows)
    blocks = used.reshape(*used.shape[:-1], -1, BLOCK).any(-1)
    counts, often = blocks.sum(-1), blocks.mean(1)
    return {
        "zeros": 1 - used.mean((1, 2)),
        "zero_blocks": 1 - blocks.mean((1, 2)),
        "active_blocks": {f"p{p}": np.percentile(counts, p, axis=1) for p in (1, 50, 90, 99, 100)},
        "units_never_used": (~used.any(1)).sum(-1),
        "blocks_never_used": (often == 0).sum(-1),
        "most_used_block": often.max(-1),
    }


def unit_masses(decoder: Decoder, rows: np.ndarray) -> np.ndarray:
    """[layers, ffn] what each hidden unit adds over all positions of text: its value times the norm of its row of `down`."""
    step = jax.jit(partial(sequence_pass, SHAPE, block=hidden_block(SHAPE)))
    params = stacked(decoder.params)
    sums = sum(np.asarray(step(params, rows[at : at + SEQUENCES])[1].sum((1, 2))) for at in range(0, len(rows), SEQUENCES))
    return sums * np.linalg.norm(params["layers"]["down"]["kernel"], axis=-1)


def pruned(decoder: Decoder, unit_masses: np.ndarray, count: int) -> Decoder:
    """The decoder with the `count` units of most mass in each layer, the others adding nothing."""
    layers = []
    for layer, mass in zip(decoder.params["layers"], unit_masses, strict=True):
        kept = mass >= np.sort(mass)[-count]
        layers.append({**layer, "down": {**layer["down"], "kernel": layer["down"]["kernel"] * kept[:, None]}})
    return Decoder(decoder.config, {**decoder.params, "layers": layers})


def best_blocks(count: int, units: jax.Array, _: jax.Array) -> jax.Array:
    """Units [n, ffn] with all blocks but the `count` of largest norm set to 0, as a perfect predictor would have it."""
    blocks = units.reshape(len(units), -1, BLOCK)
    norms = jnp.sum(blocks**2, -1)
    least = jnp.sort(norms, axis=-1)[:, -count, None] if count else jnp.inf
    return jnp.where((norms >= least)[..., None], blocks, 0).reshape(units.shape)


def perplexity_of(decoder: Decoder, rows: np.ndarray, count: int) -> float:
    """Perplexity where every token uses `count` blocks of each layer, the best for it."""
    step = jax.jit(partial(sequence_pass, SHAPE, block=hidden_block(SHAPE, partial(best_blocks, count))))
    params, total = stacked(decoder.params), 0.0
    for at in range(0, len(rows), SEQUENCES):
        part = rows[at : at + SEQUENCES]
        total += float(next_token_loss(step(params, part)[0], Batch(part, weights()))) * len(part)
    return float(np.exp(total / len(rows)))


def measure(texts: Path, out: Path) -> None:
    rows, learned = sequences(texts / "held_out.txt"), sequences(texts / "private.txt")[::READ]
    shipped = load_checkpoint(CONFIGS / "weights/kjv-relu").decoder
    models = {"kjv-relu": shipped}
    for name in ("kjv-relu-narrow", "kjv-relu-dense"):
        if (out / f"{name}.json").is_file():
            models[name] = load_checkpoint(out / name).decoder
    found: dict[str, Any] = {"held_out_tokens": int(rows[:, 1:].size), "blocks": SHAPE.ffn // BLOCK, "models": {}}
    for name, decoder in models.items():
        sums = unit_masses(decoder, learned)
        found["models"][name] = {
            "perplexity": perplexity(decoder, rows, weights()),
            **used_blocks(decoder, rows),
            "perplexity_by_blocks": {count: perplexity_of(decoder, rows, count) for count in KEPT_BLOCKS},
            "perplexity_by_units": {count: perplexity(pruned(decoder, sums, count), rows, weights()) for count in KEPT_UNITS},
            "training": json.loads((out / f"{name}.json").read_text()),
        }
    found["kjv_perplexity"] = perplexity(kjv().decoder, rows, weights())
    (HERE / "result.json").write_text(json.dumps(found, indent=1, default=plain) + "\n")
    draw(found, HERE / "plot.png")
    print((HERE / "result.json").read_text())


def plain(value: Any) -> Any:
    """Arrays as lists of few digits."""
    return np.round(np.asarray(value, np.float64), 4).tolist()


def draw(found: dict[str, Any], path: Path) -> None:
    figure, (zeros, kept, cut) = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    layers = np.arange(SHAPE.layers)
    for i, (name, model) in enumerate(found["models"].items()):
        places = layers + 0.3 * i - 0.3
        zeros.bar(places, 100 * model["zeros"], 0.28, label=f"{name}: neurons", alpha=0.5, color=f"C{i}")
        zeros.plot(places, 100 * model["zero_blocks"], "o", label=f"{name}: blocks of {BLOCK}", color=f"C{i}")
        units = model["perplexity_by_units"]
        cut.plot(list(units), [100 * (each / model["perplexity"] - 1) for each in units.values()], "o-", label=name)
        counts = model["perplexity_by_blocks"]
        label = f"{name}: {model['perplexity']:.1f} with all"
        kept.plot([100 * count / found["blocks"] for count in counts], list(counts.values()), "o-", label=label, color=f"C{i}")
    zeros.set(title="Hidden units at 0, held-out text", xlabel="layer", ylabel="%", ylim=(0, 100), xticks=layers)
    zeros.legend(fontsize=7)
    kept.set(title="A constant number of blocks a token", xlabel="% of blocks, the best", ylabel="perplexity", yscale="log")
    kept.legend(fontsize=7)
    cut.set(title="Pruned to the neurons of most mass", xlabel="neurons a layer", ylabel="perplexity added, %", yscale="symlog")
    cut.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("narrow", "sparse", "dense", "ship", "measure"))
    parser.add_argument("--texts", type=Path, default=Path("results/post_models/texts"))
    parser.add_argument("--out", type=Path, default=Path("results/comet_models"))
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    commands = {
        "narrow": partial(make, "kjv-relu-narrow", chosen.texts),
        "sparse": partial(make, "kjv-relu", chosen.texts),
        "dense": partial(make, "kjv-relu-dense", chosen.texts),
        "ship": ship,
        "measure": partial(measure, chosen.texts),
    }
    commands[chosen.command](chosen.out)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
