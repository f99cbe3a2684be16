"""transformers' Flax models on SPU as SecretFlow's examples use them, one generation a call.   See run.sh.

SPU's examples flax_gpt2 and flax_llama7b decode greedily with an unmodified Flax model: no cache, so that every new token runs the
whole text through it; the loop is unrolled into one program; weights are shared anew for every call. That is done here by SPU's
simulator, with parties that stay for several calls, as SPU's nodes do: what they set up once (CHEETAH's keys and oblivious
transfers) is done by a small program before. The logits leave the program too, to be held against plaintext; that sends nothing.

`--exp DEFAULT` is how SPU is configured where nothing is said; flax_gpt2's own configuration says PADE. `--enable` has the same
model run by the plugin's protocols, with a dealer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import enable_x64
from spu import libspu
from spu.utils.simulation import Simulator, sim_jax
from transformers import FlaxGPT2LMHeadModel, FlaxLlamaForCausalLM
from transformers.models.llama import modeling_flax_llama

import spu_llm
from spu_llm.experiment.metrics import peak_memory, reset_peak_memory
from spu_llm.experiment.schema import load_model
from spu_llm.models import Checkpoint, Decoder, load_checkpoint
from spu_llm.models.save import save_checkpoint
from spu_llm.runtime import ProtocolConfig, shares
from spu_llm.runtime.party import Party
from spu_llm.runtime.profile import profiled, read_profile, start_profiling
from spu_llm.runtime.workspace import workspace

OWNER = 1  # the rank whose weights these are; rank 0 has the prompt
FRACTION_BITS = {"FM64": 18, "FM128": 26}  # SPU's defaults
SAMPLES = 16
PROTOCOLS = ("SEMI2K", "ABY3", "CHEETAH")

Run = dict[str, Any]


class Measured(Simulator):
    """SPU's simulator between parties that stay; `cost` tells of its last call."""

    def __init__(self, protocol: ProtocolConfig, exp: str):
        self.size = protocol.world_size
        configs = [self._config(protocol, exp, rank) for rank in range(self.size)]
        super().__init__(self.size, configs[0])
        link = libspu.link.Desc()
        link.recv_timeout_ms = 900_000  # CHEETAH's parties compute for long
        for rank in range(self.size):
            link.add_party(f"id_{rank}", f"thread_{rank}")
        start_profiling()
        connect = partial(libspu.link.create_mem, link)
        self.parties = [Party(rank, partial(connect, rank), config, self.size) for rank, config in enumerate(configs)]
        for party in self.parties:
            party.ready.result()
        self.cost: Run = {}

    def _config(self, protocol: ProtocolConfig, exp: str, rank: int) -> libspu.RuntimeConfig:
        config = protocol.spu_config(profiled(rank, self.size))
        config.fxp_exp_mode = getattr(libspu.RuntimeConfig.ExpMode, f"EXP_{exp}")
        config.experimental_enable_colocated_optimization = False
        return config

    def __call__(self, executable: libspu.Executable, *leaves: Any) -> list[np.ndarray]:
        start = time.perf_counter()
        parts = [self.io.make_shares(np.asarray(leaf), libspu.Visibility.VIS_SECRET) for leaf in leaves]
        for party in self.parties:
            for name, part in zip(executable.input_names, parts, strict=True):
                party.submit(party.runtime.set_var, name, part[party.rank])
        shared = time.perf_counter()
        for done in [party.submit(party.runtime.run, executable) for party in self.parties]:
            done.result()
        ended = time.perf_counter()
        sent = read_profile(self.size).sent
        self.cost = {
            "sharing_seconds": shared - start,
            "compute_seconds": ended - shared,
            "bytes": max(each.bytes for each in sent),
            "messages": max(each.messages for each in sent),
            "input_bytes": [self._sent(part) for part in parts],
        }
        found = [[party.submit(party.runtime.get_var, name).result() for party in self.parties] for name in executable.output_names]
        return [self.io.reconstruct(each) for each in found]

    def _sent(self, parts: list[libspu.Share]) -> int:
        """Bytes that the owner of an input sends the others."""
        return sum(len(shares.pack(part)) for rank, part in enumerate(parts) if rank != OWNER)

    def close(self) -> None:
        for party in self.parties:
            party.close(30)


