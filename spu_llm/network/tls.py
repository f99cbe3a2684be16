"""Mutual TLS: on SPU's links, and asked of a peer to find out why it does not answer."""

from __future__ import annotations

import socket
import ssl
import time
from typing import TYPE_CHECKING

from ..errors import UserError
from .certificates import Identity

if TYPE_CHECKING:  # it loads SPU, which a process that only carries files needs not
    from spu import libspu

_ONE_SIGNER = 1  # role certificates are signed by the authority itself
_REFUSAL_SECONDS = 1.0  # in TLS 1.3 a refusal comes a round trip after the handshake
_PROBES, _PAUSE = 3, 0.2  # a process that is killed at this moment looks like one that refuses, but not again and again


def secure_link(desc: libspu.link.Desc, identity: Identity) -> None:
    """Set mutual TLS on a link over brpc: either end must have a certificate of this authority that is valid now.

    brpc compares no names, and yacl believes the rank a message claims. So any party of the authority could pass for another: let
    the peers prove their roles over the link (`Identity.prove`) before anything secret moves. The dealer's certificate cannot open
    connections, see certificates.py. UserError where the identity's files are not in order.
    """
    identity.check()
    desc.enable_ssl = True
    for options in (desc.client_ssl_opts, desc.server_ssl_opts):
        options.cert.certificate_path = str(identity.certificate)
        options.cert.private_key_path = str(identity.key)
        options.verify.ca_file_path = str(identity.ca)
        options.verify.verify_depth = _ONE_SIGNER  # brpc asks for no certificate at all where this is 0, its default


def check_peer(address: str, identity: Identity, role: str, seconds: float = 5.0) -> None:
    """UserError where the process at `address` (host:port) refuses our certificate or shows one that is not `role`'s.

    Returns where that is in order, and where nobody answers within `seconds`, of which TLS can tell nothing.
    """
    for _ in range(_PROBES):
        if not _is_cut_off(address, identity, role, seconds):
            return
        time.sleep(_PAUSE)
    raise UserError(_refusal(address, identity, role, "it ends the connection after the handshake"))


def _is_cut_off(address: str, identity: Identity, role: str, seconds: float) -> bool:
    """Whether a peer ends the connection once it has our certificate, as gRPC does to refuse it. UserError as from `check_peer`."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(identity.ca))
    context.load_cert_chain(identity.certificate, identity.key)
    context.set_alpn_protocols(["h2"])
    try:
        plain = socket.create_connection((host.strip("[]"), int(port)), seconds)
    except (OSError, UnicodeError):  # not there, or no host's name
        return False
    try:
        with plain, context.wrap_socket(plain, server_hostname=role) as secure:
            return _says_nothing(secure)
    except ssl.SSLCertVerificationError as error:
        raise UserError(
            f"{address}: its certificate is not one of the {role}'s ({error.verify_message}); "
            f"correct the address, or give both ends certificates of one authority ({identity.ca})"
        ) from None
    except ssl.SSLError as error:
        reason = str(error.reason)
        if "ALERT" in reason:
            raise UserError(_refusal(address, identity, role, reason.lower().replace("_", " "))) from None
        if reason in ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL"):
            raise UserError(f"{address}: does not speak TLS, so it is not the {role}; correct the address") from None
        return False
    except OSError:  # it did not come to a handshake
        return False


def _says_nothing(secure: ssl.SSLSocket) -> bool:
    """Whether the peer closes the connection without a word."""
    secure.settimeout(_REFUSAL_SECONDS)
    try:
        return not secure.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def _refusal(address: str, identity: Identity, role: str, reason: str) -> str:
    return f"{address}: the {role} refuses {identity.certificate} ({reason}); give both ends valid certificates of one authority"
