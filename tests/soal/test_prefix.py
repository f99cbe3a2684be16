"""The choice of a prefix: on models with planted outliers, and by scripted rules against trying every prefix."""

from itertools import product

import numpy as np
import pytest
from conftest import GPT2, LLAMA
from planting import planted

from spu_llm.models import load_checkpoint
from spu_llm.soal.prefix import Search
from spu_llm.soal.special import Activations

TEXTS = [[5, 6, 7, 8, 9, 12, 30, 31], [10, 11, 12, 33, 34, 9, 8], [20, 5, 21, 22, 40, 42]]
ETA = 8.0


def search(activations, texts=TEXTS, longest=4, frequent=(5, 6, 7)):
    return Search(activations, texts, [90, 91], frequent, str, ETA, longest)


def on_model(folder, tmp_path, **options):
    return search(Activations(load_checkpoint(folder).decoder, tmp_path / "kept"), **options)


def test_a_model_without_outliers_needs_no_prefix(checkpoints, tmp_path):
    found = on_model(checkpoints["llama"], tmp_path)
    chosen = found.run()
    assert chosen.prefix == () and chosen.frees and len(found.trials) == 1
    assert chosen.positions == 21 and chosen.vocabulary.special == 0


@pytest.mark.parametrize("count", [1, 2])
def test_as_long_as_the_positions_that_are_outliers(count, tmp_path):
    folder = planted(tmp_path / "model", GPT2 | {"bos_token_id": 13}, "transformer.wpe.weight", list(range(count)))
    found = on_model(folder, tmp_path)
    chosen = found.run()
    assert len(chosen.prefix) == count and chosen.prefix[0] == 13 and chosen.frees
    assert [trial.prefix for trial in found.trials[:2]] == [(), (13,)]
    assert found.trials[0].outliers == len(TEXTS) * count and found.trials[0].vocabulary is None
    assert found.trials[0].largest[0] > ETA * found.trials[0].median[0] > chosen.largest[0]


def test_without_a_first_token_of_its_own(tmp_path):
    chosen = on_model(planted(tmp_path / "model", GPT2, "transformer.wpe.weight", [0]), tmp_path).run()
    assert len(chosen.prefix) == 1 and chosen.frees


def test_a_token_that_nothing_calms_is_reported(tmp_path):
    """Its embedding is large wherever it stands; the text does not hold it."""
    folder = planted(tmp_path / "model", LLAMA | {"bos_token_id": 13}, "model.embed_tokens.weight", [41])
    found = on_model(folder, tmp_path)
    chosen = found.run()
    assert chosen.prefix == () and chosen.frees_text and not chosen.frees
    (left,) = chosen.vocabulary.worst
    assert left.token == 41 and left.text == "41" and left.ratio > ETA
    assert left.norm == pytest.approx(chosen.vocabulary.largest[0])
    assert [trial.prefix for trial in found.trials] == [(), (13,)]


def test_outliers_that_stay_in_the_text_end_the_search(tmp_path):
    folder = planted(tmp_path / "model", LLAMA | {"bos_token_id": 13}, "model.embed_tokens.weight", [7])
    chosen = on_model(folder, tmp_path).run()
    assert chosen.outliers == 1 and not chosen.frees_text


class Scripted(Activations):
    """Activations of 97 tokens by a rule: whether the last of some tokens is an outlier, and how large others are."""

    def __init__(self, decoder, outlier, size=lambda tokens: 1.0):
        super().__init__(decoder, None)
        self._outlier, self._size = outlier, size

    def of(self, prefix, passages, what=""):
        rows = [[*prefix, *passage[: i + 1]] for passage in passages for i in range(len(passage))]
        return np.array([[100.0 if self._outlier(row) else self._size(row), 1.0] for row in rows])


@pytest.fixture
def decoder(tmp_path):
    return load_checkpoint(planted(tmp_path / "model", LLAMA | {"bos_token_id": 1}, "model.embed_tokens.weight", [])).decoder


def shortest(outlier, frees, longest):
    """Every prefix that begins with 1 and frees all, of the least length there is."""
    for length in range(1, longest + 1):
        found = [(1, *rest) for rest in product(range(97), repeat=length - 1) if frees(outlier, (1, *rest))]
        if found:
            return found
    return []


def frees(outlier, prefix):
    texts = [[*prefix, *text[: i + 1]] for text in TEXTS for i in range(len(text))]
    return not any(map(outlier, [*texts, *([*prefix, token] for token in range(97))]))


def test_what_is_left_after_a_trial_may_calm_the_rest(decoder):
    """As in SmolLM2: 5 and 6 calm all after the first token but 60, which is none of the candidates; 60 calms all, itself too."""

    def outlier(row):
        *before, last = row
        if not before:
            return True
        return 60 not in before and ((last in range(20, 55) and not {5, 6} & set(before)) or (last == 60 and {5, 6} & set(before)))

    found = search(Scripted(decoder, outlier, lambda row: 0.5 if row[-2:-1] == [5] else 1.0))
    chosen = found.run()
    assert [chosen.prefix] == shortest(outlier, frees, 2) == [(1, 60)]
    assert [trial.prefix for trial in found.trials] == [(), (1,), (1, 5), (1, 60)]
    assert found.trials[2].vocabulary.special == 1
    assert not search(Scripted(decoder, outlier), longest=1).run().frees


def test_a_further_token_for_each_kind_of_outlier(decoder):
    """90 calms one kind, 91 the other: no prefix of one token more does."""

    def outlier(row):
        *before, last = row
        return not before or (last in range(70, 88) and 90 not in before) or (last in range(60, 70) and 91 not in before)

    chosen = search(Scripted(decoder, outlier)).run()
    assert chosen.prefix in shortest(outlier, frees, 3)
    assert search(Scripted(decoder, outlier), longest=2).run().prefix == (1, 90), "the one that leaves fewest"


def test_text_counts_where_the_vocabulary_is_calm(decoder):
    """A word is an outlier after another one only, unless 91 stands before."""

    def outlier(row):
        return len(row) == 1 or (row[-2:] == [20, 5] and 91 not in row[:-2])

    found = search(Scripted(decoder, outlier))
    assert found.run().prefix == (1, 91)
    assert found.trials[1].vocabulary.special == 0 and found.trials[1].outliers == 1


@pytest.mark.parametrize(("given", "chosen"), [((60,), (60,)), ((1, 2, 60), (1,)), ((50,), (1,))])
def test_a_given_prefix_stays_unless_another_is_better(given, chosen, decoder):
    def outlier(row):
        return len(row) == 1 or (row[0] == 50 and row[-1] == 70)

    found = search(Scripted(decoder, outlier))
    found.given = given
    assert found.run().prefix == chosen and found.trials[0].prefix == given
