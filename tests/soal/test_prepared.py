"""The prepared file: what comes back, what is refused."""

import json
import stat
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load, save, save_file

from spu_llm.errors import UserError
from spu_llm.models.cache import LayerCache
from spu_llm.models.calibration import LayerRanges
from spu_llm.models.plan_check import RangeReport
from spu_llm.soal.maxima import Choice, MaximaReport, ScoreReference
from spu_llm.soal.prefix import Outlier, Scan, Trial
from spu_llm.soal.prepared import Facts, Prepared, SpecialReport, load_prepared, read_prefix, save_prepared

LAYER = LayerRanges((0.25, 64.0), (1.0, 1.0), (-31.5, 2.0), (-1.5, 4.25), (-3.0, 3.0))


def a_file(prefix=(1, 0)):
    """A prepared model of two layers, with numbers that no other field has."""
    random = np.random.default_rng(0)
    trial = Trial((), (1.0, 2.0), (90.0, 3.0), 4, 40, None)
    worst = Outlier(7, "ünï\n", 9.5, 0.5, 9.5)
    chosen = Trial(prefix, (1.0, 2.0), (3.0, 3.5), 0, 40, Scan((1.0, 2.0), (9.5, 3.0), 1, (worst,)))
    special = SpecialReport(8.0, (trial, chosen), chosen, ((90.0, 1.0),) * len(prefix), ((1.0, 1.0),) * 3, ((2.0, 1.0),) * 3)
    score = ScoreReference(((0.5, 1.0), (0.75, 1.0)), ((0.0, 0.25), (2.5, 0.0)), ((-9.0, 2.5),) * 2, ((0.0, 4.0),) * 2)
    pairs = ((-9.0, 2.5),) * 2
    choice = Choice("learned", {"learned": 0, "maxima": 6}, {"sink": "too far"})
    facts = Facts(
        "tiny", "c" * 64, "t" * 64, prefix, "ab", (LAYER, replace(LAYER, router=(-2.0, 2.0))), (0.5, 8.0), 40,
        RangeReport(1000, 0, "layer 1, lookup 3", 1.25), special, MaximaReport(40, 5, score, score, pairs, pairs, choice),
        12.5, 20.0,
    )  # fmt: skip
    references = tuple(random.standard_normal((6, 2)) for _ in range(2))
    rows = tuple(LayerCache(*random.standard_normal((2, len(prefix), 1, 4)).astype(np.float32)) for _ in range(2))
    return Prepared(facts, references, rows)


@pytest.mark.parametrize("prefix", [(1, 0), ()])
def test_round_trip(prefix, tmp_path):
    path, wanted = tmp_path / "folder" / "tiny.soal", a_file(prefix)
    save_prepared(wanted, path)
    save_prepared(wanted, path)
    found = load_prepared(path, "c" * 64)
    assert found.facts == wanted.facts
    for got, want in zip(found.references, wanted.references, strict=True):
        np.testing.assert_array_equal(got, want, strict=True)
    for got, want in zip(found.prefix_rows, wanted.prefix_rows, strict=True):
        np.testing.assert_array_equal(got.keys, want.keys, strict=True)
        np.testing.assert_array_equal(got.values, want.values, strict=True)
    assert found.prefix == read_prefix(path) == prefix
    assert found.reference == "learned" and found.ranges.tightest == "layer 1, lookup 3"
    assert found.calibration.reference == "learned" and found.calibration.layers[1].router == (-2.0, 2.0)
    assert found.calibration.references[0] is found.references[0]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["tiny.soal"]


def test_phi_puts_the_middle_of_the_mean_squares_at_one():
    phi, (low, high) = a_file().phi[0, 0], LAYER.attention_squares
    assert phi**2 * low * phi**2 * high == pytest.approx(1.0)
    assert a_file().phi.shape == (2, 2) and a_file().final_phi == pytest.approx(2**-0.5)


def test_cut_anywhere_it_is_refused(tmp_path):
    path = tmp_path / "tiny.soal"
    save_prepared(a_file(), path)
    whole = path.read_bytes()
    for length in (0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="truncated or not a prepared file"):
            load_prepared(path, "c" * 64)
        with pytest.raises(UserError, match="truncated or not a prepared file"):
            read_prefix(path)


def test_a_changed_byte_is_noticed(tmp_path):
    path = tmp_path / "tiny.soal"
    save_prepared(a_file(), path)
    whole = path.read_bytes()
    for place in (len(whole) - 1, len(whole) - 40, whole.index(b"12.5")):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(UserError, match="damaged"):
            load_prepared(path, "c" * 64)


def with_metadata(path, **changes):
    from safetensors import safe_open

    save_prepared(a_file(), path)
    with safe_open(path, "numpy") as file:
        metadata = file.metadata() | changes
    path.write_bytes(save(load(path.read_bytes()), {key: value for key, value in metadata.items() if value is not None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "2"}, "of version 2, where this spu_llm reads 1"),
        ({"kind": "other"}, "holds tensors, but is not a prepared file"),
        ({"facts": "{"}, "damaged"),
        ({"facts": None}, "damaged"),
        ({"facts": json.dumps({"model": "tiny"})}, "damaged"),
        ({"sum": "0" * 64}, "damaged"),
    ],
)
def test_what_is_not_ours_is_refused(changes, message, tmp_path):
    with_metadata(tmp_path / "x", **changes)
    with pytest.raises(UserError, match=message):
        load_prepared(tmp_path / "x", "c" * 64)


def test_other_files_and_other_models(tmp_path):
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "weights.safetensors")
    with pytest.raises(UserError, match="is not a prepared file; make it with `spu-llm prepare soal`"):
        load_prepared(tmp_path / "weights.safetensors", "c" * 64)
    with pytest.raises(UserError, match="nowhere: no such file"):
        read_prefix(tmp_path / "nowhere")
    (tmp_path / "text").write_text("not at all")
    with pytest.raises(UserError, match="truncated or not a prepared file"):
        read_prefix(tmp_path / "text")
    save_prepared(a_file(), tmp_path / "tiny.soal")
    with pytest.raises(UserError, match="was prepared for model tiny with other weights"):
        load_prepared(tmp_path / "tiny.soal", "d" * 64)
    with pytest.raises(UserError, match="cannot be written"):
        save_prepared(a_file(), tmp_path / "text" / "tiny.soal")
