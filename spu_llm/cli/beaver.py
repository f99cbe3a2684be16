"""`spu-llm beaver`: a third party's multiplication triples for stock SPU."""

from __future__ import annotations

from pathlib import Path

import click

from ..dealer.beaver.server import BeaverServer, serve_beaver
from ..errors import UserError
from ..network.certificates import DEALER, Identity

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("beaver")
@click.option("--listen", default="127.0.0.1:9449", show_default=True, help="Address: host:port; port 0 takes a free one.")
@click.option("--key", default="beaver.key", show_default=True, type=_FILE, help="The server's secret key; made if missing.")
@click.option("--public-key", default="beaver.pub", show_default=True, type=_FILE, help="File to write for the parties.")
@click.option("--certificates", type=click.Path(path_type=Path, file_okay=False), help="Folder with the dealer's, for mutual TLS.")
def beaver_command(listen: str, key: Path, public_key: Path, certificates: Path | None) -> None:
    """Serve multiplication triples to parties that run stock SPU (SEMI2K, TrustedThirdParty).

    Runs until it is interrupted. It sees which operations run on how many elements, and no value; it must collude with no party.
    Parties need the address and the public key's file, brought to them by a way they trust.

    \b
    Examples:
      spu-llm beaver
      spu-llm beaver --listen 10.0.0.3:9449 --key secret/beaver.key --public-key beaver.pub --certificates dealer
    """
    identity = None if certificates is None else Identity(certificates, DEALER)
    served = serve_beaver(listen, key, identity, lambda server: _announce(server, public_key))
    click.echo(
        f"{sum(served.requests.values())} requests served, {served.refused} refused, {served.bytes / 1e6:.1f} MB sent, "
        f"{served.seconds:.1f} s of computing"
    )


def _announce(server: BeaverServer, public_key: Path) -> None:
    try:
        public_key.write_text(server.public_pem)
    except OSError as error:
        raise UserError(f"--public-key {public_key}: {error}; choose another file") from None
    click.echo(f"serving at {server.address}, public key in {public_key}:\n{server.public_pem}", nl=False)
