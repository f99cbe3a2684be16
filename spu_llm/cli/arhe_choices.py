"""What the commands of AR-HE share: options, and the model, schedule and prompt that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
import numpy as np

from ..arhe.calibrate import calibrate, check_resolved
from ..arhe.executor import Decoded, check_request, near_tie
from ..arhe.graph import Argmax, Options
from ..arhe.meaning import Meaning
from ..arhe.parameters import PRESETS, CkksParameters
from ..arhe.polynomials import Degrees
from ..arhe.report import schedule_of
from ..arhe.schedule import Schedule
from ..arhe.shapes import SHAPES, random_decoder
from ..arhe.terms import Terms
from ..errors import UserError
from ..experiment.schema import load_model
from ..models import Checkpoint, Decoder, PlainDecoder, Tokenizer, load_checkpoint
from .options import json_option, quiet_option

TOKENIZER = "tokenizer.json"
"""What a model's tokenizer is called in the folders that owner and client exchange."""

out_option = click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write to.")

_TOY = "NOT SECURE: a toy ring, for trying things out; publish with --secure"
_PASSAGE = 48  # tokens of a calibration passage, at least
_Function = TypeVar("_Function", bound=Callable[..., Any])


def plan_options(command: _Function) -> _Function:
    """The options that a schedule follows from."""
    shapes = ", ".join(SHAPES)
    for option in (
        json_option,
        click.option(
            "--argmax",
            default=Options().argmax,
            show_default=True,
            type=click.Choice(list(get_args(Argmax))),
            help="One against one in log2(vocabulary) rounds; in groups; without comparisons; or what fits the slots.",
        ),
        click.option("--no-cache", is_flag=True, help="Compute keys and values of all positions at every step."),
        click.option("--no-pack", is_flag=True, help="A ciphertext for each row, or each row and head."),
        click.option("--no-skip", is_flag=True, help="Compute masked pairs, and all rows in the last layer."),
        click.option("--reciprocal", type=int, help="Degree for 1 / x, of a softmax's sum.  [default: 59]"),
        click.option("--steep", type=int, help="Steep parts of a sign.  [default: 3, of cutmax 1; NEXUS has 2]"),
        click.option("--levels", type=int, help="Levels a bootstrap leaves.  [default: the parameters']"),
        click.option("--log-ring", type=int, help="Ring 2^this, half as many slots.  [default: the parameters']"),
        click.option(
            "--model", default="gpt2-small", show_default=True, help=f"{shapes} (random weights), or a name or YAML as elsewhere."
        ),
    ):
        command = option(command)
    return command


def parameters_option(default: str) -> Callable[[_Function], _Function]:
    return click.option("--parameters", default=default, show_default=True, type=click.Choice(list(PRESETS)), help="Of CKKS.")


def decoding_options(command: _Function) -> _Function:
    """The options of what is decoded, and of the text that ranges are calibrated on."""
    for option in (
        quiet_option,
        click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of random weights and tokens."),
        click.option("--margin", default=1.25, show_default=True, type=click.FloatRange(1), help="By which ranges are widened."),
        click.option("--passages", default=8, show_default=True, type=click.IntRange(1), help="Calibration passages."),
        click.option("--prompt-tokens", default=8, show_default=True, type=click.IntRange(1), help="Of the default prompt."),
        click.option(
            "--prompt", help="Text, for a model with a tokenizer.  [default: tokens of the calibration text, or random ones]"
        ),
        click.option("--tokens", default=8, show_default=True, type=click.IntRange(1), help="Tokens to generate."),
    ):
        command = option(command)
    return command


@dataclass(frozen=True)
class Request:
    """What is to be decoded, and by which schedule."""

    source: Source
    schedule: Schedule
    meaning: Meaning
    prompt: list[int]
    tokens: int
    model: str


def requested(choices: dict[str, Any]) -> Request:
    """Load the model, plan, calibrate. Raises UserError for what cannot be decoded."""
    parameters, degrees, options = chosen(choices)
    model, tokens = choices["model"], choices["tokens"]
    source = source_of(model, choices["seed"], choices["passages"], choices["prompt_tokens"] + tokens)
    prompt, decoder = source.tokens(choices["prompt"], choices["prompt_tokens"]), source.decoder
    schedule = schedule_of(decoder.config, parameters, degrees, options)
    check_request(decoder.config, prompt, tokens)
    ranges = calibrate(decoder, schedule.program, source.passages, choices["margin"])
    check_resolved(ranges, choices["margin"])
    return Request(source, schedule, Meaning(decoder, schedule.program, ranges), prompt, tokens, model)


