"""A layer over a prompt: its parts' bytes and messages to the last, on the plugin beside stock SPU, and the command."""

import json

import pytest
from click.testing import CliRunner

from spu_llm.bench import prompt as module
from spu_llm.bench.layer import LayerShape
from spu_llm.bench.prompt import bench_prompt
from spu_llm.cli import bench_prompt as command_module
from spu_llm.cli import main
from spu_llm.generation import assisted
from spu_llm.runtime import ProtocolConfig

GPT2 = LayerShape("gpt2", 16, 2, 2, 32, 0)
LLAMA = LayerShape("llama", 16, 4, 2, 24, 0)
TOKENS = 6
PARTS = ["softmax", "norm", "activation", "total"]


@pytest.fixture(scope="module", autouse=True)
def small():
    """Little text for ranges; a prompt of six takes two passes of the Llama-like layer, which has more heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SAMPLES", 12)
        patch.setattr(module, "_SAMPLE_TOKENS", 24)
        patch.setattr(assisted, "_SCORES", 100)
        yield


@pytest.fixture(scope="module", params=[(GPT2, [6]), (LLAMA, [4, 2])], ids=["gpt2", "llama"])
def both(request):
    """(shape, sizes of passes, on the plugin, on stock SPU)."""
    shape, sizes = request.param
    ours, stock = (bench_prompt(shape, TOKENS, ProtocolConfig(), ops) for ops in ("plugin", "stock"))
    return shape, sizes, ours, stock


def softmax_bytes(shape):
    """24 a score and 32 a row: powers of two bring sums near 1, as in every plan."""
    rows = shape.heads * TOKENS
    return rows * (24 * TOKENS + 32)


def test_what_is_reported(both):
    shape, _, ours, stock = both
    for found, ops, reference in ((ours, "plugin", "learned"), (stock, "stock", None)):
        assert (found["family"], found["tokens"], found["ops"], found["protocol"]) == (shape.family, TOKENS, ops, "SEMI2K")
        assert found["reference"] == reference
        assert list(found["parts"]) == PARTS
        assert all(cost["seconds"] > 0 for cost in found["parts"].values())
    assert ours["trust"].startswith("third-party dealer") and stock["trust"].startswith("test-only")


def test_parts_cost_what_their_openings_do(both):
    """Messages a pass; bytes of all tokens together, the same in any number of passes."""
    shape, sizes, ours, _ = both
    parts = ours["parts"]
    assert parts["activation"]["bytes"] == 16 * TOKENS * shape.ffn
    assert parts["norm"]["bytes"] == 2 * TOKENS * (8 * shape.width + 16)  # both norms; phi is opened before
    assert parts["softmax"]["bytes"] == softmax_bytes(shape)
    layer = {"gpt2": 15, "llama": 16}[shape.family] + 2
    messages = {"softmax": 5, "norm": 2 * 3, "activation": 2, "total": layer}
    assert {name: cost["messages"] for name, cost in parts.items()} == {name: len(sizes) * n for name, n in messages.items()}
    assert sum(parts[name]["bytes"] for name in PARTS[:3]) < parts["total"]["bytes"]


def test_the_dealer_is_counted_on_the_plugin_alone(both):
    _, _, ours, stock = both
    assert all(cost["dealer_bytes"] > cost["bytes"] and cost["dealer_seconds"] > 0 for cost in ours["parts"].values())
    assert all(cost["dealer_bytes"] == cost["dealer_seconds"] == 0 for cost in stock["parts"].values())


def test_below_stock_and_as_exact(both):
    _, _, ours, stock = both
    for name in PARTS:
        assert ours["parts"][name]["bytes"] < stock["parts"][name]["bytes"]
        assert ours["parts"][name]["messages"] < stock["parts"][name]["messages"]
    assert 0 < ours["max_error"] < 2e-3 and 0 < stock["max_error"] < 2e-3


def test_a_longer_prompt_costs_stock_more_than_its_share():
    """Twice the tokens: twice the units of the activation, four times the scores."""
    short, long = (bench_prompt(GPT2, tokens, ProtocolConfig(), "stock")["parts"] for tokens in (8, 16))
    ratio = {name: long[name]["bytes"] / short[name]["bytes"] for name in PARTS}
    assert 1.8 < ratio["activation"] < 2.1
    assert 3 < ratio["softmax"] < 4.2


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setitem(command_module.SHAPES, "gpt2-small", GPT2)
    return lambda *args: CliRunner().invoke(main, ["bench", "prompt", "--tokens", str(TOKENS), *args])


def test_command_prints_json(command):
    done = command("--ops", "stock", "--protocol", "ABY3", "--json", "--quiet")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["shape"], found["ops"], found["protocol"], list(found["parts"])) == ("gpt2-small", "stock", "ABY3", PARTS)
    assert done.stderr == ""


def test_command_prints_a_row_a_part(command):
    done = command()
    assert done.exit_code == 0, done.stderr
    head, *rows, error, trust = done.stdout.splitlines()
    assert head.split() == ["seconds", "messages", "bytes", "dealer_bytes", "dealer_seconds"]
    assert [row.split()[0] for row in rows] == PARTS
    assert rows[0].split()[2:4] == ["5", f"{softmax_bytes(GPT2):,}"]
    assert {len(line) for line in (head, *rows)} == {len(head)}
    assert error.startswith("largest error ") and float(error.split()[-1]) < 2e-3
    assert trust.startswith("trust: third-party dealer")
    assert "parts alone" in done.stderr


def test_command_refuses_the_plugin_elsewhere(command):
    done = command("--protocol", "ABY3")
    assert done.exit_code == 2
    assert done.stderr == "error: --ops plugin: runs on SEMI2K, not on ABY3; leave --protocol out or use --ops generic\n"


def test_command_refuses_one_token():
    done = CliRunner().invoke(main, ["bench", "prompt", "--tokens", "1"])
    assert done.exit_code == 2 and "1 is not in the range x>=2" in done.output
