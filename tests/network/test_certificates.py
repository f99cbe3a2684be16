"""Who has no valid certificate of the authority gets nowhere: judged by OpenSSL, by cryptography's verifier and by brpc itself."""

import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from identities import make_all

from spu_llm.cli import main
from spu_llm.errors import UserError
from spu_llm.network.certificates import ROLES, Identity, make_certificates
from spu_llm.network.tls import check_peer

LINK = """
import os, sys
from pathlib import Path
from spu import libspu
from spu_llm.network.certificates import Identity
from spu_llm.network.tls import secure_link

def connect(rank, *hosts):
    desc = libspu.link.Desc()
    desc.recv_timeout_ms, desc.connect_retry_interval_ms, desc.connect_retry_times = 20000, 100, 100
    for each, host in enumerate(hosts):
        desc.add_party(f"party-{each}", host)
    secure_link(desc, Identity(Path(sys.argv[1]), sys.argv[2]))
    return libspu.link.create_brpc(desc, rank)

"""
PARTY = """
link = connect(int(sys.argv[3]), *sys.argv[4:])
print(link.all_gather(sys.argv[2]), flush=True)
sys.stdin.read()
"""
CALLERS = """
for own, peer in zip(sys.argv[3::2], sys.argv[4::2]):
    if not os.fork():
        connect(0, own, peer)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_all(tmp_path_factory.mktemp("certificates"))


def load(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def free_ports(count):
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


@contextmanager
def running(code, *arguments):
    """A process group that ends with the context."""
    command = [sys.executable, "-c", LINK + code, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("role", ROLES)
def test_certificates_are_valid_to_another_verifier(made, role):
    identity = Identity(made / "right", role)
    identity.check()
    builder = PolicyBuilder().store(Store([load(identity.ca)]))
    certificate = load(identity.certificate)
    assert builder.build_server_verifier(x509.DNSName(role)).verify(certificate, [])
    assert builder.build_server_verifier(x509.DNSName("localhost")).verify(certificate, [])
    with pytest.raises(VerificationError):
        builder.build_server_verifier(x509.DNSName("elsewhere.example")).verify(certificate, [])
    if role == "dealer":
        with pytest.raises(VerificationError):
            builder.build_client_verifier().verify(certificate, [])
    else:
        assert builder.build_client_verifier().verify(certificate, [])
    late = builder.time(datetime.now(timezone.utc) + timedelta(days=91))
    with pytest.raises(VerificationError):
        late.build_server_verifier(x509.DNSName(role)).verify(certificate, [])


def test_command_makes_files_that_only_this_user_reads_and_overwrites_none(tmp_path):
    out, run = tmp_path / "made", CliRunner().invoke
    options = [
        "certificates",
        "--out",
        str(out),
        "--role",
        "owner",
        "--role",
        "dealer",
        "--host",
        "10.1.2.3",
        "--host",
        "here.example",
    ]
    assert run(main, [*options, "--days", "30"]).exit_code == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    names = ("ca", "owner", "dealer")
    assert {path.name for path in out.iterdir()} == {f"{name}.{end}" for name in names for end in ("pem", "key")}
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.glob("*.key")} == {0o600}
    names = load(out / "owner.pem").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["owner", "localhost", "here.example"]
    assert names.get_values_for_type(x509.IPAddress) == [ip_address("10.1.2.3")]
    assert load(out / "owner.pem").not_valid_after_utc < datetime.now(timezone.utc) + timedelta(days=30, minutes=1)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    refused = run(main, options)
    assert refused.exit_code == 2 and "owner.pem: is there already" in refused.output
    assert run(main, ["certificates", "--out", str(out), "--role", "client", "--days", "900"]).exit_code == 0
    assert all((out / name).read_bytes() == data for name, data in before.items())
    Identity(out, "client").check()
    assert load(out / "client.pem").not_valid_after_utc == load(out / "ca.pem").not_valid_after_utc
    bad = run(main, ["certificates", "--out", str(tmp_path / "bad"), "--host", "http://here"])
    assert bad.exit_code == 2 and not (tmp_path / "bad").exists()


def spoil(folder, what):
    owner, client = Identity(folder, "owner"), Identity(folder, "client")
    {
        "missing": owner.certificate.unlink,
        "readable": lambda: owner.key.chmod(0o640),
        "garbage": lambda: owner.certificate.write_text("no certificate"),
        "role": lambda: shutil.copy(client.certificate, owner.certificate),
        "key": lambda: shutil.copy(client.key, owner.key),
    }[what]()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("missing", r"owner\.pem: cannot be read \(No such file or directory\)"),
        ("readable", r"owner\.key: may be read by other users"),
        ("garbage", r"owner\.pem: is not a certificate"),
        ("role", r"owner\.pem: is for the role client, not owner"),
        ("key", r"owner\.key: is not the key of .*owner\.pem"),
    ],
)
def test_faults_of_ones_own_files_are_told(made, tmp_path, what, says):
    folder = tmp_path / "own"
    shutil.copytree(made / "right", folder)
    spoil(folder, what)
    with pytest.raises(UserError, match=says) as raised:
        Identity(folder, "owner").check()
    assert "\n" not in str(raised.value)


def test_dates_and_authority_are_checked(made, tmp_path):
    with pytest.raises(UserError, match=r"owner\.pem: expired on"):
        Identity(made / "expired", "owner").check()
    with pytest.raises(UserError, match=r"owner\.pem: is not valid before"):
        Identity(made / "early", "owner").check()
    folder = tmp_path / "mixed"
    shutil.copytree(made / "right", folder)
    shutil.copy(made / "other" / "ca.pem", folder)
    with pytest.raises(UserError, match=r"owner\.pem: is not signed by .*ca\.pem"):
        Identity(folder, "owner").check()
    for path in folder.glob("owner.*"):
        path.unlink()
    with pytest.raises(UserError, match=r"ca\.key: is not the key of"):
        make_certificates(folder, ["owner"])
    assert not list(folder.glob("owner.*"))


def test_roles_are_proved(made):
    client, owner = Identity(made / "right", "client"), Identity(made / "right", "owner")
    proof = client.prove(b"facts")
    owner.check_proof("client", b"facts", proof)
    for role, message, given in (
        ("client", b"other facts", proof),
        ("helper", b"facts", proof),
        ("client", b"facts", Identity(made / "other", "client").prove(b"facts")),
        ("client", b"facts", Identity(made / "expired", "client").prove(b"facts")),
        ("client", b"facts", proof[:-1]),
        ("client", b"facts", b""),
    ):
        with pytest.raises(UserError, match="the peer that should be the"):
            owner.check_proof(role, message, given)


def handshake(port, made, folder, role):
    """What OpenSSL says when somebody with these files (None: with none) connects; "" when it is let in."""
    context = ssl.create_default_context(cafile=str(made / "right" / "ca.pem"))
    if folder is not None:
        identity = Identity(made / folder, role)
        context.load_cert_chain(identity.certificate, identity.key)
    try:
        with (
            socket.create_connection(("127.0.0.1", port), 5) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            secure.settimeout(0.4)
            secure.recv(1)  # a refusal comes after our handshake
    except ssl.SSLError as error:
        return str(error.reason)
    except TimeoutError:
        return ""
    return "closed"


def test_links_take_only_valid_certificates_of_the_authority(made):
    """Two processes connect; their servers refuse whose certificate is missing, foreign, expired or the dealer's."""
    ports = free_ports(2)
    hosts = [f"127.0.0.1:{port}" for port in ports]
    with running(PARTY, made / "right", "client", 0, *hosts) as client, running(PARTY, made / "right", "owner", 1, *hosts) as owner:
        assert client.stdout.readline() == owner.stdout.readline() == "['client', 'owner']\n"
        assert handshake(ports[0], made, "right", "owner") == handshake(ports[1], made, "right", "helper") == ""
        for port, folder, role, alert in (
            (ports[0], None, "", "CERTIFICATE_REQUIRED"),
            (ports[0], "other", "owner", "UNKNOWN_CA"),
            (ports[1], "expired", "client", "CERTIFICATE_EXPIRED"),
            (ports[0], "right", "dealer", "UNSUPPORTED_CERTIFICATE"),
        ):
            assert alert in handshake(port, made, folder, role)
        check_peer(hosts[1], Identity(made / "right", "client"), "owner")
        with pytest.raises(UserError, match=r"the owner refuses .*client\.pem \(.*certificate expired\)"):
            check_peer(hosts[1], Identity(made / "expired", "client"), "owner")
        with pytest.raises(UserError, match="its certificate is not one of the helper's"):
            check_peer(hosts[1], Identity(made / "right", "client"), "helper")


