"""The breakdown of a layer: bytes of its parts to the last, what adds up, nothing saved where all is active, and the command."""

import json
from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import OPT, write_checkpoint, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.bench.costs import added, less, measured, ratios
from spu_llm.bench.indexing import IndexShape, bench_indexing
from spu_llm.bench.sparse import How, layer_parts
from spu_llm.bench.sparse_case import SparseModel, layer_case
from spu_llm.cli.bench_sparse import sparse_command
from spu_llm.comet.prepared import LayerSparsity, LowRank, Prepared
from spu_llm.errors import UserError
from spu_llm.models import load_checkpoint
from spu_llm.models.cache import LayerCache, window
from spu_llm.models.calibration import calibrate
from spu_llm.models.source import content_digest
from spu_llm.network import NetworkProfile
from spu_llm.runtime import Phase, ProtocolConfig
from spu_llm.runtime.profile import Traffic

WIDTH, HEADS, FFN, BLOCKS, RANK = 12, 3, 24, 6, 3
SIZE = FFN // BLOCKS
CONFIG = OPT | {
    "hidden_size": WIDTH,
    "word_embed_proj_dim": WIDTH,
    "num_attention_heads": HEADS,
    "ffn_dim": FFN,
    "num_hidden_layers": 3,
}
CONTEXT, ACTIVE, ACTIVE_HEADS = 5, 2, 1
LAN = NetworkProfile(name="lan", mode="model", bandwidth_mbps=1000, delay_ms=10)
SEQUENCE = np.random.default_rng(3).integers(2, 97, 12).tolist()


def low_rank(random, outputs):
    shapes = (WIDTH, RANK), (RANK,), (RANK, outputs), (outputs,)
    return LowRank(*(random.standard_normal(shape).astype(np.float32) for shape in shapes))


def sparse_layers(active=ACTIVE, active_heads=ACTIVE_HEADS):
    """Random predictors of three layers; the first one skips no head."""
    random, found = np.random.default_rng(1), []
    for i in range(3):
        heads = (None, HEADS) if i == 0 else (low_rank(random, HEADS), active_heads)
        found.append(LayerSparsity(random.permutation(FFN).astype(np.int32), low_rank(random, BLOCKS), active, *heads))
    return tuple(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("sparse") / "model", CONFIG)


@pytest.fixture(scope="module")
def model(folder):
    decoder = load_checkpoint(folder).decoder
    random = np.random.default_rng(0)
    return SparseModel(decoder, sparse_layers(), calibrate(decoder, [random.integers(0, 97, 9).tolist() for _ in range(12)]))


def parts(ops, protocol, model, tokens, products=True):
    how = How([LAN], repeats=1, products=products)
    found = layer_parts(ops, ProtocolConfig(name=protocol), model, SEQUENCE[: CONTEXT + tokens], tokens, how)
    assert json.loads(json.dumps(found)) == found
    return found


def sums(costs, key):
    """Of a whole and its halves: what the halves cost, and each half's two parts."""
    assert all(costs[half][key] == costs[f"{half}_linear"][key] + costs[f"{half}_nonlinear"][key] for half in ("attention", "ffn"))
    return costs["attention"][key] + costs["ffn"][key]


def test_plugin_sends_what_its_openings_are(model):
    tokens = 2
    found = parts("plugin", "SEMI2K", model, tokens)
    dense, sparse = found["dense"], found["sparse"]
    length, head = CONTEXT + tokens, WIDTH // HEADS
    for costs, units, heads, whole in ((dense, FFN, HEADS, "layer"), (sparse, ACTIVE * SIZE, ACTIVE_HEADS, "given")):
        assert costs["ffn"]["bytes"] == 8 * tokens * (WIDTH + 2 + 6 * units)
        assert costs["ffn_linear"]["bytes"] == 8 * tokens * (WIDTH + 2 * units)
        products = WIDTH + 2 * WIDTH + heads * (head + length + 2 * head)
        assert costs["attention_linear"]["bytes"] == 8 * tokens * products
        assert costs[whole]["bytes"] == sums(costs, "bytes") and costs[whole]["messages"] == sums(costs, "messages")
    assert 0 < sparse["predictor"]["bytes"] == sparse["layer"]["bytes"] - sparse["given"]["bytes"]
    assert 0 <= sparse["predictor"]["messages"] <= 2  # nearly all of it travels with attention
    assert found["speedup"]["bytes"] > 1 and found["ffn_speedup"]["bytes"] > found["ffn_with_predictor_speedup"]["bytes"] > 1
    assert found["predictor_share"]["bytes"] == sparse["predictor"]["bytes"] / sparse["layer"]["bytes"]
    assert found["max_error"]["dense"] < 0.05 and found["max_error"]["sparse"] < 0.05
    assert dense["layer"]["dealer_bytes"] > 0 and "spu.reveal" in found["operations"]["sparse"]
    lan = dense["layer"]["modelled"]["lan"]
    assert lan == pytest.approx(dense["layer"]["seconds"] + 0.01 * dense["layer"]["messages"] + 8e-9 * dense["layer"]["bytes"])


