"""Secure decoding against plaintext, and what it opens and sends."""

import dataclasses

import numpy as np
import pytest
from conftest import CONFIGS, GPT2, LLAMA, OPT, write_checkpoint
from spu import libspu

from spu_llm.errors import UserError
from spu_llm.experiment.schema import load_model
from spu_llm.generation import Sampler, SamplingConfig, SecureDecoder, generate
from spu_llm.generation.secure import vocabulary_block
from spu_llm.models import Decoder, PlainDecoder, load_checkpoint
from spu_llm.runtime import ProtocolConfig, Session

PROMPT = [5, 17, 96, 2, 40]
GREEDY = Sampler(SamplingConfig())


def both(decoder, protocol, prefix=(), capacity=20):
    """A session with a decoder set up in it, and the plaintext decoder at the same position."""
    session = Session(protocol)
    secure = SecureDecoder(session, decoder, capacity, prefix)
    secure.set_up()
    plain = PlainDecoder(decoder, capacity)
    if prefix:
        plain.advance(prefix)
    return session, secure, plain


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(("name", "ring"), [("SEMI2K", "FM64"), ("SEMI2K", "FM128"), ("ABY3", "FM64"), ("CHEETAH", "FM64")])
def test_greedy_tokens_equal_plaintext(family, name, ring, checkpoints):
    decoder = load_checkpoint(checkpoints[family]).decoder
    prompt, count = (PROMPT[2:4], 2) if name == "CHEETAH" else (PROMPT, 4)  # it computes for seconds a token
    session, secure, plain = both(decoder, ProtocolConfig(name=name, ring=ring))
    with session:
        ours = list(generate(secure, prompt, count, GREEDY, phase=session.phase))
    theirs = list(generate(plain, prompt, count, GREEDY))
    assert [step.token for step in ours] == [step.token for step in theirs]
    assert np.abs(np.stack([a.logits - b.logits for a, b in zip(ours, theirs, strict=True)])).max() < 0.03


ONE_HEAD = LLAMA | {"num_attention_heads": 1, "num_key_value_heads": 1}


@pytest.mark.parametrize("config", [ONE_HEAD, GPT2, OPT], ids=lambda c: c["model_type"])
def test_several_tokens_prefix_and_roll_back(config, tmp_path):
    decoder = load_checkpoint(write_checkpoint(tmp_path / "model", config)).decoder
    session, secure, plain = both(decoder, ProtocolConfig(), prefix=(7, 8))
    with session:
        for tokens in (PROMPT, [11], [12, 13, 14]):
            found, want = secure.advance(tokens, last_only=False), plain.advance(tokens)
            assert found.shape == want.shape
            assert np.abs(found - want).max() < 0.03
        secure.roll_back(8)
        plain.length = 8
        assert np.abs(secure.advance([50])[-1] - plain.advance([50])[-1]).max() < 0.03
        with pytest.raises(ValueError, match="roll back"):
            secure.roll_back(1)


def test_fills_the_cache_and_no_more(checkpoints):
    decoder = load_checkpoint(checkpoints["llama"]).decoder
    session, secure, plain = both(decoder, ProtocolConfig(), capacity=7)
    with session:
        assert np.abs(secure.advance(PROMPT)[-1] - plain.advance(PROMPT)[-1]).max() < 0.03
        assert np.abs(secure.advance([1, 2])[-1] - plain.advance([1, 2])[-1]).max() < 0.03
        with pytest.raises(UserError, match="8 positions exceed the cache capacity 7"):
            secure.advance([3])


def test_capacity_beyond_the_model(checkpoints):
    decoder = load_checkpoint(checkpoints["llama"]).decoder
    with Session(ProtocolConfig()) as session, pytest.raises(UserError, match="the model has 64 positions"):
        SecureDecoder(session, decoder, 65)


