"""Steps of a layer: all of its traffic, each part once, in order."""

import json

import jax
import pytest
from click.testing import CliRunner
from jax.experimental import enable_x64

from spu_llm.bench.layer import LayerShape, layer_inputs
from spu_llm.bench.layer_steps import _STOCK, _parts, plugin_names
from spu_llm.cli import main
from spu_llm.models.cache import window
from spu_llm.models.decoder import Decoder

TINY = ("--width", "32", "--heads", "2", "--ffn", "48", "--context", "5", "--repeats", "1")


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", "layer", *TINY, *arguments])


@pytest.fixture(scope="module")
def found():
    done = bench("--ops", "plugin", "--family", "llama", "--steps", "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_steps_add_up_to_what_spu_counted(found):
    for run in (found, found["stock"]):
        for kind in ("messages", "bytes"):
            assert sum(step[kind] for step in run["steps"]) == run[kind]
            assert all(step[kind] >= 0 for step in run["steps"])


def test_sizes_follow_from_shapes(found):
    """Words that are opened: of the stream, of q, k, v and both products, of a row of scores for each head."""
    size = {step["name"]: step["bytes"] // 8 for step in found["steps"]}
    assert size["squares, qkv product"] == size["output product"] == 32
    assert size["scores"] == 3 * 32
    assert size["exponentials"] == 2 * (5 + 1)
    assert size["activation"] == 2 * 48 and size["down product"] == 48


def test_stock_steps_are_what_they_are_called(found):
    """SPU's own log knows kinds of operations: what products, maxima and exponentials send is what their steps send."""
    operations = found["stock"]["operations"]

    def sent(*names):
        return [sum(step[kind] for step in found["stock"]["steps"] if step["name"] in names) for kind in ("messages", "bytes")]

    def logged(name):
        return [operations[name][kind] for kind in ("messages", "bytes")]

    assert sent("qkv product", "output product", "up product", "down product") == logged("dot")
    assert sent("scores", "mixed values") == logged("dot_general")
    assert sent("largest score") == logged("reduce")
    assert 2 * sent("exponentials")[0] == logged("exponential")[0]  # and SiLU has one


@pytest.mark.parametrize(("family", "messages"), [("gpt2", 15), ("llama", 16), ("opt", 17)])
def test_every_family_has_a_name_for_every_step(family, messages):
    assert len(plugin_names(family)) == messages
    config = LayerShape(family, 16, 2, 2, 24, 3).config()
    inputs = layer_inputs(config, 3)
    with enable_x64():
        traced = jax.make_jaxpr(Decoder(config, {}).block)(*inputs, window(config, 3, 1, 4))
    assert len(_parts(traced)) == len(_STOCK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--protocol", "CHEETAH"), "--steps: on CHEETAH passes differ in what they send"),
        (("--ops", "generic"), "--steps: --ops generic has steps of another kind; leave --steps out"),
        (("--ops", "plugin", "--family", "mixtral"), "--steps: --family mixtral has steps of another kind"),
    ],
)
def test_refusals(arguments, message):
    done = bench("--steps", *arguments)
    assert done.exit_code != 0 and message in str(done.exception) + done.stderr
