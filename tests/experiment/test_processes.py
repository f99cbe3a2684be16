"""Parties as processes: the same tokens, faults noticed in time, and a generation that goes on where it broke off."""

import json
import socket
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from conftest import LLAMA, TEXT, tensors, write_checkpoint, write_tokenizer
from forked import start
from safetensors.numpy import save_file

from spu_llm.experiment.launch import _Place, measure_apart
from spu_llm.experiment.schema import CONFIGS, build_experiment
from spu_llm.generation import generate
from spu_llm.models import PlainDecoder, load_checkpoint
from spu_llm.network import NetworkProfile
from spu_llm.network.certificates import make_certificates
from spu_llm.network.emulation import Relay

TIMEOUT, ENDS_WITHIN = 6, 40
NEW = 24
GENERATION = {"prompt": TEXT[18:30], "new_tokens": NEW}  # its greedy tokens lead by 0.58 at least


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model's settings."""
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, LLAMA | {"num_hidden_layers": 1})
    write_tokenizer(folder, LLAMA["vocab_size"])
    text = folder / "calibration.txt"
    text.write_text("\n".join([TEXT] * 3))
    return {"name": "tiny", "path": str(folder), "prefix": [7, 8], "calibration": str(text)}


def plain_tokens(model, prompt, count):
    checkpoint = load_checkpoint(load_model_settings(model).locate())
    decoder = PlainDecoder(checkpoint.decoder, 64)
    decoder.advance(model["prefix"])
    found = generate(decoder, checkpoint.tokenizer.encode(prompt), count, lambda logits: int(logits.argmax()))
    return [step.token for step in found]


def load_model_settings(model):
    return build_experiment({"model": model, "network": "none", "generation": GENERATION}, CONFIGS, "x").main.model


class Town:
    """A client, an owner and a dealer of one generation, started and ended one by one."""

    def __init__(self, folder, model):
        self.folder, self._model, self._running = folder, model, []
        self.relayed = {}
        self._certificates = folder / "certificates"
        make_certificates(self._certificates, ("client", "owner", "dealer"), ["127.0.0.1"])
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            each.close()
        self.addresses = {role: f"127.0.0.1:{port}" for role, port in zip(("client", "owner", "dealer"), ports, strict=False)}
        self.beaver = f"127.0.0.1:{ports[3]}"

    def start(self, role, **changes):
        arguments = ["dealer", "--listen", self.addresses[role], "--certificates", self._certificates, "--out", role]
        arguments += ["--beaver", self.beaver]
        if role != "dealer":
            config = self.folder / f"{role}.yaml"
            parties = (
                self.addresses
                | self.relayed.get(role, {})
                | {"certificates": str(self._certificates), "timeout": TIMEOUT, "patience": 60}
            )
            generation = GENERATION if role == "client" else {"new_tokens": NEW}
            settings = {"model": self._model, "ops": "plugin", "network": "none", "generation": generation, "parties": parties}
            config.write_text(json.dumps(settings | changes))
            arguments = ["party", config, "--role", role, "--out", role]  # relative, as a user would
        running = start([*map(str, arguments), "--quiet"], self.folder, f"{role}-{len(self._running)}")
        self._running.append(running)
        return running

    def end(self):
        for each in self._running:
            each.kill()


@contextmanager
def town(folder, model):
    found = Town(folder, model)
    try:
        yield found
    finally:
        found.end()


def failure(process):
    """What a process that fails says, and within what time."""
    started = time.monotonic()
    code, errors = process.wait(ENDS_WITHIN), process.errors.read_text()
    assert code == 2, errors
    line = errors.splitlines()[-1]
    assert line.startswith("error: ")
    return line, time.monotonic() - started


