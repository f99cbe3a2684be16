"""Our decoders against transformers' own Flax models, in plaintext."""

import numpy as np
import pytest
from conftest import CONFIGS, GPT2, LLAMA, OPT, tensors, write_checkpoint
from flax_models import pretrained
from safetensors.numpy import save_file
from transformers import FlaxGPT2LMHeadModel, FlaxLlamaForCausalLM, FlaxOPTForCausalLM

from spu_llm.models import PlainDecoder, load_checkpoint

MODELS = {"llama": FlaxLlamaForCausalLM, "gpt2": FlaxGPT2LMHeadModel, "opt": FlaxOPTForCausalLM}
CASES = {
    "llama": LLAMA,
    "llama, heads share one key head": LLAMA | {"num_key_value_heads": 1},
    "llama, one head": LLAMA | {"num_attention_heads": 1, "num_key_value_heads": 1},
    "llama, untied, odd sizes": LLAMA | {"tie_word_embeddings": False, "intermediate_size": 37, "vocab_size": 101},
    # transformers' Flax Llama knows no other rope_theta; SmolLM2 (100000) is checked by what it answers
    "llama, three layers": LLAMA | {"num_hidden_layers": 3},
    "gpt2": GPT2,
    "gpt2, one head, odd width": GPT2 | {"n_head": 1, "n_embd": 30},
    "gpt2, untied": GPT2 | {"tie_word_embeddings": False},
    "opt": OPT,
    "opt, untied, one layer": OPT | {"tie_word_embeddings": False, "num_hidden_layers": 1},
}


def reference_folder(folder, config):
    """The folder as transformers can read it: its Flax Llama has no tied head, so there the table is written twice."""
    if config["model_type"] != "llama" or not config["tie_word_embeddings"]:
        return folder
    arrays = tensors(config)
    copy = write_checkpoint(folder.with_name("untied"), config)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    save_file(arrays, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("name", CASES)
def test_logits_match(name, tmp_path):
    config = CASES[name]
    folder = write_checkpoint(tmp_path / "model", config)
    theirs = pretrained(MODELS[config["model_type"]], reference_folder(folder, config))
    decoder = load_checkpoint(folder).decoder
    tokens = np.random.default_rng(0).integers(2, config["vocab_size"], 33)
    want = np.asarray(theirs(tokens[None]).logits[0])
    for length in (1, 33):  # later tokens change nothing, and theirs takes long to compile for a length
        got = PlainDecoder(decoder, 40).advance(tokens[:length])
        assert np.abs(got - want[:length]).max() < 1e-4


@pytest.mark.parametrize("family", CONFIGS)
def test_cache_gives_what_one_pass_gives(family, checkpoints):
    decoder = load_checkpoint(checkpoints[family]).decoder
    tokens = np.random.default_rng(0).integers(0, 97, 11)
    whole = PlainDecoder(decoder, 16).advance(tokens)
    stepwise = PlainDecoder(decoder, 16)
    parts = [stepwise.advance(tokens[a:b]) for a, b in ((0, 1), (1, 6), (6, 9), (9, 11))]
    assert np.abs(np.concatenate(parts) - whole).max() < 1e-5
