"""The operation benchmark: the figures that are promised, exactly, and its command."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from spu_llm.bench.op import HEADER, OPS, bench_op
from spu_llm.cli import main
from spu_llm.primitives.named import NAMED

KEYS = ["bytes_per_element", "messages", "max_error", "seconds", "dealer_bytes_per_element", "trust", "stock"]


def run(*args):
    return CliRunner().invoke(main, ["bench", "op", *args])


@pytest.mark.parametrize("name", ["gelu", "silu", "exp", "reciprocal", "rsqrt"])
def test_functions_keep_their_promise(name):
    found = bench_op(name, 400, 1)
    assert sorted(found) == sorted([*KEYS, "generic"])
    assert list(found["stock"]) == list(found["generic"]) == KEYS[:4]
    assert found["generic"]["messages"] < found["stock"]["messages"]
    assert found["generic"]["bytes_per_element"] < found["stock"]["bytes_per_element"]
    assert (found["bytes_per_element"], found["messages"]) == (16, 2)
    assert found["max_error"] < 6e-4
    assert found["stock"]["messages"] > 20 and found["stock"]["bytes_per_element"] > 300


# Bytes of one pass over 130 elements (or three rows of 64), and its messages.
COSTS = {
    "softmax": (16 * 192 + 16 * 3, 3, 2e-4),
    "dot": (8 * 130 + 8 * 64, 2, 1e-3),
    "product": (24 * 130, 2, 1e-5),
    "truncate": (8 * 130, 1, 1e-5),
    "relu": (16 * 130, 2, 0),
    "compare": (16 * 130, 2, 0),
    "maximum": (16 * 130, 2, 0),
    "topk": (8 * (2 * 192 + 3 * 64 * 63 // 2), 3, 0),
    "permute": (8 * 192, 1, 0),
    "select": (8 * 130 + 8 * 64 * 130, 2, 1e-5),
    "rms_norm_dot": (8 * 2 * 192 + 16 * 3, 3, 2e-3),
}


@pytest.mark.parametrize("name", COSTS)
def test_costs(name):
    size, messages, error = COSTS[name]
    found = bench_op(name, 130, 1)
    elements = 192 if name in ("softmax", "topk", "permute", "rms_norm_dot") else 130
    assert found["bytes_per_element"] * elements == pytest.approx(size)
    assert found["messages"] == messages
    assert found["max_error"] <= error
    assert found["stock"]["max_error"] < 2e-3


@pytest.mark.parametrize("name", OPS)
def test_inputs(name):
    """Held exactly by stock SPU's 18 fraction bits; of a function, over its whole range and densely at its end."""
    for count in (1, 3, 100):
        first, *_ = inputs = OPS[name].inputs(count)
        assert first.size >= count
        assert all((value * 2.0**18 == np.round(value * 2.0**18)).all() for value in inputs)
    if name in NAMED:
        assert (first.min(), first.max()) == (NAMED[name].low, NAMED[name].high)
        assert (first > NAMED[name].high - NAMED[name].table.width).sum() >= 25


def test_command_prints_json():
    result = run("--op", "tanh", "--elements", "100", "--repeats", "1", "--json")
    assert result.exit_code == 0
    found = json.loads(result.output)
    assert list(found) == KEYS
    assert found["trust"].startswith("third-party dealer")


def test_command_prints_a_row_each(monkeypatch):
    monkeypatch.setattr("spu_llm.cli.bench_op.OPS", ["truncate", "product"])
    lines = run("--op", "all", "--elements", "50", "--repeats", "1").output.splitlines()
    assert lines[0] == HEADER
    assert [line.split()[0] for line in lines[1:]] == ["truncate", "product", "Bytes", "trust:"]
    assert lines[1].split()[1:3] == ["8.0", "1"]
    assert len(lines[1]) == len(lines[2]) <= len(HEADER)
    every = json.loads(run("--op", "all", "--elements", "50", "--repeats", "1", "--json").output)
    assert list(every) == ["truncate", "product"]


def test_command_refuses_what_it_does_not_know():
    result = run("--op", "sine")
    assert result.exit_code == 2
    assert "'sine' is not one of 'gelu'" in result.output
    assert "spu-llm bench op --op gelu --json" in run("--help").output