@pytest.mark.parametrize("tokens", [1, 2])
def test_nothing_is_saved_where_all_is_active(model, tokens):
    """Stock SPU skips no head in a pass of several tokens, whatever is predicted."""
    every = SparseModel(model.decoder, sparse_layers(BLOCKS, HEADS if tokens == 1 else ACTIVE_HEADS))
    found = parts("stock", "SEMI2K", every, tokens, products=False)
    assert found["ffn_speedup"]["bytes"] == 1 and found["speedup"]["bytes"] < 1
    assert found["sparse"]["given"]["bytes"] >= found["dense"]["layer"]["bytes"]
    assert found["blocks"] == [BLOCKS, BLOCKS] and found["heads"] == [HEADS, HEADS]
    assert "ffn_linear" not in found["dense"] and max(found["max_error"].values()) < 0.02


def test_stock_with_opened_weights(model):
    """Products are dense, so only functions are saved; SPU's own counts say what products send."""
    found = parts("stock", "SEMI2K", model, 1)
    dense, sparse, operations = found["dense"], found["sparse"], found["operations"]["dense"]
    for costs, whole in ((dense, "layer"), (sparse, "given")):
        assert sums(costs, "bytes") == pytest.approx(costs[whole]["bytes"], rel=0.02)
    assert sparse["ffn_linear"]["bytes"] == dense["ffn_linear"]["bytes"]
    assert sparse["ffn_nonlinear"]["bytes"] < dense["ffn_nonlinear"]["bytes"]
    assert sparse["attention_linear"]["bytes"] < dense["attention_linear"]["bytes"]
    products = operations["dot"]["bytes"] + operations["dot_general"]["bytes"]
    linear = dense["attention_linear"]["bytes"] + dense["ffn_linear"]["bytes"]
    assert linear - 24 * WIDTH <= products <= linear  # less the scaling of q
    assert max(found["max_error"].values()) < 0.02 and found["trust"].startswith("test-only")


def test_aby3_multiplies_active_blocks_alone(model):
    found = parts("stock", "ABY3", model, 1)
    dense, sparse = found["dense"], found["sparse"]
    for half in ("attention", "ffn"):
        for part in ("linear", "nonlinear"):
            assert sparse[f"{half}_{part}"]["bytes"] < dense[f"{half}_{part}"]["bytes"]
    assert sums(dense, "bytes") == pytest.approx(dense["layer"]["bytes"], rel=0.15)  # of three parties upper bounds are known
    assert max(found["max_error"].values()) < 0.02


def test_cheetah_sends_more_for_active_blocks(model):
    """Their weights are shared; the predictor costs comparisons alone, and no head is skipped."""
    found = parts("stock", "CHEETAH", model, 1, products=False)
    dense, sparse = found["dense"], found["sparse"]
    assert found["heads"] == [HEADS, HEADS]
    assert sparse["ffn"]["bytes"] > dense["ffn"]["bytes"]
    assert sparse["attention"]["bytes"] < 1.5 * dense["attention"]["bytes"]
    assert 0 < sparse["predictor"]["messages"] < sparse["layer"]["messages"] / 4
    assert max(found["max_error"].values()) < 0.02


def test_case_is_what_the_model_computes(model):
    """Rows of the cache and the dense output are those of the decoder's own layer."""
    case = layer_case(model, SEQUENCE, 4)
    assert (case.layer, case.tokens, case.context, len(case.sparsity)) == (1, 4, len(SEQUENCE) - 4, 2)
    rows = LayerCache(*(np.pad(part, [(0, 4), (0, 0), (0, 0)]) for part in case.cache))
    place = window(case.config, case.context, 4, len(SEQUENCE))
    want, _ = jax.jit(model.decoder.block)(model.decoder.params["layers"][1], case.x, rows, place)
    np.testing.assert_allclose(case.want, want, atol=1e-4)
    assert case.index.shape == (4, ACTIVE) and case.active.shape == (4, ACTIVE_HEADS)
    assert np.abs(case.want_sparse - case.want).max() > 0.01


