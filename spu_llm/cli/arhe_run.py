"""`spu-llm arhe run`: decoding encrypted, client and server in one process."""

from __future__ import annotations

import json
import os
import resource
import time
from typing import TYPE_CHECKING, Any

import click

from ..arhe.deviations import Deviations
from ..arhe.executor import decode
from ..arhe.parameters import CkksParameters
from ..arhe.schedule import Schedule
from ..arhe.slots import rotation_steps
from ..progress import bar, silent
from .arhe_choices import decoding_options, listed, parameters_option, plan_options, requested, result_of
from .openfhe import need_openfhe

if TYPE_CHECKING:
    from ..arhe.ckks import OpenFheBackend


@click.command("run")
@plan_options
@parameters_option("toy")
@decoding_options
@click.option("--secure", is_flag=True, help="Only with a ring of 128 bits of security by the standard's tables.")
@click.option("--errors", is_flag=True, help="Decrypt each layer's result and compare it: for debugging, needs the secret key.")
def run_command(as_json: bool, quiet: bool, secure: bool, errors: bool, **choices: Any) -> None:
    """Decode encrypted, by OpenFHE, both client and server in this process: keys, prompt, every token, and what it took.

    The tokens are decrypted at the end only. Without --secure the ring is a toy: everything is computed as it would be, and
    NOTHING IS SECURE. OpenFHE computes in one thread unless OMP_NUM_THREADS says otherwise.

    \b
    Examples:
      spu-llm arhe run --model shakespeare-tiny --prompt "My lord, " --tokens 8 --passages 200 --reciprocal 119
      spu-llm arhe run --model shakespeare-tiny --prompt "To be" --tokens 2 --passages 200 --errors --json
      spu-llm arhe run --model gpt2-tiny --prompt-tokens 3 --tokens 1 --margin 2
    """
    request = requested(choices)
    backend, made = _openfhe(request.schedule, secure)
    deviations = Deviations(request.meaning, request.schedule, backend, request.prompt)
    watch = deviations.watch if errors else None
    found = decode(request.meaning, request.schedule, backend, request.prompt, request.tokens, silent if quiet else bar, watch)
    result = {"security": _security(secure, request.schedule.parameters)} | result_of(request, found) | made
    result |= {
        "seconds_tokens": found.seconds,
        "seconds_bootstrap": backend.bootstrap_seconds / max(backend.bootstraps, 1),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "threads": int(os.environ["OMP_NUM_THREADS"]),
    }
    if errors:
        result["errors"] = deviations.facts()
    click.echo(json.dumps(result) if as_json else "\n".join(listed(result)))


def _openfhe(schedule: Schedule, secure: bool) -> tuple[OpenFheBackend, dict[str, Any]]:
    """A backend with fresh keys, and what making them took. Raises UserError where OpenFHE is not installed."""
    need_openfhe()
    from ..arhe.ckks import OpenFheBackend, make_context, make_keys

    parameters, began = schedule.parameters, time.perf_counter()
    context = make_context(parameters, secure)
    pair = make_keys(context, rotation_steps(parameters.slots, parameters.few_keys))
    made: dict[str, Any] = {"ring": parameters.ring, "slots": parameters.slots, "modulus_bits": parameters.modulus_bits}
    made["seconds_keys"] = time.perf_counter() - began
    return OpenFheBackend(parameters, context, pair.publicKey, pair.secretKey), made


def _security(secure: bool, parameters: CkksParameters) -> str:
    return "128 bits (HEStd_128_classic)" if secure else f"NOT SECURE: a toy ring, 2^{parameters.log_ring}"