@pytest.mark.parametrize("name", ["SEMI2K", "ABY3", "CHEETAH"])
def test_nothing_is_revealed_to_everyone(name, checkpoints):
    """No program opens a value, the logits stay secret in every party, and only the client is sent anything of them."""
    decoder = load_checkpoint(checkpoints["llama"]).decoder
    session, secure, _ = both(decoder, ProtocolConfig(name=name))
    with session:
        secure.advance(PROMPT[:2])
        secure.advance([1])
        assert len(session.programs) >= 6
        assert [program.name for program in session.programs if program.reveals] == []
        for party in session.parties:
            meta = party.submit(party.runtime.get_var_meta, "logits").result()
            assert meta.visibility == libspu.Visibility.VIS_SECRET
        with session.phase("out") as phase:
            session.receive_narrow("logits", 36)
        assert phase.sent[0].messages == 0
        rows = 97 + 97 % vocabulary_block(decoder, session.protocol)
        assert phase.bytes == 4 * rows, "32 bits a logit, whatever the ring"


def test_shares_alone_say_nothing_of_the_logits(checkpoints):
    """What the client holds before the owner sends its share is spread over the whole ring."""
    decoder = load_checkpoint(checkpoints["llama"]).decoder
    session, secure, _ = both(decoder, ProtocolConfig())
    with session:
        secure.advance(PROMPT)
        for party in session.parties:
            share = party.submit(party.runtime.get_var, "logits").result()
            chunk = libspu.ValueChunk()
            chunk.ParseFromString(share.share_chunks[0])
            top = np.frombuffer(chunk.content, np.uint64) >> np.uint64(60)
            assert len(set(top.tolist())) > 10


def test_weights_cost_nothing_after_set_up(tmp_path):
    """Decode traffic of the linear layers follows activations: it does not grow when the weights do."""
    sent = []
    for ffn in (64, 128):
        folder = write_checkpoint(tmp_path / str(ffn), OPT | {"ffn_dim": ffn})
        decoder = load_checkpoint(folder).decoder
        session, secure, _ = both(decoder, ProtocolConfig())
        with session:
            secure.advance(PROMPT)
            with session.phase("decode") as phase:
                secure.advance([1])
            again = session.phases["again"]
            with session.phase("again"):
                secure.advance([2])
        assert (again.bytes, again.messages) == (phase.bytes, phase.messages)
        sent.append(phase.ops["dot"].bytes)
    width, extra, layers = 32, 64, 2
    grown = sent[1] - sent[0]
    assert grown < 8 * extra * width * layers / 4, "a quarter of the added weights at the very most"
    # each of the added hidden units is opened once as input and its product's output truncated nowhere in dot
    assert grown >= 8 * extra * layers


def test_id_lookup_is_cheapest_at_its_block_size(checkpoints):
    decoder = load_checkpoint(checkpoints["llama"]).decoder
    big = dataclasses.replace(decoder, config=dataclasses.replace(decoder.config, vocabulary=49152, width=576))
    assert vocabulary_block(big, ProtocolConfig(name="ABY3")) == 1
    best = vocabulary_block(big, ProtocolConfig())
    cost = {b: 49152 / b + b * 577 for b in (1, best // 2, best, best * 2)}
    assert min(cost, key=cost.get) == best


def test_smollm2():
    """Real weights in the 64-bit ring: the first four of the model's thirty layers, and the first sixth of its vocabulary."""
    model = load_model("smollm2")
    checkpoint = load_checkpoint(model.locate())
    whole, layers, words = checkpoint.decoder, 4, 8192
    embed = {"table": whole.params["embed"]["table"][:words]}
    config = dataclasses.replace(whole.config, layers=layers, vocabulary=words)
    cut = Decoder(config, {**whole.params, "embed": embed, "layers": whole.params["layers"][:layers]})
    prompt = checkpoint.tokenizer.encode("One, two, three, four,")
    assert max(prompt) < words
    session, secure, plain = both(cut, ProtocolConfig(), prefix=model.prefix, capacity=32)
    with session:
        with session.phase("prompt"):
            found = [secure.advance(prompt)]
        with session.phase("decode") as decode:
            found.append(secure.advance([found[0][-1].argmax()]))
    wanted = [plain.advance(prompt)[-1:], plain.advance([found[0][-1].argmax()])]
    assert max(np.abs(a - b).max() for a, b in zip(found, wanted, strict=True)) < 0.05
    assert decode.bytes < 10e6, "weights are 0.15 GB in this ring: they must not be sent again"
