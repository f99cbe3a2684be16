"""The prompt's tokens, and whether they fit the model."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UserError
from ..models import DecoderConfig
from ..models.tokenizer import Tokenizer
from .schema import Experiment


def encode_prompt(experiment: Experiment, tokenizer: Tokenizer) -> list[int]:
    """The prompt's tokens. Raises UserError where there is none."""
    text = experiment.generation.prompt
    if text is None:
        raise UserError("generation.prompt is missing; add it, or --set generation.prompt=TEXT")
    prompt = tokenizer.encode(text)
    if not prompt:
        raise UserError(f"generation.prompt {text!r} has no token in this model; write another")
    return prompt


def check_tokens(name: str, config: DecoderConfig, tokens: Sequence[int]) -> None:
    """UserError where a token of prefix or prompt is none of the model's."""
    for token in tokens:
        if not 0 <= token < config.vocabulary:
            raise UserError(
                f"model {name}: token {token} of prefix or prompt is outside its vocabulary of "
                f"{config.vocabulary}; correct the prefix or the tokenizer"
            )


def cache_capacity(experiment: Experiment, config: DecoderConfig, prefix: int, prompt_tokens: int) -> int:
    """The cache rows to keep, `prefix` being tokens computed ahead. UserError if the text cannot fit them, or they the model.

    The longest draft has room behind the last token; where material is dealt ahead, in every round, and there are as many rounds as
    if none was accepted, for rows that were taken back stay taken then.
    """
    wanted, drafted = experiment.generation, 0 if experiment.decoding is None else experiment.decoding.longest
    rounds = max(1, wanted.new_tokens - 1) if experiment.apart and experiment.ops == "plugin" else 1
    positions, needed = config.positions, prefix + prompt_tokens + wanted.new_tokens + drafted
    parts = f"the prompt's {prompt_tokens} tokens, {prefix} of prefix and {wanted.new_tokens} new ones"
    parts += f" with {drafted} drafted" if drafted else ""
    if needed > positions:
        raise UserError(f"{parts} exceed the model's {positions} positions; shorten generation.prompt or generation.new_tokens")
    taken_back = drafted * (rounds - 1)
    capacity = wanted.capacity or needed + taken_back
    if needed + taken_back > capacity:
        raise UserError(f"{parts} exceed generation.capacity {capacity}; raise it to {needed + taken_back} or more")
    if capacity > positions + taken_back:
        raise UserError(f"generation.capacity {capacity} exceeds the model's {positions} positions; lower it")
    return capacity
