"""Network profiles: the shipped ones, and the time they give."""

import pytest
from pydantic import ValidationError

from spu_llm.experiment.schema import CONFIGS, read_yaml
from spu_llm.network import NetworkProfile


def shipped(name):
    return NetworkProfile.model_validate(read_yaml(CONFIGS / "network" / f"{name}.yaml"))


@pytest.mark.parametrize(
    ("name", "bandwidth", "delay"),
    [("none", None, 0), ("lan", 1000, 10), ("wan", 400, 40), ("100mbps", 100, 40), ("5gbps", 5000, 1)],
)
def test_shipped_profiles(name, bandwidth, delay):
    profile = shipped(name)
    assert (profile.name, profile.bandwidth_mbps, profile.delay_ms) == (name, bandwidth, delay)


@pytest.mark.parametrize("name", ["lan", "wan", "100mbps", "5gbps"])
def test_each_modelled_network_has_an_emulated_twin(name):
    model, link = shipped(name), shipped(f"{name}_link")
    assert (model.mode, link.mode) == ("model", "link")
    assert (link.name, link.bandwidth_mbps, link.delay_ms) == (f"{name}_link", model.bandwidth_mbps, model.delay_ms)


def test_time_of_a_run():
    wan = NetworkProfile(name="wan", mode="model", bandwidth_mbps=400, delay_ms=40)
    assert wan.seconds(1.5, messages=100, sent_bytes=50_000_000) == pytest.approx(1.5 + 4 + 1)
    assert wan.seconds(1.5, messages=100, sent_bytes=50_000_000, concurrent=30) == pytest.approx(1.5 + 2.8 + 1)
    assert NetworkProfile(name="none", mode="none").seconds(1.5, 100, 50_000_000) == 1.5


NONSENSE = [{"mode": "model"}, {"mode": "link"}, {"mode": "none", "bandwidth_mbps": 1}, {"mode": "model", "bandwidth_mbps": 0}]


@pytest.mark.parametrize("settings", NONSENSE)
def test_profiles_that_make_no_sense(settings):
    with pytest.raises(ValidationError):
        NetworkProfile.model_validate({"name": "x", **settings})
