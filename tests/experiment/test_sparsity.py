"""Sparse decoding by YAML: what is refused, and what metrics and report have of a run."""

import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import TEXT

from spu_llm.comet.prepared import LayerSparsity, LowRank, Prepared
from spu_llm.comet.terms import SparseTerms, terms_of
from spu_llm.errors import UserError
from spu_llm.experiment import load_experiment, render_report, run_experiment
from spu_llm.experiment.launch import measure_apart
from spu_llm.models import load_checkpoint
from spu_llm.models.source import content_digest

BLOCKS, ACTIVE, HEADS = 8, 6, 3  # random weights leave the dense ranges with fewer


def low_rank(random, outputs):
    shapes = (32, 3), (3,), (3, outputs), (outputs,)
    return LowRank(*(random.standard_normal(shape).astype(np.float32) for shape in shapes))


@pytest.fixture
def config(tmp_path, checkpoints):
    """An experiment on a tiny OPT with random predictors, and its dense baseline."""
    random = np.random.default_rng(0)
    layers = tuple(
        LayerSparsity(random.permutation(40).astype(np.int32), low_rank(random, BLOCKS), ACTIVE, heads, HEADS if heads else 4, 0.0)
        for heads in (None, low_rank(random, 4))
    )
    Prepared(layers, "tiny", content_digest(checkpoints["opt"])).save(tmp_path / "tiny.safetensors")
    words = TEXT.split()
    (tmp_path / "text.txt").write_text("\n".join(" ".join(random.choice(words, 5)) for _ in range(60)))
    model = {"name": "tiny", "path": str(checkpoints["opt"]), "prefix": [3], "calibration": str(tmp_path / "text.txt")}
    settings = {
        "model": model,
        "ops": "plugin",
        "network": "wan",
        "generation": {"prompt": TEXT[:1], "new_tokens": 6},  # a prompt of one token, which takes no program of its own
        "sparsity": {"file": str(tmp_path / "tiny.safetensors"), "renew": 4},
        "baseline": {"sparsity": None},
    }
    path = tmp_path / "x.yaml"
    path.write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("overrides", [("baseline=null",), ("ops=stock", "protocol={name: ABY3}")], ids=["plugin", "aby3"])
def test_metrics_and_report(config, tmp_path, overrides):
    metrics = run_experiment(load_experiment(config, overrides), tmp_path / "out")
    comet = metrics["comet"]
    assert comet["active_blocks"] == [ACTIVE] * 2 and comet["active_heads"] == [4, HEADS]
    assert comet["active_share"] == ACTIVE / BLOCKS
    assert comet["ffn_bytes_ratio"] > 1 and 0 < comet["predictor_bytes_share"] < 1
    assert comet["shuffles"]["messages"] > 0
    assert "Sparsity" in render_report(metrics)
    if "baseline" not in metrics:
        check_processes(config, metrics)
    else:
        check_baseline(metrics, comet)


def check_baseline(metrics, comet):
    baseline = metrics["baseline"]
    assert "comet" not in baseline
    assert comet["bytes_ratio"] == baseline["decode"]["bytes_per_token"] / metrics["decode"]["bytes_per_token"] > 1


def check_processes(config, threads):
    """The same between processes, with orders renewed on the way."""
    metrics = measure_apart(load_experiment(config, ("baseline=null", "processes=true")).main)
    assert metrics["text"] == threads["text"]
    for key in ("active_blocks", "active_heads", "renew", "recall"):
        assert metrics["comet"][key] == threads["comet"][key]
    ours, theirs = metrics["comet"]["shuffles"], threads["comet"]["shuffles"]
    assert ours["dealt_bytes"] == pytest.approx(theirs["dealt_bytes"], abs=64)  # when the parties meet
    assert ours["bytes"] == pytest.approx(theirs["bytes"], rel=0.05)


def test_a_fresh_order_for_every_token_renews_nothing(config, tmp_path):
    metrics = run_experiment(load_experiment(config, ("sparsity.renew=token", "baseline=null")), tmp_path / "out")
    assert metrics["comet"]["shuffles"]["bytes"] == 0
    assert metrics["comet"]["active_heads"] == [4, 4]


def test_what_is_told_has_no_weight(config):
    experiment = load_experiment(config).main
    layers = Prepared.load(experiment.sparsity.file).layers
    terms = terms_of(layers, "token")
    assert SparseTerms.from_json(terms.to_json()) == terms
    blind = terms.blind(load_checkpoint(experiment.model.locate()).decoder.config)
    for own, told in zip(layers, blind, strict=True):
        assert (own.active_blocks, own.active_heads, own.blocks) == (told.active_blocks, told.active_heads, told.blocks)
        for predictor, zeros in ((own.neurons, told.neurons), (own.heads, told.heads)):
            assert (predictor is None) == (zeros is None)
            for part, zero in zip(predictor or (), zeros or (), strict=True):
                assert part.shape == zero.shape and not zero.any()
    with pytest.raises(UserError, match="not valid"):
        SparseTerms.from_json(b'{"layers": []}')


def test_terms_that_no_model_has_are_refused(config):
    experiment = load_experiment(config).main
    model = load_checkpoint(experiment.model.locate()).decoder.config
    terms = terms_of(Prepared.load(experiment.sparsity.file).layers, 4)
    terms.check(model, 4)
    with pytest.raises(UserError, match="orders serve 4, where token was agreed to"):
        terms.check(model, "token")
    with pytest.raises(UserError, match="predictors of 1 layers, the model has 2"):
        replace(terms, layers=terms.layers[:1]).check(model, 4)
    first, second = terms.layers
    wrong = {"blocks": 0}, {"blocks": 7}, {"rank": -1}, {"rank": 10**12}, {"active_blocks": 900}, {"active_heads": 99}
    for changes in wrong:
        with pytest.raises(UserError, match="predictors of layer 1 that no such layer can have"):
            replace(terms, layers=(first, replace(second, **changes))).check(model, 4)
    with pytest.raises(UserError, match="layer 0"):
        replace(terms, layers=(second, second)).check(model, 4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("sparsity.renew=0",), "sparsity.renew"),
        (("sparsity.count=variable", "sparsity.renew=token"), "count variable tells more than a fresh order"),
        (("sparsity.count=variable", "ops=stock"), "sparsity.count variable is for ops plugin, not stock"),
        (("sparsity.file=nowhere",), "sparsity.file 'nowhere': no such file; make it with `spu-llm prepare comet`"),
        (("sparsity.blocks=3",), "unknown key sparsity.blocks; known here: file, renew, count"),
        (("processes=true", "ops=stock"), "between processes sparsity is for ops plugin and a constant count"),
        (("processes=true", "sparsity.count=variable"), "between processes sparsity is for ops plugin and a constant count"),
        (("sparsity.file=null",), "sparsity.file is missing; name a file of `spu-llm prepare comet`"),
    ],
)
def test_refused(config, overrides, message):
    with pytest.raises(UserError, match=message):
        load_experiment(config, overrides)


def test_another_models_file_is_refused(config, tmp_path, checkpoints):
    settings = json.loads(config.read_text())
    settings["model"]["path"] = str(checkpoints["gpt2"])
    config.write_text(json.dumps(settings))
    with pytest.raises(UserError, match="was prepared for model tiny with other weights"):
        run_experiment(load_experiment(config), tmp_path / "out")
