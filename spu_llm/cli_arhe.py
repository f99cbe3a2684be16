"""`spu-llm plan arhe`, `spu-llm arhe simulate` and `arhe run`: decoding under CKKS, planned, performed on plaintext, encrypted."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
import numpy as np

from .arhe.calibrate import calibrate, check_resolved
from .arhe.deviations import Deviations
from .arhe.executor import Decoded, check_request, decode, near_tie
from .arhe.graph import Argmax, Options
from .arhe.meaning import Meaning
from .arhe.parameters import PRESETS, CkksParameters
from .arhe.polynomials import Degrees
from .arhe.report import planned, schedule_of
from .arhe.schedule import Schedule
from .arhe.shapes import SHAPES, random_decoder
from .arhe.simulator import Simulator
from .arhe.slots import rotation_steps
from .errors import UserError
from .experiment.schema import load_model
from .models import Decoder, PlainDecoder, Tokenizer, load_checkpoint
from .progress import bar, silent

if TYPE_CHECKING:
    from .arhe.ckks import OpenFheBackend

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


def _parameters(default: str) -> Callable[[_Function], _Function]:
    return click.option("--parameters", default=default, show_default=True, type=click.Choice(list(PRESETS)), help="Of CKKS.")


def _generating(command: _Function) -> _Function:
    """The options of what is decoded, and of the text that ranges are calibrated on."""
    for option in (
        click.option("--quiet", is_flag=True, help="No progress bar."),
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


@plan_group.command("arhe")
@_shared
@_parameters("paper")
@click.option("--context", default=33, show_default=True, type=int, help="Positions that the step's token attends to.")
@click.option("--bootstrap-seconds", type=click.FloatRange(0), help="Measured time of one bootstrap, for an estimate.")
def plan_arhe(model: str, context: int, bootstrap_seconds: float | None, as_json: bool, **choices: Any) -> None:
    """Bootstraps of a decoding step and of a prompt, by part, with and without each optimisation; nothing is run.

    \b
    Examples:
      spu-llm plan arhe --model gpt2-small --context 33 --json
      spu-llm plan arhe --model kjv --context 64 --bootstrap-seconds 14.5
      spu-llm plan arhe --model gpt2-small --levels 7 --steep 2 --argmax tournament
    """
    config = SHAPES[model] if model in SHAPES else _loaded(model).decoder.config
    found = {"model": model} | planned(config, *_chosen(choices), context, bootstrap_seconds)
    click.echo(json.dumps(found) if as_json else "\n".join(_lines(found)))


@arhe_group.command("simulate")
@_shared
@_parameters("paper")
@_generating
@click.option("--errors", is_flag=True, help="Compare each layer's result with exact functions.")
def simulate(as_json: bool, quiet: bool, errors: bool, **choices: Any) -> None:
    """Perform the schedule on plaintext vectors that keep CKKS' levels, scales and ranges, and count its bootstraps.

    A pass whose one-hot vector's squares do not sum to 1 had a second logit too near the largest: a near-tie.

    \b
    Examples:
      spu-llm arhe simulate --model kjv --prompt "And it came to pass" --tokens 8
      spu-llm arhe simulate --model gpt2-small --tokens 4 --json
      spu-llm arhe simulate --model llama-tiny --tokens 16 --no-cache --log-ring 10
    """
    began = time.perf_counter()
    request = _request(choices)
    backend = Simulator(request.schedule.parameters)
    deviations = Deviations(request.meaning, request.schedule, backend, request.prompt)
    watch = deviations.watch if errors else None
    found = decode(request.meaning, request.schedule, backend, request.prompt, request.tokens, silent if quiet else bar, watch)
    result = _result(request, found) | {"lowest_level": backend.lowest, "seconds": time.perf_counter() - began}
    if errors:
        result["errors"] = deviations.facts()
    click.echo(json.dumps(result) if as_json else "\n".join(_lines(result)))


@arhe_group.command("run")
@_shared
@_parameters("toy")
@_generating
@click.option("--secure", is_flag=True, help="Only with a ring of 128 bits of security by the standard's tables.")
@click.option("--errors", is_flag=True, help="Decrypt each layer's result and compare it: for debugging, needs the secret key.")
def run(as_json: bool, quiet: bool, secure: bool, errors: bool, **choices: Any) -> None:
    """Decode encrypted, by OpenFHE, both client and server in this process: keys, prompt, every token, and what it took.

    The tokens are decrypted at the end only. Without --secure the ring is a toy: everything is computed as it would be, and
    NOTHING IS SECURE. OpenFHE computes in one thread unless OMP_NUM_THREADS says otherwise.

    \b
    Examples:
      spu-llm arhe run --model shakespeare-tiny --prompt "My lord, " --tokens 8 --passages 200 --reciprocal 119
      spu-llm arhe run --model shakespeare-tiny --prompt "To be" --tokens 2 --passages 200 --errors --json
      spu-llm arhe run --model gpt2-tiny --prompt-tokens 3 --tokens 1 --margin 2
    """
    request = _request(choices)
    backend, made = _openfhe(request.schedule, secure)
    deviations = Deviations(request.meaning, request.schedule, backend, request.prompt)
    watch = deviations.watch if errors else None
    found = decode(request.meaning, request.schedule, backend, request.prompt, request.tokens, silent if quiet else bar, watch)
    result = {"security": _security(secure, request.schedule.parameters)} | _result(request, found) | made
    result |= {
        "seconds_tokens": found.seconds,
        "seconds_bootstrap": backend.bootstrap_seconds / max(backend.bootstraps, 1),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "threads": int(os.environ["OMP_NUM_THREADS"]),
    }
    if errors:
        result["errors"] = deviations.facts()
    click.echo(json.dumps(result) if as_json else "\n".join(_lines(result)))


def _openfhe(schedule: Schedule, secure: bool) -> tuple[OpenFheBackend, dict[str, Any]]:
    """A backend with fresh keys, and what making them took. Raises UserError where OpenFHE is not installed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # its threads spin while they wait
    try:
        from .arhe.ckks import OpenFheBackend, make_context, make_keys
    except ImportError as error:
        raise UserError(f"OpenFHE: {error}; install spu_llm's extra `arhe` on Python 3.10") from None
    parameters, began = schedule.parameters, time.perf_counter()
    context = make_context(parameters, secure)
    pair = make_keys(context, rotation_steps(parameters.slots, parameters.few_keys))
    made: dict[str, Any] = {"ring": parameters.ring, "slots": parameters.slots, "modulus_bits": parameters.modulus_bits}
    made["seconds_keys"] = time.perf_counter() - began
    return OpenFheBackend(parameters, context, pair.publicKey, pair.secretKey), made


