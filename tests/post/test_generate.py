"""POST's loop and the `distribution` disclosure: what is sampled is the target's distribution, and greedy is greedy."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import GPT2, LLAMA, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from spu_llm.generation import Sampler, SamplingConfig, SecureDecoder, generate
from spu_llm.models import PlainDecoder, load_checkpoint
from spu_llm.post.distribution import Distribution
from spu_llm.post.draft import Draft
from spu_llm.post.draft_length import AutoLength, FixedLength, Round, expected_tokens
from spu_llm.post.generate import PostDecoder, follow
from spu_llm.post.lookup_draft import LookupDraft
from spu_llm.runtime import Phase, ProtocolConfig, Session

PROMPT = [3, 1, 4]
WORDS = 9  # a vocabulary of which all texts of three words can be counted


class Memory:
    """A model's logits after each text, computed once."""

    def __init__(self, decoder):
        self.decoder, self._plain, self._known = decoder, PlainDecoder(decoder, 64), {}

    def logits(self, text):
        if text not in self._known:
            self._plain.length = 0
            self._known[text] = self._plain.advance([*text, *[0] * (64 - len(text))])[len(text) - 1]  # compiled for one length
        return self._known[text]


class Plain:
    """What POST needs of a secure decoder, in plaintext; `says` is what the client told the others."""

    def __init__(self, memory):
        self._memory, self._text, self._scored = memory, (), ()
        self.session = SimpleNamespace(phases={"draft": Phase()}, phase=self._phase, broadcast=self._broadcast)
        self.says = []

    @contextmanager
    def _phase(self, name):
        yield Phase()

    def _broadcast(self, data, role):
        self.says.append(data)
        return data

    @property
    def length(self):
        return len(self._text)

    def advance(self, tokens):
        self._text += tuple(tokens)
        return self._memory.logits(self._text)[None]

    def score(self, tokens):
        self._scored, self._text = self._text, self._text + tuple(tokens)

    def row(self, i):
        return self._memory.logits(self._text[: len(self._scored) + i + 1])

    def roll_back(self, length):
        assert length <= self.length
        self._text = self._text[:length]


class MemoryDraft:
    """Draws as ModelDraft does, from remembered logits."""

    vocabulary = WORDS

    def __init__(self, memory, sampling):
        self._memory, self._sampler, self._seed = memory, Sampler(sampling), sampling.drawn_seed

    def propose(self, tokens, length):
        drafted, rows = [], []
        for _ in range(length):
            rows.append(self._sampler.probabilities(self._memory.logits((*tokens, *drafted))))
            random = np.random.default_rng([self._seed, 2, len(tokens) + len(drafted)])
            drafted.append(int(random.choice(WORDS, p=rows[-1])))
        return Draft(drafted, np.array(rows).reshape(-1, WORDS))


@pytest.fixture(scope="module")
def memories(tmp_path_factory):
    """A target and a draft that agree now and then."""
    folder = tmp_path_factory.mktemp("models")
    small = {"vocab_size": WORDS, "num_hidden_layers": 1}
    folders = [write_checkpoint(folder / str(seed), LLAMA | small, seed) for seed in (1, 2)]
    return [Memory(load_checkpoint(folder).decoder) for folder in folders]


def post(memories, sampling, length):
    target = Plain(memories[0])
    lengths = FixedLength(length, (length,))
    return PostDecoder(target, MemoryDraft(memories[1], sampling), Distribution(target, sampling), lengths)


@pytest.mark.parametrize(
    ("options", "length"),
    [({"temperature": 2.0}, 3), ({"temperature": 1.5, "top_k": 4}, 1), ({"temperature": 3.0, "top_p": 0.8}, 2)],
)
def test_what_is_sampled_follows_the_target(memories, options, length):
    """Chi-square and the likelihood ratio (2 N KL) over 10,500 texts of three words: 21,000 tokens that were verified."""
    texts, counts, accepted = 10_500, np.zeros((WORDS,) * 3), 0
    for seed in range(texts):
        decoder = post(memories, SamplingConfig(seed=seed, **options), length)
        counts[tuple(step.token for step in decoder.generate(PROMPT, 3))] += 1
        accepted += sum(made.accepted for made in decoder.rounds)
    assert 0.1 * texts < accepted < 1.9 * texts  # neither always nor never
    expected, sampler = np.zeros_like(counts), Sampler(SamplingConfig(**options))

    def after(*text):
        return sampler.probabilities(memories[0].logits((*PROMPT, *text)))

    for first, p in enumerate(after()):
        for second, q in enumerate(after(first)):
            expected[first, second] = texts * p * q * after(first, second)
    assert not counts[expected == 0].any()
    groups = np.where(expected >= 5, np.arange(expected.size).reshape(expected.shape), expected.size).ravel()
    found, due = (np.bincount(groups, each.ravel()) for each in (counts, expected))
    found, due = found[due > 0], due[due > 0]
    for kind in ("pearson", "log-likelihood"):
        assert stats.power_divergence(found, due, lambda_=kind).pvalue > 1e-3
    assert stats.power_divergence(found, np.full(len(due), texts / len(due))).pvalue < 1e-9  # it can tell


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1000), new_tokens=st.integers(1, 9), length=st.integers(1, 5), temperature=st.sampled_from([0.0, 2.0]))
def test_nothing_is_opened_behind_the_first_rejection(memories, seed, new_tokens, length, temperature):
    """Rows are asked for one by one, none after a rejection, an end, or the last token wanted; the cache holds the text."""
    sampling = SamplingConfig(seed=seed, temperature=temperature)
    decoder, asked = post(memories, sampling, length), []
    target = decoder.decoder
    row = target.row
    target.row = lambda i: asked.append(i) or row(i)
    steps = list(decoder.generate(PROMPT, new_tokens, ends=(0,)))
    tokens = [step.token for step in steps]
    assert len(tokens) == new_tokens or tokens[-1] == 0
    assert 0 not in tokens[:-1]
    assert sum(made.steps for made in decoder.rounds) == len(tokens) - 1 == len(asked)
    assert asked == [i for made in decoder.rounds for i in range(made.steps)]
    assert target.length == len(PROMPT) + len(tokens) - 1
    for i, step in enumerate(steps):
        assert np.array_equal(step.logits, memories[0].logits((*PROMPT, *tokens[:i])))


