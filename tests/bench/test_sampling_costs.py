"""The sampling benchmark: naive and optimised in one run, with exact counts, and its command."""

import json

import pytest
from click.testing import CliRunner

from spu_llm.bench.sampling import bench_sampling
from spu_llm.cli.bench_sampling import sampling_command
from spu_llm.errors import UserError
from spu_llm.network import NetworkProfile
from spu_llm.runtime import ProtocolConfig

LAN = NetworkProfile(name="lan", mode="model", bandwidth_mbps=1000, delay_ms=10)


@pytest.mark.parametrize("refined", [False, True])
def test_plugin(refined):
    found = bench_sampling(60, 3, "plugin", ProtocolConfig(), [LAN], 1, refined)
    naive, ours = found["naive"], found["optimised"]
    scalars = 8 if refined else 7
    assert ours["messages"] == (9 if refined else 7)  # 5 or 7 openings; the owner's are more: range check and row
    assert ours["bytes"] == 8 * 3 * ((1 + refined) * 60 + scalars) + 8 + 4 * 60
    assert ours["dealer_bytes"] > 3 * 60 * 96 * (1 + refined)
    assert ours["modelled"]["lan"] == pytest.approx(ours["seconds"] + 0.01 * ours["messages"] + 8e-9 * ours["bytes"])
    assert naive["messages"] > 3 * ours["messages"] and naive["bytes"] > 3 * ours["bytes"]
    assert found["ratio"]["bytes"] == naive["bytes"] / ours["bytes"]


@pytest.mark.parametrize("protocol", ["SEMI2K", "ABY3"])
def test_stock(protocol):
    found = bench_sampling(9, 2, "stock", ProtocolConfig(name=protocol), [LAN], 1)
    assert found["ratio"]["messages"] > 2 and found["ratio"]["bytes"] > 1.2
    assert found["optimised"]["dealer_bytes"] == 0


def test_command():
    arguments = ["--vocabulary", "5", "--draft-length", "1", "--repeats", "1", "--quiet"]
    run = CliRunner().invoke(sampling_command, [*arguments, "--json"])
    found = json.loads(run.output)
    assert sorted(found["ratio"]) == ["bytes", "lan", "messages", "seconds", "wan"]
    table = CliRunner().invoke(sampling_command, arguments).output
    assert "optimised" in table and "trust: third-party dealer" in table
    for extra, message in (
        (["--protocol", "CHEETAH"], "runs on SEMI2K, not on CHEETAH"),
        (["--ops", "stock", "--refined"], "is for --ops plugin"),
        (["--vocabulary", "4097"], "vocabularies up to 4096"),
    ):
        error = CliRunner().invoke(sampling_command, [*arguments, *extra]).exception
        assert isinstance(error, UserError) and message in str(error)
