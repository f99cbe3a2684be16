"""Network profiles: the shipped ones, and the time they give."""

import pytest
from pydantic import ValidationError

from spu_llm.experiment.schema import CONFIGS, read_yaml
from spu_llm.network import NetworkProfile


@pytest.mark.parametrize(
    ("name", "bandwidth", "delay"),
    [("none", None, 0), ("lan", 1000, 10), ("wan", 400, 40), ("100mbps", 100, 40), ("5gbps", 5000, 1)],
)
def test_shipped_profiles(name, bandwidth, delay):
    profile = NetworkProfile.model_validate(read_yaml(CONFIGS / "network" / f"{name}.yaml"))
    assert (profile.name, profile.bandwidth_mbps, profile.delay_ms) == (name, bandwidth, delay)


def test_time_of_a_run():
    wan = NetworkProfile(name="wan", mode="model", bandwidth_mbps=400, delay_ms=40)
    assert wan.seconds(1.5, messages=100, sent_bytes=50_000_000) == pytest.approx(1.5 + 4 + 1)
    assert NetworkProfile(name="none", mode="none").seconds(1.5, 100, 50_000_000) == 1.5


NONSENSE = [{"mode": "model"}, {"mode": "none", "bandwidth_mbps": 1}, {"mode": "model", "bandwidth_mbps": 0}]


@pytest.mark.parametrize("settings", NONSENSE)
def test_profiles_that_make_no_sense(settings):
    with pytest.raises(ValidationError):
        NetworkProfile.model_validate({"name": "x", **settings})
