"""`spu-llm plan arhe` and `spu-llm arhe simulate`: decoding under CKKS, planned and performed without a key."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import click
import numpy as np

from .arhe.calibrate import calibrate
from .arhe.executor import check_request, decode
from .arhe.graph import Options
from .arhe.meaning import Meaning
from .arhe.parameters import PRESETS, CkksParameters
from .arhe.polynomials import Degrees
from .arhe.report import planned, schedule_of
from .arhe.shapes import SHAPES, random_decoder
from .arhe.simulator import Simulator
from .errors import UserError
from .experiment.schema import load_model
from .models import Decoder, PlainDecoder, Tokenizer, load_checkpoint
from .progress import bar, silent

_TIE = 0.1  # by which a one-hot vector's sum strays from 1 when a second logit was within reach of the largest
_PASSAGE = 48  # tokens of a calibration passage, at least
_Function = TypeVar("_Function", bound=Callable[..., Any])


@click.group("plan")
def plan_group() -> None:
    """Say what a run will cost, from shapes alone."""


@click.group("arhe")
def arhe_group() -> None:
    """Decoding that the server does alone under CKKS, the client offline (AR-HE)."""


def _shared(command: _Function) -> _Function:
    """The options that a schedule follows from."""
    shapes = ", ".join(SHAPES)
    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines."),
        click.option("--no-league", is_flag=True, help="Argmax: one against one, log2(vocabulary) rounds."),
        click.option("--no-cache", is_flag=True, help="Compute keys and values of all positions at every step."),
        click.option("--no-pack", is_flag=True, help="A ciphertext for each row, or each row and head."),
        click.option("--no-skip", is_flag=True, help="Compute masked pairs, and all rows in the last layer."),
        click.option("--steep", type=int, help="Steep parts of a sign.  [default: 3; NEXUS has 2]"),
        click.option("--levels", type=int, help="Levels a bootstrap leaves.  [default: the parameters']"),
        click.option("--log-ring", type=int, help="Ring 2^this, half as many slots.  [default: the parameters']"),
        click.option("--parameters", default="paper", show_default=True, type=click.Choice(list(PRESETS)), help="Of CKKS."),
        click.option(
            "--model", default="gpt2-small", show_default=True, help=f"{shapes} (random weights), or a name or YAML as elsewhere."
        ),
    ):
        command = option(command)
    return command


@plan_group.command("arhe")
@_shared
@click.option("--context", default=33, show_default=True, type=int, help="Positions that the step's token attends to.")
@click.option("--bootstrap-seconds", type=click.FloatRange(0), help="Measured time of one bootstrap, for an estimate.")
def plan_arhe(model: str, context: int, bootstrap_seconds: float | None, as_json: bool, **choices: Any) -> None:
    """Bootstraps of a decoding step and of a prompt, by part, with and without each optimisation; nothing is run.

    \b
    Examples:
      spu-llm plan arhe --model gpt2-small --context 33 --json
      spu-llm plan arhe --model kjv --context 64 --bootstrap-seconds 14.5
      spu-llm plan arhe --model gpt2-small --levels 7 --steep 2 --no-league
    """
    config = SHAPES[model] if model in SHAPES else _loaded(model).decoder.config
    found = {"model": model} | planned(config, *_chosen(choices), context, bootstrap_seconds)
    click.echo(json.dumps(found) if as_json else "\n".join(_lines(found)))


@arhe_group.command("simulate")
@_shared
@click.option("--tokens", default=8, show_default=True, type=click.IntRange(1), help="Tokens to generate.")
@click.option("--prompt", help="Text, for a model with a tokenizer.  [default: tokens of the calibration text, or random ones]")
@click.option("--prompt-tokens", default=8, show_default=True, type=click.IntRange(1), help="Of the default prompt.")
@click.option("--passages", default=8, show_default=True, type=click.IntRange(1), help="Calibration passages.")
@click.option("--margin", default=1.25, show_default=True, type=click.FloatRange(1), help="By which calibrated ranges are widened.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of random weights and tokens.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def simulate(
    model: str, tokens: int, prompt: str | None, prompt_tokens: int, passages: int, margin: float, seed: int, quiet: bool,
    as_json: bool, **choices: Any,
) -> None:  # fmt: skip
    """Perform the schedule on plaintext vectors that keep CKKS' levels, scales and ranges, and count its bootstraps.

    A pass whose one-hot vector does not sum to 1 had a second logit too near the largest: a near-tie.

    \b
    Examples:
      spu-llm arhe simulate --model kjv --prompt "And it came to pass" --tokens 8
      spu-llm arhe simulate --model gpt2-small --tokens 4 --json
      spu-llm arhe simulate --model llama-tiny --tokens 16 --no-cache --log-ring 10
    """
    parameters, degrees, options = _chosen(choices)
    source = _source(model, seed, passages, prompt_tokens + tokens)
    begin = source.tokens(prompt, prompt_tokens)
    decoder = source.decoder
    schedule = schedule_of(decoder.config, parameters, degrees, options)
    check_request(decoder.config, begin, tokens)
    began = time.perf_counter()
    ranges = calibrate(decoder, schedule.program, source.passages, margin)
    backend = Simulator(parameters)
    meaning = Meaning(decoder, schedule.program, ranges)
    found = decode(meaning, schedule, backend, begin, tokens, silent if quiet else bar)
    plain = _greedy(decoder, begin, tokens)
    result = {
        "model": model,
        "prompt": begin,
        "tokens": found.tokens,
        "plain_tokens": plain,
        "agree": next((i for i, pair in enumerate(zip(found.tokens, plain, strict=True)) if pair[0] != pair[1]), tokens),
        "near_ties": [i for i, total in enumerate(found.sums) if abs(total - 1) > _TIE],
        "one_hot_sums": found.sums,
        "resolved_gap": 2 * meaning.threshold * (ranges.logits[1] - ranges.logits[0]),
        "predicted": found.predicted,
        "performed": found.performed,
        "lowest_level": backend.lowest,
        "seconds": time.perf_counter() - began,
    }
    if source.tokenizer is not None:
        result["text"] = source.tokenizer.decode(found.tokens)
    click.echo(json.dumps(result) if as_json else "\n".join(_lines(result)))


@dataclass(frozen=True)
class _Source:
    """A model, and token sequences to calibrate it on."""

    decoder: Decoder
    passages: list[list[int]]
    tokenizer: Tokenizer | None = None
    prefix: tuple[int, ...] = ()

    def tokens(self, prompt: str | None, count: int) -> list[int]:
        if prompt is None:
            return self.passages[0][:count]
        if self.tokenizer is None:
            raise UserError("--prompt: this model has no tokenizer; leave the prompt out, random tokens take its place")
        return [*self.prefix, *self.tokenizer.encode(prompt)]


def _source(model: str, seed: int, passages: int, length: int) -> _Source:
    """Random weights and tokens for a shape, else a model's checkpoint and its calibration text."""
    if model in SHAPES:
        config = SHAPES[model]
        draw = np.random.default_rng(seed)
        length = min(length, config.positions)
        return _Source(random_decoder(config, seed), draw.integers(0, config.vocabulary, (passages, length)).tolist())
    described, loaded = load_model(model), _loaded(model)
    length = min(max(length, _PASSAGE), loaded.decoder.config.positions)
    if described.calibration is None or loaded.tokenizer is None:
        raise UserError(f"model {model}: ranges come from text; give its YAML a calibration text and its folder a tokenizer")
    lines = described.calibration.read_text().splitlines()[:passages]
    return _Source(
        loaded.decoder,
        [[*described.prefix, *loaded.tokenizer.encode(line)][:length] for line in lines],
        loaded.tokenizer,
        tuple(described.prefix),
    )


def _loaded(model: str) -> Any:
    return load_checkpoint(load_model(model).locate())


def _chosen(choices: dict[str, Any]) -> tuple[CkksParameters, Degrees, Options]:
    parameters = PRESETS[choices["parameters"]]
    changed = {key: choices[key] for key in ("levels", "log_ring") if choices[key] is not None}
    if changed:
        parameters = replace(parameters, slots=0, **changed)
    degrees = Degrees() if choices["steep"] is None else Degrees(steep=choices["steep"])
    return parameters, degrees, Options(**{name: not choices[f"no_{name}"] for name in ("skip", "pack", "cache", "league")})


def _greedy(decoder: Decoder, prompt: Sequence[int], tokens: int) -> list[int]:
    plain = PlainDecoder(decoder, len(prompt) + tokens)
    logits, found = plain.advance(prompt)[-1], []
    for _ in range(tokens):
        found.append(int(np.argmax(logits)))
        if len(found) < tokens:
            logits = plain.advance(found[-1:])[-1]
    return found


def _lines(found: dict[str, Any], indent: str = "") -> list[str]:
    """Names and values, nested ones under their name."""
    lines = []
    for key, value in found.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key:24} {f'{value:.4g}' if isinstance(value, float) else value}")
    return lines
