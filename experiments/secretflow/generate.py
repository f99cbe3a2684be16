"""Text from a real model on a SecretFlow device: alice has the prompt, bob the checkpoint, carol deals.

In production mode (SecretFlow 1.14) every party runs this file with its name; on Ray (SecretFlow 1.13) one driver runs it with
--ray, on a cluster whose nodes are the parties. What a user writes is `generate`, the same for both. run.sh starts them.
"""

import json
import re
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import click
import secretflow as sf
import spu
from jax.experimental import disable_x64

from spu_llm.experiment import schema
from spu_llm.models import load_checkpoint
from spu_llm.models.calibration import calibrate
from spu_llm.models.calibration_file import read_passages
from spu_llm.models.decoder import Decoder
from spu_llm.secretflow import OwnerModel, SecretFlowDecoder, load_model

PARTIES = ("alice", "bob", "carol")
SPU_PORTS = 10  # after the first port
CAPACITY = 64
LINK = re.compile(r"Link details: total send bytes (\d+), recv bytes (\d+), send actions (\d+), recv actions (\d+)")


def encode(tokenizer, text):
    return tokenizer.encode(text)


def tokenizer_of(model):
    return model.tokenizer


def load_cut(config, layers):
    """At bob: the first layers of a model, with ranges of their own."""
    settings = schema.load_model(config)
    with disable_x64():
        whole = load_checkpoint(settings.locate())
        params = {**whole.decoder.params, "layers": whole.decoder.params["layers"][:layers]}
        decoder = Decoder(replace(whole.decoder.config, layers=layers), params)
        _, texts = read_passages(settings, whole)
        return OwnerModel(decoder, calibrate(decoder, texts, settings.prefix), settings.prefix, whole.tokenizer)


def generate(device, pyus, config, layers, text, new_tokens, delivery, mark):
    """`mark` measures what came before it."""
    alice, bob, carol = pyus
    model = bob(load_model)(config) if layers is None else bob(load_cut)(config, layers)
    prompt = alice(encode)(bob(tokenizer_of)(model).to(alice), text)  # the tokenizer is not the owner's secret
    with SecretFlowDecoder(device, alice, bob, carol, model, CAPACITY, delivery) as decoder:
        for name, count in (("setup and compilation", 2), ("prefill", 1), ("generation", new_tokens)):
            decoder.roll_back()
            steps = list(decoder.generate(prompt, count))
            mark(name)
    return steps


def save(steps, out):
    """At alice: the tokens, and their logits for comparison with plaintext."""
    Path(out).write_text(json.dumps([(step.token, step.logits.tolist()) for step in steps]))


class Meter:
    """Seconds, what this party's SPU runtime sent by its log, and what this process sent through SecretFlow to each party.

    cpu_seconds are those of this process: other work on the machine hardly changes them.
    """

    def __init__(self, log):
        self.log, self.marks, self.sent = Path(log), [], Counter()
        self("start")

    def __call__(self, name):
        lines = [tuple(map(int, found.groups())) for found in LINK.finditer(self._text())]
        spu = {"bytes": sum(line[0] for line in lines), "messages": sum(line[2] for line in lines)}
        times = {"seconds": time.perf_counter(), "cpu_seconds": time.process_time()}
        self.marks.append({"name": name, **times, "spu": spu, "secretflow": dict(self.sent)})

    def _text(self):
        return self.log.read_text(errors="replace") if self.log.is_file() else ""

    def count(self):
        """Count what SecretFlow sends from here on, in production mode."""
        from secretflow.distributed.fed.proxy.grpc.grpc import GrpcProxy

        connect, sent, lock = GrpcProxy._init_channel, self.sent, threading.Lock()

        class Counted:
            def __init__(self, stub, party):
                self.stub, self.party = stub, party

            def SendData(self, request, **options):
                with lock:
                    sent[f"{self.party}, bytes"] += len(request.data)
                    sent[f"{self.party}, messages"] += 1
                return self.stub.SendData(request, **options)

        def counted_connect(proxy):
            connect(proxy)
            proxy._stubs = {party: Counted(stub, party) for party, stub in proxy._stubs.items()}

        GrpcProxy._init_channel = counted_connect


@click.command()
@click.option("--party", type=click.Choice(PARTIES), help="Production mode: which party this process is.")
@click.option("--ray", "ray_address", help="Address of a Ray cluster that has a node a party, as a resource of its name.")
@click.option("--port", default=26100, help="First of the ports that the parties listen on, on this machine.")
@click.option("--model", "config", default="smollm2")
@click.option("--layers", type=int, help="Only so many layers of it.")
@click.option("--prompt", default="The capital of France is")
@click.option("--tokens", default=4)
@click.option("--delivery", type=click.Choice(["keys", "shares"]), default="keys")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for this process's figures and alice's text.")
def main(party, ray_address, port, config, layers, prompt, tokens, delivery, out):
    out.mkdir(parents=True, exist_ok=True)
    name = party or "driver"
    log = str((out / f"{name}.spu.log").resolve())
    meter = Meter(log)
    if ray_address:
        sf.init(list(PARTIES), address=ray_address, log_to_driver=False)
    else:
        meter.count()
        cluster = {"parties": {each: {"address": f"127.0.0.1:{port + i}"} for i, each in enumerate(PARTIES)}, "self_party": party}
        sf.init(cluster_config=cluster, ray_mode=False, cross_silo_comm_backend="grpc", logging_level="error")
    nodes = [{"party": each, "address": f"127.0.0.1:{port + SPU_PORTS + i}"} for i, each in enumerate(PARTIES[:2])]
    runtime = {"protocol": "SEMI2K", "field": "FM64", "enable_pphlo_profile": True}
    options = spu.logging.LogOptions()
    options.enable_console_logger, options.system_log_path = False, log
    device = sf.SPU({"nodes": nodes, "runtime_config": runtime}, link_desc={"recv_timeout_ms": 600_000}, log_options=options)
    pyus = [sf.PYU(each) for each in PARTIES]
    steps = generate(device, pyus, config, layers, prompt, tokens, delivery, meter)
    sf.wait(pyus[0](save)(steps, str((out / "alice.json").resolve())))
    (out / f"{name}.marks.json").write_text(json.dumps(meter.marks, indent=1))
    sf.shutdown()


if __name__ == "__main__":
    main()
