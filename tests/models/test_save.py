"""Saved folders: read back by us and by transformers they are the model that was saved."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import CONFIGS, GPT2, LLAMA, OPT, write_checkpoint, write_tokenizer
from flax_models import pretrained
from transformers import FlaxGPT2LMHeadModel, FlaxLlamaForCausalLM, FlaxOPTForCausalLM

from spu_llm.errors import UserError
from spu_llm.models import Decoder, PlainDecoder, load_checkpoint
from spu_llm.models.checkpoint import _safetensors_places, _safetensors_reader
from spu_llm.models.save import save_checkpoint

MODELS = {"llama": FlaxLlamaForCausalLM, "gpt2": FlaxGPT2LMHeadModel, "opt": FlaxOPTForCausalLM}
CASES = {
    "llama, untied": LLAMA | {"tie_word_embeddings": False},  # transformers' Flax Llama has no tied head
    "llama, one head, odd sizes": LLAMA
    | {"tie_word_embeddings": False, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 37},
    "gpt2": GPT2,
    "gpt2, inner width, untied": GPT2 | {"tie_word_embeddings": False, "n_head": 1},
    "opt": OPT,
    "opt, one layer, untied": OPT | {"tie_word_embeddings": False, "num_hidden_layers": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_what_was_saved(name, tmp_path):
    config = CASES[name]
    decoder = load_checkpoint(write_checkpoint(tmp_path / "first", config)).decoder
    save_checkpoint(tmp_path / "saved", decoder)
    theirs = pretrained(MODELS[config["model_type"]], tmp_path / "saved")
    tokens = np.random.default_rng(0).integers(2, config["vocab_size"], 13)
    want = PlainDecoder(decoder, 13).advance(tokens)
    assert np.abs(np.asarray(theirs(tokens[None]).logits[0]) - want).max() < 1e-4


@pytest.mark.parametrize("config", [*CONFIGS.values(), *CASES.values(), LLAMA | {"eos_token_id": [2, 5], "bos_token_id": 1}])
def test_saved_and_read_again_nothing_has_changed(config, tmp_path):
    first = load_checkpoint(write_checkpoint(tmp_path / "first", config)).decoder
    save_checkpoint(tmp_path / "saved", first)
    again = load_checkpoint(tmp_path / "saved").decoder
    assert again.config == first.config
    assert jax.tree_util.tree_all(jax.tree_util.tree_map(np.array_equal, again.params, first.params))


def test_tensors_of_a_mixture_are_those_of_its_file(tmp_path):
    folder = Path(__file__).parent / "mixtral"
    decoder = load_checkpoint(folder).decoder
    save_checkpoint(tmp_path, decoder)
    ours, theirs = _safetensors_places(tmp_path), _safetensors_places(folder)
    assert set(ours) == set(theirs)
    for name in theirs:
        assert np.array_equal(_safetensors_reader(tmp_path, ours)(name), _safetensors_reader(folder, theirs)(name)), name
    assert load_checkpoint(tmp_path).decoder.config == decoder.config


def test_half_precision_and_tokenizer(tmp_path):
    folder = write_checkpoint(tmp_path / "first", GPT2)
    write_tokenizer(folder, 97)
    first = load_checkpoint(folder)
    save_checkpoint(tmp_path / "half", first.decoder, first.tokenizer, np.float16)
    again = load_checkpoint(tmp_path / "half")
    assert (tmp_path / "half/model.safetensors").stat().st_size < 0.6 * (folder / "model.safetensors").stat().st_size
    for old, new in zip(*map(jax.tree_util.tree_leaves, (first.decoder.params, again.decoder.params)), strict=True):
        assert np.array_equal(old.astype(np.float16).astype(np.float32), new)
    assert again.tokenizer.encode("the fox") == first.tokenizer.encode("the fox")
    assert json.loads((tmp_path / "half/config.json").read_text())["torch_dtype"] == "float16"
    assert sorted(path.name for path in (tmp_path / "half").iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_what_cannot_be_saved(tmp_path):
    decoder = load_checkpoint(write_checkpoint(tmp_path / "first", GPT2)).decoder
    table = decoder.params["embed"]["table"] * 1e6
    large = Decoder(decoder.config, decoder.params | {"embed": decoder.params["embed"] | {"table": table}})
    with pytest.raises(UserError, match=r"wte.weight: its largest value .* does not fit float16; use float32"):
        save_checkpoint(tmp_path / "half", large, dtype=np.float16)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another folder"):
        save_checkpoint(tmp_path / "file", decoder)
