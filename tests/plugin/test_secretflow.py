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


def run_parties(script: str, arguments: list[str], folder: Path, seconds: float) -> dict[str, str]:
    """Run a script beside this file as each party, in `folder`, until all have ended well; gives what each of them said."""
    environment = os.environ | {"JAX_ENABLE_X64": "1", "PYTHONPATH": str(ROOT)}
    path, port, parties = str(Path(__file__).with_name(script)), str(free_ports()), []
    for name in PARTIES:
        with open(folder / name, "w") as log:
            command = [sys.executable, path, name, port, *arguments]
            parties.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [party.wait(seconds) for party in parties]
    finally:
        for party in parties:
            party.kill()
    logs = {name: (folder / name).read_text() for name in PARTIES}
    assert codes == [0, 0, 0], logs
    return logs


def test_device(tmp_path):
    logs = run_parties("secretflow_party.py", [], tmp_path, 120)
    assert all(f"{name}: error" in log for name, log in logs.items())