def flax_model(name: str) -> tuple[Any, Any, Checkpoint, tuple[int, ...]]:
    """transformers' model without weights, its weights, our checkpoint of them, and the prefix that begins its texts."""
    config = load_model(name)
    checkpoint = load_checkpoint(config.locate())
    decoder = checkpoint.decoder
    folder, kind = workspace() / "checkpoint", FlaxGPT2LMHeadModel
    if decoder.config.llama_like:
        kind = FlaxLlamaForCausalLM
        use_rope_base(decoder.config.rope_base)
        decoder = untied(decoder)
    save_checkpoint(folder, decoder)
    model = kind.from_pretrained(folder, local_files_only=True)
    params = jax.tree_util.tree_map(partial(np.asarray, dtype=np.float32), model.params)
    return kind(model.config, _do_init=False), params, checkpoint, config.prefix


def use_rope_base(base: float | None) -> None:
    """transformers' Flax Llama knows one base, 10000; have it turn by another."""

    def angles(positions: int, width: int) -> np.ndarray:
        turns = np.outer(np.arange(positions), np.float64(base) ** (-np.arange(0, width, 2) / width))
        both = np.concatenate([turns, turns], axis=-1)[:, None, :]
        return jnp.asarray(np.concatenate([np.sin(both), np.cos(both)], axis=-1)[:, :, :], jnp.float32)

    modeling_flax_llama.create_sinusoidal_positions = angles


def untied(decoder: Decoder) -> Decoder:
    """The same with its table written twice: transformers' Flax Llama has no tied head."""
    params = {**decoder.params, "head": {"table": decoder.params["embed"]["table"]}}
    return Decoder(replace(decoder.config, tied_head=False), params)


def greedy(model: Any, new_tokens: int, ids: Any, params: Any) -> tuple[Any, Any]:
    """The examples' loop: ids [1, n] -> ids with the new tokens, and the logits [new_tokens, vocabulary] of each."""
    rows = []
    for _ in range(new_tokens):
        rows.append(logits_after(model, ids, params))
        ids = jnp.concatenate([ids, jnp.argmax(rows[-1]).astype(ids.dtype)[None, None]], axis=1)
    return ids, jnp.stack(rows)


def logits_after(model: Any, ids: Any, params: Any) -> Any:
    """Of the last token of ids [1, n]: [vocabulary]."""
    return model(input_ids=ids, params=params).logits[0, -1]


def run(simulator: Measured, model: Any, new_tokens: int, ids: np.ndarray, params: Any) -> tuple[np.ndarray, np.ndarray, Run]:
    """One call, as the examples make it: ids, logits, and what it cost."""
    found, logits = simulate(simulator, partial(greedy, model, new_tokens))(ids, params)
    return np.asarray(found)[0], np.asarray(logits), cost_of(simulator, 1) | {"dealt": {"bytes": 0, "seconds": 0.0}}


def run_enabled(
    simulator: Measured, model: Any, new_tokens: int, ids: np.ndarray, params: Any, samples: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, Run]:
    """By the plugin, which has no rule for the arg-max of a secret: a call a token, whose logits the client gets."""
    function = partial(logits_after, model)
    plugin = spu_llm.enable(function, ranges=spu_llm.calibrate(function, *((sample, params) for sample in samples)))
    rows, costs = [], []
    for _ in range(new_tokens):
        with enable_x64():
            start = time.perf_counter()
            material = plugin.deal(ids, params)
            dealt = {"bytes": material.nbytes, "seconds": time.perf_counter() - start}
            rows.append(np.asarray(simulate(simulator, plugin.program)(material, ids, params)))
        costs.append(cost_of(simulator, 2) | {"dealt": dealt})
        ids = np.append(ids, [[rows[-1].argmax()]], axis=1).astype(ids.dtype)
    return ids[0], np.stack(rows), jax.tree_util.tree_map(lambda *values: sum(values), *costs)


