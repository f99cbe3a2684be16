"""Puts together what generate.py and enable.py left, with the tokens in plaintext along the same text."""

import json
import sys
from pathlib import Path

import numpy as np
from generate import load_cut

from spu_llm.models import PlainDecoder
from spu_llm.secretflow import load_model

PROMPT = "The capital of France is"


def compared(folder, model):
    """The text, and whether it is plaintext's."""
    steps = json.loads((folder / "alice.json").read_text())
    tokens = [token for token, _ in steps]
    fed = [*model.prefix, *model.tokenizer.encode(PROMPT), *tokens[:-1]]
    plain = PlainDecoder(model.decoder, len(fed)).advance(fed)[-len(steps) :]
    return {
        "text": model.tokenizer.decode(tokens),
        "tokens_equal": bool((plain.argmax(-1) == tokens).all()),
        "max_logit_error": float(np.abs(plain - np.asarray([logits for _, logits in steps])).max()),
        "max_logit": float(np.abs(plain).max()),
    }


def costs(folder, tokens):
    """Seconds by phase, and for each process what it sent: through its SPU runtime and through SecretFlow.

    A driver on Ray knows only how long it waited.
    """
    found = {}
    for path in sorted(folder.glob("*.marks.json")):
        start, setup, prefill, end = json.loads(path.read_text())
        name = path.name.split(".")[0]
        found[name] = {
            "setup": difference(start, setup),
            "prefill": difference(setup, prefill),
            "token": difference(prefill, end, difference(setup, prefill), tokens - 1),
        }
        if name == "driver":
            found[name] = {phase: {"seconds": cost["seconds"]} for phase, cost in found[name].items()}
    return found


def difference(first, second, less=None, share=1):
    """What happened between two marks, less what a prefill takes, in `share` parts."""
    out = {}
    for key in ("seconds", "cpu_seconds", "spu", "secretflow"):
        a, b, c = first[key], second[key], (less or {}).get(key, {})
        if isinstance(b, dict):
            out[key] = {name: (b[name] - a.get(name, 0) - (c.get(name, 0) if c else 0)) / share for name in b}
        else:
            out[key] = (b - a - (c or 0)) / share
    return out


def main(results, tokens, layers, target):
    results = Path(results)
    out = {"prompt": PROMPT, "new_tokens": int(tokens)}
    for name in ("production", "cut", "shares", "ray"):
        model = load_model("smollm2") if name == "production" else load_cut("smollm2", int(layers))
        folder = results / name
        out[name] = {"layers": model.decoder.config.layers, **compared(folder, model), "parties": costs(folder, int(tokens))}
    out["enable"] = json.loads((results / "enable" / "enable.json").read_text())
    Path(target).write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
