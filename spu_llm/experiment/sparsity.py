"""Sparse decoding as an experiment says: its decoders, and what was computed of how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..bench.sparse import How, layer_parts
from ..bench.sparse_case import SparseModel
from ..comet.assisted import SparseAssistedDecoder
from ..comet.assisted_fresh import FreshAssistedDecoder
from ..comet.assisted_variable import VariableAssistedDecoder
from ..comet.network import all_heads, network_for, sparse_network
from ..comet.prepared import LayerSparsity, Prepared
from ..comet.renewal import SHUFFLE
from ..comet.secure import SparseSecureDecoder
from ..comet.secure_fresh import FreshSecureDecoder
from ..comet.terms import SparseTerms, terms_of
from ..errors import UserError
from ..generation import AssistedDecoder, SecureDecoder
from ..generation.material import Make, blind_decoder
from ..models import Checkpoint, Decoder
from ..models.config import DecoderConfig
from ..models.published import Published
from ..models.source import content_digest
from ..progress import Progress
from ..runtime import Phase, Session
from ..runtime.assisted import offline
from ..runtime.supply import Supply
from .metrics import seconds_on
from .owner import measured
from .schema import Experiment


def sparsity_file(experiment: Experiment, config: DecoderConfig) -> Prepared:
    """The prepared file. Raises UserError where it is none, or not this model's."""
    assert experiment.sparsity is not None
    if experiment.sparsity.file is None:
        raise UserError("sparsity.file is missing: the owner computes by what `spu-llm prepare comet` made; name its file")
    prepared = Prepared.load(experiment.sparsity.file)
    prepared.check(experiment.sparsity.file, config, content_digest(experiment.model.locate()))
    return prepared


def sparse_secure(session: Session, experiment: Experiment, decoder: Decoder, capacity: int) -> SecureDecoder:
    """By SPU's own operations."""
    assert experiment.sparsity is not None
    layers = sparsity_file(experiment, decoder.config).layers
    if experiment.sparsity.renew == "token":
        return FreshSecureDecoder(session, sparse_network(decoder, all_heads(layers), dense=True), capacity, experiment.prefix)
    network = network_for(experiment.protocol, decoder, layers)
    return SparseSecureDecoder(session, network, capacity, experiment.prefix, experiment.sparsity.tokens)


def sparse_assisted(experiment: Experiment, decoder: Decoder, *args: Any, **kwargs: Any) -> AssistedDecoder:
    """On the plugin, for who has the prepared file; what follows are `AssistedDecoder`'s arguments, but for the decoder."""
    assert experiment.sparsity is not None
    layers = sparsity_file(experiment, decoder.config).layers
    session, *others = args
    if experiment.sparsity.count == "variable":
        renew = experiment.sparsity.tokens
        return VariableAssistedDecoder(session, decoder, *others, sparsity=layers, renew=renew, **kwargs)
    return _assisted(layers, experiment.sparsity.renew, session, decoder, *others, **kwargs)


def blind_maker(terms: SparseTerms | None) -> Make:
    """What makes the decoder of whoever has no weights."""
    if terms is None:
        return blind_decoder

    def make(session: Session, model: Published, capacity: int, supply: Supply, appends: bool) -> AssistedDecoder:
        parts = session, model.decoder, model.calibration, capacity, model.prefix
        others = {"supply": supply, "prefix_rows": model.prefix_rows, "appends": appends}
        return _assisted(terms.blind(model.config), terms.renew, *parts, **others)

    return make


def _assisted(layers: Sequence[LayerSparsity], renew: int | str, *args: Any, **kwargs: Any) -> AssistedDecoder:
    if renew == "token":
        return FreshAssistedDecoder(*args, sparsity=layers, **kwargs)
    return SparseAssistedDecoder(*args, sparsity=layers, renew=renew if isinstance(renew, int) else None, **kwargs)


def recall_metrics(experiment: Experiment, decoder: DecoderConfig) -> dict[str, Any]:
    """Means over layers of the share of the neurons' and heads' mass that is computed, of text that the predictors did not see."""
    found = [layer.measured for layer in sparsity_file(experiment, decoder).layers if layer.measured is not None]
    return {
        "recall": float(np.mean([each.recall for each in found])) if found else None,
        "head_recall": float(np.mean([each.head_recall for each in found])) if found else None,
    }


