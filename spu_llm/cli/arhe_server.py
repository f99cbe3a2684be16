"""`spu-llm arhe publish, serve`: the part of the model's owner, who decodes under encryption for a client that is offline.

OpenFHE is imported when a command is run: the rest of the command line works where it cannot be installed.
"""

from __future__ import annotations

import json
import resource
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args

import click

from ..arhe.calibrate import calibrate, check_resolved
from ..arhe.files import file_digest, write_bytes
from ..arhe.graph import Argmax, Options
from ..arhe.meaning import Meaning
from ..arhe.parameters import PRESETS
from ..arhe.shapes import SHAPES
from ..arhe.terms import Terms, load_terms, publish
from ..errors import UserError
from ..experiment.schema import load_model
from ..models import load_checkpoint
from ..models.decoder import Decoder
from ..models.tokenizer import Tokenizer
from ..progress import bar, silent
from .arhe_choices import TOKENIZER, degrees_of, out_option, ring_of, source_of
from .openfhe import need_openfhe
from .options import json_option, quiet_option

_path = click.Path(path_type=Path)
_model = click.option(
    "--model", required=True, help=f"{', '.join(SHAPES)} (random weights), or a name or YAML as elsewhere: the owner's."
)
_PRESETS = [name for name, parameters in PRESETS.items() if parameters.reserve]  # OpenFHE's bootstrap takes no input at level 0


@click.command("publish")
@_model
@click.option("--parameters", default="toy", show_default=True, type=click.Choice(_PRESETS), help="Of CKKS.")
@click.option("--log-ring", type=int, help="Ring 2^this, half as many slots.  [default: the parameters']")
@click.option("--levels", type=int, help="Levels a bootstrap leaves.  [default: the parameters']")
@click.option("--steep", type=int, help="Steep parts of a sign.  [default: 3, of cutmax 1]")
@click.option("--reciprocal", type=int, help="Degree for 1 / x, of a softmax's sum.  [default: 59]")
@click.option("--argmax", default=Options().argmax, show_default=True, type=click.Choice(get_args(Argmax)), help="How it is found.")
@click.option("--few-keys", is_flag=True, help="Keys for rotations by powers of two alone: smaller, and slower to use.")
@click.option("--secure", is_flag=True, help="Only with a ring of 128 bits of security by the standard's tables.")
@out_option
def publish_command(
    model: str, parameters: str, steep: int | None, reciprocal: int | None, argmax: Argmax, secure: bool, out: Path, **changes: Any
) -> None:  # fmt: skip
    """The owner's: write what a client has to know of a model: its shape, CKKS parameters, its tokenizer.

    No weight, and nothing that was measured on text.

    \b
    Examples:
      spu-llm arhe publish --model shakespeare-tiny --out published
      spu-llm arhe publish --model shakespeare-tiny --parameters secure --secure --out published
    """
    changes = {name: value for name, value in changes.items() if value is not None and value is not False}
    if "log_ring" in changes:
        changes["slots"] = 0
    chosen = replace(PRESETS[parameters], **changes)
    tokenizer: Tokenizer | None = None
    prefix: tuple[int, ...] = ()
    if model in SHAPES:
        config = SHAPES[model]
    else:
        described = load_model(model)
        checkpoint = load_checkpoint(described.locate())
        config, tokenizer, prefix = checkpoint.decoder.config, checkpoint.tokenizer, described.prefix
    if tokenizer is not None:
        write_bytes(out / TOKENIZER, tokenizer.to_json().encode())
    digest = None if tokenizer is None else file_digest(out / TOKENIZER)
    degrees, options = degrees_of(steep, reciprocal), Options(argmax=argmax)
    terms = Terms(Path(model).stem, config, chosen, degrees, options, prefix, secure, digest)
    terms.schedule()  # raises where there is none
    if secure:
        need_openfhe()
        from ..arhe.ckks import make_context

        make_context(chosen, secure)  # raises where the ring is too small
    publish(out, terms)
    click.echo(f"{out}: terms of {terms.model}; {ring_of(terms)}")


@click.command("serve")
@click.option("--keys", "folder", required=True, type=_path, help="The client's public folder.")
@click.option("--request", required=True, type=_path, help="What `arhe encrypt` wrote.")
@click.option(
    "--terms", "published", required=True, type=_path, help="What `arhe publish` wrote: keys for other terms are refused."
)
@_model
@click.option("--tokens", type=click.IntRange(1), help="Tokens to generate.  [default: what the request asks for]")
@click.option("--passages", default=8, show_default=True, type=click.IntRange(1), help="Calibration passages.")
@click.option("--margin", default=1.25, show_default=True, type=click.FloatRange(1), help="By which calibrated ranges are widened.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of random weights and tokens.")
@click.option("--save-seconds", default=10.0, show_default=True, type=click.FloatRange(0), help="Work that a kill may cost.")
@click.option("--restart", is_flag=True, help="Drop what an earlier run left in --out.")
@out_option
@json_option
@quiet_option
def serve_command(
    folder: Path, request: Path, published: Path, model: str, tokens: int | None, passages: int, margin: float, seed: int,
    save_seconds: float, restart: bool, out: Path, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """The server's: decode under encryption. OUT/response goes to the client; the state in OUT stays.

    Started again after it was killed, it goes on from the operation that was kept last.

    \b
    Example:
      spu-llm arhe serve --terms published --keys client/public --request request --model shakespeare-tiny --out server
    """
    need_openfhe()
    from ..arhe import service
    from ..arhe.keys import load_public
    from ..arhe.request import load_request

    began = time.perf_counter()
    keys = load_public(folder, evaluation=True)
    if keys.terms.digest != load_terms(published).digest:  # a client could have logits in place of tokens by terms of its own
        raise UserError(f"{folder}: keys were made for other terms than {published}; have keys made with what you published")
    asked = load_request(request, keys)
    source = source_of(model, seed, passages, asked.prompt + asked.tokens)
    _check_model(model, source.decoder, keys.terms)
    if restart:
        service.restart(out)
    schedule = keys.terms.schedule()
    ranges = calibrate(source.decoder, schedule.program, source.passages, margin)
    check_resolved(ranges, margin)
    meaning = Meaning(source.decoder, schedule.program, ranges)
    digest = service.model_digest(source.decoder, [source.passages, margin])
    wanted = tokens or asked.tokens

    def said(number: int, seconds: dict[str, float], bootstraps: int) -> None:
        parts = ", ".join(f"{part} {spent:.1f}" for part, spent in seconds.items())
        click.echo(f"token {number} of {wanted}: {sum(seconds.values()):.1f} s ({parts}), {bootstraps} bootstraps", err=True)

    work = service.Service(service.Job(keys, asked, meaning, schedule, digest), out, save_seconds)
    loaded = time.perf_counter() - began
    life = work.run(wanted, silent if quiet else bar, (lambda *_: None) if quiet else said)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = asdict(life) | {"loading_seconds": loaded, "peak_rss_bytes": peak}
    click.echo(json.dumps(found) if as_json else f"{out / 'response'}: {len(work.work.performed)} tokens, for the client")


def _check_model(name: str, decoder: Decoder, terms: Terms) -> None:
    """Raise UserError where a model is not of the shape that keys were made for."""
    for field in fields(decoder.config):
        found, agreed = (getattr(config, field.name) for config in (decoder.config, terms.config))
        if found != agreed:
            raise UserError(
                f"model {name}: {field.name} is {found}, and the keys were made for {terms.model}, with {agreed}; serve that model"
            )
