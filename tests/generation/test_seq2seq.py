"""Secure T5 against plaintext, which tests/models/test_t5.py holds against transformers: prompts, passes of several, roll back."""

import numpy as np
import pytest
from t5_checkpoint import FLAN, ONE_HEAD, T5_1_0, write_t5

from spu_llm.errors import UserError
from spu_llm.generation import Sampler, SamplingConfig, generate
from spu_llm.generation.seq2seq import SecureSeq2Seq
from spu_llm.models.checkpoint import load_t5
from spu_llm.models.t5 import PlainT5
from spu_llm.runtime import ProtocolConfig, Session

PROMPT = [5, 17, 60, 2, 40, 33, 8]
GREEDY = Sampler(SamplingConfig())
ERROR = 0.03


@pytest.fixture
def model(request, tmp_path):
    return load_t5(write_t5(tmp_path / "model", request.param)).model


def both(session, model, capacity=20):
    """A secure and a plaintext T5."""
    secure = SecureSeq2Seq(session, model, capacity)
    secure.set_up()
    return secure, PlainT5(model, capacity)


def apart(secure, plain, tokens, **how):
    """How far logits are apart."""
    found, want = secure.advance(tokens, **how), plain.advance(tokens)
    assert found.shape == want[-len(found) :].shape
    return np.abs(found - want[-len(found) :]).max()


@pytest.mark.parametrize(
    ("model", "name", "ring"),
    [(T5_1_0, "SEMI2K", "FM64"), (FLAN, "SEMI2K", "FM64"), (FLAN, "ABY3", "FM64"), (T5_1_0, "SEMI2K", "FM128")],
    ids=["1.0", "FLAN", "ABY3", "FM128"],
    indirect=["model"],
)
def test_greedy_tokens_equal_plaintext(model, name, ring):
    with Session(ProtocolConfig(name=name, ring=ring)) as session:
        secure, plain = both(session, model)
        for decoder in (secure, plain):
            decoder.encode(PROMPT)
        ours = list(generate(secure, [model.config.start_token], 4, GREEDY))
    theirs = list(generate(plain, [model.config.start_token], 4, GREEDY))
    assert [step.token for step in ours] == [step.token for step in theirs]
    assert max(np.abs(a.logits - b.logits).max() for a, b in zip(ours, theirs, strict=True)) < ERROR


@pytest.mark.parametrize("model", [ONE_HEAD], indirect=True)
def test_cheetah(model):
    with Session(ProtocolConfig(name="CHEETAH")) as session:
        secure, plain = both(session, model)
        for decoder in (secure, plain):
            decoder.encode(PROMPT[:3])
        assert apart(secure, plain, [0, 4], last_only=False) < ERROR


@pytest.mark.parametrize("model", [FLAN, ONE_HEAD], ids=["FLAN", "one head"], indirect=True)
def test_drafts_are_rolled_back_and_another_prompt_is_taken(model):
    """What POST does: passes of several tokens with all logits, of which only the first stay."""
    with Session(ProtocolConfig()) as session:
        secure, plain = both(session, model)
        for prompt in (PROMPT, [9]):
            secure.encode(prompt)
            plain.encode(prompt)
            assert apart(secure, plain, [0]) < ERROR
            for tokens, keep in (([3, 4, 5, 6, 7], 3), ([50, 51, 52], 6), ([11], 4)):
                assert apart(secure, plain, tokens, last_only=False) < ERROR
                secure.roll_back(keep)
                plain.roll_back(keep)
            assert apart(secure, plain, [8]) < ERROR
            secure.roll_back(0)
            plain.roll_back(0)
            assert apart(secure, plain, [0, 13, 14], last_only=False) < ERROR
            with pytest.raises(ValueError, match="roll back"):
                secure.roll_back(4)


@pytest.mark.parametrize("model", [FLAN], indirect=True)
def test_scored_rows_are_given_one_by_one(model):
    with Session(ProtocolConfig()) as session:
        secure, plain = both(session, model)
        for decoder in (secure, plain):
            decoder.encode(PROMPT)
        secure.score([0, 9, 10])
        want = plain.advance([0, 9, 10])
        assert max(np.abs(secure.row(i) - want[i]).max() for i in range(3)) < ERROR
        assert not [program.name for program in session.programs if program.reveals]


@pytest.mark.parametrize("model", [FLAN], indirect=True)
def test_a_prompt_costs_once(model):
    """For a longer prompt a pass sends more for scores and weights, but does not open its keys and values again."""
    sent = []
    with Session(ProtocolConfig()) as session:
        secure, _ = both(session, model)
        for length in (16, 32):
            secure.encode([7] * length)
            secure.advance([0])
            with session.phase(f"pass {length}") as phase:
                secure.advance([1])
            sent.append(phase)
    short, long = sent
    config = model.config
    opened_again = 8 * 2 * 16 * config.heads_width * config.layers
    assert long.ops["dot"].bytes - short.ops["dot"].bytes < opened_again / 2


@pytest.mark.parametrize("model", [FLAN], indirect=True)
def test_arguments(model):
    with Session(ProtocolConfig()) as session:
        secure = SecureSeq2Seq(session, model, 4)
        secure.set_up(prompt_tokens=5)
        with pytest.raises(ValueError, match="no prompt yet"):
            secure.advance([0])
        for wrong in ([], [97], [-1]):
            with pytest.raises(ValueError, match="vocabulary"):
                secure.encode(wrong)
        secure.encode(PROMPT)
        with pytest.raises(UserError, match="5 positions exceed the cache capacity 4"):
            secure.advance([0] * 5)
