"""T5 against transformers' own Flax model, in plaintext; its checkpoints; its arguments."""

import json

import numpy as np
import pytest
from flax_models import pretrained
from safetensors.numpy import load_file, save_file
from t5_checkpoint import FLAN, ONE_HEAD, T5_1_0, write_t5
from transformers import FlaxT5ForConditionalGeneration
from transformers.models.t5.modeling_flax_t5 import FlaxT5Attention

from spu_llm.errors import UserError
from spu_llm.models import t5
from spu_llm.models.checkpoint import load_checkpoint, load_t5
from spu_llm.models.t5 import PlainT5

CASES = {
    "1.0": T5_1_0,
    "FLAN": FLAN,
    "one head, one layer": ONE_HEAD,
    "untied ReLU, deeper decoder": T5_1_0 | {"tie_word_embeddings": False, "num_layers": 1, "num_decoder_layers": 3},
}


PROMPT, TOKENS = 13, 36


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """A model of ours and transformers'."""
    folder = write_t5(tmp_path_factory.mktemp("t5") / "model", CASES[request.param], seed=1)
    return PlainT5(load_t5(folder).model, 40), pretrained(FlaxT5ForConditionalGeneration, folder)


def drawn(length, seed):
    return np.random.default_rng(seed).integers(2, 61, length)


def apart(got, want):
    """How far logits are apart, in units of the largest."""
    return np.abs(got - want).max() / np.abs(want).max()


@pytest.mark.parametrize(("prompt", "count"), [(1, 1), (PROMPT, TOKENS)])
def test_logits_match_transformers(pair, prompt, count):
    """In one pass, token by token, and in passes of several."""
    plain, theirs = pair
    ids, tokens = drawn(prompt, 0), drawn(count, 1)
    want = np.asarray(theirs(input_ids=ids[None], decoder_input_ids=tokens[None]).logits[0])
    for parts in {1, count, min(3, count)}:
        plain.encode(ids)
        got = np.concatenate([plain.advance(part) for part in np.split(tokens, parts)])
        assert apart(got, want) < 5e-5


def test_long_prompts_take_a_product_a_head(pair, monkeypatch):
    """Above a number of scores the encoder's heads are multiplied apart: the same, in less memory."""
    plain, _ = pair
    tokens = drawn(3, 1)
    plain.encode(drawn(PROMPT, 0))
    want = plain.advance(tokens)
    monkeypatch.setattr(t5, "_TOGETHER", 0)
    other = PlainT5(plain.decoder, 40)
    other.encode(drawn(PROMPT, 0))
    assert apart(other.advance(tokens), want) < 5e-5


def test_greedy_generation_matches_transformers(pair):
    plain, theirs = pair
    ids, config = drawn(PROMPT, 3), plain.decoder.config
    want = theirs.generate(ids[None], max_length=13, num_beams=1, do_sample=False).sequences[0].tolist()
    found = [config.start_token]
    plain.encode(ids)
    while len(found) < 13 and found[-1] not in config.end_tokens:
        found.append(int(plain.advance(found[-1:])[-1].argmax()))
    assert found == want[: len(found)]
    assert len(set(found)) > 2, "a model that repeats one token shows little"


def test_roll_back_and_another_prompt(pair):
    """Nothing is left of an earlier prompt, nor of tokens that were rolled back."""
    plain, theirs = pair
    ids, tokens = drawn(PROMPT, 4), drawn(TOKENS, 5)
    want = np.asarray(theirs(input_ids=ids[None], decoder_input_ids=tokens[None]).logits[0])
    plain.encode(ids[::-1])
    plain.advance(tokens[::-1])
    plain.encode(ids)
    assert apart(plain.advance(tokens[:12]), want[:12]) < 5e-5
    plain.advance(tokens[::-1][:12])
    plain.roll_back(12)
    assert apart(plain.advance(tokens[12:24]), want[12:24]) < 5e-5
    with pytest.raises(ValueError, match="roll back to 25"):
        plain.roll_back(25)


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (32, 129), (4, 3)])
def test_buckets_match_transformers(buckets, distance):
    config = t5.read_config(FLAN | {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": distance})
    ahead = np.arange(400)[None, :] - np.arange(400)[:, None]
    bucket = FlaxT5Attention._relative_position_bucket
    assert np.array_equal(t5.encoder_buckets(config, 400), bucket(ahead, True, buckets, distance))
    want = np.asarray(bucket(ahead, False, buckets, distance))
    assert np.array_equal(t5.decoder_buckets(config, 150, 7, 400), want[150:157])


def test_repeated_tensors_are_no_mistake(tmp_path):
    folder = write_t5(tmp_path / "model", T5_1_0)
    tensors = load_file(folder / "model.safetensors")
    want = load_t5(folder).model.params["embed"]["table"]
    tensors |= {f"{stack}.embed_tokens.weight": tensors["shared.weight"] for stack in ("encoder", "decoder")}
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    save_file(tensors | {unused: np.ones((8, 4), np.float32)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert np.array_equal(load_t5(folder).model.params["embed"]["table"], want)
    save_file(tensors | {"decoder.block.2.layer.0.layer_norm.weight": np.ones(8, np.float32)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"decoder\.block\.2.* has no place in the model"):
        load_t5(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj is 'gated-silu', but only 'gated-gelu'"),
        ({"model_type": "umt5"}, "model_type 'umt5' is not supported; known families: t5"),
        ({"num_heads": 3}, "layers.*has shape|encoder.*has shape|cross.*has shape"),
        ({"relative_attention_num_buckets": 6}, "6 buckets"),
        ({"decoder_start_token_id": 97}, "decoder_start_token_id"),
        ({"d_kv": None}, "key_width is None"),
    ],
)
def test_configs_that_make_no_model(change, message, tmp_path):
    folder = write_t5(tmp_path / "model", FLAN)
    (folder / "config.json").write_text(json.dumps(FLAN | change))
    with pytest.raises(UserError, match=message):
        load_t5(folder)


def test_is_no_decoder_alone(tmp_path):
    with pytest.raises(UserError, match="model_type 't5' is not supported"):
        load_checkpoint(write_t5(tmp_path / "model", FLAN))
