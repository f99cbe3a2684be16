"""Decoding by POST as an experiment says: its parts, and what its rounds cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..generation import AssistedDecoder, SecureDecoder
from ..models import Checkpoint, load_checkpoint
from ..models import Decoder as PlainModel
from ..models.calibration_file import read_passages
from ..models.centred_head import CentredHead, centred_head
from ..models.source import ModelConfig
from ..models.tokenizer import Tokenizer, need_tokenizer
from ..post.distribution import Distribution
from ..post.draft import Drafter, ModelDraft
from ..post.draft_length import AutoLength, FixedLength, Lengths, Round
from ..post.flags import MOST_SPAN, DealtVerifier, Flags, check_sampling, plan_dealt
from ..post.flags_stock import StockVerifier, plan_stock
from ..post.generate import PHASES, Disclosure, PostDecoder
from ..post.lookup_draft import LookupDraft
from ..post.vocabulary import same_rows, same_tokenizer
from ..progress import Progress
from ..runtime import Phase
from ..runtime.assisted import offline
from ..runtime.profile import Traffic
from .metrics import seconds_on
from .schema import Experiment

Decoder = AssistedDecoder | SecureDecoder


@dataclass(frozen=True)
class Target:
    """The model whose text is wanted: `head` where drafts are tested under encryption, which asks for another output layer."""

    decoder: PlainModel
    head: CentredHead | None = None


def target_model(experiment: Experiment, checkpoint: Checkpoint, progress: Progress) -> Target:
    """The owner's model as it is decoded. UserError where the disclosure cannot serve it."""
    if experiment.decoding is None or experiment.decoding.disclosure == "distribution":
        return Target(checkpoint.decoder)
    sampling = experiment.generation.sampling
    check_sampling(sampling, checkpoint.decoder.config.vocabulary)
    texts = read_passages(experiment.model, checkpoint)[1]
    most = MOST_SPAN if experiment.ops == "plugin" else inf  # stock SPU has no second reference
    head = centred_head(checkpoint.decoder, texts, sampling.temperature, most, experiment.prefix, progress)
    return Target(head.decoder, head)


def post_decoder(decoder: Decoder, experiment: Experiment, target: Target, tokenizer: Tokenizer) -> PostDecoder:
    """The client's end, with all parties in this process. UserError where the draft's tokenizer is another than the target's."""
    return _post_decoder(decoder, experiment, _disclosure(decoder, experiment, target), tokenizer, None)


def client_decoder(decoder: Decoder, experiment: Experiment, tokenizer: Tokenizer) -> PostDecoder:
    """The same where the others are processes, whose traffic is not known before the end: rounds are timed by the clock."""
    return _post_decoder(decoder, experiment, known_disclosure(decoder, experiment), tokenizer, "measured")


def scored_passes(experiment: Experiment) -> list[int]:
    """Tokens of the passes that verify drafts."""
    return [] if experiment.decoding is None else [1 + size for size in experiment.decoding.sizes]


def known_disclosure(decoder: Decoder, experiment: Experiment) -> Distribution:
    """What every process knows of how a pass is opened."""
    return Distribution(decoder, experiment.generation.sampling)


def _disclosure(decoder: Decoder, experiment: Experiment, target: Target) -> Disclosure:
    sampling, head = experiment.generation.sampling, target.head
    if head is None or experiment.decoding is None:
        return Distribution(decoder, sampling)
    every = experiment.decoding.disclosure == "all-flags"
    if isinstance(decoder, AssistedDecoder):
        return Flags(decoder, sampling, DealtVerifier(decoder.assisted, plan_dealt(head, sampling), every))
    return Flags(decoder, sampling, StockVerifier(decoder.session, plan_stock(head, sampling), every))


def _post_decoder(
    decoder: Decoder, experiment: Experiment, disclosure: Disclosure, tokenizer: Tokenizer, mode: str | None
) -> PostDecoder:
    decoding, phases, network = experiment.decoding, decoder.session.phases, experiment.network
    assert decoding is not None
    length, sizes = decoding.draft_length, decoding.sizes
    lengths: Lengths = AutoLength(sizes) if length == "auto" else FixedLength(length, sizes)

    def clock() -> float:
        return seconds_on(network, post_phases(experiment, phases)["decode"], mode)

    return PostDecoder(decoder, _drafter(experiment, decoder, tokenizer), disclosure, lengths, clock)


