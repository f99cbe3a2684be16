"""Who is who between machines: a certificate authority, and for each role a key and a certificate that names the role.

Everything is ECDSA on P-256 with SHA-256. A certificate's common name is its role. The dealer's may only serve connections
(extended key usage, RFC 5280 section 4.2.1.12), so that it cannot open one to a party in another's name; a party's may do both.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import msgpack
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import UserError

ROLES = ("client", "owner", "helper", "dealer")
DEALER = "dealer"

_CURVE, _HASH = ec.SECP256R1, hashes.SHA256()
_CLOCKS_APART = timedelta(hours=1)  # a certificate is valid so long before it is made: machines' clocks differ
_PROOF = b"spu_llm role proof\0"
_REMEDY = "make it with `spu-llm certificates --out FOLDER`"


@dataclass(frozen=True)
class Identity:
    """What one role's process shows to others, and whom it believes: `ca.pem`, `ROLE.pem` and `ROLE.key` in a folder.

    `ca.pem` and `ROLE.pem` are public, `ROLE.key` is the role's secret.
    """

    folder: Path
    role: str

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def certificate(self) -> Path:
        return self.folder / f"{self.role}.pem"

    @property
    def key(self) -> Path:
        return self.folder / f"{self.role}.key"

    def check(self) -> None:
        """UserError where a file is missing or damaged, others may read the key, or the certificate is not this role's, not
        signed by the authority, not valid now, or not of this key. Call it before the files are used.
        """
        if self.role not in ROLES:
            raise UserError(f"role {self.role!r}: use one of {', '.join(ROLES)}")
        authority, certificate, key = _read_certificate(self.ca), _read_certificate(self.certificate), _read_key(self.key)
        if self.key.stat().st_mode & 0o077:
            raise UserError(f"{self.key}: may be read by other users; chmod 600 it if nobody has, else make new certificates")
        _check_validity(authority, self.ca)
        _check_certificate(certificate, authority, self.role, str(self.certificate), self.ca)
        if key.public_key() != certificate.public_key():
            raise UserError(f"{self.key}: is not the key of {self.certificate}; take both from one `spu-llm certificates` run")

    def prove(self, message: bytes) -> bytes:
        """A proof that this role's process has seen `message`: its certificate and a signature, about 0.8 KB.

        It is worth what the message is: let it hold fresh random bytes of the one who asks, and whatever both agree on.
        """
        signature = _read_key(self.key).sign(_PROOF + message, ec.ECDSA(_HASH))
        return msgpack.packb((self.certificate.read_bytes(), signature))

    def check_proof(self, role: str, message: bytes, proof: bytes) -> None:
        """UserError unless `proof` was made by `role`, certified by this identity's authority, for this message."""
        where = f"the certificate of the peer that should be the {role}"
        try:
            pem, signature = msgpack.unpackb(proof)
            certificate = x509.load_pem_x509_certificate(pem)
        except (ValueError, TypeError, msgpack.UnpackException):
            raise UserError(f"{where}: cannot be read; is it another version of spu_llm?") from None
        _check_certificate(certificate, _read_certificate(self.ca), role, where, self.ca)
        try:
            _public_key(certificate, where).verify(signature, _PROOF + message, ec.ECDSA(_HASH))
        except (InvalidSignature, TypeError):
            raise UserError(f"{where}: the peer does not have its key, or signed other facts; end the connection") from None


def make_certificates(folder: Path, roles: Sequence[str] = ROLES, hosts: Sequence[str] = (), days: int = 90) -> list[Path]:
    """An authority in `folder`, unless one is there, and for each role a key and a certificate; returns all new files.

    A certificate is for the role's name, localhost and `hosts` (names or addresses), from now for `days` days but not longer
    than its authority's. Keys are readable by this user alone. Raises UserError, with nothing changed, where a role has files
    already or the authority is incomplete or no longer valid.
    """
    wanted = list(dict.fromkeys(roles))
    for role in wanted:
        if role not in ROLES:
            raise UserError(f"--role {role}: use one of {', '.join(ROLES)}")
        for path in (folder / f"{role}.pem", folder / f"{role}.key"):
            if path.exists():
                raise UserError(f"{path}: is there already and is not overwritten; choose another --out, or remove it")
    # a role's name is in its own certificate alone, whatever hosts are called: peers are told apart by it
    names = [_general_name(host) for host in dict.fromkeys(("localhost", *hosts)) if host not in ROLES]
    made: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority, authority_key = _authority(folder, days, made)
        for role in wanted:
            key = ec.generate_private_key(_CURVE())
            certificate = _role_certificate(role, names, days, key, authority, authority_key)
            _write_pair(folder, role, certificate, key, made)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made or written to ({error.strerror}); choose another --out") from None
    return made


