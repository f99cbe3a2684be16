"""The prepared file of Comet: what comes back, what is refused."""

import stat
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opt_reference import tiny
from safetensors import safe_open
from safetensors.numpy import load, save, save_file

from spu_llm.comet.prepared import Facts, LayerSparsity, LowRank, Measured, Prepared
from spu_llm.errors import UserError

DIGEST = "d" * 64


def low_rank(random, width, outputs, rank=3):
    return LowRank(*(random.standard_normal(shape).astype(np.float32) for shape in ((width, rank), rank, (rank, outputs), outputs)))


def a_file(width=12, ffn=24, blocks=6, heads=3, layers=2, seed=0):
    random = np.random.default_rng(seed)
    curves = [tuple(np.sort(random.random(blocks)).tolist()) for _ in range(8)]
    measured = Measured(0.9, 0.125, 0.375, *curves, 0.75, tuple(np.linspace(0, 1, heads)), tuple(np.linspace(0, 1, heads)))
    found = [
        LayerSparsity(
            random.permutation(ffn).astype(np.int32),
            low_rank(random, width, blocks),
            blocks,
            low_rank(random, width, heads) if i else None,
            min(2, heads) if i else heads,
            0.3 if i else None,
            measured if i else None,
        )
        for i in range(layers)
    ]
    return Prepared(tuple(found), "tiny", DIGEST, Facts("t" * 64, 40, 0.95, 0.9, 0, 1.5))


def same(a, b):
    assert (a.model, a.digest, a.facts, len(a.layers)) == (b.model, b.digest, b.facts, len(b.layers))
    for ours, theirs in zip(a.layers, b.layers, strict=True):
        np.testing.assert_array_equal(ours.order, theirs.order, strict=True)
        for left, right in ((ours.neurons, theirs.neurons), (ours.heads, theirs.heads)):
            assert (left is None) == (right is None)
            for x, y in zip(left or (), right or (), strict=True):
                np.testing.assert_array_equal(x, y, strict=True)
        for name in ("active_blocks", "active_heads", "threshold", "measured", "blocks"):
            assert getattr(ours, name) == getattr(theirs, name)


def test_round_trip(tmp_path):
    path, wanted = tmp_path / "folder" / "tiny.comet", a_file()
    wanted.save(path)
    wanted.save(path)
    found = Prepared.load(path)
    same(found, wanted)
    found.check(path, tiny().config, DIGEST)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["tiny.comet"]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 99))
def test_any_shape_comes_back(tmp_path_factory, width, blocks, size, heads, layers, seed):
    path, wanted = tmp_path_factory.mktemp("any") / "x", a_file(width, blocks * size, blocks, heads, layers, seed)
    wanted.save(path)
    same(Prepared.load(path), wanted)


def test_other_numbers_bring_their_thresholds_and_recalls():
    first, second = a_file().layers
    found, measured = second.computing(3, 1), second.measured
    assert (found.active_blocks, found.active_heads, found.threshold) == (3, 1, measured.thresholds[2])
    assert found.measured.recall == measured.by_threshold[2] and found.measured.head_recall == measured.heads_by_score[0]
    assert found.measured.neuron_recall == measured.neurons_by_threshold[2]
    assert second.computing(heads=1).threshold == 0.3 and second.computing(blocks=2).active_heads == 2
    assert first.computing(2, 1) == replace(first, active_blocks=2, active_heads=1)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_block_of_is_the_orders_inverse(blocks, size, seed):
    layer = a_file(ffn=blocks * size, blocks=blocks, seed=seed).layers[0]
    for block in range(blocks):
        assert set(np.flatnonzero(layer.block_of == block)) == set(layer.order[block * size : (block + 1) * size])


def test_scores_are_two_products():
    predictor = low_rank(np.random.default_rng(1), 4, 5)
    y = np.random.default_rng(2).standard_normal((3, 4)).astype(np.float32)
    first, first_bias, second, second_bias = (np.asarray(part, np.float64) for part in predictor)
    want = np.einsum("nw,wr,ro->no", y, first, second) + first_bias @ second + second_bias
    np.testing.assert_allclose(predictor.scores(y), want, rtol=1e-4, atol=1e-4)


def test_cut_anywhere_it_is_refused(tmp_path):
    path = tmp_path / "tiny.comet"
    a_file().save(path)
    whole = path.read_bytes()
    for length in (0, 1, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="truncated or not a prepared file"):
            Prepared.load(path)


def test_a_changed_byte_is_noticed(tmp_path):
    path = tmp_path / "tiny.comet"
    a_file().save(path)
    whole = path.read_bytes()
    for place in (len(whole) - 1, len(whole) - 40, whole.index(b"0.125")):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(UserError, match="damaged"):
            Prepared.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "2"}, "of version 2, where this spu_llm reads 1"),
        ({"kind": "other"}, "holds tensors, but is not a file of Comet"),
        ({"facts": "{"}, "damaged"),
        ({"facts": None}, "damaged"),
        ({"sum": "0" * 64}, "damaged"),
    ],
)
def test_what_is_not_ours_is_refused(changes, message, tmp_path):
    path = tmp_path / "x"
    a_file().save(path)
    with safe_open(path, "numpy") as file:
        metadata = file.metadata() | changes
    path.write_bytes(save(load(path.read_bytes()), {key: value for key, value in metadata.items() if value is not None}))
    with pytest.raises(UserError, match=message):
        Prepared.load(path)


def test_no_file_and_other_files(tmp_path):
    with pytest.raises(UserError, match="no such file; make it with `spu-llm prepare comet`"):
        Prepared.load(tmp_path / "none")
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "weights")
    with pytest.raises(UserError, match="is not a file of Comet"):
        Prepared.load(tmp_path / "weights")
    with pytest.raises(UserError, match=r"cannot be written .*choose another --out"):
        a_file().save(tmp_path / "weights" / "inside")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": np.arange(23, dtype=np.int32)}, "23 neurons in 6 blocks"),
        ({"order": np.zeros(24, np.int32)}, "no order of all"),
        ({"active_blocks": 7}, "7 active blocks of 6"),
        ({"active_heads": 0}, "0 active heads"),
    ],
)
def test_what_cannot_be_run_is_refused(change, message, tmp_path):
    whole = a_file()
    replace(whole, layers=(whole.layers[0], replace(whole.layers[1], **change))).save(tmp_path / "x")
    with pytest.raises(UserError, match=f"layer 1: .*{message}"):
        Prepared.load(tmp_path / "x")


@pytest.mark.parametrize(
    ("model", "digest", "message"),
    [
        ({}, "e" * 64, "was prepared for model tiny with other weights"),
        ({"layers": 3}, DIGEST, "has 2 layers, the model 3"),
        ({"ffn": 48}, DIGEST, "layer 0 is of 24 neurons, width 12 and 3 heads, the model of 48, 12 and 3"),
        ({"width": 24}, DIGEST, "width 12 and 3 heads, the model of 24, 24 and 3"),
        ({"heads": 2}, DIGEST, "layer 1 is of 24 neurons, width 12 and 3 heads, the model of 24, 12 and 2"),
    ],
)
def test_a_file_of_another_model_is_refused(model, digest, message, tmp_path):
    path = tmp_path / "x"
    a_file().save(path)
    with pytest.raises(UserError, match=message):
        Prepared.load(path).check(path, tiny(**model).config, digest)
