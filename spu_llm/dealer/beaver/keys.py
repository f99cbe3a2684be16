"""The server's SM2 key pair, and opening what is encrypted under it.

SPU's client knows one scheme, SM2 (GB/T 32918), which the `cryptography` package lacks; GmSSL's implementation does it (package
`gmssl-pyx`, its C library in a wheel). Files are PEM as OpenSSL writes them: `openssl genpkey -algorithm SM2` makes a key too.
"""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path

from gmssl_pyx import sm2_decrypt, sm2_encrypt, sm2_key_generate
from gmssl_pyx.gmsslext import GmsslInnerError

from ...errors import UserError
from .prg import BLOCK
from .refusal import BAD_SEED, Refusal

# RFC 5208 and 5480 around a private key of 32 bytes and a public one of 64, for the curve 1.2.156.10197.1.301
_PRIVATE = bytes.fromhex("308187020100301306072a8648ce3d020106082a811ccf5501822d046d306b0201010420")
_PUBLIC_IN_PRIVATE = bytes.fromhex("a14403420004")
_PUBLIC = bytes.fromhex("3059301306072a8648ce3d020106082a811ccf5501822d03420004")


class ServerKey:
    """The key pair of one server. Whoever has the private key can expand every seed that was sent to the server."""

    def __init__(self, private: bytes, public: bytes):
        self._private = private
        self.public_pem = _pem("PUBLIC KEY", _PUBLIC + public)
        """The public key, PEM: what the parties put into `server_public_key`."""

    def open_seed(self, encrypted: bytes) -> bytes:
        """A party's seed of 16 bytes. Refusal if it was encrypted under another key, or is damaged."""
        try:
            seed = sm2_decrypt(self._private, encrypted)
        except GmsslInnerError:
            raise Refusal("a seed is not encrypted under this server's key: set its server_public_key", BAD_SEED) from None
        if len(seed) != BLOCK:
            raise Refusal(f"a seed of {len(seed)} bytes; it has {BLOCK}", BAD_SEED)
        return seed


def load_key(path: Path) -> ServerKey:
    """The key pair in a file, which is made, readable by its owner alone, if there is none. UserError if it is no SM2 key."""
    try:
        if not path.exists():
            _create(path)
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read or made ({error}); choose another key file") from None
    private, public = _read(path, text)
    if not _belong_together(private, public):
        raise UserError(f"{path}: its private and public key do not belong together; name a file that does not exist for a new one")
    return ServerKey(private, public)


def _belong_together(private: bytes, public: bytes) -> bool:
    probe = bytes(BLOCK)
    try:
        return sm2_decrypt(private, sm2_encrypt(public, probe)) == probe
    except GmsslInnerError:
        return False


def _create(path: Path) -> None:
    public, private = sm2_key_generate()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(_pem("PRIVATE KEY", _PRIVATE + private + _PUBLIC_IN_PRIVATE + public))


def _read(path: Path, text: str) -> tuple[bytes, bytes]:
    """Private and public key."""
    body = "".join(line for line in text.split("\n") if not line.startswith("-"))
    try:
        der = base64.b64decode(body, validate=True)
    except binascii.Error:
        der = b""
    public = der[len(_PRIVATE) + 32 :]
    if len(public) != len(_PUBLIC_IN_PRIVATE) + 64 or der[: len(_PRIVATE)] != _PRIVATE or public[:6] != _PUBLIC_IN_PRIVATE:
        raise UserError(f"{path}: not an SM2 private key in PEM (PKCS #8); name a file that does not exist to have one made")
    return der[len(_PRIVATE) : len(_PRIVATE) + 32], public[6:]


def _pem(label: str, der: bytes) -> str:
    body = base64.b64encode(der).decode()
    lines = "\n".join(body[i : i + 64] for i in range(0, len(body), 64))
    return f"-----BEGIN {label}-----\n{lines}\n-----END {label}-----\n"
