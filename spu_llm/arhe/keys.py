"""A client's keys as files: the secret one, for the client's user alone, and a folder of public ones for the server.

    secret.key                 the client's, mode 0600
    public/parameters.json     the terms, the key's tag, size and digest of every file; its own digest names the key set
    public/context.bin         CKKS parameters as OpenFHE writes them
    public/public.key          encrypts
    public/relinearisation.key for products
    public/automorphism.key    for rotations, the conjugation and bootstraps

Two of the last, at the even indices 2N - 4 and 2N - 2 (N: the ring), switch to a sparser secret and back, as a bootstrap does for
one step: they are encryptions of one secret under the other (Bossuat et al., ACNS 2022).

The server makes the context anew from the terms and compares: what a reader of context.bin would take on trust is checked instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openfhe

from ..errors import UserError
from .ckks import make_context, make_keys
from .files import FolderFacts, check_listing, listing, read_facts, whole, write_bytes, write_facts
from .slots import rotation_steps
from .terms import Terms, read_terms

_KIND = "keys of AR-HE, 1"
_REMEDY = "make keys with `spu-llm arhe keys`, and copy all of public/"
SECRET, PUBLIC, PARAMETERS = "secret.key", "public", "parameters.json"
_CONTEXT, _ENCRYPTION = "context.bin", "public.key"
_EVALUATION = ("relinearisation.key", "automorphism.key")


class KeyFacts(FolderFacts):
    terms: dict[str, Any]
    library: str
    tag: str


@dataclass(frozen=True)
class PublicKeys:
    """Public keys in the memory of this process. `tag`: OpenFHE's name of the secret key; `digest`: of the key set."""

    terms: Terms
    context: Any
    encryption: Any
    tag: str
    digest: str


def write_keys(folder: Path, terms: Terms) -> dict[str, int]:
    """Make keys and write them; returns the bytes of each file in the folder. Raises UserError where there are keys already."""
    secret, public = folder / SECRET, folder / PUBLIC
    if secret.exists() or public.exists():
        raise UserError(f"{folder}: holds keys already, and what was encrypted under them needs them; choose another --out")
    context = make_context(terms.parameters, terms.secure)
    pair = make_keys(context, rotation_steps(terms.parameters.slots, terms.parameters.few_keys))
    tag = pair.secretKey.GetKeyTag()
    write_bytes(secret, openfhe.Serialize(pair.secretKey, openfhe.BINARY), private=True)
    write_bytes(public / _CONTEXT, openfhe.Serialize(context, openfhe.BINARY))
    write_bytes(public / _ENCRYPTION, openfhe.Serialize(pair.publicKey, openfhe.BINARY))
    for name, write in zip(_EVALUATION, (context.SerializeEvalMultKey, context.SerializeEvalAutomorphismKey), strict=True):
        _write_evaluation(public / name, write, tag)
    files = listing(public, (_CONTEXT, _ENCRYPTION, *_EVALUATION))
    write_facts(public / PARAMETERS, _KIND, {"terms": terms.facts(), "library": _library(), "tag": tag, "files": files})
    return {SECRET: secret.stat().st_size} | {f"{PUBLIC}/{name}": entry["bytes"] for name, entry in files.items()}


def load_public(folder: Path, evaluation: bool = False) -> PublicKeys:
    """The key set of a public folder; `evaluation`: with the keys that only the server needs.

    Raises UserError where a file is missing, truncated or changed, or the keys were made for a context that is not the one that
    the terms give here (another OpenFHE, say).
    """
    facts = read_facts(folder / PARAMETERS, _KIND, _REMEDY, KeyFacts)
    terms = read_terms(facts["terms"], folder / PARAMETERS)
    needed = (_CONTEXT, _ENCRYPTION, *(_EVALUATION if evaluation else ()))
    if not set(needed) <= set(facts["files"]):
        raise UserError(f"{folder / PARAMETERS}: lists no {(set(needed) - set(facts['files'])).pop()}; {_REMEDY}")
    check_listing(folder, {name: facts["files"][name] for name in needed}, _REMEDY)
    context = make_context(terms.parameters, terms.secure)
    if openfhe.Serialize(context, openfhe.BINARY) != (folder / _CONTEXT).read_bytes():
        raise UserError(
            f"{folder / _CONTEXT}: made with {facts['library']} for another context than {_library()} makes of the same "
            "parameters; use the client's version, or make new keys"
        )
    key, _ = openfhe.DeserializePublicKey(str(folder / _ENCRYPTION), openfhe.BINARY)
    if evaluation and facts["tag"] not in context.GetAllEvalMultKeys():  # OpenFHE keeps them for the whole process
        context.DeserializeEvalMultKey(str(folder / _EVALUATION[0]), openfhe.BINARY)
        context.DeserializeEvalAutomorphismKey(str(folder / _EVALUATION[1]), openfhe.BINARY)
    return PublicKeys(terms, context, key, facts["tag"], facts["digest"])


def load_secret(folder: Path, keys: PublicKeys) -> Any:
    """The client's secret key. Raises UserError where others may read it, or it is not of these public keys."""
    path = folder / SECRET
    try:
        mode, data = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); only the client that made the keys can decrypt") from None
    if mode & 0o077:
        raise UserError(f"{path}: may be read by other users; chmod 600 it if nobody has, else make new keys")
    try:
        key = openfhe.DeserializePrivateKeyString(data, openfhe.BINARY)
    except RuntimeError:
        raise UserError(f"{path}: truncated or no secret key; restore it from a copy, or make new keys and a new request") from None
    if key.GetKeyTag() != keys.tag:
        raise UserError(f"{path}: is not the secret of {folder / PUBLIC}; name the folder that `spu-llm arhe keys` wrote")
    return key


def _write_evaluation(path: Path, write: Callable[[str, Any, str], bool], tag: str) -> None:
    with whole(path) as part:
        try:
            written = write(str(part), openfhe.BINARY, tag)
        except RuntimeError:  # a full disk
            written = False
        if not written:
            raise UserError(f"{path}: OpenFHE could not write it; make room or choose another --out")


def _library() -> str:
    return f"openfhe {version('openfhe')}"