def test_links_connect_only_to_valid_certificates_of_the_authority(made):
    """brpc's client shakes hands with OpenSSL's server under a right certificate, not under a foreign or expired one."""
    heard: dict[str, list[str]] = {"right": [], "other": [], "expired": []}
    doors = [socket.create_server(("127.0.0.1", 0)) for _ in heard]
    for door, folder in zip(doors, heard, strict=True):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(made / "right" / "ca.pem"))
        context.load_cert_chain(made / folder / "owner.pem", made / folder / "owner.key")
        context.verify_mode = ssl.CERT_REQUIRED
        threading.Thread(target=serve, args=(door, context, heard[folder]), daemon=True).start()
    ends = [f"127.0.0.1:{port}" for door in doors for port in (*free_ports(1), door.getsockname()[1])]
    with running(CALLERS, made / "right", "client", *ends):
        limit = time.monotonic() + 20
        while not all(heard.values()) and time.monotonic() < limit:
            time.sleep(0.05)
    for door in doors:
        door.close()
    assert set(heard["right"]) == {"client"}
    assert set(heard["other"]) == {"TLSV1_ALERT_UNKNOWN_CA"}
    assert set(heard["expired"]) == {"SSLV3_ALERT_CERTIFICATE_EXPIRED"}


def serve(door, context, heard):
    """Shake hands with whoever comes; notes whose certificate was shown, or why not."""
    while True:
        try:
            plain, _ = door.accept()
        except OSError:
            return
        try:
            with context.wrap_socket(plain, server_side=True) as secure:
                subject = secure.getpeercert()["subject"]
                secure.recv(1)  # a refusal comes after our handshake
                heard.append(dict(part[0] for part in subject)["commonName"])
        except ssl.SSLError as error:
            heard.append(str(error.reason))
        except OSError:
            continue


def test_a_peer_that_is_not_there_is_left_to_the_caller(made):
    check_peer(f"127.0.0.1:{free_ports(1)[0]}", Identity(made / "right", "client"), "owner")
