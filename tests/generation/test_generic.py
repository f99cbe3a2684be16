"""Decoding on stock SPU with narrowed functions: against plaintext, on three protocols, and for what cost beside SPU's own."""

import dataclasses
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import CONFIGS, LLAMA, write_checkpoint

from spu_llm.cli import main
from spu_llm.errors import UserError
from spu_llm.experiment.schema import load_model
from spu_llm.generation import SecureDecoder
from spu_llm.models import PlainDecoder, load_checkpoint
from spu_llm.models.calibration import LayerRanges, calibrate
from spu_llm.models.narrow import narrow_decoder, plan_narrow
from spu_llm.primitives.narrow.pieces import Pieces
from spu_llm.runtime import ProtocolConfig, Session
from spu_llm.soal.maxima import by_reference, measure_maxima

PROMPT = [5, 17, 96, 2, 40]
PREFIX = (7, 8)
CAPACITY = 20
MIXTRAL = Path(__file__).parents[1] / "models" / "mixtral" / "mixtral.yaml"
ONE_LAYER_ONE_HEAD = LLAMA | {
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
LAYERS = {"gpt2": "n_layer", "llama": "num_hidden_layers", "opt": "num_hidden_layers"}


def loaded(config, folder):
    """A decoder whose queries and keys are small: weights drawn as in conftest give scores like no model's."""
    decoder = load_checkpoint(write_checkpoint(folder, config)).decoder
    attending = (decoder.config.heads + decoder.config.kv_heads) * decoder.config.head_width
    scale = np.where(np.arange(decoder.params["layers"][0]["qkv"]["kernel"].shape[1]) < attending, 0.5, 1.0).astype(np.float32)
    layers = [layer | {"qkv": layer["qkv"] | {"kernel": layer["qkv"]["kernel"] * scale}} for layer in decoder.params["layers"]]
    return dataclasses.replace(decoder, params=decoder.params | {"layers": layers})


def calibrated(decoder, reference="learned", prefix=PREFIX):
    random = np.random.default_rng(0)
    texts = [random.integers(0, decoder.config.vocabulary, 18).tolist() for _ in range(30)]
    found = calibrate(decoder, texts, prefix)
    if reference == "learned":
        return found
    measured = measure_maxima(decoder, texts, prefix, found)
    return by_reference(found, reference, getattr(measured, reference))


def passes(decoder, protocol, narrow, prefix=PREFIX):
    """Largest difference of logits from plaintext over some passes, and the phase of a one-token pass."""
    plain = PlainDecoder(decoder, CAPACITY)
    if prefix:
        plain.advance(prefix)
    errors = []
    with Session(protocol) as session:
        secure = SecureDecoder(session, decoder, CAPACITY, prefix, narrow)
        secure.set_up(len(PROMPT))
        for tokens in (PROMPT, [11], [12, 13]):
            with session.phase(f"{len(tokens)}"):
                found = secure.advance(tokens, last_only=False)
            want = plain.advance(tokens)
            assert found.shape == want.shape
            errors.append(np.abs(found - want).max())
        secure.roll_back(len(prefix) + len(PROMPT))
        plain.length = secure.length
        errors.append(np.abs(secure.advance([50])[-1] - plain.advance([50])[-1]).max())
        assert [program.name for program in session.programs if program.reveals] == []
        return max(errors), session.phases["1"]


def own_cost(decoder, protocol, prefix=PREFIX):
    """The phase of a one-token pass by SPU's own functions."""
    with Session(protocol) as session:
        secure = SecureDecoder(session, decoder, CAPACITY, prefix)
        secure.set_up()
        with session.phase("1") as phase:
            secure.advance([11])
    return phase


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_equal_plaintext_for_less(family, tmp_path):
    decoder = loaded(CONFIGS[family], tmp_path)
    narrow = narrow_decoder(decoder, calibrated(decoder), CAPACITY, len(PREFIX))
    error, cost = passes(decoder, ProtocolConfig(), narrow)
    own = own_cost(decoder, ProtocolConfig())
    assert error < 0.04
    assert cost.messages < 0.55 * own.messages
    assert cost.bytes < 0.6 * own.bytes


@pytest.mark.parametrize(
    ("protocol", "family"), [("ABY3", "llama"), ("ABY3", "gpt2"), ("CHEETAH", "llama"), ("FM128", "opt")], ids=lambda x: x
)
def test_other_protocols_and_rings(protocol, family, tmp_path):
    decoder = loaded(CONFIGS[family] | {LAYERS[family]: 1}, tmp_path)
    settings = {"ring": "FM128", "fraction_bits": 26} if protocol == "FM128" else {"name": protocol}
    narrow = narrow_decoder(decoder, calibrated(decoder), CAPACITY, len(PREFIX))
    error, _ = passes(decoder, ProtocolConfig(**settings), narrow)
    assert error < 0.04


@pytest.mark.parametrize("reference", ["sink", "maxima"])
def test_references_that_are_scores(reference, tmp_path):
    """The score of position 0, and the largest among the prefix, the first position and the last two; no prefix, one head."""
    decoder = loaded(ONE_LAYER_ONE_HEAD, tmp_path)
    narrow = narrow_decoder(decoder, calibrated(decoder, reference, ()), CAPACITY)
    assert [plan.leading for plan in narrow.plan.layers] == [1 if reference == "maxima" else 0]
    error, _ = passes(decoder, ProtocolConfig(), narrow, ())
    assert error < 0.04


def test_messages_of_a_token_do_not_grow_with_heads(tmp_path):
    sent = []
    for groups in (1, 4):
        decoder = loaded(LLAMA | {"num_hidden_layers": 1, "num_key_value_heads": groups}, tmp_path / str(groups))
        error, cost = passes(decoder, ProtocolConfig(), narrow_decoder(decoder, calibrated(decoder), CAPACITY, len(PREFIX)))
        assert error < 0.04
        sent.append(cost.messages)
    assert sent[0] == sent[1]


def test_mixture_of_experts():
    model = load_model(str(MIXTRAL))
    checkpoint = load_checkpoint(model.locate())
    texts = [checkpoint.tokenizer.encode(line)[:CAPACITY] for line in model.calibration.read_text().splitlines() if line.strip()]
    decoder = checkpoint.decoder
    error, cost = passes(decoder, ProtocolConfig(), narrow_decoder(decoder, calibrate(decoder, texts), CAPACITY), ())
    assert error < 0.05
    assert cost.messages < 0.6 * own_cost(decoder, ProtocolConfig(), ()).messages


# Plans

NEAR = LayerRanges((0.5, 1.0), (1.0, 3.0), (-12.0, 3.0), (-1.0, 3.0), (-4.0, 3.0))


@cache
def mixtral_calibrated():
    decoder = load_checkpoint(load_model(str(MIXTRAL)).locate()).decoder
    return decoder.config, calibrated(decoder, prefix=())


def planned(*layers, family="llama", **changes):
    config, calibration = mixtral_calibrated()
    calibration = dataclasses.replace(calibration, layers=layers, **changes)
    return plan_narrow(dataclasses.replace(config, family=family), calibration, CAPACITY)


def test_layers_of_few_kinds():
    wide = dataclasses.replace(NEAR, ffn_squares=(1.0, 400.0))
    gated = dataclasses.replace(NEAR, activation=(-30.0, 9.0))
    plans = planned(NEAR, wide, gated, NEAR, dataclasses.replace(NEAR, activation=(-13.0, 9.0)), final_squares=(1.0, 2.0)).layers
    assert [isinstance(plan.norm, Pieces) for plan in plans] == [False, True, False, False, False]
    assert len({plan.activation for plan in plans}) == 2
    assert all(plan.activation.largest >= 1.3 * 30 for plan in plans[2:3])
    assert plans[0].activation.chain.levels < plans[2].activation.chain.levels + 8 * plans[2].activation.tail


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"ffn_squares": (1e-9, 1.0)},
            "layer 1, norms: mean squares on the calibration text: a range of ratio 4e.09 takes 15 comp",
        ),
        ({"activation": (-70.0, 1.0)}, "layer 1: inputs on the calibration text: silu up to 91: the widest plan reaches 64; give"),
        (
            {"relative": (-300.0, 1.0)},
            "scores less their reference on the calibration text: exp from -187.5 to 1.875",
        ),
    ],
)
def test_a_range_beyond_every_plan_is_refused_with_a_remedy(change, message):
    with pytest.raises(UserError, match=message) as raised:
        planned(NEAR, dataclasses.replace(NEAR, **change))
    assert "give the model a prefix that takes its outliers" in str(raised.value)


# Commands


def test_generate_and_bench(tmp_path):
    run = CliRunner().invoke(
        main, ["generate", "--model", str(MIXTRAL), "--ops", "generic", "--prompt", "S", "--tokens", "2", "--quiet"]
    )
    assert run.exit_code == 0, run.output
    assert "100% of tokens as in plaintext" in run.output
    shape = ["--width", "32", "--heads", "4", "--ffn", "48", "--context", "5", "--repeats", "1", "--protocol", "ABY3", "--json"]
    run = CliRunner().invoke(main, ["bench", "layer", "--ops", "generic", "--family", "gpt2", *shape])
    found = json.loads(run.output)
    assert found["ops"] == "generic"
    assert found["messages"] < 0.5 * found["stock"]["messages"]
    assert found["max_error"] < 0.01


def test_too_few_fraction_bits():
    arguments = ["generate", "--model", str(MIXTRAL), "--ops", "generic", "--prompt", "x", "--fraction-bits", "16"]
    run = CliRunner().invoke(main, arguments)
    assert run.exit_code == 2
    assert "ops generic has coefficients of 18 fraction bits, protocol only 16" in run.output
