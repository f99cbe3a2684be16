"""Coverage and misses against the attention weights that transformers gives: ratios of weights are differences of scores."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import GPT2, OPT, write_checkpoint
from flax_models import pretrained
from transformers import FlaxGPT2LMHeadModel, FlaxOPTForCausalLM

from spu_llm.errors import UserError
from spu_llm.models import load_checkpoint, trace
from spu_llm.models.calibration import Calibration, LayerRanges
from spu_llm.models.trace import sequences
from spu_llm.soal.maxima import ScoreReference, by_reference, choose, conformant, measure_maxima

MODELS = {"gpt2": (FlaxGPT2LMHeadModel, GPT2), "opt": (FlaxOPTForCausalLM, OPT)}
PREFIX = [7, 8]
TEXTS = [np.random.default_rng(i).integers(2, 97, length).tolist() for i, length in enumerate([20, 20, 1, 20])]
CALM = Calibration(tuple([LayerRanges((0.5, 2.0), (0.5, 2.0), (-20.0, 3.0), (-1.0, 4.0), (-5.0, 5.0))] * 2), (), (0.5, 2.0), 9)


def looked_at(row, start):
    """The columns of the paper: those of the prefix, the first after it, the last two."""
    return sorted({*range(start), start, row - 1, row} & set(range(row + 1)))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("prefix", [[], PREFIX], ids=["alone", "prefix"])
def test_as_in_transformers_attention(family, prefix, tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "ROWS", 50)
    kind, config = MODELS[family]
    folder = write_checkpoint(tmp_path / "model", config)
    theirs = pretrained(kind, folder)
    start = len(prefix)
    misses = {"maxima": [], "sink": []}
    log_sums = []
    for text in TEXTS:
        weights = np.stack(theirs(np.array([[*prefix, *text]]), output_attentions=True).attentions)[:, 0]
        scores = np.log(np.maximum(weights.astype(np.float64), 1e-30))  # [layers, heads, n, n] less the log of the row's sum
        for row in range(start, start + len(text)):
            seen = scores[:, :, row, : row + 1]
            misses["maxima"].append(seen.max(-1) - seen[..., looked_at(row, start)].max(-1))
            misses["sink"].append(seen.max(-1) - seen[..., 0])
            log_sums.append(-seen[..., 0])
    decoder = load_checkpoint(folder).decoder
    found = measure_maxima(decoder, TEXTS, prefix, CALM)
    assert found.rows == sum(map(len, TEXTS)) and found.positions == start + 3
    for name, reference in (("maxima", found.maxima), ("sink", found.sink)):
        want = np.stack(misses[name])  # [rows, layers, heads]
        np.testing.assert_allclose(reference.coverage, (want < 1e-6).mean(0), atol=1e-9)
        np.testing.assert_allclose(reference.miss, want.max(0), atol=1e-3)
        np.testing.assert_allclose(np.array(reference.relative)[:, 1], want.max((0, 2)), atol=1e-3)
    np.testing.assert_allclose(np.array(found.sink.log_sum)[:, 1], np.stack(log_sums).max((0, 2)), atol=1e-3)
    assert 0.3 < found.maxima.mean_coverage < 1 and found.sink.mean_coverage < found.maxima.mean_coverage


@pytest.mark.parametrize("prefix", [[], PREFIX], ids=["alone", "prefix"])
def test_columns_that_are_looked_at(prefix, monkeypatch):
    monkeypatch.setattr(trace, "ROWS", 16)
    start = len(prefix)
    for part in sequences(prefix, [[5, 6, 7, 8, 9], [1], [2, 3], [4] * 6]):
        own = conformant(part)
        for row in np.flatnonzero(part.kept):
            want = [*range(start), *(row - part.positions[row] + p for p in looked_at(part.positions[row], start) if p >= start)]
            assert np.flatnonzero(own[row]).tolist() == sorted(want)


def reference(relative, log_sum, layers=2):
    return ScoreReference(((1.0,),) * layers, ((0.0,),) * layers, (relative,) * layers, (log_sum,) * layers)


FITS, TOO_LOW = reference((-20.0, 2.0), (0.0, 3.0)), reference((-400.0, 1.0), (0.0, 3.0))
TOO_FAR = reference((-20.0, 28.0), (0.0, 28.0))
REFINED = reference((-20.0, 9.0), (0.0, 9.0))
WILD = replace(CALM, layers=tuple(replace(layer, relative=(-400.0, 3.0)) for layer in CALM.layers))


@pytest.mark.parametrize(
    ("sink", "learned", "maxima", "chosen", "messages"),
    [
        (FITS, CALM, FITS, "sink", {"sink": 0, "learned": 0, "maxima": 18}),
        (TOO_FAR, CALM, FITS, "learned", {"learned": 0, "maxima": 18}),
        (REFINED, CALM, FITS, "learned", {"sink": 4, "learned": 0, "maxima": 18}),
        (REFINED, WILD, FITS, "sink", {"sink": 4, "maxima": 18}),
        (TOO_LOW, WILD, FITS, "maxima", {"maxima": 18}),
    ],
)
def test_the_cheapest_that_fits_is_chosen(sink, learned, maxima, chosen, messages, checkpoints):
    config = load_checkpoint(checkpoints["llama"]).decoder.config
    found = choose(config, learned, maxima, sink, 5)
    assert found.reference == chosen and found.messages == messages
    assert set(found.refused) == {"sink", "learned", "maxima"} - set(messages)
    assert all("score" in reason for reason in found.refused.values())


def test_none_fits(checkpoints):
    config = load_checkpoint(checkpoints["llama"]).decoder.config
    with pytest.raises(UserError, match="400 below their reference"):
        choose(config, WILD, TOO_LOW, TOO_FAR, 5)
    assert by_reference(CALM, "maxima", FITS).layers[1].relative == (-20.0, 2.0)
    assert by_reference(CALM, "maxima", FITS).layers[1].activation == CALM.layers[1].activation


def test_first_tokens_count_in_the_ranges_only(checkpoints):
    decoder = load_checkpoint(checkpoints["gpt2"]).decoder
    alone, both = (measure_maxima(decoder, TEXTS[:1], PREFIX, CALM, firsts=firsts) for firsts in ((), range(97)))
    assert both.maxima.coverage == alone.maxima.coverage and both.sink.miss == alone.sink.miss
    largest = [pair[1] for pair in both.sink.log_sum]
    assert all(b >= a for a, b in zip((pair[1] for pair in alone.sink.log_sum), largest, strict=True))
    whole = measure_maxima(decoder, [TEXTS[0], *([token] for token in range(97))], PREFIX, CALM)
    np.testing.assert_allclose(largest, [pair[1] for pair in whole.sink.log_sum], rtol=1e-4)
    assert both.learned_log_sum == ((-1.0, 4.0),) * 2