@pytest.mark.parametrize("ops", ["plugin", "stock"])
def test_indexing(ops):
    found = bench_indexing(ops, ProtocolConfig(), IndexShape(BLOCKS, ACTIVE, SIZE, WIDTH), [LAN], 1)
    assert max(found["max_error"].values()) < 1e-3
    counts = {way: found[way]["bytes"] for way in ("bits", "disclosed", "units", "weights")}
    assert counts["bits"] < counts["disclosed"] < counts["units"] and counts["disclosed"] < counts["weights"]
    assert found["ratio"]["units"]["bytes"] == counts["units"] / counts["disclosed"]
    assert found["break_even_tokens"]["units"] > 0
    if ops == "plugin":
        hot = 3 * BLOCKS + ACTIVE * BLOCKS
        assert counts["disclosed"] == counts["bits"] + 8 * (2 * BLOCKS + WIDTH)
        assert counts["units"] == counts["bits"] + 8 * (hot + WIDTH + FFN)
        assert counts["weights"] == counts["bits"] + 8 * (hot + WIDTH + ACTIVE * SIZE * WIDTH)
        assert found["shuffle"]["bytes"] == 8 * FFN * WIDTH and found["shuffle"]["messages"] == 1


FIGURES = ("seconds", "messages", "bytes", "irregular_bytes", "dealer_bytes", "dealer_seconds")
numbers = st.integers(0, 1 << 40)
costs = st.builds(
    lambda modelled, *figures: dict(zip(FIGURES, figures, strict=True)) | {"modelled": {"lan": modelled}}, *[numbers] * 7
)


def test_medians_and_what_is_irregular():
    """A pass that sends much more, as CHEETAH's do now and then, changes the mean only; the first one warms up."""
    session = SimpleNamespace(phases=defaultdict(Phase))
    sent = iter([9000, 10, 10, 100, 10, 10])

    @contextmanager
    def phase(name):
        yield session.phases[name]

    def run():
        session.phases[list(session.phases)[-1]].sent = [Traffic(next(sent), 3)]

    session.phase = phase
    cost = measured(session, {"run": run}, [LAN], repeats=5)["run"]
    assert (cost["bytes"], cost["messages"], cost["irregular_bytes"], cost["dealer_bytes"]) == (10, 3, 18, 0)
    assert cost["modelled"]["lan"] == pytest.approx(0.03 + 80e-9)


@given(costs, costs)
@settings(max_examples=30, deadline=None)
def test_costs_add_up(a, b):
    assert added(less(a, b), b) == a
    found = ratios(a, b)
    assert set(found) == {"seconds", "messages", "bytes", "lan"}
    assert found["bytes"] == (a["bytes"] / b["bytes"] if b["bytes"] else None)


def test_command(folder, tmp_path):
    write_tokenizer(folder, 97)
    (tmp_path / "tiny.yaml").write_text(f"name: tiny\npath: {folder}\nprefix: [1]\n")
    text, comet = tmp_path / "text.txt", tmp_path / "tiny.safetensors"
    text.write_text("the quick brown fox jumps over the lazy dog " * 3)
    Prepared(sparse_layers(), "tiny", content_digest(folder)).save(comet)
    arguments = ["--model", str(tmp_path / "tiny.yaml"), "--comet", str(comet), "--text", str(text), "--ops", "stock", "--quiet"]
    arguments += ["--repeats", "1", "--network", "lan", "--no-products", "--tokens", "1", "--context", "4"]
    table = CliRunner().invoke(sparse_command, arguments).output
    assert f"layer 1, 1 tokens after 4; {ACTIVE} of {BLOCKS} blocks, {ACTIVE_HEADS} of {HEADS} heads" in table
    assert "predictor_share" in table and "trust: test-only" in table
    found = json.loads(CliRunner().invoke(sparse_command, [*arguments, "--indexing", "--json"]).output)
    assert (found["blocks"], found["size"], found["model"]) == ([ACTIVE, BLOCKS], SIZE, "tiny")
    for extra, message in (
        (["--ops", "plugin", "--protocol", "ABY3"], "runs on SEMI2K, not on ABY3"),
        (["--tokens", "0"], "--tokens 0: give numbers above 0"),
        (["--tokens", "2,200"], "fewer than 204"),
        (["--layer", "3"], "layers 0 to 2"),
        (["--layer", "3", "--indexing"], "layers 0 to 2"),
        (["--comet", str(tmp_path / "none")], "no such file"),
    ):
        error = CliRunner().invoke(sparse_command, [*arguments, *extra]).exception
        assert isinstance(error, UserError) and message in str(error)
