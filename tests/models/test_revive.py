"""Silent units that become copies of others: the decoder computes what it did, and they fire."""

import numpy as np
import pytest

from spu_llm.errors import UserError
from spu_llm.models import Decoder, load_checkpoint
from spu_llm.models.revive import revived
from spu_llm.models.sequences import Reader, hidden_block, sequence_pass, stacked

GROUP = 4
TOKENS = np.random.default_rng(3).integers(1, 90, (6, 12))


@pytest.fixture(scope="module")
def narrow(checkpoints):
    """A decoder of which half of the units never fire, in the last group none, and which do."""
    decoder = load_checkpoint(checkpoints["opt"]).decoder
    ffn = decoder.config.ffn
    alive = np.random.default_rng(4).random((decoder.config.layers, ffn)) < 0.5
    alive[:, -GROUP:], alive[:, 0] = False, True
    layers = []
    for layer, fires in zip(decoder.params["layers"], alive, strict=True):
        up = {"kernel": layer["up"]["kernel"] * fires, "bias": np.where(fires, layer["up"]["bias"], -1).astype(np.float32)}
        layers.append(layer | {"up": up})
    return Decoder(decoder.config, decoder.params | {"layers": layers}), alive


def units_of(decoder):
    return np.asarray(sequence_pass(decoder.config, stacked(decoder.params), TOKENS, hidden_block(decoder.config))[1])


def test_what_is_computed_stays(narrow):
    decoder, alive = narrow
    found = revived(decoder, alive, GROUP, 0.0, 1)
    assert np.abs(Reader(found)(TOKENS) - Reader(decoder)(TOKENS)).max() < 1e-4
    before, after = units_of(decoder), units_of(found)
    assert not (before > 0)[:, :, :, -GROUP:].any()
    for layer in range(len(alive)):
        used = (before[layer] > 0).any((0, 1)), (after[layer] > 0).any((0, 1))
        own = used[0].reshape(-1, GROUP).any(1)
        assert used[1].reshape(-1, GROUP)[own].any(1).all() and used[1].sum() > used[0].sum()
    assert np.array_equal(before[0][..., alive[0]], after[0][..., alive[0]])


def test_copies_differ_and_what_fired_keeps_its_inputs(narrow):
    decoder, alive = narrow
    found = revived(decoder, alive, GROUP, 0.3, 1)
    for before, after, fires in zip(decoder.params["layers"], found.params["layers"], alive, strict=True):
        old, new = before["up"]["kernel"], after["up"]["kernel"]
        assert np.array_equal(old[:, fires], new[:, fires]) and new.dtype == old.dtype
        assert len(np.unique(new, axis=1).T) == len(fires)
        assert np.allclose(before["down"]["kernel"][fires].sum(0), after["down"]["kernel"].sum(0), atol=1e-4)
    again = revived(decoder, alive, GROUP, 0.3, 1)
    assert np.array_equal(Reader(found)(TOKENS), Reader(again)(TOKENS))


def test_a_layer_without_a_unit_that_fires(narrow):
    decoder, alive = narrow
    alive = alive.copy()
    alive[1] = False
    with pytest.raises(UserError, match="layer 1: none of its"):
        revived(decoder, alive, GROUP, 0.3, 1)
