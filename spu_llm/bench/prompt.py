"""One decoder layer over a whole prompt, and its non-linear parts alone: what a long context costs, on each kind of operations.

Weights and token embeddings are random (deviations 0.02, as GPT-2 begins, and 1). The parts (softmax, both norms, activation)
run as programs of their own on the values that the layer gives them. The plugin's layer merges openings, so its parts add up to
more than it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from ..generation.assisted import AssistedDecoder
from ..generation.secure import fitting_window
from ..models.cache import LayerCache, cache_shape, window
from ..models.calibration import Calibration, Reference, calibrate
from ..models.config import DecoderConfig
from ..models.decoder import Decoder
from ..models.fixed_block import STREAM_BITS, BlockPlan
from ..models.layers import LayerNorm, RMSNorm, softmax
from ..models.narrow import narrow_decoder
from ..models.narrow_block import NormParams, norm
from ..models.trace import MASKED, embedded, sequences, trace_layer, traced_params
from ..primitives import attention
from ..primitives.fixed import Fixed, encode
from ..primitives.lookup import lookup
from ..primitives.narrow.activation import activation
from ..primitives.narrow.softmax import softmax as narrow_softmax
from ..primitives.norm import encode_phi, normalised
from ..primitives.truncate import truncate
from ..progress import Progress, silent
from ..runtime import ProtocolConfig, Session, Slot
from ..runtime.assisted import TRUST, Assisted, OperandSlot, offline
from ..runtime.session import Phase
from ..soal.maxima import by_reference, measure_maxima
from .layer import LayerShape, random_params, spu_layer

_VOCABULARY = 256
_DEVIATION = 0.02
_SAMPLES, _SAMPLE_TOKENS = 60, 128  # random texts that the plugin's tables are calibrated on
_ONLINE = "prompt"


@dataclass
class Cost:
    """What one party sends and all compute; of the dealer, on the plugin: bytes to the party that gets more, and compute."""

    seconds: float
    messages: int
    bytes: int
    dealer_bytes: int = 0
    dealer_seconds: float = 0.0


@dataclass(frozen=True)
class Prompt:
    """A layer, the prompt's tokens, and what the layer computes on them in plaintext."""

    decoder: Decoder
    tokens: np.ndarray
    trace: Any  # a `Trace` of numpy arrays
    output: np.ndarray

    @property
    def config(self) -> DecoderConfig:
        return self.decoder.config


def bench_prompt(
    shape: LayerShape,
    tokens: int,
    protocol: ProtocolConfig,
    ops: str = "stock",
    reference: Reference = "learned",
    progress: Progress = silent,
) -> dict[str, Any]:
    """A layer over `tokens` positions: `parts` holds a `Cost` each for softmax, norm (both norms), activation and total.

    Seconds are measured compute. The plugin's tables come from ranges measured on other random tokens; `reference` is what stands
    for the maximum in its softmax (the part alone leaves out how it is found).
    """
    prompt = random_prompt(shape, tokens)
    bench = partial(_plugin, reference) if ops == "plugin" else partial(_on_spu, ops, protocol)
    costs, error = bench(prompt, progress)
    return {
        "family": shape.family,
        "tokens": tokens,
        "ops": ops,
        "reference": reference if ops == "plugin" else None,
        "protocol": protocol.name,
        "trust": TRUST if ops == "plugin" else protocol.trust,
        "parts": {name: asdict(cost) for name, cost in costs.items()},
        "max_error": error,
    }


def random_prompt(shape: LayerShape, tokens: int) -> Prompt:
    """A layer with random weights, and random tokens."""
    positions = max(tokens, _SAMPLE_TOKENS)
    config = replace(replace(shape, context=positions - 1).config(), vocabulary=_VOCABULARY)
    random = np.random.default_rng(0)
    width = (config.vocabulary, config.width)
    embed = {"table": random.standard_normal(width, np.float32)}
    if config.rope_base is None:
        embed["positions"] = 0.1 * random.standard_normal((positions, config.width), np.float32)
    decoder = Decoder(config, {"embed": embed, "layers": [random_params(config, random, _DEVIATION)], "final": _final(config)})
    ids = random.integers(0, _VOCABULARY, tokens)
    sequence = next(sequences((), [ids.tolist()]))
    params = traced_params(config, decoder.params["layers"][0])
    output, trace = trace_layer(config, params, embedded(decoder, sequence), sequence.places)
    return Prompt(decoder, ids, jax.tree_util.tree_map(np.asarray, trace), np.asarray(output)[:tokens])


def _final(config: DecoderConfig) -> dict[str, Any]:
    ones = np.ones(config.width, np.float32)
    return {"norm": {"scale": ones} if config.llama_like else {"scale": ones, "bias": 0 * ones}}


