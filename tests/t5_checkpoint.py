"""Tiny T5 checkpoints with random weights, under the names that Hugging Face writes."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

T5_1_0 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "is_encoder_decoder": True,
    "vocab_size": 97,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
FLAN = T5_1_0 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "d_kv": 6, "d_ff": 36}
"""As FLAN-T5-small's, the heads together (24) are narrower than the model (32)."""
ONE_HEAD = FLAN | {"num_heads": 1, "d_kv": 7, "num_layers": 1, "vocab_size": 61}


def t5_tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of which attention, positions and every layer make a difference to the logits."""
    random = np.random.default_rng(seed)
    width, inner, ffn = config["d_model"], config["num_heads"] * config["d_kv"], config["d_ff"]
    out: dict[str, np.ndarray] = {}

    def linear(name: str, rows: int, columns: int, size: float = 1.0) -> None:
        out[f"{name}.weight"] = (size * columns**-0.5 * random.standard_normal((rows, columns))).astype(np.float32)

    def norm(name: str) -> None:
        out[f"{name}.weight"] = (1 + 0.2 * random.standard_normal(width)).astype(np.float32)

    def attention(name: str) -> None:
        linear(f"{name}.q", inner, width, size=1.5 * config["d_kv"] ** -0.5)  # scores are not divided by sqrt(d_kv)
        linear(f"{name}.k", inner, width)
        linear(f"{name}.v", inner, width)
        linear(f"{name}.o", width, inner)

    def stack(name: str, layers: int) -> None:
        for layer in (f"{name}.block.{i}.layer" for i in range(layers)):
            attention(f"{layer}.0.SelfAttention")
            last = 1 if name == "encoder" else 2
            if name == "decoder":
                attention(f"{layer}.1.EncDecAttention")
            for i in range(last + 1):
                norm(f"{layer}.{i}.layer_norm")
            for part in ("wi_0", "wi_1") if config["feed_forward_proj"].startswith("gated") else ("wi",):
                linear(f"{layer}.{last}.DenseReluDense.{part}", ffn, width)
            linear(f"{layer}.{last}.DenseReluDense.wo", width, ffn)
        norm(f"{name}.final_layer_norm")
        bias = random.standard_normal((config["relative_attention_num_buckets"], config["num_heads"]))
        out[f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = bias.astype(np.float32)

    out["shared.weight"] = (0.1 * random.standard_normal((config["vocab_size"], width))).astype(np.float32)
    stack("encoder", config["num_layers"])
    stack("decoder", config.get("num_decoder_layers") or config["num_layers"])
    if not config["tie_word_embeddings"]:
        linear("lm_head", config["vocab_size"], width)
    return out


def write_t5(folder: Path, config: dict, seed: int = 0) -> Path:
    """A Hugging Face folder: config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(t5_tensors(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
