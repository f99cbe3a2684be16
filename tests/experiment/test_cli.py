"""The command line as a user meets it: real processes, real output, exit codes."""

import errno
import json
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner
from conftest import TEXT

from spu_llm.cli import main
from spu_llm.errors import UserError
from spu_llm.experiment import files, load_experiment, run_experiment, runner
from spu_llm.experiment.files import write_whole

METRICS = {
    "model", "protocol", "ring", "fraction_bits", "network", "text", "tokens", "setup", "prefill", "decode", "offline",
    "failure_probability_per_token", "accuracy", "peak_rss_bytes",
}  # fmt: skip


def spu_llm(*arguments, **kwargs):
    command = [sys.executable, "-c", "from spu_llm.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)


def here(*arguments):
    """The same in this process, where everything is imported already."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def config(tmp_path, checkpoints):
    """An experiment on a tiny model, with a baseline on another protocol."""
    path = tmp_path / "x.yaml"
    model = {"name": "tiny", "path": str(checkpoints["gpt2"]), "prefix": [3]}
    generation = {"prompt": TEXT[:12], "new_tokens": 3, "capacity": 32}
    settings = {"model": model, "network": "wan", "generation": generation, "baseline": {"protocol": {"name": "ABY3"}}}
    path.write_text(json.dumps(settings))
    return path


def test_run_writes_metrics_and_report_and_resumes(config, tmp_path):
    out = tmp_path / "out"
    done = spu_llm("run", config, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "sharing weights" in done.stderr
    metrics = json.loads((out / "metrics.json").read_text())
    assert set(metrics) >= METRICS
    assert set(metrics["baseline"]) >= METRICS
    assert metrics["schema"] == 1
    assert len(metrics["tokens"]) == 3
    assert done.stdout.strip() == metrics["text"].strip()
    assert metrics["decode"]["tokens"] == 2
    assert metrics["accuracy"]["top1_agreement"] == 1.0
    decode, other = metrics["decode"], metrics["baseline"]["decode"]
    assert metrics["speedup"] == pytest.approx(other["seconds_per_token"] / decode["seconds_per_token"])
    network = decode["messages_per_token"] * 0.04 + decode["bytes_per_token"] * 8 / 400e6
    assert decode["seconds_per_token"] == pytest.approx(decode["compute_seconds_per_token"] + network)
    page = (out / "report.html").read_text()
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)
    parser.feed(page)
    assert tags.count("table") == 3
    assert tags.count("svg") == 2
    assert "http-equiv" not in page and "<script" not in page and "src=" not in page
    again = here("run", config, "--out", out)
    assert "finished before" in again.stderr
    assert again.exit_code == 0
    assert json.loads((out / "metrics.json").read_text())["setup"] == metrics["setup"]
    assert not list(out.glob("*.part"))
    (kept,) = out.glob("main.*.json")
    kept.write_text('{"tokens": [')
    assert "finished before" not in here("run", config, "--out", out, "--set", "baseline=null").stderr
    assert json.loads(kept.read_text())["tokens"] == metrics["tokens"]


def test_values_that_do_not_fit_the_ring_are_warned_of(config, tmp_path):
    arguments = ("run", config, "--out", tmp_path / "out", "--set", "baseline=null", "--set", "protocol={fraction_bits: 8}")
    done = here(*arguments)
    assert done.exit_code == 0
    assert "warning: FM64 with 8 fraction bits does not hold this model's values; use FM128" in done.stderr


def test_generate_streams_text_only_to_standard_output(checkpoints, tmp_path):
    model = tmp_path / "tiny.yaml"
    model.write_text(json.dumps({"name": "tiny", "path": str(checkpoints["llama"])}))
    arguments = ("generate", "--model", model, "--prompt", TEXT[:9], "--tokens", 4, "--temperature", 1.5, "--quiet")
    done, again = (run(*arguments, "--seed", 1) for run in (spu_llm, here))
    assert (done.returncode, again.exit_code) == (0, 0), done.stderr
    assert done.stdout == again.stdout != "\n"
    assert "s of compute a token here; one party sends" in done.stderr


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "opt"])
def test_bench_layer(family):
    done = here("bench", "layer", "--family", family, "--width", 48, "--heads", 3, "--ffn", 80, "--context", 9, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert set(result) >= {"bytes", "messages", "seconds", "max_error", "failure_probability"}
    assert 0 < result["max_error"] < 0.02
    assert 100 < result["messages"] < 500


def test_bench_layer_of_experts():
    """Beside a Llama layer of one expert's size: openings of all experts' units, of the routing, and two messages."""
    shape = ("--width", 16, "--heads", 2, "--ffn", 24, "--context", 3, "--ops", "plugin", "--repeats", 1, "--json")
    done = [here("bench", "layer", "--family", *family, *shape) for family in (("llama",), ("mixtral", "--experts", 3))]
    llama, mixtral = (json.loads(each.stdout) for each in done)
    assert mixtral["max_error"] < 0.005
    assert mixtral["messages"] == llama["messages"] + 2
    routed = 2 * 3 * 24 + 3 + 4 * 3 * 24 + 3 * 16 + 3 * (3 + 3) + 16 + 2  # after the norm, and fixed_experts.py
    assert mixtral["bytes"] - llama["bytes"] == 8 * (routed - 7 * 24)


def test_bench_layer_baseline():
    """The figures everything later is held against: GPT-2 small, 64 positions (DESIGN: about 277 messages, 2.69 MB)."""
    done = here("bench", "layer", "--json", "--repeats", 1)
    result = json.loads(done.stdout)
    assert result["bytes"] == pytest.approx(2.7e6, rel=0.02)
    assert 270 < result["messages"] < 320


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "nowhere.yaml", "--out", "out"), "nowhere.yaml: no such config"),
        (("run", "{config}", "--out", "out", "--set", "generation.capacity=5"), "exceed generation.capacity 5; raise it to"),
        (("run", "{config}", "--out", "out", "--set", "generation.capacity=65"), "exceeds the model's 64 positions; lower it"),
        (("run", "{config}", "--out", "out", "--set", "generation.new_tokens=64"), "exceed the model's 64 positions; shorten"),
        (("run", "{config}", "--out", "out", "--set", "protocol={{name: CHEETAH, parties: 3}}"), "CHEETAH runs between 2"),
        (("run", "{config}", "--out", "out", "--set", "model.path=nowhere"), "nowhere: no such checkpoint"),
        (("run", "{config}", "--out", "/proc/no/out"), "cannot be made"),
        (
            ("run", "{config}", "--out", "out", "--set", "model.prefix=[97]"),
            "token 97 of prefix or prompt is outside",
        ),
        (("run", "{config}", "--out", "out", "--set", "generation.prompt=東"), "has no token in this model"),
        (("run", "{config}", "--out", "out", "--set", "generation.prompt=2020-13-45"), "not valid YAML"),
        (("generate", "--model", "gpt9", "--prompt", "x"), "unknown model 'gpt9'"),
        (("fetch", "gpt9"), "unknown model 'gpt9'"),
        (("bench", "layer", "--width", "10", "--heads", "3"), "each must be a multiple of the next"),
        (("bench", "layer", "--family", "llama", "--width", "9", "--heads", "3"), "an even head width"),
        (("bench", "layer", "--kv-heads", "3"), "gpt2 has as many key/value heads as heads"),
        (("bench", "layer", "--experts", "3"), "gpt2 has no experts"),
        (("bench", "layer", "--family", "mixtral", "--experts", "1"), "2 experts a token of 1"),
        (("bench", "layer", "--ops", "magic"), "'magic' is not"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(config, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = here(*(text.format(config=config) for text in arguments))
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.exception.args == (2,), "an exit, and no error with a traceback"
    assert not (tmp_path / "out").exists()


def test_bad_input_as_a_user_meets_it(tmp_path):
    done = spu_llm("fetch", "gpt9", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_no_room_for_opened_weights(config, tmp_path, monkeypatch):
    monkeypatch.setattr(runner.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    runs = load_experiment(config)
    with pytest.raises(UserError, match="point TMPDIR to a larger disk"):
        run_experiment(runs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_disk_that_fills_up_while_writing(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="cannot be written"):
        write_whole(tmp_path / "missing" / "metrics.json", "{}")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        write_whole(tmp_path / "metrics.json", "{}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [(), ("fetch",), ("generate",), ("run",), ("bench",), ("bench", "layer")])
def test_help(arguments):
    done = here(*arguments, "--help")
    assert done.exit_code == 0
    assert "Usage:" in done.stdout
    assert arguments in ((), ("bench",)) or "Example" in done.stdout
