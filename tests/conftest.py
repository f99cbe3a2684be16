"""Tiny checkpoints with random weights, written the way Hugging Face writes them."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

pytest_plugins = ["studies"]
collect_ignore = [] if find_spec("ray") else ["plugin/test_secretflow_ray.py"]
"""Ray has an environment of its own: `make test-ray`."""

TEXT = "the quick brown fox jumps over the lazy dog. in the beginning was the word, and the word was secret."

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
}
OPT = {
    "model_type": "opt",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 40,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "tie_word_embeddings": True,
    "pad_token_id": 1,
}
CONFIGS = {"llama": LLAMA, "gpt2": GPT2, "opt": OPT}


def tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors under PyTorch's names, as transformers documents them for each family."""
    random = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 0.3) -> np.ndarray:
        return (scale * random.standard_normal(shape)).astype(np.float32)

    def norm(name: str, width: int, bias: bool = True) -> dict[str, np.ndarray]:
        return {f"{name}.weight": 1 + normal(width, scale=0.1)} | ({f"{name}.bias": normal(width, scale=0.1)} if bias else {})

    def linear(name: str, rows: int, columns: int, bias: bool = True) -> dict[str, np.ndarray]:
        return {f"{name}.weight": normal(rows, columns)} | ({f"{name}.bias": normal(rows)} if bias else {})

    out: dict[str, np.ndarray] = {}
    vocabulary = config["vocab_size"]
    if config["model_type"] == "llama":
        d, heads, kv, ffn = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"))
        out["model.embed_tokens.weight"] = normal(vocabulary, d)
        for i in range(config["num_hidden_layers"]):
            name = f"model.layers.{i}"
            out |= norm(f"{name}.input_layernorm", d, bias=False) | norm(f"{name}.post_attention_layernorm", d, bias=False)
            for proj, rows in (("q", d), ("k", d // heads * kv), ("v", d // heads * kv)):
                out |= linear(f"{name}.self_attn.{proj}_proj", rows, d, bias=False)
            out |= linear(f"{name}.self_attn.o_proj", d, d, bias=False)
            out |= linear(f"{name}.mlp.gate_proj", ffn, d, bias=False) | linear(f"{name}.mlp.up_proj", ffn, d, bias=False)
            out |= linear(f"{name}.mlp.down_proj", d, ffn, bias=False)
        out |= norm("model.norm", d, bias=False)
    elif config["model_type"] == "gpt2":
        d = config["n_embd"]

        def conv(name: str, rows: int, columns: int) -> dict[str, np.ndarray]:
            return {f"{name}.weight": normal(rows, columns), f"{name}.bias": normal(columns)}

        out["transformer.wte.weight"], out["transformer.wpe.weight"] = normal(vocabulary, d), normal(config["n_positions"], d)
        for i in range(config["n_layer"]):
            name = f"transformer.h.{i}"
            out |= norm(f"{name}.ln_1", d) | norm(f"{name}.ln_2", d)
            out |= conv(f"{name}.attn.c_attn", d, 3 * d) | conv(f"{name}.attn.c_proj", d, d)
            out |= conv(f"{name}.mlp.c_fc", d, 4 * d) | conv(f"{name}.mlp.c_proj", 4 * d, d)
        out |= norm("transformer.ln_f", d)
    else:
        d, ffn = config["hidden_size"], config["ffn_dim"]
        out["model.decoder.embed_tokens.weight"] = normal(vocabulary, d)
        out["model.decoder.embed_positions.weight"] = normal(config["max_position_embeddings"] + 2, d)
        for i in range(config["num_hidden_layers"]):
            name = f"model.decoder.layers.{i}"
            for proj in ("q", "k", "v", "out"):
                out |= linear(f"{name}.self_attn.{proj}_proj", d, d)
            out |= norm(f"{name}.self_attn_layer_norm", d) | norm(f"{name}.final_layer_norm", d)
            out |= linear(f"{name}.fc1", ffn, d) | linear(f"{name}.fc2", d, ffn)
        out |= norm("model.decoder.final_layer_norm", d)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = normal(vocabulary, d)
    return out


def write_checkpoint(folder: Path, config: dict, seed: int = 0) -> Path:
    """A Hugging Face folder: config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False))
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """A folder of each family, with a tokenizer that knows the letters of TEXT."""
    root = tmp_path_factory.mktemp("checkpoints")
    folders = {family: write_checkpoint(root / family, config) for family, config in CONFIGS.items()}
    for folder in folders.values():
        write_tokenizer(folder, 97)
    return folders


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of words of TEXT in random order."""
    path = tmp_path_factory.mktemp("text") / "public.txt"
    path.write_text(" ".join(np.random.default_rng(0).choice(TEXT.split(), 800)))
    return path
