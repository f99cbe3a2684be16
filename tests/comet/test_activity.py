"""What is recorded of a model on text, against a float64 model in NumPy."""

import numpy as np
import pytest
from conftest import GPT2, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from opt_reference import run, tiny

from spu_llm.comet.activity import LayerActivity, activity, masses
from spu_llm.errors import UserError
from spu_llm.models import load_checkpoint

SHAPES = [{}, {"heads": 1, "ffn": 7, "width": 5}, {"heads": 4, "layers": 1, "ffn": 33}]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("count", "n", "skipped"), [(1, 1, 0), (3, 9, 1), (10, 5, 2)])
def test_records_are_the_models(shape, count, n, skipped):
    decoder = tiny(**shape)
    sequences = np.random.default_rng(1).integers(0, decoder.config.vocabulary, (count, n))
    wanted = [run(decoder, tokens)[1] for tokens in sequences]
    found = list(activity(decoder, sequences, skipped))
    assert len(found) == decoder.config.layers
    for i, records in enumerate(found):
        theirs = [np.concatenate([sequence[i][part][skipped:] for sequence in wanted]) for part in range(4)]
        theirs[3] = np.linalg.norm(theirs[3], axis=-1)
        for name, ours, want in zip(LayerActivity._fields, records, theirs, strict=True):
            assert ours.shape == want.shape and ours.dtype == np.float32, name
            np.testing.assert_allclose(ours, want, atol=3e-4, err_msg=name)
        assert ((records.hidden == 0) == (theirs[2] == 0)).mean() > 0.999


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_a_mass_is_the_norm_of_what_a_neuron_adds(rows, ffn, seed):
    random = np.random.default_rng(seed)
    hidden = np.maximum(random.standard_normal((rows, ffn)), 0).astype(np.float32)
    down = random.standard_normal((ffn, 4)).astype(np.float32)
    found = masses({"down": {"kernel": down}}, hidden)
    added = hidden[:, :, None].astype(np.float64) * down
    np.testing.assert_allclose(found, np.sqrt((added**2).sum(-1)), rtol=1e-5)


def test_a_model_without_relu_is_refused(tmp_path):
    decoder = load_checkpoint(write_checkpoint(tmp_path / "gpt2", GPT2)).decoder
    with pytest.raises(UserError, match="family gpt2 has no ReLU"):
        next(activity(decoder, np.zeros((1, 4), int)))
