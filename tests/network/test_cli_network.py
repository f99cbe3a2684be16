"""`spu-llm bench network`."""

import json

import pytest
from click.testing import CliRunner

from spu_llm.cli import main
from spu_llm.network import emulation_check


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(emulation_check, "_CEILING_BYTES", 1 << 24)
    monkeypatch.setattr(emulation_check, "_LONG_SECONDS", 0.1)


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", "network", "--quiet", *arguments])


def test_a_profile_is_measured(tmp_path, short):
    path = tmp_path / "near.yaml"
    path.write_text("{name: near, mode: link, bandwidth_mbps: 100, delay_ms: 5}")
    found = json.loads(bench("--network", str(path), "--json").output)
    (link,) = found["links"]
    assert (link["profile"], link["asked_rtt_ms"], link["asked_mbps"]) == ("near", 10, 100)
    assert link["measured_rtt_ms"] == pytest.approx(10, rel=0.25)
    assert link["measured_mbps"] == pytest.approx(100, rel=0.25)
    assert found["ceiling"]["mbps"] > 200
    assert found["netem"]
    table = bench("--network", str(path)).output
    assert "near" in table and "Mbps" in table


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("moon", None, "--network 'moon': no such profile; known: 100mbps, 100mbps_link"),
        ("none", None, "--network 'none': has no bandwidth or no delay"),
        ("bad.yaml", "{name: x, mode: link}", "mode link needs bandwidth_mbps; correct the profile"),
    ],
)
def test_profiles_that_cannot_be_measured(tmp_path, monkeypatch, name, text, message):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    result = bench("--network", name)
    assert result.exit_code == 2
    assert message in result.output
