"""generate.py on a Ray cluster of three nodes, the parties, all of this machine; its options are passed on."""

import subprocess
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

STORE = 900_000_000  # bytes: two opened embedding tables and some room

node = {"num_cpus": 4, "object_store_memory": STORE}
cluster = Cluster(initialize_head=True, head_node_args={**node, "resources": {"alice": 8}, "include_dashboard": False})
try:
    for party in ("bob", "carol"):
        cluster.add_node(**node, resources={party: 8})
    script = str(Path(__file__).with_name("generate.py"))
    sys.exit(subprocess.run([sys.executable, script, "--ray", cluster.address, *sys.argv[1:]]).returncode)
finally:
    cluster.shutdown()