def _security(secure: bool, parameters: CkksParameters) -> str:
    return "128 bits (HEStd_128_classic)" if secure else f"NOT SECURE: a toy ring, 2^{parameters.log_ring}"


@dataclass(frozen=True)
class _Request:
    """What is to be decoded, and by which schedule."""

    source: _Source
    schedule: Schedule
    meaning: Meaning
    prompt: list[int]
    tokens: int
    model: str


def _request(choices: dict[str, Any]) -> _Request:
    """Load the model, plan, calibrate. Raises UserError for what cannot be decoded."""
    parameters, degrees, options = _chosen(choices)
    model, tokens = choices["model"], choices["tokens"]
    source = source_of(model, choices["seed"], choices["passages"], choices["prompt_tokens"] + tokens)
    prompt, decoder = source.tokens(choices["prompt"], choices["prompt_tokens"]), source.decoder
    schedule = schedule_of(decoder.config, parameters, degrees, options)
    check_request(decoder.config, prompt, tokens)
    ranges = calibrate(decoder, schedule.program, source.passages, choices["margin"])
    check_resolved(ranges, choices["margin"])
    return _Request(source, schedule, Meaning(decoder, schedule.program, ranges), prompt, tokens, model)


def _result(request: _Request, found: Decoded) -> dict[str, Any]:
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


def source_of(model: str, seed: int, passages: int, length: int) -> _Source:
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


def _lines(found: dict[str, Any], indent: str = "") -> list[str]:
    """Names and values, nested ones under their name."""
    lines = []
    for key, value in found.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key:24} {f'{value:.4g}' if isinstance(value, float) else value}")
    return lines
