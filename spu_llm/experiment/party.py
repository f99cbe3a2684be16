"""One party's part of a generation between processes: the client decodes, the others follow it pass by pass.

Before anything secret moves the parties compare their settings and versions. Then the client says how long its prompt is, and the
owner publishes its model's shapes and table sizes. Every party learns these, the number of tokens of each pass, and nothing else of
the others' data.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ..comet.terms import SparseTerms
from ..errors import UserError
from ..generation import AssistedDecoder, Sampler, SecureDecoder, TextStream, generate
from ..generation.material import Facts
from ..models import Checkpoint, load_checkpoint
from ..models.calibration import Calibration
from ..models.checkpoint import load_tokenizer
from ..models.plan_check import RangeReport
from ..models.published import Published, publish
from ..models.tokenizer import need_tokenizer
from ..post.generate import follow
from ..progress import Progress, silent
from ..runtime import ProtocolConfig
from ..runtime.beaver import settings
from ..runtime.remote import Peers, RemoteSession
from ..runtime.service import Limits, MaterialPuller, Wanted
from ..runtime.supply import StoredSupply
from .decoding import Decoder, client_decoder, known_disclosure, post_metrics, post_phases, scored_passes
from .files import make_folder, write_whole
from .journal import Journal
from .metrics import collect, peak_memory, ranges_of
from .owner import measured, prepared_file
from .prompt import cache_capacity, check_tokens, encode_prompt
from .schema import Experiment, PartiesConfig
from .sparsity import blind_maker, sparse_assisted, sparse_metrics, sparse_terms

_PATIENCE = 3600.0  # for a message whose dealer is at work; one that is gone is noticed by the puller
_HOLD_ALL = 1 << 50
_METRICS, _MATERIAL = "metrics.json", "material"


def run_client(
    experiment: Experiment,
    out: Path,
    progress: Progress = silent,
    stream: Callable[[str], None] = lambda text: None,
    mode: str | None = None,
) -> dict[str, Any]:
    """Generate as the client, going on where an earlier call with the same settings broke off; writes metrics.json.

    `out` holds the tokens and logits too, which are the client's secrets. `mode`: how the metrics' seconds came about, if not as
    the network's mode says. Raises UserError where a peer fails or does not fit.
    """
    make_folder(out)
    tokenizer = need_tokenizer(load_tokenizer(experiment.model.locate()), experiment.model)
    prompt = encode_prompt(experiment, tokenizer)
    journal, text = Journal(out, _digest(experiment)), TextStream(tokenizer)
    resumed, count = len(journal.tokens), experiment.generation.new_tokens
    for token in journal.tokens:
        stream(text.push(token))
    if journal.done:
        stream(text.finish())
        return _finished(out, text.text, journal.tokens)
    sampler = Sampler(experiment.generation.sampling)
    sampler.skip(resumed)
    with _session(experiment, "client") as session:
        before = prompt + journal.tokens
        opening = {"session": uuid.uuid4().hex, "prompt_tokens": len(before), "new_tokens": count - resumed}
        session.broadcast(json.dumps(opening).encode(), "client")
        told = _told(experiment, session, None)
        model = told.model
        check_tokens(experiment.model.name, model.config, [*model.prefix, *prompt])
        with _decoder(experiment, session, told, opening, out, None) as decoder:
            post = None if experiment.decoding is None else client_decoder(decoder, experiment, tokenizer)
            decoder.set_up(len(before), progress, scored_passes(experiment))
            announced, ends = _Announced(session, decoder), model.config.end_tokens
            if post is None:
                found = generate(announced, before, count - resumed, sampler, ends, session.phase)
            else:
                post.warm_up(before, model.prefix)
                found = post.generate(before, count - resumed, ends, model.prefix)
            for _, step in zip(progress(range(count - resumed), "generating", "token"), found, strict=False):
                journal.add(step, last=step.token in ends or len(journal.tokens) + 1 == count)
                stream(text.push(step.token))
            stream(text.finish())
            session.broadcast(b"0", "client")
        session.gather_costs()
        phases = session.phases if post is None else post_phases(experiment, session.phases)
        metrics = collect(experiment, decoder, phases, before, journal.steps()[resumed:], mode)
        if post is not None:
            metrics["post"] = post_metrics(experiment, session.phases, post.rounds, mode)
        if told.sparsity is not None:
            metrics["comet"] = sparse_metrics(experiment, told.sparsity, session.phases, model.config, mode)
    metrics |= {"text": text.text, "tokens": journal.tokens, "resumed_at": resumed, "peak_rss_bytes": peak_memory()}
    write_whole(out / _METRICS, json.dumps(metrics, indent=1), private=True)
    return metrics


def _finished(out: Path, text: str, tokens: list[int]) -> dict[str, Any]:
    """The metrics of a generation that is whole; its text and tokens alone where it ended before the metrics were written."""
    with suppress(OSError, ValueError):
        metrics = json.loads((out / _METRICS).read_text())
        if metrics["tokens"] == tokens:
            return metrics
    return {"text": text, "tokens": tokens}


def run_follower(experiment: Experiment, role: str, out: Path, progress: Progress = silent) -> None:
    """Take part as the owner, whose weights these are, or as a three-party protocol's helper, until the client is done."""
    make_folder(out)
    owned = _load(experiment, progress) if role == "owner" else None
    with _session(experiment, role) as session:
        opening = json.loads(session.broadcast(b"", "client"))
        told = _told(experiment, session, owned)
        with _decoder(experiment, session, told, opening, out, owned) as decoder:
            decoder.set_up(opening["prompt_tokens"], progress, scored_passes(experiment))
            if experiment.decoding is None:
                _follow(session, decoder)
            else:
                follow(decoder, known_disclosure(decoder, experiment))
        session.gather_costs()
    facts = {"peak_rss_bytes": peak_memory(), "ranges": None if owned is None else ranges_of(owned.ranges)}
    write_whole(out / f"{role}.json", json.dumps(facts))