def sparse_terms(experiment: Experiment, decoder: DecoderConfig) -> SparseTerms:
    """What of the prepared file is public."""
    assert experiment.sparsity is not None
    layers = sparsity_file(experiment, decoder).layers
    if experiment.protocol.ciphertexts or experiment.sparsity.renew == "token":  # no heads are skipped (comet/joint_sparse.py)
        layers = all_heads(layers)
    return terms_of(layers, experiment.sparsity.renew)


def sparse_metrics(
    experiment: Experiment, terms: SparseTerms, phases: Mapping[str, Phase], decoder: DecoderConfig, mode: str | None = None
) -> dict[str, Any]:
    """What metrics.json has of a sparse generation; shares are means over layers, of 1.

    shuffles: renewals of all orders, set-up's included: the parties' traffic and the dealer's, which needs no input and is in no
    token's figures. mode: how seconds came about, if not as the network's mode says.
    """
    assert experiment.sparsity is not None
    layers = terms.layers
    heads = [layer.active_heads for layer in layers]
    shuffle, dealt = phases.get(SHUFFLE, Phase()), phases.get(offline(SHUFFLE), Phase())
    return {
        "active_share": float(np.mean([layer.active_blocks / layer.blocks for layer in layers])),
        "active_heads_share": float(np.mean(heads)) / decoder.heads,
        "active_blocks": [layer.active_blocks for layer in layers],
        "active_heads": heads,
        "renew": terms.renew,
        "count": experiment.sparsity.count,
        "shuffles": {
            "seconds": seconds_on(experiment.network, shuffle, mode),
            "compute_seconds": shuffle.seconds + dealt.seconds,
            "bytes": shuffle.bytes,
            "messages": shuffle.messages,
            "dealt_bytes": dealt.bytes,
        },
    }


def bucket_metrics(decoder: SecureDecoder | AssistedDecoder) -> dict[str, Any]:
    """Where the count of blocks varies: the share that was computed, and of these the share that only filled a bucket up."""
    if not isinstance(decoder, VariableAssistedDecoder):
        return {}
    return {"active_share": decoder.filled.share, "bucket_waste": decoder.filled.waste}


def layer_shares(experiment: Experiment, checkpoint: Checkpoint, prompt: Sequence[int], progress: Progress) -> dict[str, Any]:
    """Of the middle layer and one token after the prompt, measured once more, part by part (bench/sparse.py).

    ffn_speedup, ffn_bytes_ratio: the dense feed-forward part over the sparse one; predictor_share, predictor_bytes_share: of the
    sparse layer. Seconds are the network's. Nothing for fresh orders and varying counts, which that benchmark does not take apart.
    """
    sparsity = experiment.sparsity
    assert sparsity is not None
    if sparsity.renew == "token" or sparsity.count == "variable" or experiment.ops == "generic":
        return {}
    plugin = experiment.ops == "plugin"
    calibration = measured(experiment, checkpoint, progress)[0] if plugin else None
    model = SparseModel(checkpoint.decoder, sparsity_file(experiment, checkpoint.decoder.config).layers, calibration)
    repeats = 3 if experiment.protocol.ciphertexts else 1  # some passes make triples for others
    how, name = How([experiment.network], repeats, products=False), experiment.network.name
    parts = layer_parts(
        "plugin" if plugin else "stock", experiment.protocol, model, [*experiment.prefix, *prompt], 1, how, progress
    )
    return {
        "ffn_speedup": parts["ffn_speedup"][name],
        "ffn_bytes_ratio": parts["ffn_speedup"]["bytes"],
        "predictor_share": parts["predictor_share"][name],
        "predictor_bytes_share": parts["predictor_share"]["bytes"],
    }


def bytes_ratio(sparse: dict[str, Any], dense: dict[str, Any]) -> float | None:
    """How many times the bytes of a token the dense run sends."""
    ours, theirs = (metrics["decode"]["bytes_per_token"] for metrics in (sparse, dense))
    return theirs / ours if ours and theirs else None
