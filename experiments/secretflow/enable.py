"""An unmodified FlaxGPT2 in a user's own device call: as SecretFlow runs it, and with `spu_llm.enable`, in one script.

Every party runs this file with its name (production mode, SecretFlow 1.14): alice has ids, bob weights, carol deals. See run.sh.
"""

import json
import time
from functools import partial
from pathlib import Path

import click
import jax
import numpy as np
import secretflow as sf
import spu
import transformers
from generate import LINK, PARTIES, SPU_PORTS

import spu_llm
from spu_llm.secretflow import SecretFlowDealer

CONFIG = transformers.GPT2Config(vocab_size=1024, n_embd=768, n_layer=2, n_head=12, n_positions=64)  # GPT-2 small's layers
MODEL = transformers.FlaxGPT2LMHeadModel(CONFIG, _do_init=False)  # no weights: the architecture is public
TOKENS = 16


def forward(ids, params):
    return MODEL(ids, params=params).logits


def weights():
    """At bob: stands for a checkpoint."""
    return MODEL.init_weights(jax.random.PRNGKey(0), (1, 1))


def ids(seed):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (1, TOKENS), dtype=np.int32)


def measured(params):
    """At bob: the ranges of what the tables must hold, on samples of his own. They are public."""
    return spu_llm.calibrate(forward, *((ids(seed), params) for seed in range(1, 9)))


def shapes(params):
    return jax.tree_util.tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)


def run_stock(device, alice, bob, carol, tokens, params):
    return device(forward)(tokens.to(device), params.to(device))


def run_enabled(device, alice, bob, carol, tokens, params, ranges, shape):
    function = spu_llm.enable(forward, ranges=ranges)
    material = SecretFlowDealer(device, carol).material(function, *shape)
    return device(function.program)(material, tokens.to(device), params.to(device))


def error(logits, tokens, params):
    """Largest difference from plaintext; alice and bob put both sides together here to measure it."""
    want = np.asarray(forward(tokens, jax.tree_util.tree_map(np.asarray, params)))
    return float(np.abs(np.asarray(logits) - want).max()), float(np.abs(want).max())


@click.command()
@click.option("--party", type=click.Choice(PARTIES), required=True)
@click.option("--port", default=27100)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(party, port, out):
    out.mkdir(parents=True, exist_ok=True)
    log = out / f"{party}.enable.spu.log"
    cluster = {"parties": {each: {"address": f"127.0.0.1:{port + i}"} for i, each in enumerate(PARTIES)}, "self_party": party}
    sf.init(cluster_config=cluster, ray_mode=False, cross_silo_comm_backend="grpc", logging_level="error")
    nodes = [{"party": each, "address": f"127.0.0.1:{port + SPU_PORTS + i}"} for i, each in enumerate(PARTIES[:2])]
    runtime = {"protocol": "SEMI2K", "field": "FM64", "enable_pphlo_profile": True, "fxp_exp_mode": "EXP_PADE"}
    options = spu.logging.LogOptions()
    options.enable_console_logger, options.system_log_path = False, str(log)
    device = sf.SPU({"nodes": nodes, "runtime_config": runtime}, link_desc={"recv_timeout_ms": 600_000}, log_options=options)
    alice, bob, _ = pyus = [sf.PYU(each) for each in PARTIES]

    tokens, params = alice(ids)(0), bob(weights)()
    ranges, shape = sf.reveal(bob(measured)(params)), (ids(0), sf.reveal(bob(shapes)(params)))
    result = {}
    for name, run in (("stock", run_stock), ("enabled", partial(run_enabled, ranges=ranges, shape=shape))):
        begun = len(read(log))
        start = time.perf_counter()
        logits = run(device, *pyus, tokens, params).to(alice)
        sf.wait(logits)
        seconds = time.perf_counter() - start
        if party != "carol":
            sent, _, messages, _ = read(log)[begun]
            result[name] = {"messages": messages, "bytes": sent, "seconds_with_sharing_and_compilation": seconds}
        worst, largest = sf.reveal(alice(error)(logits, tokens, params.to(alice)))
        result.setdefault(name, {}).update(max_error=worst, max_logit=largest)
    if party == "alice":
        saved = {key: result["stock"][key] - result["enabled"][key] for key in ("messages", "bytes")}
        print(f"stock {result['stock']['messages']} messages, enabled {result['enabled']['messages']}: {saved['messages']} saved")
        print(f"stock {result['stock']['bytes']} bytes, enabled {result['enabled']['bytes']}: {saved['bytes']} saved")
        facts = {"tokens": TOKENS, "layers": CONFIG.n_layer, "width": CONFIG.n_embd}
        (out / "enable.json").write_text(json.dumps({**facts, **result, "saved": saved}, indent=1))
    sf.shutdown()


def read(log):
    """What alice's runtime sent, received: a line a program."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    return [tuple(map(int, found.groups())) for found in LINK.finditer(text)]


if __name__ == "__main__":
    main()
