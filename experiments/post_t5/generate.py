"""POST with an encoder-decoder: a T5 of FLAN-T5-small's shape, fewer layers and random weights, drafted for by one near it.

    python experiments/post_t5/generate.py --out experiments/post_t5/result.json

The draft is the target with noise added to each weight; how near it is decides the acceptance rate, and says nothing of real pairs.
What counts here are the passes: the encoder's once, then decoder passes of several tokens, rolled back to what is accepted, with
token by token decoding of the same target as the baseline. Greedy tokens must be equal. Seconds on a network follow its profile.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spu_llm.experiment.schema import CONFIGS, read_yaml
from spu_llm.generation import Sampler, SamplingConfig, Step, generate
from spu_llm.generation.seq2seq import SecureSeq2Seq
from spu_llm.models.decoder import path_name
from spu_llm.models.t5 import T5, PlainT5, T5Config, read_config
from spu_llm.network import NetworkProfile
from spu_llm.post.distribution import Distribution
from spu_llm.post.draft import ModelDraft
from spu_llm.post.draft_length import FixedLength, Round
from spu_llm.post.generate import PostDecoder
from spu_llm.runtime import Phase, ProtocolConfig, Session

NETWORKS = ("lan", "wan")
SHAPE = {  # FLAN-T5-small's config.json
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}


class T5Draft(ModelDraft):
    """Drafts by a T5 in plaintext that has encoded the prompt."""

    def __init__(self, plain: PlainT5, sampling: SamplingConfig):
        super().__init__(plain.decoder, plain.capacity, sampling)
        self._decoder = plain


def random_t5(config: T5Config, seed: int) -> T5:
    """Weights of the size that keeps activations near 1, and logits as far apart as a trained model's."""
    random = np.random.default_rng(seed)

    def leaf(path: tuple, value: np.ndarray) -> np.ndarray:
        name = path_name(path)
        if name.endswith("scale"):
            return np.ones(value.shape, np.float32)
        size = len(value) ** -0.5 if name.endswith("kernel") else 4 * config.width**-0.5 if name.startswith("head") else 1.0
        drawn = size * random.standard_normal(value.shape)
        if name.endswith(("qkv.kernel", "cross_q.kernel")):  # as T5's are drawn: scores are not divided by sqrt(head_width)
            drawn[:, : config.heads_width] *= config.head_width**-0.5
        return drawn.astype(np.float32)

    return T5(config, jax.tree_util.tree_map_with_path(leaf, T5.blind(config).params))


def near(model: T5, noise: float, seed: int) -> T5:
    """The model with noise of so many times its own size in every weight."""
    random = np.random.default_rng(seed)

    def leaf(value: np.ndarray) -> np.ndarray:
        return (value + noise * value.std() * random.standard_normal(value.shape)).astype(np.float32)

    return T5(model.config, jax.tree_util.tree_map(leaf, model.params))


Decode = Callable[[SecureSeq2Seq], list[Step]]


def run(target: T5, prompt: list[int], options: argparse.Namespace, decode: Decode) -> tuple[list[Step], dict[str, Phase]]:
    """A generation in a session of its own, and what its phases cost."""
    with Session(ProtocolConfig(name=options.protocol, ring=options.ring)) as session:
        secure = SecureSeq2Seq(session, target, options.tokens + options.length + 1)
        secure.set_up(len(prompt), scored={1, options.length + 1})
        with session.phase("encoder"):
            secure.encode(prompt)
        return decode(secure), dict(session.phases)


def cost(phases: Sequence[Phase], tokens: int, in_turn: Phase | None = None) -> dict[str, float]:
    """Of each token: messages and bytes of the party that sends more, seconds of compute here and on networks.

    In the phase `in_turn` parties answer each other, so that the messages of all of them are waited for.
    """
    turns = [in_turn] if in_turn else []
    messages = sum(phase.messages for phase in phases) + sum(sent.messages for phase in turns for sent in phase.sent)
    compute = sum(phase.seconds for phase in [*phases, *turns])
    size = sum(phase.bytes for phase in [*phases, *turns])
    found = {"messages": messages / tokens, "bytes": size / tokens, "compute_seconds": compute / tokens}
    for name in NETWORKS:
        profile = NetworkProfile.model_validate(read_yaml(CONFIGS / "network" / f"{name}.yaml"))
        found[f"{name}_seconds"] = profile.seconds(compute, messages, size) / tokens
    return found


def largest_error(target: T5, prompt: list[int], steps: list[Step]) -> float:
    """Of the client's logits, against plaintext along the same tokens."""
    plain = PlainT5(target, len(steps))
    plain.encode(prompt)
    want = plain.advance([target.config.start_token, *(step.token for step in steps[:-1])])
    return float(max(np.abs(step.logits - row).max() for step, row in zip(steps, want, strict=True)))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Baseline and POST on the same target, prompt and sampling."""
    config = read_config({"model_type": "t5", "num_layers": options.layers, **SHAPE})
    target, sampling = random_t5(config, seed=0), SamplingConfig(temperature=options.temperature)
    prompt = np.random.default_rng(1).integers(2, config.vocabulary, options.prompt_tokens).tolist()
    start, rounds = [config.start_token], list[Round]()
    draft = PlainT5(near(target, options.noise, seed=2), options.tokens + options.length + 1)
    draft.encode(prompt)

    def stepwise(secure: SecureSeq2Seq) -> list[Step]:
        return list(generate(secure, start, options.tokens, Sampler(sampling), phase=secure.session.phase))

    def post(secure: SecureSeq2Seq) -> list[Step]:
        lengths = FixedLength(options.length, [options.length])
        client = PostDecoder(secure, T5Draft(draft, sampling), Distribution(secure, sampling), lengths, rounds=rounds)
        return list(client.generate(start, options.tokens))

    baseline, before = run(target, prompt, options, stepwise)
    steps, phases = run(target, prompt, options, post)
    same = [a.token == b.token for a, b in zip(baseline, steps, strict=True)]
    if options.temperature == 0 and not all(same):
        raise SystemExit(f"greedy tokens differ from token {same.index(False)} on")
    later = options.tokens - 1  # the first token came of the pass over the start token
    one = cost([before["decode"]], later)
    other = cost([phases["draft"], phases["decode"]], later, in_turn=phases["sampling"])
    tested = sum(made.tested for made in rounds)
    return {
        **vars(options),
        "encoder": cost([phases["encoder"]], 1),
        "baseline": {"decode": one, "max_logit_error": largest_error(target, prompt, baseline)},
        "post": {"decode": other, "max_logit_error": largest_error(target, prompt, steps)},
        "acceptance_rate": sum(made.accepted for made in rounds) / tested,
        "tokens_per_round": sum(made.steps for made in rounds) / len(rounds),
        "speedup": {name: one[f"{name}_seconds"] / other[f"{name}_seconds"] for name in NETWORKS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--protocol", default="SEMI2K", choices=["SEMI2K", "ABY3", "CHEETAH"])
    parser.add_argument("--ring", default="FM64", choices=["FM64", "FM128"])
    parser.add_argument("--layers", type=int, default=2, help="of the encoder, and of the decoder")
    parser.add_argument("--prompt-tokens", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=17)
    parser.add_argument("--length", type=int, default=4, help="of a draft")
    parser.add_argument("--noise", type=float, default=0.05, help="in the draft's weights, in units of their own size")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    out = options.out
    del options.out
    found = json.dumps(compare(options), indent=1)
    out.write_text(found + "\n")
    print(found)


if __name__ == "__main__":
    main()