def _runs(prompt: Prompt, sizes: list[int], whole: int | None = None) -> dict[str, list[tuple[np.ndarray, ...]]]:
    """For each part the inputs of each of its runs, in passes of `sizes` tokens: the mask last where there is one."""
    runs: dict[str, list[tuple[np.ndarray, ...]]] = {"softmax": [], "norm": [], "activation": []}
    trace, start = prompt.trace, 0
    for size in sizes:
        place = fitting_window(prompt.config, start, size, len(prompt.tokens)) if whole is None else None
        mask = np.tri(size, whole, dtype=bool) if place is None else place.mask
        rows = slice(start, start + size)
        scores = trace.scores[rows, :, : mask.shape[1]].transpose(1, 0, 2)
        log_sum = jax.nn.logsumexp(jnp.where(mask, scores, MASKED), -1)
        runs["softmax"].append((scores, np.asarray(log_sum)[..., None], mask))
        runs["norm"] += [(trace.attention_input[rows],), (trace.ffn_input[rows],)]
        runs["activation"].append((trace.hidden[rows, : prompt.config.hidden],))
        start += size
    return runs


# SPU without a dealer


def _on_spu(ops: str, protocol: ProtocolConfig, prompt: Prompt, progress: Progress) -> tuple[dict[str, Cost], float]:
    n = len(prompt.tokens)
    functions, runs = (_narrowed if ops == "generic" else _stock)(prompt, protocol, _runs(prompt, [n], n))
    costs = {}
    for name in progress(list(runs), "parts alone", "part"):
        with Session(protocol) as session:
            costs[name] = _spu_part(session, functions[name], runs[name])
    cache = LayerCache(*(np.zeros(cache_shape(prompt.config, n), np.float32) for _ in range(2)))
    x, place = prompt.trace.attention_input[:n], window(prompt.config, 0, n, n)
    total, y = spu_layer(functions["total"][0], functions["total"][1], x, cache, place, protocol, 1)
    costs["total"] = Cost(total["seconds"], total["messages"], total["bytes"])
    y = y if prompt.config.llama_like else y - y.mean(-1, keepdims=True)
    return costs, float(np.abs(y - prompt.output).max())


def _stock(prompt: Prompt, protocol: ProtocolConfig, runs: Any) -> tuple[dict[str, Any], Any]:
    config = prompt.config
    norm = RMSNorm(config.epsilon) if config.llama_like else LayerNorm(config.epsilon)
    weights = {"params": {name: np.ones(config.width, np.float32) for name in ("scale", "bias")[: 1 if config.llama_like else 2]}}
    return {
        "softmax": lambda scores, log_sum, mask: softmax(scores, mask),
        "norm": lambda x: norm.apply(weights, x),
        "activation": nn.silu if config.llama_like else partial(nn.gelu, approximate=True),
        "total": (prompt.decoder.block, prompt.decoder.params["layers"][0]),
    }, runs


def _narrowed(prompt: Prompt, protocol: ProtocolConfig, runs: Any) -> tuple[dict[str, Any], Any]:
    """A norm's numbers are secret inputs."""
    narrow = narrow_decoder(prompt.decoder, calibrated(prompt), len(prompt.tokens))
    plan, params = narrow.plan.layers[0], narrow.params["layers"][0]
    assert plan.activation is not None
    return {
        "softmax": lambda scores, log_sum, mask: narrow_softmax(scores, mask, log_sum, plan.softmax),
        "norm": lambda x, phi, weights: norm(prompt.config, plan.norm, NormParams(phi, weights), x),
        "activation": partial(activation, plan=plan.activation),
        "total": (narrow.layer(0), params),
    }, {**runs, "norm": [(x, *each) for (x,), each in zip(runs["norm"], (params.attention_norm, params.ffn_norm), strict=True)]}


def _spu_part(session: Session, function: Callable, runs: list[tuple[np.ndarray, ...]]) -> Cost:
    public = [value.dtype == bool for value in runs[0]]
    slots = tuple(Slot(value.shape, value.dtype, public=known) for value, known in zip(runs[0], public, strict=True))
    program = session.compile("part", function, slots)
    names = tuple(f"in{i}" for i in range(len(slots)))
    total = Cost(0.0, 0, 0)
    for number, run in enumerate(runs):
        for name, value, known in zip(names, run, public, strict=True):
            session.publish(name, value) if known else session.share(name, value, "client")
        with session.phase(f"{_ONLINE} {number}") as phase:
            session.run(program, names, "out")
        _add(total, phase)
    return total


def _add(total: Cost, phase: Phase, dealt: Phase | None = None, dealer_bytes: int = 0) -> None:
    total.seconds += phase.seconds
    total.messages += phase.messages
    total.bytes += phase.bytes
    total.dealer_bytes += dealer_bytes
    total.dealer_seconds += dealt.seconds if dealt is not None else 0.0


