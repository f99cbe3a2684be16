"""Decoding by dealer protocols against plaintext: families, several tokens at once, roll back, and what it opens."""

import copy
import dataclasses

import numpy as np
import pytest
from conftest import CONFIGS, GPT2, LLAMA, OPT, write_checkpoint

from spu_llm.errors import UserError
from spu_llm.generation import AssistedDecoder
from spu_llm.models import PlainDecoder, load_checkpoint
from spu_llm.models.calibration import calibrate
from spu_llm.runtime import ProtocolConfig, Session

PROMPT = [5, 17, 96, 2, 40]
PREFIX = (7, 8)
ONE_HEAD = LLAMA | {"num_attention_heads": 1, "num_key_value_heads": 1}
UNTIED = LLAMA | {"tie_word_embeddings": False, "num_hidden_layers": 1}
ERROR = 0.05


def both(decoder, capacity=20, seed=0, ring="FM64"):
    """A session with an assisted decoder set up in it, and the plaintext decoder at the same position."""
    random = np.random.default_rng(seed)
    texts = [random.integers(0, decoder.config.vocabulary, length).tolist() for length in [18] * 30 + [2] * 30]
    session = Session(ProtocolConfig(ring=ring))
    assisted = AssistedDecoder(session, decoder, calibrate(decoder, texts, PREFIX), capacity, PREFIX)
    assisted.set_up()
    plain = PlainDecoder(decoder, capacity)
    plain.advance(PREFIX)
    return session, assisted, plain


@pytest.mark.parametrize("config", [*CONFIGS.values(), ONE_HEAD, UNTIED], ids=lambda c: f"{c['model_type']}")
def test_logits_equal_plaintext(config, tmp_path):
    decoder = load_checkpoint(write_checkpoint(tmp_path / "model", config)).decoder
    session, assisted, plain = both(decoder)
    with session:
        for tokens in (PROMPT, [11], [12, 13, 14]):
            found, want = assisted.advance(tokens, last_only=False), plain.advance(tokens)
            assert found.shape == want.shape
            assert np.abs(found - want).max() < ERROR
        assisted.roll_back(8)
        plain.length = 8
        assert np.abs(assisted.advance([50])[-1] - plain.advance([50])[-1]).max() < ERROR
        with pytest.raises(ValueError, match="roll back"):
            assisted.roll_back(1)


@pytest.mark.parametrize(("config", "messages"), [(GPT2, 19), (LLAMA, 20), (OPT, 21)], ids=["gpt2", "llama", "opt"])
def test_messages_are_those_of_the_openings(config, messages, tmp_path):
    decoder = load_checkpoint(write_checkpoint(tmp_path / "model", config)).decoder
    session, assisted, _ = both(decoder)
    with session:
        with session.phase("one"):
            assisted.advance([3])
        with session.phase("five"):
            assisted.advance(PROMPT)
    expected = messages * decoder.config.layers + 10  # embedding and output layer: ids, logits, and 8 openings
    assert session.phases["one"].messages == session.phases["five"].messages == expected


def test_a_layer_out_of_scale_ends_in_an_error(tmp_path):
    decoder = load_checkpoint(write_checkpoint(tmp_path / "model", LLAMA)).decoder
    texts = [np.random.default_rng(0).integers(0, 97, 18).tolist() for _ in range(30)]
    calibration = calibrate(decoder, texts, PREFIX)
    scaled = copy.deepcopy(decoder.params)
    scaled["layers"][0]["down"]["kernel"] = 100 * scaled["layers"][0]["down"]["kernel"]
    with Session(ProtocolConfig()) as session:
        assisted = AssistedDecoder(session, dataclasses.replace(decoder, params=scaled), calibration, 20, PREFIX)
        assisted.set_up()
        with pytest.raises(UserError, match="range check"):
            assisted.advance([3])
        assert assisted.length == len(PREFIX)


def test_the_128_bit_ring_gives_the_same(tmp_path):
    decoder = load_checkpoint(write_checkpoint(tmp_path / "model", GPT2)).decoder
    session, assisted, plain = both(decoder, ring="FM128")
    with session:
        assert np.abs(assisted.advance(PROMPT, last_only=False) - plain.advance(PROMPT)).max() < ERROR
