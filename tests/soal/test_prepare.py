"""`spu-llm prepare soal` as its user meets it, and runs that take its file."""

import json
import re
from html.parser import HTMLParser

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import GPT2, TEXT, write_checkpoint
from planting import model_file, planted
from safetensors.numpy import load_file, save_file

from spu_llm.cli import main
from spu_llm.errors import UserError
from spu_llm.experiment.schema import load_model
from spu_llm.models import PlainDecoder, load_checkpoint
from spu_llm.models.calibration import calibrate
from spu_llm.models.calibration_file import read_passages
from spu_llm.models.source import content_digest
from spu_llm.soal.maxima import by_reference, measure_maxima
from spu_llm.soal.prepare import Rule, default_path, refuse_encoder
from spu_llm.soal.prepared import load_prepared

LENGTHS = [30] * 40 + [3] * 40


def spu_llm(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A tiny GPT-2 whose first position is an outlier: its YAML, its prepared file, a report, and what was said."""
    folder = tmp_path_factory.mktemp("prepared")
    config = GPT2 | {"n_layer": 1, "bos_token_id": 13}
    checkpoint = planted(folder / "model", config, "transformer.wpe.weight", [0], factor=400.0)
    model = model_file(folder, checkpoint, LENGTHS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPU_LLM_CACHE", str(folder / "cache"))
        done = spu_llm("prepare", "soal", "--model", model, "--out", folder / "tiny.soal", "--report", folder / "r.html", "--quiet")
        assert done.exit_code == 0, done.stderr
        yield model, folder / "tiny.soal", folder / "r.html", done.stdout


def test_the_file_holds_what_its_parts_measure(prepared):
    path, file, _, _ = prepared
    model = load_model(str(path))
    checkpoint = load_checkpoint(model.locate())
    found = load_prepared(file, content_digest(model.locate()))
    assert found.prefix == (13,) and found.facts.special.chosen.frees
    _, texts = read_passages(model, checkpoint)
    texts, firsts = [text[:60] for text in texts], range(97)
    learned = calibrate(checkpoint.decoder, texts, (13,), firsts=firsts)
    used = found.calibration.reference
    maxima = measure_maxima(checkpoint.decoder, texts, (13,), learned, firsts=() if used == "learned" else firsts)
    want = learned if used == "learned" else by_reference(learned, used, getattr(maxima, used))
    assert found.facts.maxima == maxima and maxima.choice.reference == used
    assert found.calibration.layers == want.layers and found.calibration.final_squares == want.final_squares
    np.testing.assert_array_equal(found.calibration.references, want.references)
    plain = PlainDecoder(checkpoint.decoder, 4)
    plain.advance([13])
    np.testing.assert_allclose(found.prefix_rows[0].keys, plain.cache[0].keys[:1], rtol=1e-5)
    np.testing.assert_allclose(found.prefix_rows[0].values, plain.cache[0].values[:1], rtol=1e-5)
    special = found.facts.special
    assert special.prefix_maxima[0][0] == pytest.approx(max(special.before)[0], rel=0.2)
    assert special.before[0][0] > 8 * special.chosen.median[0] > max(pair[0] for pair in special.after)
    assert len(special.before) == max(map(len, texts))


def test_what_is_said(prepared):
    _, file, _, said = prepared
    assert re.search(r"prefix .* ids \[13\]; its own activations: \d", said)
    assert re.search(r"nothing +\d+ +[\d,]+ +80 of", said)
    assert "no position of the text and no token right after the prefix is an outlier" in said
    assert re.search(r"maxima +of 4 scores: the exact one in \d+\.\d%", said)
    assert f"{file} (the owner's secret)" in said


def test_reports(prepared, tmp_path):
    path, _, page, _ = prepared
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)
    parser.feed(page.read_text())
    assert tags.count("svg") == 2 and tags.count("table") == 2
    assert "<script" not in page.read_text() and "src=" not in page.read_text()
    reports = ["--report", tmp_path / "r.json", "--report", tmp_path / "r.png"]
    done = spu_llm("prepare", "soal", "--model", path, "--out", tmp_path / "x", *reports, "--fresh", "--quiet")
    assert done.exit_code == 0
    found = json.loads((tmp_path / "r.json").read_text())
    positions = found["positions"]["norm"]
    assert len(positions["before"]) == len(positions["after"]) and positions["before"][0] > 8 * max(positions["after"])
    assert found["prefix"] == [13] and found["frees_vocabulary"] and found["trials"][0]["text"]["outliers"] == 80
    assert found["messages_a_pass"][found["reference"]] == min(found["messages_a_pass"].values())
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_by_default_the_file_lies_in_the_cache(prepared, tmp_path):
    path, file, _, _ = prepared
    done = spu_llm("prepare", "soal", "--model", path, "--quiet")
    kept = re.search(r"file +(\S+)", done.stdout)[1]
    assert kept.startswith(str(file.parent / "cache" / "soal-"))
    assert str(default_path(load_model(str(path)), Rule())) == kept
    assert str(default_path(load_model(str(path)), Rule(eta=9.0))) != kept


def test_runs_take_the_file(prepared, tmp_path):
    """The same text as with the prefix in the model's config; also from material dealt for it."""
    path, file, _, _ = prepared
    model = json.loads(path.read_text()) | {"path": str(path.parent / "model"), "calibration": str(path.parent / "text.txt")}
    generation = {"prompt": TEXT[:1], "new_tokens": 3}  # a prompt of one token, which takes no program of its own
    settings = {"model": model, "ops": "plugin", "network": "none", "generation": generation}
    experiment = tmp_path / "x.yaml"
    experiment.write_text(json.dumps(settings | {"soal": str(file)}))
    done = spu_llm("run", experiment, "--out", tmp_path / "a", "--quiet")
    assert done.exit_code == 0, done.stderr
    first = json.loads((tmp_path / "a" / "metrics.json").read_text())
    assert first["accuracy"]["max_logit_error"] < 0.05
    assert first["ranges"]["values"] == load_prepared(file, content_digest(path.parent / "model")).ranges.values
    assert len(list((tmp_path / "a").glob("main.*.json"))) == 1
    file.touch()
    spu_llm("run", experiment, "--out", tmp_path / "a", "--quiet")
    assert len(list((tmp_path / "a").glob("main.*.json"))) == 2, "a new file is a new run"

    counts = ["--prompt-tokens", 1, "--tokens", 3]
    dealt = spu_llm("deal", "--model", path, "--soal", file, *counts, "--out", tmp_path / "material", "--quiet")
    assert dealt.exit_code == 0, dealt.stderr
    arguments = ["generate", "--model", path, "--prompt", TEXT[:1], "--tokens", 3, "--quiet", "--material", tmp_path / "material"]
    done = spu_llm(*arguments, "--soal", file)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.rstrip("\n") == first["text"]


def test_a_file_that_does_not_fit_is_refused(prepared, tmp_path):
    path, file, _, _ = prepared
    asked = ("generate", "--model", path, "--prompt", TEXT[:9], "--tokens", 2, "--quiet", "--soal")
    other = write_checkpoint(tmp_path / "other", GPT2, seed=1)
    model = model_file(tmp_path, other, [5])
    done = spu_llm("generate", "--model", model, "--prompt", TEXT[:9], "--tokens", 2, "--quiet", "--soal", file)
    assert done.exit_code == 2 and "was prepared for model tiny with other weights" in done.stderr
    (tmp_path / "cut").write_bytes(file.read_bytes()[:500])
    done = spu_llm(*asked, tmp_path / "cut")
    assert done.exit_code == 2 and "truncated or not a prepared file" in done.stderr
    experiment = tmp_path / "x.yaml"
    experiment.write_text(
        json.dumps(
            {"model": "smollm2", "ops": "plugin", "network": "none", "generation": {"prompt": "x", "use_prefix": False}}
            | {"soal": str(file)}
        )
    )
    done = spu_llm("run", experiment, "--out", tmp_path / "out")
    assert done.exit_code == 2 and "soal's ranges hold after its prefix only" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "{model}", "--report", "r.pdf"), "--report r.pdf: of no known kind; end it in .html, .json, .png"),
        (("--model", "{model}", "--longest", "64"), "--longest 64: the model has 64 positions"),
        (("--model", "{model}", "--text", "nowhere.txt"), "nowhere.txt: the calibration text cannot be read"),
        (("--model", "{model}", "--text", "/dev/null"), "/dev/null: holds no token"),
        (("--model", "{model}", "--eta", "1"), "1.0 is not in the range x>1"),
        (("--model", "gpt9"), "unknown model 'gpt9'"),
    ],
)
def test_bad_input(prepared, arguments, message):
    done = spu_llm("prepare", "soal", "--quiet", *(text.format(model=prepared[0]) for text in arguments))
    assert done.exit_code == 2 and message in done.stderr


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "bert"),
        ({"model_type": "xlm-roberta"}, "xlm-roberta"),
        ({"model_type": "t5", "architectures": ["T5EncoderModel"]}, "t5"),
        ({"model_type": "new", "is_encoder_decoder": True}, "new"),
        ({"model_type": "new", "architectures": ["NewForMaskedLM"]}, "new"),
    ],
)
def test_encoders_are_refused(config, kind, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "x.yaml").write_text(json.dumps({"name": "x", "path": "model"}))
    done = spu_llm("prepare", "soal", "--model", tmp_path / "x.yaml")
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1
    assert f"a model of type {kind} has an encoder, in which every position sees all others" in done.stderr


def test_encoders_are_refused_in_gguf_and_decoders_are_not(tmp_path, checkpoints):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "nomic-bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="type nomic-bert has an encoder"):
        refuse_encoder(tmp_path / "model.gguf")
    for folder in checkpoints.values():
        refuse_encoder(folder)


def test_the_digest_is_of_contents(checkpoints, tmp_path):
    folder = write_checkpoint(tmp_path / "a", GPT2)
    first = content_digest(folder)
    folder.rename(tmp_path / "b")
    (tmp_path / "b" / "README.md").write_text("words")
    (tmp_path / "b" / "config.json").touch()
    assert content_digest(tmp_path / "b") == first
    arrays = load_file(tmp_path / "b" / "model.safetensors")
    arrays["transformer.wte.weight"][0, 0] += 1
    save_file(arrays, tmp_path / "b" / "model.safetensors")
    assert content_digest(tmp_path / "b") != first
