"""The client's two moments: it encrypts a prompt before it goes offline, and decrypts the response when it is back.

request/    request.json: the key set, the prompt's length, tokens asked for; ciphertexts of one-hot vectors
response/   response.json: the request; ciphertexts of each token's one-hot vector
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from ..errors import UserError
from .ciphertexts import read_ciphertexts, write_ciphertexts
from .ckks import OpenFheBackend
from .executor import check_request, decrypted, encrypted, near_tie
from .files import FolderFacts, check_listing, read_facts, write_facts
from .keys import PublicKeys

_REQUEST, _RESPONSE = "request of AR-HE, 1", "response of AR-HE, 1"
_ASK_AGAIN = "encrypt the prompt again with `spu-llm arhe encrypt`"
_FETCH_AGAIN = "copy all of the server's response/ again"


class RequestFacts(FolderFacts):
    keys: str
    prompt: PositiveInt
    tokens: PositiveInt


class ResponseFacts(FolderFacts):
    keys: str
    request: str
    asked: PositiveInt
    tokens: NonNegativeInt


@dataclass(frozen=True)
class Request:
    """One-hot vectors of a prompt's tokens as ciphertexts, how many tokens it has, and how many are asked for."""

    one_hots: list[Any]
    prompt: int
    tokens: int
    digest: str


@dataclass(frozen=True)
class Answer:
    """What the client gets: tokens, and the numbers of those (from 1) whose logit had another too near it."""

    tokens: list[int]
    near_ties: list[int]
    asked: int


def write_request(folder: Path, keys: PublicKeys, prompt: Sequence[int], tokens: int) -> dict[str, int]:
    """Encrypt a prompt; returns each ciphertext file's bytes. Raises UserError for what the model cannot decode."""
    config = keys.terms.config
    check_request(config, prompt, tokens)
    backend = OpenFheBackend(keys.terms.parameters, keys.context, keys.encryption)
    files = write_ciphertexts(folder, "prompt", encrypted(backend, config, prompt))
    facts = {"keys": keys.digest, "prompt": len(prompt), "tokens": tokens, "files": files}
    write_facts(folder / "request.json", _REQUEST, facts)
    return {name: entry["bytes"] for name, entry in files.items()}


def load_request(folder: Path, keys: PublicKeys) -> Request:
    """What `write_request` wrote. Raises UserError where it is not whole, or was made with other keys."""
    facts = _facts(folder)
    if facts["keys"] != keys.digest:
        raise UserError(f"{folder}: was encrypted with another set of keys than --keys; name that set, or {_ASK_AGAIN}")
    check_listing(folder, facts["files"], _ASK_AGAIN)
    parameters = keys.terms.parameters
    backend = OpenFheBackend(parameters, keys.context)
    one_hots = read_ciphertexts(folder, list(facts["files"]), keys)
    expected = -(-facts["prompt"] * keys.terms.config.vocabulary // parameters.slots)
    if len(one_hots) != expected or any(backend.level(x) != parameters.levels for x in one_hots):
        raise UserError(f"{folder}: does not hold {expected} fresh ciphertexts for {facts['prompt']} tokens; {_ASK_AGAIN}")
    return Request(one_hots, facts["prompt"], facts["tokens"], facts["digest"])


def write_response(folder: Path, keys: PublicKeys, request: Request, tokens: int, files: dict[str, Any]) -> None:
    """List what is there of the first `tokens` tokens: the server's."""
    facts = {"keys": keys.digest, "request": request.digest, "asked": request.tokens, "tokens": tokens, "files": files}
    write_facts(folder / "response.json", _RESPONSE, facts)


def open_response(folder: Path, keys: PublicKeys, secret: Any, request: Path | None = None) -> Answer:
    """Decrypt a response, whole or as far as it is. Raises UserError where it is damaged, under other keys, the answer to another
    request than the one in `request`, or noise.

    Only tokens leave this function: values that CKKS decrypts to carry its errors, which tell of the secret key (Li and Micciancio,
    EUROCRYPT 2021), and must not get to the server.
    """
    facts = read_facts(folder / "response.json", _RESPONSE, _FETCH_AGAIN, ResponseFacts)
    if facts["keys"] != keys.digest:
        raise UserError(f"{folder}: was computed with another set of keys than --keys; name the set that it was asked with")
    if request is not None and facts["request"] != _facts(request)["digest"]:
        raise UserError(f"{folder}: answers another request than {request}; name the one that it answers")
    check_listing(folder, facts["files"], _FETCH_AGAIN)
    backend = OpenFheBackend(keys.terms.parameters, keys.context, secret_key=secret)
    tokens, ties = [], []
    for number in range(1, facts["tokens"] + 1):
        names = [name for name in facts["files"] if name.startswith(f"token-{number}.")]
        if len(names) != -(-keys.terms.config.vocabulary // keys.terms.parameters.slots):
            raise UserError(f"{folder}: lists {len(names)} ciphertexts of token {number}, too few or too many; {_FETCH_AGAIN}")
        token, total = _token(backend, keys, read_ciphertexts(folder, names, keys))
        if not abs(total) <= keys.terms.config.vocabulary:
            raise UserError(
                f"{folder}: token {number} decrypts to noise; do not let the server know, and ask again with new keys only "
                "(docs/leakage.md)"
            )
        tokens.append(token)
        if near_tie(total):
            ties.append(number)
    return Answer(tokens, ties, facts["asked"])


def _token(backend: OpenFheBackend, keys: PublicKeys, one_hot: list[Any]) -> tuple[int, float]:
    """A token and its one-hot vector's sum, not a number where that is beyond what the modulus holds."""
    try:
        return decrypted(backend, keys.terms.config, one_hot)
    except RuntimeError:  # OpenFHE says so of a decryption whose errors are larger than its values
        return 0, float("nan")


def _facts(folder: Path) -> dict[str, Any]:
    """Of a request."""
    return read_facts(folder / "request.json", _REQUEST, _ASK_AGAIN, RequestFacts)
