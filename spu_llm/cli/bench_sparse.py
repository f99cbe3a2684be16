"""`spu-llm bench sparse`: what the parts of a layer cost, dense and sparse, and ways to take active blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from ..bench.indexing import IndexShape, bench_indexing
from ..bench.sparse import How, layer_parts
from ..bench.sparse_case import SparseModel
from ..comet.prepared import Prepared
from ..errors import UserError
from ..experiment.schema import CONFIGS, load_model, load_network
from ..models import Checkpoint, load_checkpoint
from ..models.calibration_file import calibration_for
from ..models.source import ModelConfig, content_digest
from ..models.tokenizer import need_tokenizer
from ..post.align import read_tokens
from ..progress import bar, silent
from ..runtime import ProtocolConfig
from .options import json_option, numbers, protocol_option, quiet_option, repeats_option

_DENSE = ("layer", "attention", "attention_linear", "attention_nonlinear", "ffn", "ffn_linear", "ffn_nonlinear")
_SPARSE = (*_DENSE, "given", "predictor")
_RATIOS = ("speedup", "attention_speedup", "ffn_speedup", "ffn_with_predictor_speedup", "predictor_share")
_WAYS = ("bits", "disclosed", "units", "weights", "shuffle")


@click.command("sparse")
@click.option("--model", default="kjv-relu", show_default=True, help="Name in configs/model, or path of a model's YAML; an OPT.")
@click.option("--comet", type=click.Path(path_type=Path), help="Its file from `prepare comet`.  [default: in configs/comet]")
@click.option("--text", type=click.Path(path_type=Path), help="Tokens are from its beginning.  [default: the calibration text]")
@click.option("--ops", default="plugin", show_default=True, type=click.Choice(["plugin", "stock"]), help="Whose operations.")
@protocol_option
@click.option("--tokens", default="1,9,64", show_default=True, help="Sizes of passes.")
@click.option("--context", default=64, show_default=True, type=click.IntRange(1), help="Cache rows before a pass, prefix and all.")
@click.option("--layer", type=click.IntRange(0), help="Which layer.  [default: the middle one]")
@click.option("--network", "networks", multiple=True, help="Name in configs/network; repeated.  [default: 100mbps to 5gbps]")
@repeats_option
@click.option("--no-products", is_flag=True, help="Do not tell linear from nonlinear parts: half the time.")
@click.option("--indexing", is_flag=True, help="Ways to take active blocks instead: disclosed places against secret gathers.")
@json_option
@quiet_option
def sparse_command(model: str, comet: Path | None, ops: str, protocol: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """One layer of a ReLU model, dense and sparse: halves, products and functions, the predictor; or how active blocks are taken.

    Compute is measured here; messages and bytes are what one party sends; networks' seconds are modelled.

    \b
    Examples:
      spu-llm bench sparse --tokens 1,9
      spu-llm bench sparse --ops stock --protocol ABY3 --tokens 1 --network lan --json
      spu-llm bench sparse --ops stock --protocol CHEETAH --indexing
    """
    if ops == "plugin" and protocol != "SEMI2K":
        raise UserError(f"--ops plugin: runs on SEMI2K, not on {protocol}; leave --protocol out or use --ops stock")
    config, progress = load_model(model), silent if quiet else bar
    path = comet or CONFIGS / "comet" / f"{config.name}.safetensors"
    checkpoint = load_checkpoint(config.locate())
    prepared = Prepared.load(path)
    prepared.check(path, checkpoint.decoder.config, content_digest(config.locate()))
    how = How(
        [load_network(name) for name in options["networks"] or ("100mbps", "wan", "lan", "5gbps")],
        options["repeats"],
        options["layer"],
        not options["no_products"],
    )
    settings = ProtocolConfig.model_validate({"name": protocol})
    if options["indexing"]:
        found = bench_indexing(ops, settings, _shape(prepared, checkpoint, how.layer), how.networks, how.repeats, progress)
        text = _indexing_table(found)
    else:
        calibration = calibration_for(config, checkpoint, progress)[0] if ops == "plugin" else None
        sparse = SparseModel(checkpoint.decoder, prepared.layers, calibration)
        passes, context = numbers("--tokens", options["tokens"]), options["context"]
        sequence = _sequence(config, checkpoint, options["text"], context + max(passes))
        parts = [layer_parts(ops, settings, sparse, sequence[: context + n], n, how, progress) for n in passes]  # type: ignore[arg-type]
        found = {"passes": parts}
        text = "\n\n".join(map(_table, parts))
    click.echo(json.dumps({"model": config.name, "digest": prepared.digest, **found}) if as_json else text)


def _shape(prepared: Prepared, checkpoint: Checkpoint, layer: int | None) -> IndexShape:
    """A layer's blocks; as measuring the layer chooses it."""
    config = checkpoint.decoder.config
    i = config.layers // 2 if layer is None else layer
    if i >= config.layers:
        raise UserError(f"--layer {layer}: the model has layers 0 to {config.layers - 1}; name one of these")
    sparsity = prepared.layers[i]
    return IndexShape(sparsity.blocks, sparsity.active_blocks, config.ffn // sparsity.blocks, config.width)


def _sequence(config: ModelConfig, checkpoint: Checkpoint, text: Path | None, count: int) -> list[int]:
    """The prefix and the text's first tokens, `count` in all."""
    need_tokenizer(checkpoint.tokenizer, config)
    source = text or config.calibration
    if source is None:
        raise UserError(f"model {config.name}: has no calibration text to take tokens from; give --text")
    found = [*config.prefix, *np.asarray(read_tokens([source], checkpoint)[:count]).tolist()][:count]
    if len(found) < count:
        raise UserError(f"{source}: gives {len(found)} tokens, fewer than {count}; give a longer one, or a smaller --context")
    return found


def _table(found: dict[str, Any]) -> str:
    blocks, heads = (f"{active} of {every}" for active, every in (found["blocks"], found["heads"]))
    title = f"{found['protocol']}, {found['ops']}: layer {found['layer']}, {found['tokens']} tokens after {found['context']}"
    lines = [f"{title}; {blocks} blocks, {heads} heads"]
    names = list(found["dense"]["layer"]["modelled"])
    lines.append(_heads(names))
    for side, parts in (("dense", _DENSE), ("sparse", _SPARSE)):
        lines += [_row(f"{side} {part}", found[side][part]) for part in parts if part in found[side]]
    for name in _RATIOS:
        cells = [found[name][key] for key in ("seconds", "messages", "bytes", *names)]
        lines.append(f"{name:27}" + "".join(f"{'-' if cell is None else f'{cell:.2f}':>12}" for cell in cells))
    return "\n".join([*lines, f"trust: {found['trust']}"])


def _indexing_table(found: dict[str, Any]) -> str:
    active, every = found["blocks"]
    lines = [f"{found['protocol']}, {found['ops']}: {active} of {every} blocks of {found['size']} units, width {found['width']}"]
    lines.append(_heads(list(found["bits"]["modelled"])))
    lines += [_row(way, found[way]) for way in _WAYS]
    for way in ("units", "weights"):
        tokens = found["break_even_tokens"][way]
        after = "never" if tokens is None else f"after {tokens:.0f} tokens of an order"
        lines.append(f"{way}: {found['ratio'][way]['bytes']:.2f} times the bytes of disclosed; a shuffle's bytes are saved {after}")
    return "\n".join([*lines, f"trust: {found['trust']}"])


def _heads(networks: Sequence[str]) -> str:
    return f"{'':27}" + "".join(f"{head:>12}" for head in ("compute s", "messages", "bytes", *networks))


def _row(name: str, cost: dict[str, Any]) -> str:
    cells = f"{cost['seconds']:12.4f}{cost['messages']:12,}{cost['bytes']:12,}"
    return f"{name:27}{cells}" + "".join(f"{seconds:12.4f}" for seconds in cost["modelled"].values())
