"""What a run is held against: only what differs in nothing else."""

import pytest

from spu_llm.experiment.runner import _compare

RUN = {
    "decode": {"seconds_per_token": 2.0, "bytes_per_token": 100.0},
    "network": {"name": "lan"},
    "ops": "plugin",
    "protocol": "SEMI2K",
    "prompt": "And",
}


@pytest.mark.parametrize(
    ("other", "speedup", "bytes_ratio"),
    [
        ({}, 3.0, 2.5),
        ({"network": {"name": "wan"}}, None, 2.5),
        ({"ops": "stock"}, 3.0, None),  # its bytes are not those of the same decoding, dense
        ({"post": {}}, 3.0, None),
        ({"comet": {}}, 3.0, None),
        ({"prompt": "But"}, 3.0, None),
    ],
)
def test_ratios_are_of_runs_alike(other, speedup, bytes_ratio):
    run = RUN | {"comet": {}}
    _compare(run, RUN | {"decode": {"seconds_per_token": 6.0, "bytes_per_token": 250.0}} | other)
    assert (run["speedup"], run["comet"]["bytes_ratio"]) == (speedup, bytes_ratio)
