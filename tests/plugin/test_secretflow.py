"""A SecretFlow device in production mode: three processes, the dealer none of the SPU's parties; functions, and generated text."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import GPT2, write_checkpoint
from generation_check import check_generation

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
    """Weights and cache stay on the device; two prompts in one conversation, then the first again from the start."""
    checkpoint, out = write_checkpoint(tmp_path / "model", GPT2 | {"n_layer": 1}), tmp_path / "alice.json"
    logs = run_parties("secretflow_party.py", [str(checkpoint), str(out)], tmp_path, 240)
    assert all(f"{name}: error" in log for name, log in logs.items())
    check_generation(checkpoint, out)
