"""The bench of what sparse runs reveal: its masks are the predictors', and the command gives every setting."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from spu_llm.bench.sparsity_leakage import COUNTS, Scores, _blocks, _head_limits, _one_word, _part_unknown, read_scores
from spu_llm.cli import main
from spu_llm.comet.predictor import bucket
from spu_llm.comet.prepare import Rule, prepare
from spu_llm.comet.prepared import LowRank
from spu_llm.models import load_checkpoint
from spu_llm.models.source import ModelConfig

RULE = Rule(blocks=8, rank=4, recall=0.7, head_recall=0.7, length=16, tokens=1600)


@pytest.fixture(scope="module")
def made(checkpoints, text, tmp_path_factory):
    """A model's YAML and the file prepared for it."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "relu.yaml").write_text(f"name: relu\npath: {checkpoints['opt']}\nprefix: [3]\n")
    found = prepare(ModelConfig(name="relu", path=checkpoints["opt"], prefix=(3,)), [text], RULE)
    found.save(folder / "relu.safetensors")
    return folder / "relu.yaml", folder / "relu.safetensors", found


def run(*arguments):
    return CliRunner().invoke(main, ["bench", "sparsity-leakage", *map(str, arguments)])


def test_every_setting_has_its_rates(made, text):
    model, file, _ = made
    found = run("--comet", file, "--model", model, "--text", text, "--length", 16, "--requests", 10, "--json", "--quiet")
    assert found.exit_code == 0, found.output
    result = json.loads(found.output)
    rows = {(row["count"], row["heads"], row["period"], row["partial"]): row for row in result["rows"]}
    periods = [(period, partial) for partial in (False, True) for period in (1, 4, None) if not (partial and period is None)]
    assert set(rows) == {(count, heads, *each) for count in COUNTS for heads in (False, True) for each in periods}
    assert result["texts"] == 10 and result["blocks"] == 8 and result["tokens"] == 16
    for row in rows.values():
        assert all(0 <= rate["rate"] <= 1 and rate["low"] <= rate["high"] for rate in row.values() if isinstance(rate, dict))
        assert (row["head"] is not None) == row["heads"] and (row["repeated"] is None) == (row["period"] == 1)
    default = rows["constant", False, 1, False]
    assert default["token"]["low"] == default["token"]["high"] == 0
    assert default["pair"]["rate"] == default["word"]["rate"] == 0.5 and default["among"]["rate"] == pytest.approx(0.1)
    assert rows["constant", True, None, False]["among"]["rate"] == 1
    assert rows["variable", False, 1, False]["pair"]["rate"] > 0.7  # half by guessing


def test_the_table_and_errors(made, text, checkpoints, tmp_path):
    model, file, _ = made
    arguments = ("--comet", file, "--model", model, "--text", text, "--quiet")
    found = run(*arguments, "--length", 8, "--requests", 8)
    assert found.exit_code == 0 and "constant" in found.output and "guessing" in found.output
    for more, message in ((("--length", 64), "63 positions"), (("--length", 60), "give longer"), (("--text", "none"), "none")):
        failed = run(*arguments, *more)
        assert failed.exit_code == 2 and message in failed.output
    (tmp_path / "other.yaml").write_text(f"name: other\npath: {checkpoints['gpt2']}\n")
    assert run("--comet", file, "--model", tmp_path / "other.yaml", "--text", text).exit_code == 2


def test_masks_are_what_the_predictors_choose(made, checkpoints):
    """Scores of a text do not depend on the texts beside it; each count of blocks is what its name says."""
    decoder, (_, _, prepared) = load_checkpoint(checkpoints["opt"]).decoder, made
    texts = np.random.default_rng(1).integers(0, 97, (5, 12)).astype(np.int32)
    scores = read_scores(decoder, (3,), prepared, texts)
    alone = read_scores(decoder, (3,), prepared, texts[2:3])
    assert scores.heads[0] is None and scores.heads[1].shape == (5, 12, 4)
    for both, one in zip(scores.neurons, alone.neurons, strict=True):
        assert both.shape == (5, 12, 8) and np.allclose(both[2:3], one, atol=1e-4)
    found, layer = scores.neurons[1], replace(prepared.layers[1], active_blocks=3, threshold=float(np.median(scores.neurons[1])))
    constant, rounded, variable = (_blocks(layer, found, count) for count in COUNTS)
    above = found > layer.threshold
    assert (variable == above).all() and (constant.sum(-1) == 3).all()
    wanted = [[*np.flatnonzero(row), *np.flatnonzero(~row)][:3] for row in above.reshape(-1, 8)]
    assert [sorted(row) for row in wanted] == [list(np.flatnonzero(row)) for row in constant.reshape(-1, 8)]
    wide = replace(layer, threshold=0.5, neurons=LowRank(*(np.zeros((1, 48), np.float32),) * 3, np.zeros(48, np.float32)))
    many = np.random.default_rng(4).standard_normal((5, 12, 48)).astype(np.float32)
    rounded, variable = (_blocks(wide, many, count) for count in ("rounded", "variable"))
    step = bucket(48)
    assert step > 1 and (rounded.sum(-1) % step == 0).all()
    assert (rounded >= variable).all() and (rounded.sum(-1) - variable.sum(-1) < step).all()


def test_a_variable_number_of_heads_is_on_average_the_constant_one(made):
    _, _, prepared = made
    found = np.random.default_rng(2).standard_normal((6, 50, 4))
    limits = _head_limits(prepared.layers, Scores(np.zeros((6, 50)), [], [None, found]))
    wanted = prepared.layers[1].active_heads
    assert (found > limits[1]).sum(-1).mean() == pytest.approx(wanted, abs=0.05)


def test_wrong_guesses_differ_where_they_should():
    random = np.random.default_rng(3)
    victims, public = random.integers(0, 9, (6, 16)), random.integers(0, 9, (20, 16))
    assert ((_one_word(victims, public, random) != victims).sum(1) == 1).all()
    part = _part_unknown(victims)
    assert (part[:, 4:] == victims[:, 4:]).all() and (part[1:, :4] == victims[:-1, :4]).all()