def test_greedy_is_greedy_decoding(memories):
    plain = PlainDecoder(memories[0].decoder, 64)
    expected = [step.token for step in generate(plain, PROMPT, 40, lambda logits: int(logits.argmax()))]
    for length in (1, 4):
        assert [step.token for step in post(memories, SamplingConfig(), length).generate(PROMPT, 40)] == expected
    looked = post(memories, SamplingConfig(), 4)
    looked.drafter, looked.lengths = LookupDraft(WORDS), FixedLength(4, (4, 2, 1))
    assert [step.token for step in looked.generate(PROMPT, 40)] == expected
    assert any(made.accepted for made in looked.rounds)


def test_the_other_party_follows(memories):
    client = post(memories, SamplingConfig(temperature=2.0, seed=5), 3)
    steps = list(client.generate(PROMPT, 12))
    assert len(steps) == 12
    owner = Plain(memories[0])
    said = iter([*client.decoder.says, b"0"])
    owner.session.broadcast = lambda data, role: next(said)
    lengths = []
    back = owner.roll_back
    owner.roll_back = lambda length: lengths.append(length) or back(length)
    follow(owner, Distribution(owner, SamplingConfig()))
    assert next(said, None) is None
    assert np.diff([len(PROMPT), *lengths]).tolist() == [made.steps for made in client.rounds]


@pytest.mark.parametrize("config", [LLAMA, GPT2])
def test_between_parties_on_stock_spu(config, tmp_path):
    """Greedy tokens are plaintext's; a pass that is taken back leaves no trace."""
    folder = write_checkpoint(tmp_path, config | {"vocab_size": WORDS})
    decoder = load_checkpoint(folder).decoder
    plain = PlainDecoder(decoder, 64)
    expected = [step.token for step in generate(plain, PROMPT, 8, lambda logits: int(logits.argmax()))]
    with Session(ProtocolConfig()) as session:
        secure = SecureDecoder(session, decoder, 32)
        secure.set_up(len(PROMPT), scored=[3])
        drafter = LookupDraft(WORDS, shortest=1)
        client = PostDecoder(secure, drafter, Distribution(secure, SamplingConfig()), FixedLength(2, (2,)))
        assert [step.token for step in client.generate(PROMPT, 8)] == expected
        assert session.phases["sampling"].messages > 0


@given(acceptance=st.floats(0, 0.999), length=st.integers(0, 16))
def test_expected_tokens_is_the_papers_formula(acceptance, length):
    assert expected_tokens(acceptance, length) == pytest.approx((1 - acceptance ** (length + 1)) / (1 - acceptance), rel=1e-6)


@pytest.mark.parametrize(("acceptance", "each"), [(0.9, 0.05), (0.5, 0.05), (0.9, 1.0), (0.1, 0.3)])
def test_the_length_that_is_chosen_is_good(acceptance, each):
    """After a while nearly as many tokens a second as the best, by the formula for a known acceptance."""
    random, lengths = np.random.default_rng(0), AutoLength()
    used = []
    for _ in range(300):
        length = lengths.choose()
        taken = int(np.argmin([*(random.random(length) < acceptance), False]))
        lengths.learn(Round(length, min(taken + 1, length), taken, taken + 1, 1.0 + each * length))
        used.append(length)
    speeds = {n: expected_tokens(acceptance, n) / (1 + each * n) for n in lengths.sizes}
    assert np.mean([speeds[length] for length in used[100:]]) > 0.9 * max(speeds.values())
    assert lengths.acceptance == pytest.approx(acceptance, abs=0.2)
