"""A SecretFlow device in production mode: three processes, the dealer none of the SPU's parties."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import spu_llm

pytest.importorskip("secretflow")

PARTIES = ("alice", "bob", "carol")
ROOT = Path(spu_llm.__file__).parents[1]


def free_ports() -> int:
    """The first of a run of ports that nobody listens on."""
    for start in range(23000, 32000, 20):
        sockets = [socket.socket() for _ in range(13)]
        try:
            for i, each in enumerate(sockets):
                each.bind(("127.0.0.1", start + i))
            return start
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise RuntimeError("no free ports")


def test_device(tmp_path):
    port = str(free_ports())
    environment = os.environ | {"JAX_ENABLE_X64": "1", "PYTHONPATH": str(ROOT)}
    script = str(Path(__file__).with_name("secretflow_party.py"))
    parties = []
    for name in PARTIES:
        with open(tmp_path / name, "w") as log:
            command = [sys.executable, script, name, port]
            parties.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [party.wait(120) for party in parties]
    finally:
        for party in parties:
            party.kill()
    logs = {name: (tmp_path / name).read_text() for name in PARTIES}
    assert codes == [0, 0, 0], logs
    assert all(f"{name}: error" in log for name, log in logs.items())