def _follow(session: RemoteSession, decoder: Decoder) -> None:
    """Token by token, until the client is done."""
    phase = "prefill"
    while True:
        with session.phase(phase):
            count = int(session.broadcast(b"", "client"))
            if count == 0:
                return
            decoder.advance([0] * count)
        phase = "decode"


@dataclass(frozen=True)
class _Owned:
    """What the owner's process has of its model; without calibration on SPU's own operations."""

    checkpoint: Checkpoint
    calibration: Calibration | None
    ranges: RangeReport | None


def _load(experiment: Experiment, progress: Progress) -> _Owned:
    checkpoint = load_checkpoint(experiment.model.locate())
    if experiment.ops == "stock":
        return _Owned(checkpoint, None, None)
    return _Owned(checkpoint, *measured(experiment, checkpoint, progress))


@dataclass(frozen=True)
class _Told:
    """What the owner tells every party, and through them the dealer."""

    model: Published
    sparsity: SparseTerms | None


def _told(experiment: Experiment, session: RemoteSession, owned: _Owned | None) -> _Told:
    """Told by whoever has the model, heard by the others. Raises UserError for a prepared file that is not the model's."""
    model = terms = b""
    config = None if owned is None else owned.checkpoint.decoder.config
    if owned is not None and config is not None:
        model = publish(config, experiment.prefix, owned.calibration).to_json()
    published = Published.from_json(session.broadcast(model, "owner"))
    if experiment.sparsity is None:
        return _Told(published, None)
    if config is not None:
        terms = sparse_terms(experiment, config).to_json()
    heard = SparseTerms.from_json(session.broadcast(terms, "owner"))
    heard.check(published.config, experiment.sparsity.renew)
    return _Told(published, heard)


class _Announced:
    """The client's decoder, which says before each pass how many tokens it takes."""

    def __init__(self, session: RemoteSession, decoder: Decoder):
        self._session, self._decoder = session, decoder

    def advance(self, tokens: Sequence[int]) -> np.ndarray:
        self._session.broadcast(str(len(tokens)).encode(), "client")
        return self._decoder.advance(tokens)


def _parties(experiment: Experiment) -> PartiesConfig:
    if experiment.parties is None:
        raise UserError(
            "parties is missing: say where client, owner and dealer are, and which certificates to show (docs/guide-parties.md)"
        )
    return experiment.parties


@contextmanager
def _session(experiment: Experiment, role: str) -> Iterator[RemoteSession]:
    """The session; where this party fails, the others are told."""
    parties = _parties(experiment)
    if role not in experiment.protocol.roles:
        roles = ", ".join(experiment.protocol.roles)
        raise UserError(f"--role {role}: {experiment.protocol.name} runs between {roles}; use one of these")
    addresses = {name: address for name in ("client", "owner", "helper") if (address := getattr(parties, name)) is not None}
    if len(addresses) < experiment.protocol.world_size:
        raise UserError(f"parties.helper is missing: {experiment.protocol.name} has three parties")
    peers = Peers(role, addresses, parties.identity(role), experiment.network, parties.timeout, parties.patience)
    session = RemoteSession(experiment.protocol, peers, _agreement(experiment))
    with session:
        try:
            yield session
        except BaseException:
            session.fail()
            raise


