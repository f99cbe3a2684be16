"""A head relative to a prediction of its softmax's log sum: the same softmax, sums near 1, on every family."""

import numpy as np
import pytest
from conftest import CONFIGS, write_checkpoint
from scipy.special import logsumexp, softmax

from spu_llm.models import PlainDecoder, load_checkpoint
from spu_llm.models.centred_head import centred_head


@pytest.mark.parametrize(("family", "tied", "halved"), [("gpt2", True, False), ("llama", False, True), ("opt", True, True)])
def test_the_same_softmax_with_sums_in_range(family, tied, halved, tmp_path):
    decoder = load_checkpoint(write_checkpoint(tmp_path / "model", CONFIGS[family] | {"tie_word_embeddings": tied})).decoder
    random = np.random.default_rng(0)
    texts = [random.integers(0, 97, 18).tolist() for _ in range(100)]
    made = centred_head(decoder, texts, 0.7, 0.1 if halved else np.inf, (7, 8))
    assert (made.decoder.config.tied_head, made.halved) == (False, halved)
    power = 1 + halved
    sums, least, unpredicted = [], [], []
    for want, found in zip(_logits(decoder, texts[:40]), _logits(made.decoder, texts[:40]), strict=True):
        np.testing.assert_allclose(softmax(found, -1), softmax(want, -1), atol=2e-5)
        sums.append(power * logsumexp(found / power, -1))
        unpredicted.append(power * logsumexp(want / power, -1))
        least.append(found.min())
        assert (found.min(-1) - sums[-1]).min() > made.fall - 2
    sums = np.concatenate(sums)
    low, high = made.log_sum
    assert low < sums.mean() < high
    assert np.mean((sums >= low) & (sums <= high)) > 0.97  # of a fit that saw these texts, by one that did not
    assert min(least) > made.least - 2
    assert made.deviation < 1.1 * np.std(np.concatenate(unpredicted))


def _logits(decoder, texts):
    plain = PlainDecoder(decoder, 40)
    for text in texts:
        plain.length = 0
        yield plain.advance([7, 8, *text])[2:] / 0.7


def test_one_text_is_enough_to_run(tmp_path):
    decoder = load_checkpoint(write_checkpoint(tmp_path / "model", CONFIGS["gpt2"])).decoder
    made = centred_head(decoder, [[5]], 1.0, 5.0)
    assert made.log_sum[0] == made.log_sum[1]
    assert made.deviation == 0
