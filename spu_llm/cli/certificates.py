"""`spu-llm certificates`: keys and certificates for the parties and the dealer."""

from __future__ import annotations

from pathlib import Path

import click

from ..network.certificates import ROLES, make_certificates


@click.command("certificates")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for the files; made if missing.")
@click.option("--role", "roles", multiple=True, type=click.Choice(ROLES), help="Whom to certify; repeatable.  [default: all]")
@click.option("--host", "hosts", multiple=True, metavar="NAME|IP", help="Where those roles run, besides localhost; repeatable.")
@click.option("--days", default=90, show_default=True, type=click.IntRange(1, 3650), help="Valid from now on.")
def certificates_command(out: Path, roles: tuple[str, ...], hosts: tuple[str, ...], days: int) -> None:
    """Make an authority, and for each role a key and a certificate that it signs.

    Each role's machine gets ca.pem, ROLE.pem and ROLE.key, in a folder of their own. The .key files are secret: whoever has ca.key
    can pass for any role, so keep it where no role runs. Nothing is overwritten; run it again in the same folder for further roles.

    \b
    Examples:
      spu-llm certificates --out certificates
      spu-llm certificates --out certificates --host client.example --host 10.0.0.7 --days 30
      spu-llm certificates --out certificates --role helper
    """
    made = make_certificates(out, roles or ROLES, hosts, days)
    click.echo("\n".join(str(path) for path in made))
    click.echo(f"valid for {days} days; .key files are secret, and {out / 'ca.key'} belongs on no role's machine", err=True)