def post_phases(experiment: Experiment, phases: Mapping[str, Phase]) -> dict[str, Phase]:
    """A session's phases with whole rounds as `decode`, their dealing too."""
    rounds = list(_rounds(experiment, phases).values())
    dealt = [phases[offline(name)] for name in PHASES if offline(name) in phases]
    return {**phases, "decode": _sum(rounds), offline("decode"): _sum(dealt)}


def post_metrics(
    experiment: Experiment, phases: Mapping[str, Phase], rounds: Sequence[Round], mode: str | None = None
) -> dict[str, Any]:
    """What metrics.json has of a generation by POST."""
    assert experiment.decoding is not None
    seconds = {name: seconds_on(experiment.network, phase, mode) for name, phase in _rounds(experiment, phases).items()}
    whole = sum(seconds.values())
    tested, drafted = sum(made.tested for made in rounds), sum(made.drafted for made in rounds)
    return {
        "draft_model": _draft_name(experiment),
        "draft_length": experiment.decoding.draft_length,
        "mean_draft_length": drafted / max(1, len(rounds)),
        "disclosure": experiment.decoding.disclosure,
        "acceptance_rate": sum(made.accepted for made in rounds) / tested if tested else None,
        "tokens_per_round": sum(made.steps for made in rounds) / max(1, len(rounds)),
        "sampling_share": seconds["sampling"] / whole if whole else 0.0,
        "draft_share": seconds["draft"] / whole if whole else 0.0,
        "rounds": [vars(made) for made in rounds],
    }


def _drafter(experiment: Experiment, decoder: Decoder, target: Tokenizer) -> Drafter:
    decoding, config = experiment.decoding, decoder.decoder.config
    assert decoding is not None
    if not isinstance(decoding.draft_model, ModelConfig):
        return LookupDraft(config.vocabulary)
    checkpoint = load_checkpoint(decoding.draft_model.locate())
    same_tokenizer(target, need_tokenizer(checkpoint.tokenizer, decoding.draft_model))
    draft = checkpoint.decoder
    same_rows(config, draft.config)
    # of an ordinary cache as many as there are rows; rows that were taken back are none of the draft's
    positions = min(decoder.capacity, config.positions)
    if draft.config.positions < positions:
        raise UserError(
            f"decoding.draft_model {decoding.draft_model.name}: has {draft.config.positions} positions, but the cache {positions}; "
            "shorten the generation, or draft with another model"
        )
    return ModelDraft(draft, positions, experiment.generation.sampling)


def draft_files(experiment: Experiment) -> list[Path]:
    """The draft model's own files."""
    model = None if experiment.decoding is None else experiment.decoding.draft_model
    if not isinstance(model, ModelConfig):
        return []
    checkpoint = model.locate()
    return sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]


def _draft_name(experiment: Experiment) -> str:
    assert experiment.decoding is not None
    model = experiment.decoding.draft_model
    return model.name if isinstance(model, ModelConfig) else model


def _rounds(experiment: Experiment, phases: Mapping[str, Phase]) -> dict[str, Phase]:
    """What the parts of all rounds took, messages as they are waited for."""
    found = {name: phases.get(name, Phase()) for name in PHASES}
    if experiment.decoding is not None and experiment.decoding.disclosure == "distribution":
        found["sampling"] = _in_turn(found["sampling"])
    return found


def _in_turn(phase: Phase) -> Phase:
    """Of parties that answer each other: each of the owner's rows waits for the client's word; those of an exchange cross."""
    messages = 2 * phase.sent[1].messages if phase.sent else 0
    return replace(phase, sent=[Traffic(traffic.bytes, messages) for traffic in phase.sent])


def _sum(phases: Sequence[Phase]) -> Phase:
    total = Phase()
    for phase in phases:
        total.seconds += phase.seconds
        if phase.sent:
            total.add(phase.sent)
        total.add_ops(phase.ops)
    return total