def _authority(folder: Path, days: int, made: list[Path]) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    pem, secret = folder / "ca.pem", folder / "ca.key"
    if pem.exists() or secret.exists():
        authority, authority_key = _read_certificate(pem), _read_key(secret)
        _check_validity(authority, pem)
        if authority_key.public_key() != authority.public_key():
            raise UserError(f"{secret}: is not the key of {pem}; put the right one there, or choose another --out")
        return authority, authority_key
    key = ec.generate_private_key(_CURVE())
    # The serial keeps two authorities apart by name: a peer then says "not signed by mine" instead of "bad signature".
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"spu_llm authority {os.urandom(4).hex()}")])
    builder = _builder(name, name, key, days).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = builder.add_extension(_usage(signs_certificates=True), critical=True).sign(key, _HASH)
    _write_pair(folder, "ca", certificate, key, made)
    return certificate, key


def _role_certificate(
    role: str, names: list[x509.GeneralName], days: int, key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate, authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:  # fmt: skip
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)])
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, *([] if role == DEALER else [ExtendedKeyUsageOID.CLIENT_AUTH])]
    builder = _builder(subject, authority.subject, key, days, authority.not_valid_after_utc)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(role), *names]), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    return builder.add_extension(issuer, critical=False).sign(authority_key, _HASH)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int, latest: datetime | None = None
) -> x509.CertificateBuilder:
    now = datetime.now(timezone.utc)
    end = now + timedelta(days=days)
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - _CLOCKS_APART)
    builder = builder.not_valid_after(end if latest is None else min(end, latest))
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        if host and not set(host) & set(" :/@"):
            return x509.DNSName(host)
    except ValueError:  # not ASCII
        pass
    raise UserError(f"--host {host}: is neither a host's name nor an IP address; leave out port and scheme")


def _write_pair(folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, made: list[Path]) -> None:
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for path, data, mode in (
        (folder / f"{name}.key", secret, 0o600),
        (folder / f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644),
    ):
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        made.append(path)


def _check_certificate(certificate: x509.Certificate, authority: x509.Certificate, role: str, where: str, ca: Path) -> None:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise UserError(f"{where}: is not signed by {ca}; use certificates of one authority for all roles") from None
    found = [str(attribute.value) for attribute in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if found != [role]:
        raise UserError(f"{where}: is for the role {', '.join(found) or 'of nobody'}, not {role}; give {role} its own certificate")
    _check_validity(certificate, where)


def _check_validity(certificate: x509.Certificate, where: object) -> None:
    now, start, end = datetime.now(timezone.utc), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < start:
        raise UserError(f"{where}: is not valid before {start:%Y-%m-%d %H:%M} UTC; set this machine's clock")
    if now > end:
        raise UserError(f"{where}: expired on {end:%Y-%m-%d %H:%M} UTC; make new ones with `spu-llm certificates --out FOLDER`")


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from None
    except ValueError:
        raise UserError(f"{path}: is not a certificate in PEM form; {_REMEDY}") from None


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from None
    except (ValueError, TypeError):
        raise UserError(f"{path}: is not an unencrypted private key in PEM form; {_REMEDY}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path}: is not a key on an elliptic curve; {_REMEDY}")
    return key


def _public_key(certificate: x509.Certificate, where: str) -> ec.EllipticCurvePublicKey:
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(f"{where}: has no key on an elliptic curve; {_REMEDY}")
    return key
