"""Text to token ids and back, with the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from ..errors import UserError
from .source import ModelConfig

_CONTROL = 3  # GGUF's type of tokens such as <|im_start|>


class Tokenizer:
    """A model's tokenizer. Special tokens in the text are recognised; none is added."""

    def __init__(self, inner: HFTokenizer):
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._inner.decode(list(tokens), skip_special_tokens=False)

    def to_json(self) -> str:
        """All of it, as tokenizer.json holds it."""
        return self._inner.to_str()

    @property
    def control_tokens(self) -> list[int]:
        """Ids of tokens that stand for no text, such as where one begins or ends."""
        return sorted(token for token, added in self._inner.get_added_tokens_decoder().items() if added.special)


def need_tokenizer(tokenizer: Tokenizer | None, model: ModelConfig) -> Tokenizer:
    """A model's tokenizer. Raises UserError where it has none."""
    if tokenizer is None:
        raise UserError(f"model {model.name}: no tokenizer; add tokenizer.json, or vocab.json and merges.txt, to its folder")
    return tokenizer


def read_folder_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder: tokenizer.json, or GPT-2's vocab.json and merges.txt; None if it has none."""
    whole, vocab, merges = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    try:
        if whole.is_file():
            return Tokenizer(HFTokenizer.from_file(str(whole)))
        if vocab.is_file() and merges.is_file():
            inner = HFTokenizer(models.BPE.from_file(str(vocab), str(merges)))
            inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            inner.decoder = decoders.ByteLevel()
            return Tokenizer(inner)
    except Exception as error:  # the library raises nothing more precise
        raise UserError(f"{folder}: its tokenizer files cannot be read ({error}); fetch the checkpoint again") from None
    return None


def gguf_tokenizer(fields: dict[str, Any], place: str) -> Tokenizer:
    """The byte-level BPE tokenizer that a GGUF file carries in its fields."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in ("smollm", "gpt-2", "default"):
        raise UserError(f"{place}: tokenizer {kind}/{pre} is not supported (only byte-level BPE: gpt2 with smollm or gpt-2)")
    try:
        tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
        inner = HFTokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    except Exception as error:  # the library raises nothing more precise
        raise UserError(f"{place}: its tokenizer cannot be read ({error}); fetch the file again") from None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        byte_level = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    inner.pre_tokenizer = byte_level
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    )
    return Tokenizer(inner)