def simulate(simulator: Measured, function: Callable) -> Callable:
    return sim_jax(simulator, function, copts=compiler_options())


def cost_of(simulator: Measured, weights: int) -> Run:
    """Of the last call, whose inputs are weights from that one on."""
    cost = dict(simulator.cost)
    return cost | {"owner_shares_bytes": sum(cost.pop("input_bytes")[weights:])}


def compiler_options() -> libspu.CompilerOptions:
    """As flax_llama7b has them: x / broadcast(y) becomes x * broadcast(1 / y)."""
    options = libspu.CompilerOptions()
    options.enable_optimize_denominator_with_broadcast = True
    return options


def calibration(name: str, checkpoint: Checkpoint, length: int) -> list[np.ndarray]:
    """Beginnings of the passages of the model's calibration text: ids [1, length] each."""
    config = load_model(name)
    assert config.calibration is not None and checkpoint.tokenizer is not None
    texts = [[*config.prefix, *checkpoint.tokenizer.encode(line)] for line in config.calibration.read_text().splitlines()]
    return [np.array([text[:length]], np.int32) for text in texts if len(text) >= length][:SAMPLES]


def measure(args: argparse.Namespace) -> Run:
    reset_peak_memory()
    model, params, checkpoint, prefix = flax_model(args.model)
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    ids = np.array([[*prefix, *tokenizer.encode(args.prompt)]], np.int32)
    protocol = ProtocolConfig(name=args.protocol, ring=args.ring, fraction_bits=FRACTION_BITS[args.ring])
    simulator = Measured(protocol, args.exp)
    sim_jax(simulator, lambda x: jnp.argmax(jnp.exp(x @ x)))(np.eye(4, dtype=np.float32))  # sets up what is set up once
    if args.enable:
        found, logits, cost = run_enabled(
            simulator, model, args.tokens, ids, params, calibration(args.model, checkpoint, ids.shape[1])
        )
    else:
        found, logits, cost = run(simulator, model, args.tokens, ids, params)
    simulator.close()
    peak = peak_memory()
    right = np.asarray(greedy(model, args.tokens, ids, params)[0])[0]
    plain = np.asarray(model(input_ids=found[None, :-1], params=params).logits)[0, -args.tokens :]
    new = found[ids.shape[1] :].tolist()
    return {
        "model": args.model,
        "protocol": args.protocol,
        "ring": args.ring,
        "exp": args.exp,
        "enabled": args.enable,
        "prompt_tokens": ids.shape[1],
        "new_tokens": args.tokens,
        "tokens": new,
        "text": tokenizer.decode(new),
        "plain_text": tokenizer.decode(right[ids.shape[1] :].tolist()),
        "call": cost,
        "accuracy": {
            "max_logit_error": float(np.abs(logits - plain).max()),
            "max_logit": float(np.abs(plain).max()),
            "top1_agreement": float(np.mean(logits.argmax(-1) == plain.argmax(-1))),
        },
        "peak_rss_bytes": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kjv", help="name in configs/model")
    parser.add_argument("--prompt", default="And it came to pass")
    parser.add_argument("--tokens", type=int, default=4, help="new tokens")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="SEMI2K")
    parser.add_argument("--ring", choices=sorted(FRACTION_BITS), default="FM64")
    parser.add_argument("--exp", choices=("DEFAULT", "PADE"), default="PADE")
    parser.add_argument("--enable", action="store_true", help="by the plugin's protocols")
    parser.add_argument("--out", type=Path, required=True, help="write the figures there as JSON")
    args = parser.parse_args()
    found = measure(args)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(found["text"], found["call"], found["accuracy"])


if __name__ == "__main__":
    main()