# The plugin


def calibrated(prompt: Prompt, reference: Reference = "learned") -> Calibration:
    """Ranges of the layer on other random tokens."""
    texts = np.random.default_rng(2).integers(0, _VOCABULARY, (_SAMPLES, _SAMPLE_TOKENS)).tolist()
    found = calibrate(prompt.decoder, texts)
    if reference == "learned":
        return found
    measured = measure_maxima(prompt.decoder, texts, (), found)
    return by_reference(found, reference, measured.maxima if reference == "maxima" else measured.sink)


def _plugin(reference: Reference, prompt: Prompt, progress: Progress) -> tuple[dict[str, Cost], float]:
    with Session(ProtocolConfig()) as session:
        decoder = AssistedDecoder(session, prompt.decoder, calibrated(prompt, reference), len(prompt.tokens))
        sizes = decoder.passes(len(prompt.tokens))
        total, error = _plugin_layer(session, decoder, prompt, sizes, progress)
        plan, phi = decoder.plan.blocks[0], decoder.plan.phis[0]
    costs = {}
    for name, runs in progress(list(_runs(prompt, sizes).items()), "parts alone", "part"):
        with Session(ProtocolConfig()) as session:
            costs[name] = _plugin_part(session, name, plan, phi[0], runs)
    return {**costs, "total": total}, error


def _plugin_layer(
    session: Session, decoder: AssistedDecoder, prompt: Prompt, sizes: list[int], progress: Progress
) -> tuple[Cost, float]:
    """The layer pass by pass, its error against plaintext (without the mean where the family's norms subtract it)."""
    decoder.set_up(len(prompt.tokens), progress)
    for start, size in starts(sizes):  # compiles what set-up left, before anything is timed
        decoder.length = start
        decoder.layer_program(size, decoder.plan.blocks[0])
    total, error = Cost(0.0, 0, 0), 0.0
    decoder.length = 0
    for start, size in progress(list(starts(sizes)), "layer", "pass"):
        decoder.embed(list(prompt.tokens[start : start + size]))
        name = f"{_ONLINE} {start}"
        with session.phase(name) as phase:
            decoder.run_layers(size)
        decoder.length += size
        _add(total, phase, session.phases[offline(name)], session.phases[offline(name)].bytes)
        found = session.receive("x") / 2.0**STREAM_BITS
        error = max(error, float(np.abs(found - prompt.output[start : start + size]).max()))
    decoder.assisted.check_ranges()
    return total, error


def starts(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Where each pass begins, and how many tokens it takes."""
    start = 0
    for size in sizes:
        yield start, size
        start += size


def _plugin_part(session: Session, name: str, plan: BlockPlan, phi: float, runs: list[tuple[np.ndarray, ...]]) -> Cost:
    assisted, total = Assisted(session), Cost(0.0, 0, 0)
    bits = plan.norm.weight_bits(STREAM_BITS)
    weight = encode_phi(phi, bits)
    operand = Fixed(assisted.mask_operand("phi", weight, "owner"), bits), Fixed(OperandSlot("phi", ()), bits)
    programs: dict[Any, Any] = {}
    for number, (x, *others) in enumerate(runs):
        session.share("x", encode(x, STREAM_BITS), "client")
        slots: list[Any] = [Fixed(Slot(x.shape, np.int64), STREAM_BITS)]
        names: list[Any] = ["x"]
        if name == "softmax":
            log_sum, mask = others
            session.share("log_sum", encode(log_sum, STREAM_BITS), "client")
            session.publish("mask", mask.astype(np.int64))
            slots += [Fixed(Slot(log_sum.shape, np.int64), STREAM_BITS), Slot(mask.shape, np.int64, public=True)]
            names += ["log_sum", "mask"]
        elif name == "norm":
            slots, names = [*slots, operand[1]], [*names, operand[0]]
        if x.shape not in programs:
            programs[x.shape] = assisted.compile("part", partial(_ours, name, plan), tuple(slots), (None,))
        phase_name = f"{_ONLINE} {number}"
        with session.phase(phase_name) as phase:
            assisted.run(programs[x.shape], tuple(names), ["out"])
        _add(total, phase, session.phases[offline(phase_name)], session.phases[offline(phase_name)].bytes)
    return total


def _ours(name: str, plan: BlockPlan, x: Fixed, *others: Any) -> Fixed:
    if name == "softmax":
        return attention.softmax(x, others[1], plan.softmax, others[0])
    if name == "norm":
        return normalised(x, plan.norm, others[0])
    assert plan.activation is not None
    return truncate(lookup(x, plan.activation), plan.softmax.bits)
