"""`spu-llm party` and `spu-llm dealer`: the processes of a generation, on as many machines as there are roles."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import click

from ..dealer.beaver.keys import load_key
from ..dealer.beaver.server import BeaverServer
from ..errors import UserError
from ..experiment.dealer import serve_material
from ..experiment.party import run_client, run_follower
from ..experiment.schema import is_address, load_experiment
from ..network.certificates import Identity
from ..progress import Progress, bar, silent
from ..runtime.workspace import workspace
from .options import quiet_option, set_option
from .streaming import stream

_FAILED = 2
_with_parent = click.option("--with-parent", is_flag=True, hidden=True, help="End when the process that started this one does.")


@click.command("party")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--role", required=True, type=click.Choice(["client", "owner", "helper"]), help="Whose part this process plays.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for what this party keeps.")
@set_option
@quiet_option
@_with_parent
def party_command(config: Path, role: str, out: Path, overrides: tuple[str, ...], quiet: bool, with_parent: bool) -> None:
    """Take part in one generation as one party; the others are processes elsewhere, as `parties` in CONFIG says.

    The client's text streams to standard output. Started again with the same settings and --out after a failure, it goes on after
    the last whole token, with fresh material.

    \b
    Examples:
      spu-llm party run.yaml --role owner --out owner
      spu-llm party run.yaml --role client --out client --set generation.prompt="The capital of France is"
    """
    if with_parent:
        _end_with_parent()
    progress = _progress(quiet)
    try:
        experiment = load_experiment(config, overrides).main
        if experiment.parties is not None and not quiet:
            click.echo(f"waiting for the other parties, up to {experiment.parties.patience:g} s", err=True)
        if role == "client":
            # between machines a clock shows the network's time as well; the launcher's processes follow the network's mode
            run_client(experiment, out, progress, stream, None if with_parent else "measured")
            click.echo()
        else:
            run_follower(experiment, role, out, progress)
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        _leave(_FAILED)
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)


@click.command("dealer")
@click.option("--listen", required=True, metavar="HOST:PORT", help="Where the parties reach this dealer; port 0: any free one.")
@click.option("--certificates", required=True, type=click.Path(path_type=Path), help="Folder with the dealer's own certificate.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for material that is not fetched yet.")
@click.option(
    "--beaver", metavar="HOST:PORT", help="Serve stock SPU's triples too, there; OUT/beaver.pub is the parties' public key."
)
@click.option("--ahead", type=click.IntRange(1), help="Deal for so many passes at most before some are fetched.")
@quiet_option
@_with_parent
def dealer_command(
    listen: str, certificates: Path, out: Path, beaver: str | None, ahead: int | None, quiet: bool, with_parent: bool
) -> None:
    """Serve correlated randomness to the parties of any number of generations, until it is stopped.

    It learns the model's shape, its table sizes and the number of tokens of each pass, and must not collude with a party.

    \b
    Examples:
      spu-llm dealer --listen 0.0.0.0:9000 --certificates certificates --out material
      spu-llm dealer --listen 0.0.0.0:9000 --certificates certificates --out material --beaver 0.0.0.0:9449
    """
    if with_parent:
        _end_with_parent()
    for option, address in (("--listen", listen), ("--beaver", beaver)):
        if address is not None and not is_address(address):
            raise UserError(f"{option} {address}: give HOST:PORT, for example 0.0.0.0:9000")
    identity = Identity(certificates, "dealer")
    with ExitStack() as stack:
        server = stack.enter_context(serve_material(listen, identity, out, ahead, _progress(quiet)))
        click.echo(f"dealing at {server.address}; stop with Ctrl-C")
        if beaver is not None:
            triples = stack.enter_context(BeaverServer(beaver, load_key(out / "beaver.key"), identity))
            (out / "beaver.pub").write_text(triples.public_pem)
            click.echo(f"triples at {triples.address}, public key in {out / 'beaver.pub'}")
        threading.Event().wait()


def _progress(quiet: bool) -> Progress:
    return silent if quiet else bar


def _leave(code: int) -> NoReturn:
    """End the process though threads may wait for a peer that is gone, who could not be woken."""
    shutil.rmtree(workspace(), ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        _leave(_FAILED)

    threading.Thread(target=watch, daemon=True).start()
