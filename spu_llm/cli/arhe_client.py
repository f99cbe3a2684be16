"""`spu-llm arhe keys, encrypt, decrypt`: the client's part, which hands folders over and hears no word while the server runs.

OpenFHE is imported when a command is run: the rest of the command line works where it cannot be installed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import click

from ..arhe.files import file_digest, write_bytes
from ..arhe.terms import Terms, load_terms
from ..errors import UserError
from ..models.tokenizer import Tokenizer, read_folder_tokenizer
from .arhe_choices import TOKENIZER, out_option, ring_of
from .openfhe import need_openfhe
from .options import json_option

_path = click.Path(path_type=Path)
_client = click.option("--keys", "folder", required=True, type=_path, help="The client's folder, which `arhe keys` wrote.")


@click.command("keys")
@click.option("--terms", "published", required=True, type=_path, help="The folder that the owner published.")
@out_option
@json_option
def keys_command(published: Path, out: Path, as_json: bool) -> None:
    """The client's: make keys. OUT/secret.key stays with the client; OUT/public goes to the server.

    \b
    Example:
      spu-llm arhe keys --terms published --out client
    """
    need_openfhe()
    from ..arhe.keys import write_keys

    terms, began = load_terms(published), time.perf_counter()
    tokenizer = _tokenizer(published, terms)
    sizes = write_keys(out, terms)
    if tokenizer is not None:
        write_bytes(out / TOKENIZER, (published / TOKENIZER).read_bytes())
    _print_sizes(out, sizes, time.perf_counter() - began, terms, as_json)


@click.command("encrypt")
@_client
@click.option("--prompt", required=True, help="The secret text; of a model without a tokenizer, token ids and blanks.")
@click.option("--tokens", default=8, show_default=True, type=click.IntRange(1), help="Tokens to ask for.")
@out_option
@json_option
def encrypt_command(folder: Path, prompt: str, tokens: int, out: Path, as_json: bool) -> None:
    """The client's: encrypt a prompt. OUT goes to the server; it tells the prompt's length and the tokens asked for.

    \b
    Example:
      spu-llm arhe encrypt --keys client --prompt "My lord, " --tokens 8 --out request
    """
    need_openfhe()
    from ..arhe.keys import load_public
    from ..arhe.request import write_request

    began = time.perf_counter()
    keys = load_public(folder / "public")
    tokenizer = _tokenizer(folder, keys.terms)
    ids = tokenizer.encode(prompt) if tokenizer is not None else _ids(prompt)
    sizes = write_request(out, keys, [*keys.terms.prefix, *ids], tokens)
    _print_sizes(out, sizes, time.perf_counter() - began, keys.terms, as_json)


@click.command("decrypt")
@_client
@click.option("--request", type=_path, help="What `arhe encrypt` wrote, to check that this is its answer.")
@click.option("--response", required=True, type=_path, help="The server's response folder, whole or as far as it is.")
@json_option
def decrypt_command(folder: Path, request: Path | None, response: Path, as_json: bool) -> None:
    """The client's: decrypt a response and print its text. Send nothing of it back to the server, not even that it failed.

    \b
    Example:
      spu-llm arhe decrypt --keys client --response server/response
    """
    need_openfhe()
    from ..arhe.keys import load_public, load_secret
    from ..arhe.request import open_response

    keys = load_public(folder / "public")
    tokenizer = _tokenizer(folder, keys.terms)
    answer = open_response(response, keys, load_secret(folder, keys), request)
    text = " ".join(map(str, answer.tokens)) if tokenizer is None else tokenizer.decode(answer.tokens)
    if as_json:
        click.echo(json.dumps({"text": text} | asdict(answer)))
        return
    click.echo(text)
    for number in answer.near_ties:
        click.echo(f"token {number}: a near-tie; what follows is of a mixture of tokens", err=True)
    if len(answer.tokens) < answer.asked:
        click.echo(f"{len(answer.tokens)} of {answer.asked} tokens so far", err=True)


def _tokenizer(folder: Path, terms: Terms) -> Tokenizer | None:
    """The one that was published with the terms, if any was. Raises UserError where it is missing, or another."""
    if terms.tokenizer is None:
        return None
    path = folder / TOKENIZER
    if not path.is_file() or file_digest(path) != terms.tokenizer:
        raise UserError(f"{path}: is not the tokenizer that was published; copy that file from what `spu-llm arhe publish` wrote")
    return read_folder_tokenizer(folder)


def _ids(prompt: str) -> Iterable[int]:
    try:
        return [int(word) for word in prompt.split()]
    except ValueError:
        raise UserError(f"--prompt {prompt!r}: the model has no tokenizer; give token ids, as in '3 17 4'") from None


def _print_sizes(folder: Path, sizes: dict[str, int], seconds: float, terms: Terms, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"bytes": sizes, "seconds": seconds, "security": ring_of(terms)}))
        return
    click.echo(ring_of(terms), err=True)
    for name, size in sizes.items():
        click.echo(f"{folder / name}  {size / 1e6:.3g} MB")
    click.echo(f"{folder}: {sum(sizes.values()) / 1e6:.3g} MB in {seconds:.1f} s")