def until(true, *running, seconds=120.0):
    """Wait for it, while these go on running."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        assert all(each.process.exitcode is None for each in running), [each.errors.read_text() for each in running]
        time.sleep(0.05)


def test_a_generation_survives_a_killed_party_and_a_cut_link(model, tmp_path):
    """Of a link that is cut nothing arrives any more and no connection breaks: as where a cable is pulled."""
    sessions = set()

    def note_sessions():  # the dealer forgets one a minute after it is all fetched
        sessions.update(path.name for path in (tmp_path / "dealer").iterdir() if path.is_dir())

    with town(tmp_path, model) as parties:
        parties.start("dealer")
        kept = tmp_path / "client" / "tokens.json"
        owner, client = parties.start("owner"), parties.start("client")
        until(lambda: client.out.stat().st_size, owner, client)
        owner.kill()
        line, seconds = failure(client)
        assert line.startswith(f"error: owner ({parties.addresses['owner']}) ")
        assert line.endswith("start the parties again: the client goes on after its last whole token")
        assert seconds < TIMEOUT + 15
        note_sessions()
        done = cut_link(parties, kept)
        note_sessions()
        owner, client = parties.start("owner"), parties.start("client")
        until(lambda: tokens(kept) > done, owner, client)
        note_sessions()
        assert client.wait(120) == 0, client.errors.read_text()
        assert owner.wait(30) == 0, owner.errors.read_text()
        metrics = json.loads((tmp_path / "client" / "metrics.json").read_text())
        assert metrics["resumed_at"] == done
        assert metrics["tokens"] == plain_tokens(model, GENERATION["prompt"], NEW)
        assert len(sessions) == 3  # material anew each time
        assert kept.stat().st_mode & 0o077 == 0
        again = parties.start("client")  # alone: there is nothing left to do
        assert again.wait(60) == 0, again.errors.read_text()
        assert json.loads((tmp_path / "client" / "metrics.json").read_text()) == metrics


def cut_link(parties, kept):
    """Goes on until more tokens are there, and cuts the link between the parties; how many tokens there are then."""
    before, client, owner = tokens(kept), parties.addresses["client"], parties.addresses["owner"]
    with Relay(NetworkProfile(name="bare", mode="none"), client, owner) as relay:
        parties.relayed = {"client": {"owner": relay.to_b}, "owner": {"client": relay.to_a}}
        processes = [parties.start(role) for role in ("owner", "client")]
        until(lambda: tokens(kept) > before, *processes)
        relay.cut()
        for process, peer, address in ((processes[1], "owner", relay.to_b), (processes[0], "client", relay.to_a)):
            line, seconds = failure(process)
            assert line.startswith(f"error: {peer} ({address}) was not heard for {TIMEOUT} seconds")
            assert seconds < TIMEOUT + 15
    parties.relayed = {}
    done = tokens(kept)
    assert before < done < NEW
    return done


def tokens(kept):
    """How many whole ones a client has kept."""
    return len(json.loads(kept.read_text())["tokens"])


def test_other_settings_are_refused_before_anything_moves(model, tmp_path):
    with town(tmp_path, model) as parties:
        owner, client = parties.start("owner", protocol={"ring": "FM128", "fraction_bits": 26}), parties.start("client")
        assert "the owner has protocol {'name': 'SEMI2K', 'ring': 'FM128'" in failure(client)[0]
        assert "give all parties the same" in failure(owner)[0]


def test_stock_operations_with_a_third_partys_triples(model, tmp_path):
    with town(tmp_path, model) as parties:
        parties.start("dealer")
        key = tmp_path / "dealer" / "beaver.pub"
        until(key.exists)
        settings = {"ops": "stock", "protocol": {"beaver": {"address": parties.beaver, "public_key": str(key)}}}
        few = {"generation": GENERATION | {"new_tokens": 6}}
        owner, client = parties.start("owner", **settings, **few), parties.start("client", **settings, **few)
        assert client.wait(200) == 0, client.errors.read_text()
        assert owner.wait(30) == 0, owner.errors.read_text()
        metrics = json.loads((tmp_path / "client" / "metrics.json").read_text())
        assert metrics["tokens"] == plain_tokens(model, GENERATION["prompt"], 6)
        assert metrics["trust"].startswith("third-party Beaver server") and metrics["network"]["mode"] == "measured"


def test_drafts_are_verified_between_processes(model, tmp_path):
    """With material dealt ahead of what is accepted: rows taken back stay taken, more than there are positions."""
    folder = tmp_path / "draft"
    config = LLAMA | {"num_hidden_layers": 1}
    write_checkpoint(folder, config)
    random = np.random.default_rng(0)
    near = {name: value + 0.25 * random.standard_normal(value.shape) for name, value in tensors(config).items()}
    save_file({name: value.astype(np.float32) for name, value in near.items()}, folder / "model.safetensors")
    write_tokenizer(folder, config["vocab_size"])
    decoding = {"draft_model": {"name": "draft", "path": str(folder)}, "draft_length": 3}
    settings = {"model": model, "network": "none", "processes": True, "generation": GENERATION | {"new_tokens": 16}}
    experiment = build_experiment(settings | {"decoding": decoding, "ops": "plugin"}, CONFIGS, "test").main
    metrics = measure_apart(experiment)
    assert metrics["tokens"] == plain_tokens(model, GENERATION["prompt"], 16)
    assert metrics["accuracy"]["top1_agreement"] == 1.0
    assert 0 < metrics["post"]["acceptance_rate"] < 1
    assert 1 < metrics["post"]["tokens_per_round"] < 4


def test_a_run_starts_its_parties_over_an_emulated_link(model):
    network = {"name": "fast", "mode": "link", "bandwidth_mbps": 1000, "delay_ms": 2}
    settings = {"model": model, "network": network, "generation": GENERATION | {"new_tokens": 3}}
    experiment = build_experiment(settings, CONFIGS, "test").main
    said = []
    metrics = measure_apart(experiment, stream=said.append)
    assert metrics["tokens"] == plain_tokens(model, GENERATION["prompt"], 3)
    assert metrics["accuracy"]["top1_agreement"] == 1.0
    assert "".join(said).strip() == metrics["text"].strip()
    assert metrics["network"]["mode"] == "link"
    assert metrics["network"]["emulation"]["measured_rtt_ms"] > 4
    assert metrics["network"]["carried"]["client, owner"]["a_to_b"] > metrics["decode"]["bytes_per_token"]
    assert metrics["decode"]["seconds_per_token"] > 0.9 * metrics["decode"]["messages_per_token"] * 2e-3
    assert set(metrics["peak_rss_bytes_by_role"]) == {"client", "owner"}


def test_a_partys_config_has_nothing_of_the_runs_beside_it(model, tmp_path):
    beside = {"baseline": {"generation": {"prompt": "a second secret"}}, "variants": {"a": {"generation": {"prompt": "a third"}}}}
    settings = {"model": model, "ops": "plugin", "network": "none", "processes": True, "generation": GENERATION, **beside}
    with ExitStack() as stack:
        place = _Place(tmp_path, build_experiment(settings, CONFIGS, "test").main, stack)
        for role in ("client", "owner"):
            place.party_arguments(role)
            config = (tmp_path / role / "run.yaml").read_text()
            assert "second secret" not in config and "third" not in config
            assert (GENERATION["prompt"] in config) == (role == "client")
