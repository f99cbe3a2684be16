"""`spu-llm prepare comet` as its user meets it."""

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from conftest import TEXT

import spu_llm.comet.prepare as module
from spu_llm.cli import main
from spu_llm.comet.activity import activity, masses
from spu_llm.comet.blocks import in_blocks
from spu_llm.comet.gate import chosen
from spu_llm.comet.predictor import recall_curve
from spu_llm.comet.prepare import Rule, prepare_layers, split_rows
from spu_llm.comet.prepared import Prepared
from spu_llm.errors import UserError
from spu_llm.experiment.schema import load_model
from spu_llm.models import load_checkpoint
from spu_llm.models.source import content_digest

SMALL = ["--blocks", "8", "--rank", "3", "--length", "16"]


def spu_llm(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def model(checkpoints, tmp_path, monkeypatch):
    """The YAML of a tiny OPT with a calibration text; a cache folder of its own."""
    monkeypatch.setenv("SPU_LLM_CACHE", str(tmp_path / "cache"))
    return model_file(checkpoints["opt"], tmp_path)


def model_file(checkpoint, folder, **more):
    words = np.random.default_rng(0).permutation(np.repeat(TEXT.split(), 30))
    (folder / "text.txt").write_text(" ".join(words))
    raw = {"name": "tiny", "path": str(checkpoint), "prefix": [3], "calibration": str(folder / "text.txt")} | more
    (folder / "tiny.yaml").write_text(yaml.safe_dump({key: value for key, value in raw.items() if value is not None}))
    return folder / "tiny.yaml"


def test_the_file_is_the_models_and_says_what_is_so(model, tmp_path):
    done = spu_llm("prepare", "comet", "--model", model, *SMALL, "--out", tmp_path / "x", "--recall", "0.8")
    assert done.exit_code == 0, done.stderr
    assert "2 layers" not in done.stdout and f"file       {tmp_path / 'x'} (the owner's secret)" in done.stdout
    assert "seconds" in done.stdout and "GB" in done.stdout
    found, config = Prepared.load(tmp_path / "x"), load_model(str(model))
    decoder = load_checkpoint(config.locate()).decoder
    found.check(tmp_path / "x", decoder.config, content_digest(config.locate()))
    assert found.facts.recall == 0.8 and found.facts.tokens > 500
    assert [layer.heads is None for layer in found.layers] == [True, False] and found.layers[0].active_heads == 4
    for layer in found.layers:
        assert layer.blocks == 8 and layer.neurons.first.shape == (32, 3)
        measured, last = layer.measured, layer.active_blocks - 1
        assert measured.oracle[last] >= measured.by_score[last] >= measured.recall * 0.98 > measured.still[last] * 0.9
        assert measured.recall > 0.75  # asked for 0.8 on other text
        assert (measured.recall, layer.threshold) == (measured.by_threshold[last], measured.thresholds[last])


def test_neurons_that_fire_are_caught_as_asked(checkpoints):
    decoder = load_checkpoint(checkpoints["opt"]).decoder
    sequences = np.random.default_rng(1).integers(0, 97, (30, 12))
    few, more = (
        prepare_layers(decoder, sequences, 1, Rule(blocks=8, rank=2, recall=0.3, neuron_recall=asked)) for asked in (0.3, 0.8)
    )
    for one, other in zip(few, more, strict=True):
        assert one.active_blocks < other.active_blocks < 8
        assert other.measured.neuron_recall > 0.75  # asked for 0.8 on other text


def test_measured_is_what_the_text_that_was_held_out_gives(checkpoints):
    decoder = load_checkpoint(checkpoints["opt"]).decoder
    sequences = np.random.default_rng(1).integers(0, 97, (30, 12))
    rule = Rule(blocks=5, rank=2, held=0.2)
    layers = prepare_layers(decoder, sequences, 1, rule)
    learned, _, report = split_rows(30, 11, rule)
    for layer, params, found in zip(layers, decoder.params["layers"], activity(decoder, sequences, 1), strict=True):
        sums = in_blocks(masses(params, found.hidden), layer.order, 5)[report]
        scores = layer.neurons.scores(found.normed[report])
        np.testing.assert_allclose(layer.measured.by_score, recall_curve(scores, sums), atol=1e-5)
        np.testing.assert_allclose(layer.measured.oracle, recall_curve(sums, sums), atol=1e-5)
        assert layer.measured.zeros == pytest.approx((found.hidden[report] == 0).mean())
        inside = np.take_along_axis(sums, chosen(scores, layer.threshold, layer.active_blocks), axis=1)
        assert layer.measured.recall == pytest.approx(inside.sum() / sums.sum(), abs=1e-5)
        assert (np.diff(in_blocks(masses(params, found.hidden), layer.order, 5)[learned].sum(0)) <= 0).all()


def test_sequences_are_learned_from_or_measured_on_and_never_both():
    rows = split_rows(20, 3, Rule(held=0.15))
    assert sorted(np.concatenate(rows)) == list(range(60))
    assert [len(part) for part in rows] == [42, 9, 9]
    assert all(len(set(part // 3)) == len(part) // 3 for part in rows)
    with pytest.raises(UserError, match="the text gives 2 sequences of 3 tokens, too few"):
        split_rows(2, 3, Rule())


def test_a_run_that_broke_off_goes_on(model, tmp_path, monkeypatch):
    made, real = [], module.prepare_layer

    def counted(*arguments):
        made.append(None)
        if len(made) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    command = ["prepare", "comet", "--model", model, *SMALL, "--quiet", "--out"]
    monkeypatch.setattr(module, "prepare_layer", counted)
    assert spu_llm(*command, tmp_path / "a").exit_code != 0 and len(made) == 2
    assert spu_llm(*command, tmp_path / "a").exit_code == 0 and len(made) == 3  # the second layer only
    assert spu_llm(*command, tmp_path / "b", "--fresh").exit_code == 0 and len(made) == 5
    one, other = (Prepared.load(tmp_path / name).layers for name in "ab")
    for a, b in zip(one, other, strict=True):
        assert (a.active_blocks, a.threshold, a.measured) == (b.active_blocks, b.threshold, b.measured)
        np.testing.assert_array_equal(a.neurons.first, b.neurons.first)


def test_heads_are_left_alone_where_all_are_asked_for(model, tmp_path):
    assert spu_llm("prepare", "comet", "--model", model, *SMALL, "--head-recall", "1", "--quiet").exit_code == 0
    (path,) = (tmp_path / "cache").glob("comet-*.safetensors")
    assert all(layer.heads is None and layer.active_heads == 4 for layer in Prepared.load(path).layers)


def test_what_cannot_be_prepared_is_refused_in_one_line(model, checkpoints, tmp_path):
    def error(*arguments):
        done = spu_llm("prepare", "comet", "--quiet", *arguments)
        assert done.exit_code == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        return done.stderr

    assert "--blocks 7: the model's 40 neurons a layer" in error("--model", model, "--blocks", "7")
    assert "--text none.txt: cannot be read" in error("--model", model, "--blocks", "8", "--text", "none.txt")
    (tmp_path / "short.txt").write_text("a")
    assert "gives no sequence" in error("--model", model, "--blocks", "8", "--text", tmp_path / "short.txt")
    assert "--out" in error("--model", model, *SMALL, "--out", tmp_path / "text.txt" / "x")
    other = tmp_path / "other"
    other.mkdir()
    assert "names no calibration text" in error("--model", model_file(checkpoints["opt"], other, calibration=None), *SMALL)
    assert "family gpt2 has no ReLU" in error("--model", model_file(checkpoints["gpt2"], other), *SMALL)