@contextmanager
def _decoder(
    experiment: Experiment, session: RemoteSession, told: _Told, opening: dict[str, Any], out: Path, owned: _Owned | None
) -> Iterator[Decoder]:
    """This party's decoder, with material on its way to it. `owned`: None where the weights are another's."""
    model, new_tokens, prompt_tokens = told.model, opening["new_tokens"], opening["prompt_tokens"]
    done = experiment.generation.new_tokens - new_tokens
    capacity = cache_capacity(experiment, model.config, len(model.prefix), prompt_tokens - done)
    if experiment.ops == "stock":
        decoder = model.decoder if owned is None else owned.checkpoint.decoder
        yield SecureDecoder(session, decoder, capacity, model.prefix)
        return
    parties, role = _parties(experiment), session.roles[session.rank]
    assert parties.dealer is not None  # as the config was checked
    draft = 0 if experiment.decoding is None else experiment.decoding.longest
    facts = Facts(experiment.model.name, len(model.prefix), prompt_tokens, new_tokens, capacity, draft)
    wanted = Wanted(opening["session"], _wanted(told, facts))
    limits = Limits(parties.patience, _HOLD_ALL) if parties.prefetch else Limits(parties.patience)
    shutil.rmtree(out / _MATERIAL, ignore_errors=True)  # of a generation that broke off, and of no use
    folder = out / _MATERIAL / opening["session"]
    with MaterialPuller(parties.dealer, parties.identity(role), wanted, folder, limits, session.check) as puller:
        if parties.prefetch:
            puller.wait()
        supply = StoredSupply(folder, _PATIENCE, (session.rank,), puller.check)
        if owned is None or owned.calibration is None:
            yield blind_maker(told.sparsity)(session, model, capacity, supply, draft > 0)
        else:
            decoder, rows = owned.checkpoint.decoder, None if experiment.soal is None else prepared_file(experiment).prefix_rows
            measured_on = owned.calibration, capacity, model.prefix, owned.ranges
            kept: dict[str, Any] = {"supply": supply, "prefix_rows": rows, "appends": draft > 0}
            if told.sparsity is None:
                yield AssistedDecoder(session, decoder, *measured_on, **kept)
            else:
                yield sparse_assisted(experiment, decoder, session, *measured_on, **kept)
    shutil.rmtree(folder)


def _wanted(told: _Told, facts: Facts) -> bytes:
    """What the dealer is told."""
    sparsity = None if told.sparsity is None else told.sparsity.to_json().decode()
    return json.dumps({"model": told.model.to_json().decode(), "facts": asdict(facts), "sparsity": sparsity}).encode()


def _agreement(experiment: Experiment) -> dict[str, Any]:
    """What every party must run alike: settings, and the code that traces the programs."""
    wanted = experiment.generation
    return {
        "spu_llm": version("spu_llm"),
        "its code": _code_digest(),
        **{name: version(name) for name in ("jax", "spu")},
        "protocol": _protocol(experiment.protocol),
        "ops": experiment.ops,
        "model": experiment.model.name,
        "new_tokens": wanted.new_tokens,
        "capacity": wanted.capacity,
        "use_prefix": wanted.use_prefix,
        "decoding": _verification(experiment),
        "sparsity": None if experiment.sparsity is None else experiment.sparsity.model_dump(exclude={"file"}),
    }


def _protocol(protocol: ProtocolConfig) -> dict[str, Any]:
    """Its settings; of a Beaver server the key itself, wherever each party keeps it."""
    found = protocol.model_dump(mode="json")
    if protocol.beaver is not None:
        found["beaver"]["public_key"] = settings(protocol.beaver)["ttp_beaver_config"]["server_public_key"]
    return found


def _verification(experiment: Experiment) -> list[Any] | None:
    """What all parties have to know of POST: how long drafts may be, and what is opened."""
    return None if experiment.decoding is None else [experiment.decoding.draft_length, experiment.decoding.disclosure]


def _code_digest() -> str:
    root = Path(__file__).resolve().parents[1]
    whole = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        whole.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return whole.hexdigest()[:16]


def _digest(experiment: Experiment) -> str:
    """Tells generations apart, wherever their parties are."""
    return hashlib.sha256(experiment.model_dump_json(exclude={"network", "parties", "processes", "baseline"}).encode()).hexdigest()
