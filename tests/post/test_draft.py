"""Drafts by a model: the fast decoder against the reference, and draws from the distributions that are told."""

from itertools import pairwise

import numpy as np
import pytest
from conftest import CONFIGS, LLAMA, write_checkpoint, write_tokenizer
from scipy.stats import chisquare
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from spu_llm.errors import UserError
from spu_llm.generation import Sampler, SamplingConfig, generate
from spu_llm.models import PlainDecoder, Tokenizer, load_checkpoint
from spu_llm.models.fast import FastDecoder
from spu_llm.models.tokenizer import read_folder_tokenizer
from spu_llm.post.draft import ModelDraft
from spu_llm.post.vocabulary import same_tokenizer

PROMPT = [3, 14, 15, 92, 65]
SAMPLINGS = [
    SamplingConfig(temperature=0.7, seed=1),
    SamplingConfig(temperature=1.5, top_k=5, seed=2),
    SamplingConfig(temperature=1.0, top_p=0.6, seed=3),
    SamplingConfig(temperature=2.0, top_k=40, top_p=0.9, seed=4),
]


@pytest.fixture(scope="module")
def decoder(checkpoints):
    return load_checkpoint(checkpoints["llama"]).decoder


@pytest.mark.parametrize("family", CONFIGS)
def test_fast_decoder_is_the_reference(family, checkpoints):
    decoder = load_checkpoint(checkpoints[family]).decoder
    tokens = np.random.default_rng(0).integers(0, 97, 64)
    want = PlainDecoder(decoder, 64).advance(tokens)
    fast = FastDecoder(decoder, 64)  # as many as there are positions: padded passes reach past both
    for parts in ((1, 2, 5, 17, 39), (64,), (33, 1, 1, 29)):
        fast.roll_back(0)
        edges = np.cumsum((0, *parts))
        found = np.concatenate([fast.advance(tokens[a:b]) for a, b in pairwise(edges)])
        assert np.abs(found - want).max() < 1e-4
        assert np.array_equal(found.argmax(-1), want.argmax(-1))


def test_fast_decoder_after_rolling_back(decoder):
    fast, plain = FastDecoder(decoder, 30), PlainDecoder(decoder, 30)
    fast.advance([*PROMPT, 7, 7, 7, 7, 7, 7])
    fast.roll_back(len(PROMPT))
    assert np.abs(fast.advance([1, 2])[-1] - plain.advance([*PROMPT, 1, 2])[-1]).max() < 1e-4
    assert fast.advance([]).shape == (0, 97)
    with pytest.raises(ValueError, match="roll back"):
        fast.roll_back(8)


@pytest.mark.parametrize("capacity", [0, 65])
def test_capacity_that_the_model_does_not_have(decoder, capacity):
    with pytest.raises(UserError, match="the model has 64"):
        FastDecoder(decoder, capacity)


def test_more_tokens_than_the_cache_holds(decoder):
    with pytest.raises(UserError, match="room for 8"):
        FastDecoder(decoder, 8).advance(range(9))


def test_greedy_draft_is_greedy_decoding(decoder):
    steps = generate(PlainDecoder(decoder, 40), PROMPT, 12, Sampler(SamplingConfig()))
    draft = ModelDraft(decoder, 40, SamplingConfig()).propose(PROMPT, 12)
    assert draft.tokens == [step.token for step in steps]
    assert np.array_equal(draft.probabilities, np.eye(97)[draft.tokens])


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_rows_are_the_distributions_of_the_target_s_sampling(decoder, sampling):
    draft = ModelDraft(decoder, 40, sampling).propose(PROMPT, 6)
    logits = PlainDecoder(decoder, 40).advance([*PROMPT, *draft.tokens])
    want = np.stack([Sampler(sampling).probabilities(row) for row in logits[len(PROMPT) - 1 : -1]])
    assert draft.probabilities.dtype == np.float64
    assert np.abs(draft.probabilities - want).max() < 1e-5
    assert np.allclose(draft.probabilities.sum(-1), 1) and (draft.probabilities[range(6), draft.tokens] > 0).all()


