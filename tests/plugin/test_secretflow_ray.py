"""The generation of test_secretflow.py on Ray: one driver, each party on a node of its own. See `make test-ray`."""

import os
import subprocess
import sys
from pathlib import Path

from conftest import GPT2, write_checkpoint
from generation_check import check_generation
from test_secretflow import ROOT, free_ports


def test_generation(tmp_path, monkeypatch):
    from ray.cluster_utils import Cluster

    monkeypatch.chdir(tmp_path)  # Ray's workers have folder and environment of their node
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    checkpoint, out = write_checkpoint(tmp_path / "model", GPT2 | {"n_layer": 1}), tmp_path / "alice.json"
    script = str(Path(__file__).with_name("secretflow_generation_party.py"))
    node = {"num_cpus": 4, "object_store_memory": 150_000_000}
    head = {**node, "resources": {"alice": 8}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for party in ("bob", "carol"):
            cluster.add_node(**node, resources={party: 8})
        command = [sys.executable, script, cluster.address, str(free_ports()), str(checkpoint), str(out)]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=300)
    finally:
        cluster.shutdown()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check_generation(checkpoint, out)
