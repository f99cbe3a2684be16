"""Makes tests/models/mixtral: a tiny Mixtral that transformers' torch code trained, as a checkpoint, and that code's logits.

Our environment has no torch, so this runs in one of its own and its results are committed:

    python3.10 -m venv torch && torch/bin/pip install torch==2.2.2 transformers==4.57.6 safetensors==0.8.0 'numpy<2'
    torch/bin/python tests/models/make_mixtral_reference.py

Those versions made what is committed, on a CPU, in about a minute. One thread and one seed; another machine's rounding gives other
weights, so a new checkpoint comes with new logits, never alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MixtralConfig, MixtralForCausalLM

FOLDER = Path(__file__).parent / "mixtral"
TEXT = Path(__file__).parents[2] / "configs" / "calibration" / "brown.txt"
END = "<|end|>"
CONFIG = {
    "vocab_size": 192,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # of so small a model, so that what is read at the first steps differs from position to position
    "bos_token_id": 0,
    "eos_token_id": 0,
}
STEPS, BATCH, LENGTH, RATE = 2000, 16, 96, 3e-3
LENGTHS = (1, 7, 40)
"""Tokens of the texts whose logits are kept."""


def train_tokenizer(lines: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=CONFIG["vocab_size"], special_tokens=[END], show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def train(model: MixtralForCausalLM, tokens: torch.Tensor) -> float:
    """Next-token training on random windows of the text; the last step's loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS)
    for _ in range(STEPS):
        starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1))
        batch = tokens[starts + torch.arange(LENGTH)]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return float(loss)


def reference(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits in float32 of the checkpoint as it was written, for texts of `LENGTHS` tokens."""
    model = MixtralForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    kept = {}
    for length in LENGTHS:
        ids = tokens[100 * length : 101 * length]
        with torch.no_grad():
            kept |= {f"tokens.{length}": ids.int(), f"logits.{length}": model(input_ids=ids[None]).logits[0].contiguous()}
    return kept


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    lines = TEXT.read_text().splitlines()
    tokenizer = train_tokenizer(lines)
    tokens = torch.tensor([id for line in lines for id in tokenizer.encode(line + END).ids])
    model = MixtralForCausalLM(MixtralConfig(**CONFIG))
    print("loss of the last step:", train(model, tokens))
    model.to(torch.bfloat16).save_pretrained(FOLDER)  # the format that Mixtral's own checkpoint has
    (FOLDER / "generation_config.json").unlink(missing_ok=True)
    written = FOLDER / "tokenizer.json"
    tokenizer.save(str(written))
    written.write_text(json.dumps(json.loads(written.read_text()), separators=(",", ":")) + "\n")
    save_file(reference(tokens), FOLDER / "logits.safetensors")


if __name__ == "__main__":
    main()
