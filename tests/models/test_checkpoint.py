"""Checkpoints: GGUF and sharded files give the same model, bad files give one clear line."""

import json
import shutil

import gguf
import numpy as np
import pytest
from conftest import LLAMA, tensors, write_checkpoint
from safetensors.numpy import save_file

from spu_llm.errors import UserError
from spu_llm.models import PlainDecoder, load_checkpoint
from spu_llm.models.gguf_file import _NAMES

TOKENS = [3, 14, 15, 92]


def write_gguf(path, config, arrays):
    """A GGUF file as llama.cpp's converter writes it: its names, and rotary rows of each head interleaved."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["t", "1", "t1", *(f"x{i}" for i in range(3, config["vocab_size"]))])
    writer.add_token_types([1] * config["vocab_size"])
    writer.add_token_merges(["t 1"])
    for name, value in arrays.items():
        parts = name.removeprefix("model.").split(".")
        layered = parts[0] == "layers"
        ours = f"blk.{parts[1]}.{_NAMES['.'.join(parts[2:])]}" if layered else _NAMES[".".join(parts)]
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(parts[-2])
        if heads:
            rows, columns = value.shape
            value = value.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        writer.add_tensor(ours, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(path):
    return PlainDecoder(load_checkpoint(path).decoder, 8).advance(TOKENS)


def test_gguf_and_sharded_folder_are_the_same_model(tmp_path):
    folder = write_checkpoint(tmp_path / "whole", LLAMA)
    arrays = tensors(LLAMA)
    path = tmp_path / "model.gguf"
    write_gguf(path, LLAMA, arrays)
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    shutil.copy(folder / "config.json", sharded)
    names = sorted(arrays)
    index = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i}.safetensors"
        save_file({name: arrays[name] for name in part}, sharded / file)
        index |= dict.fromkeys(part, file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert np.array_equal(logits(sharded), logits(folder))
    assert np.array_equal(logits(path), logits(folder))


def broken(tmp_path, **changes):
    return write_checkpoint(tmp_path / "model", LLAMA | changes)


def test_truncated_safetensors(tmp_path):
    folder = broken(tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"model\.safetensors: truncated"):
        load_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 3, 200, 5000])
def test_truncated_gguf(tmp_path, keep):
    path = tmp_path / "model.gguf"
    write_gguf(path, LLAMA, tensors(LLAMA))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model.gguf: truncated or not a GGUF"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; known families: gpt2, llama, mixtral, opt"),
        ({"intermediate_size": 41}, r"layers.0.down.kernel has shape \(40, 32\) where the config gives \(41, 32\)"),
        ({"num_hidden_layers": 3}, "no tensor layers.2"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling"),
        ({"tie_word_embeddings": False}, "no tensor lm_head.weight"),
        ({"num_hidden_layers": 1}, "tensor model.layers.1.input_layernorm.weight has no place"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_type is 'llama3'"),
        ({"hidden_size": "32"}, "describes no llama decoder"),
        ({"num_attention_heads": 0}, "describes no llama decoder"),
        ({"num_attention_heads": 5}, "each must be a multiple"),
        ({"num_hidden_layers": None}, "layers is None"),
        ({"num_key_value_heads": 3}, "each must be a multiple"),
        ({"rope_theta": 0}, "positive base"),
        ({"rope_theta": "x"}, "describes no llama decoder"),
        ({"tie_word_embeddings": "no"}, "tied_head 'no'"),
        ({"eos_token_id": "</s>"}, "describes no llama decoder"),
        ({"model_type": ["llama"]}, "is not supported"),
    ],
)
def test_config_that_does_not_fit(tmp_path, change, message):
    folder = broken(tmp_path)
    (folder / "config.json").write_text(json.dumps(LLAMA | change))
    with pytest.raises(UserError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize("text", ["[1]", "{", "\xff", "[" * 100000])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_files_that_are_not_what_they_should_be(tmp_path, name, text):
    folder = broken(tmp_path)
    (folder / name).write_text(text, encoding="latin-1")
    with pytest.raises(UserError) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("drop", ["add_block_count", "add_context_length", "add_head_count", "add_token_merges", "add_token_types"])
def test_gguf_without_a_field(tmp_path, drop, monkeypatch):
    monkeypatch.setattr(gguf.GGUFWriter, drop, lambda *arguments: None)
    path = tmp_path / "model.gguf"
    write_gguf(path, LLAMA, tensors(LLAMA))
    with pytest.raises(UserError, match=r"model\.gguf"):
        load_checkpoint(path)


def test_incomplete_config(tmp_path):
    folder = broken(tmp_path)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"config\.json has no"):
        load_checkpoint(folder)


def test_values_that_are_not_finite(tmp_path):
    folder = broken(tmp_path)
    arrays = tensors(LLAMA)
    arrays["model.norm.weight"][0] = np.inf
    save_file(arrays, folder / "model.safetensors")
    with pytest.raises(UserError, match="not finite"):
        load_checkpoint(folder)


def test_pickled_weights_are_not_read(tmp_path):
    folder = broken(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="convert the checkpoint to safetensors"):
        load_checkpoint(folder)


def test_path_that_is_nothing(tmp_path):
    with pytest.raises(UserError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "nowhere")