def test_tokens_are_drawn_from_their_row(decoder):
    sampling = SamplingConfig(temperature=3.0, top_k=6)
    drafts = [ModelDraft(decoder, 8, sampling.model_copy(update={"seed": seed})).propose(PROMPT, 1) for seed in range(1500)]
    row = drafts[0].probabilities[0]
    counts = np.bincount([draft.tokens[0] for draft in drafts], minlength=97)
    assert counts[row == 0].sum() == 0
    assert chisquare(counts[row > 0], 1500 * row[row > 0]).pvalue > 1e-3


def test_draws_depend_on_seed_and_position_only(decoder):
    sampling = SamplingConfig(temperature=1.5, seed=11)
    one = ModelDraft(decoder, 40, sampling)
    whole = one.propose(PROMPT, 8)
    later = ModelDraft(decoder, 40, sampling).propose([*PROMPT, *whole.tokens[:3]], 5)
    assert later.tokens == whole.tokens[3:]
    assert np.abs(later.probabilities - whole.probabilities[3:]).max() < 1e-5
    other = [whole.tokens[0], (whole.tokens[1] + 1) % 97]  # the second drafted token was rejected
    assert one.propose([*PROMPT, *other], 4).tokens == ModelDraft(decoder, 40, sampling).propose([*PROMPT, *other], 4).tokens
    assert ModelDraft(decoder, 40, sampling.model_copy(update={"seed": 12})).propose(PROMPT, 8).tokens != whole.tokens


def test_only_what_is_new_is_computed(decoder, monkeypatch):
    fed = []
    advance = FastDecoder.advance

    def noting(self, tokens):
        fed.append(len(tokens))
        return advance(self, tokens)

    monkeypatch.setattr(FastDecoder, "advance", noting)
    model = ModelDraft(decoder, 40, SamplingConfig())
    drafted = model.propose(PROMPT, 4).tokens
    model.propose([*PROMPT, *drafted[:2], (drafted[2] + 1) % 97], 2)
    assert fed == [5, 1, 1, 1, 1, 1]
    model.propose([*PROMPT, *drafted, 8], 1)  # all accepted: the last drafted token and the bonus were never fed
    assert fed[6:] == [3]


def test_a_draft_ends_where_the_cache_ends(decoder):
    model = ModelDraft(decoder, 8, SamplingConfig())
    assert len(model.propose(PROMPT, 9).tokens) == 3
    assert model.propose([*PROMPT, 1, 2, 3], 4).probabilities.shape == (0, 97)
    with pytest.raises(UserError, match="room for 8 positions, not for 9"):
        model.propose([*PROMPT, 1, 2, 3, 4], 4)
    with pytest.raises(UserError, match="give a prompt"):
        model.propose([], 4)


# Tokenizers


def changed(folder, change):
    inner = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    return Tokenizer(change(inner) or inner)


def without_merges(inner):
    import json

    whole = json.loads(inner.to_str())
    whole["model"]["merges"] = whole["model"]["merges"][::-1]
    return HFTokenizer.from_str(json.dumps(whole))


def swapped(inner):
    import json

    whole = json.loads(inner.to_str())
    tokens = sorted(whole["model"]["vocab"].items(), key=lambda item: item[1])
    (one, _), (other, _) = tokens[:2]
    whole["model"]["vocab"] |= {one: 1, other: 0}
    return HFTokenizer.from_str(json.dumps(whole))


def split_otherwise(inner):
    from tokenizers import pre_tokenizers

    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda inner: inner.add_special_tokens([AddedToken("<end>", special=True)]) and None, r"'<end>'"),
        (swapped, "token 0 is"),
        (without_merges, r"merge 0 is"),
        (split_otherwise, "split"),
    ],
)
def test_other_tokenizers_are_told_apart(change, message, checkpoints):
    same = read_folder_tokenizer(checkpoints["llama"])
    same_tokenizer(same, read_folder_tokenizer(checkpoints["llama"]))
    with pytest.raises(UserError, match=message):
        same_tokenizer(same, changed(checkpoints["llama"], change))


def test_smaller_vocabulary(tmp_path, checkpoints):
    folder = write_checkpoint(tmp_path / "small", LLAMA)
    write_tokenizer(folder, 60)
    with pytest.raises(UserError, match=r"token \d+ is .* in one tokenizer and .* in the other"):
        same_tokenizer(read_folder_tokenizer(checkpoints["llama"]), read_folder_tokenizer(folder))