def result_of(request: Request, found: Decoded) -> dict[str, Any]:
    """What was decoded, beside the plaintext model's tokens, and the bootstraps."""
    plain = _greedy(request.source.decoder, request.prompt, request.tokens)
    result = {
        "model": request.model,
        "prompt": request.prompt,
        "tokens": found.tokens,
        "plain_tokens": plain,
        "agree": next((i for i, pair in enumerate(zip(found.tokens, plain, strict=True)) if pair[0] != pair[1]), request.tokens),
        "near_ties": [i for i, total in enumerate(found.sums) if near_tie(total)],
        "one_hot_sums": found.sums,
        "resolved_gap": request.meaning.ranges.resolved,
        "predicted": found.predicted,
        "performed": found.performed,
    }
    if request.source.tokenizer is not None:
        result["text"] = request.source.tokenizer.decode(found.tokens)
    return result


@dataclass(frozen=True)
class Source:
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


def source_of(model: str, seed: int, passages: int, length: int) -> Source:
    """Random weights and tokens for a shape, else a model's checkpoint and its calibration text."""
    if model in SHAPES:
        config = SHAPES[model]
        draw = np.random.default_rng(seed)
        length = min(length, config.positions)
        return Source(random_decoder(config, seed), draw.integers(0, config.vocabulary, (passages, length)).tolist())
    described, loaded = load_model(model), checkpoint_of(model)
    length = min(max(length, _PASSAGE), loaded.decoder.config.positions)
    if described.calibration is None or loaded.tokenizer is None:
        raise UserError(f"model {model}: ranges come from text; give its YAML a calibration text and its folder a tokenizer")
    lines = described.calibration.read_text().splitlines()[:passages]
    return Source(
        loaded.decoder,
        [[*described.prefix, *loaded.tokenizer.encode(line)][:length] for line in lines],
        loaded.tokenizer,
        tuple(described.prefix),
    )


def checkpoint_of(model: str) -> Checkpoint:
    return load_checkpoint(load_model(model).locate())


def chosen(choices: dict[str, Any]) -> tuple[CkksParameters, Degrees, Options]:
    parameters = PRESETS[choices["parameters"]]
    changed = {key: choices[key] for key in ("levels", "log_ring") if choices[key] is not None}
    if changed:
        parameters = replace(parameters, slots=0, **changed)
    degrees = degrees_of(choices["steep"], choices["reciprocal"])
    flags = {name: not choices[f"no_{name}"] for name in ("skip", "pack", "cache")}
    return parameters, degrees, Options(**flags, argmax=choices["argmax"])


def degrees_of(steep: int | None, reciprocal: int | None) -> Degrees:
    """The usual degrees but for those given."""
    degrees = Degrees() if steep is None else Degrees(steep=steep, cut_steep=steep)
    return degrees if reciprocal is None else replace(degrees, reciprocal=reciprocal)


def _greedy(decoder: Decoder, prompt: Sequence[int], tokens: int) -> list[int]:
    plain = PlainDecoder(decoder, len(prompt) + tokens)
    logits, found = plain.advance(prompt)[-1], []
    for _ in range(tokens):
        found.append(int(np.argmax(logits)))
        if len(found) < tokens:
            logits = plain.advance(found[-1:])[-1]
    return found


def listed(found: dict[str, Any], indent: str = "") -> list[str]:
    """Names and values, nested ones under their name."""
    lines = []
    for key, value in found.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}", *listed(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key:24} {f'{value:.4g}' if isinstance(value, float) else value}")
    return lines


def ring_of(terms: Terms) -> str:
    """The ring that keys are made for, and whether it protects anything."""
    ring = f"ring 2^{terms.parameters.log_ring}, {terms.parameters.slots} slots"
    return f"{ring}, 128 bits of security" if terms.secure else f"{ring}; {_TOY}"
