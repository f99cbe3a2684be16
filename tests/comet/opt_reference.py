"""An OPT in float64 NumPy, written from the paper's formulas and not from our code: dense, or with chosen blocks and heads only."""

import numpy as np

from spu_llm.models.config import DecoderConfig
from spu_llm.models.decoder import Decoder
from spu_llm.models.training import fresh


def tiny(seed=0, **changes):
    """A random OPT whose activations are large enough to differ."""
    shape = {"vocabulary": 31, "width": 12, "layers": 2, "heads": 3, "ffn": 24, "positions": 16} | changes
    config = DecoderConfig(family="opt", kv_heads=shape["heads"], epsilon=1e-5, tied_head=True, **shape)
    random = np.random.default_rng(seed)
    params = fresh(config, seed).params
    for layer in params["layers"]:
        for part in ("qkv", "out", "up", "down"):
            layer[part]["kernel"] = (0.5 * random.standard_normal(layer[part]["kernel"].shape)).astype(np.float32)
            layer[part]["bias"] = (0.3 * random.standard_normal(layer[part]["bias"].shape)).astype(np.float32)
        for part in ("attention_norm", "ffn_norm"):
            layer[part]["scale"] = (1 + 0.2 * random.standard_normal(config.width)).astype(np.float32)
            layer[part]["bias"] = (0.2 * random.standard_normal(config.width)).astype(np.float32)
    params["embed"]["table"] = random.standard_normal((config.vocabulary, config.width)).astype(np.float32)
    return Decoder(config, params)


def norm(params, x, epsilon):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * params["scale"] + params["bias"]


def dense(params, x):
    return x @ params["kernel"].astype(np.float64) + params["bias"]


def head_parts(config, layer, y):
    """[n, heads, width] what each head adds, before the bias of `out`; a loop over positions and heads."""
    d = config.width // config.heads
    q, k, v = np.split(dense(layer["qkv"], y), 3, axis=-1)
    out = np.zeros((len(y), config.heads, config.width))
    for head in range(config.heads):
        own = slice(head * d, (head + 1) * d)
        for i in range(len(y)):
            scores = k[: i + 1, own] @ q[i, own] / np.sqrt(d)
            weights = np.exp(scores - scores.max())
            out[i, head] = (weights / weights.sum()) @ v[: i + 1, own] @ layer["out"]["kernel"][own].astype(np.float64)
    return out


def run(decoder, tokens, choose=None):
    """Logits [n, vocabulary], and records of each layer: y, z, hidden, head parts.

    choose(i, y, before, hidden) says what is computed: bool neurons [n, ffn] (None before hidden is there) and heads [n, heads].
    """
    config, params = decoder.config, decoder.params
    x = (params["embed"]["table"][tokens] + params["embed"]["positions"][: len(tokens)]).astype(np.float64)
    before, records = None, []
    for i, layer in enumerate(params["layers"]):
        y = norm(layer["attention_norm"], x, config.epsilon)
        heads = head_parts(config, layer, y)
        chosen = choose(i, y, before, None)[1] if choose else np.ones(heads.shape[:2], bool)
        x = x + (heads * chosen[..., None]).sum(1) + layer["out"]["bias"]
        z = norm(layer["ffn_norm"], x, config.epsilon)
        hidden = np.maximum(dense(layer["up"], z), 0)
        neurons = choose(i, y, before, hidden)[0] if choose else np.ones(hidden.shape, bool)
        records.append((y, z, hidden, heads))
        for row in range(len(x)):  # only the rows of down that are needed, gathered
            active = np.flatnonzero(neurons[row])
            x[row] += hidden[row, active] @ layer["down"]["kernel"][active].astype(np.float64) + layer["down"]["bias"]
        before = y
    last = norm(params["final"]["norm"], x, config.epsilon)
    return last @ params["embed"]["table"].astype(np.float64).T, records
