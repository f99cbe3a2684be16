"""Two processes that exchange folders: a server killed within a token, resumed at every operation, and what it must refuse."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.importorskip("openfhe", reason="OpenFHE's wheel runs on Python 3.10 only")

from click.testing import CliRunner
from conftest import GPT2, write_checkpoint
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse

from spu_llm.arhe import Degrees, Meaning, Options, calibrate
from spu_llm.arhe.ciphertexts import read_ciphertexts, write_ciphertexts
from spu_llm.arhe.ckks import OpenFheBackend
from spu_llm.arhe.executor import encrypted
from spu_llm.arhe.files import listing, write_facts
from spu_llm.arhe.keys import load_public, load_secret, write_keys
from spu_llm.arhe.parameters import TOY
from spu_llm.arhe.request import load_request, open_response, write_request, write_response
from spu_llm.arhe.schedule import prompt_span, step_span
from spu_llm.arhe.service import Job, Service, alone, model_digest, restart
from spu_llm.arhe.shapes import random_decoder
from spu_llm.arhe.terms import Terms, load_terms, publish
from spu_llm.cli import main
from spu_llm.errors import UserError
from spu_llm.models import DecoderConfig, PlainDecoder, load_checkpoint

LETTERS, PROMPT, TOKENS = "abcdef ", "abc", 2


def command(*arguments):
    return CliRunner().invoke(main, ["arhe", *map(str, arguments)])


def done(*arguments):
    found = command(*arguments)
    assert found.exit_code == 0, found.output
    return found


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    """A model of seven letters, its terms, a client's keys and its request."""
    folder = tmp_path_factory.mktemp("town")
    write_checkpoint(folder / "model", GPT2 | {"vocab_size": len(LETTERS), "n_embd": 8, "n_layer": 1, "n_head": 2})
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token=" "))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), Fuse()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    (folder / "text.txt").write_text("\n".join(["abcabc def abfe cab", "fed cab abba deaf fade bead abe"] * 4))
    settings = {"name": "letters", "path": str(folder / "model"), "calibration": str(folder / "text.txt")}
    (folder / "letters.yaml").write_text(json.dumps(settings))
    done(
        "publish",
        "--model",
        folder / "letters.yaml",
        "--log-ring",
        5,
        "--levels",
        9,
        "--argmax",
        "league",
        "--out",
        folder / "published",
    )
    shutil.move(folder / "model", folder / "kept")  # a client does without
    done("keys", "--terms", folder / "published", "--out", folder / "client")
    done("encrypt", "--keys", folder / "client", "--prompt", PROMPT, "--tokens", TOKENS, "--out", folder / "request")
    shutil.move(folder / "kept", folder / "model")
    return folder


def serve(town, out):
    """A server's process, which sees the client's public folder and no other."""
    arguments = ["serve", "--terms", town / "published", "--keys", "public", "--request", "request"]
    arguments += ["--model", town / "letters.yaml", "--margin", 2]
    arguments += ["--out", out, "--save-seconds", 0, "--json", "--quiet"]
    place = town / "machine"
    if not place.exists():
        shutil.copytree(town / "client" / "public", place / "public")
        shutil.copytree(town / "request", place / "request")
    return subprocess.Popen(
        [sys.executable, "-m", "spu_llm", "arhe", *map(str, arguments)],
        cwd=place,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def kept(state):
    """How far a server's state is: tokens, operations of the next."""
    try:
        with safe_open(state, "numpy") as file:
            facts = json.loads(file.metadata()["facts"])
    except OSError:
        return 0, 0
    return len(facts["work"]["performed"]), facts["done"]


def test_a_server_killed_within_its_second_token_goes_on(town):
    out = town / "machine" / "served"
    first = serve(town, "served")
    try:
        while kept(out / "state.bin") < (1, 5):
            assert first.poll() is None, first.stderr.read()
            time.sleep(0.01)
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    assert not any(path.name == "secret.key" for path in (town / "machine").rglob("*"))
    tokens, operations = kept(out / "state.bin")
    assert tokens == 1 and operations >= 5
    before = {path.name: path.read_bytes() for path in (out / "response").glob("*.ct")}
    partial = command("decrypt", "--keys", town / "client", "--response", out / "response")
    assert len(partial.stdout.strip("\n")) == 1 and "1 of 2 tokens" in partial.stderr, partial.output

    second = serve(town, "served")
    said, errors = second.communicate(timeout=120)
    assert second.returncode == 0, errors
    life = json.loads(said)
    assert (life["tokens"], life["operations"]) == (tokens, operations) and len(life["seconds"]) == 1
    assert {name: (out / "response" / name).read_bytes() for name in before} == before

    answer = done("decrypt", "--keys", town / "client", "--response", out / "response", "--request", town / "request", "--json")
    found = json.loads(answer.stdout)
    expected, bootstraps = plain(town)
    assert (found["text"], found["near_ties"], found["asked"]) == (expected, [], TOKENS)
    assert life["bootstraps"] == bootstraps[1:]  # those before the kill among them


def plain(town):
    """The model's own text after the prompt, and the bootstraps that were planned for each token."""
    checkpoint = load_checkpoint(town / "model")
    prompt, found = checkpoint.tokenizer.encode(PROMPT), []
    decoder = PlainDecoder(checkpoint.decoder, len(prompt) + TOKENS)
    logits = decoder.advance(prompt)[-1]
    while len(found) < TOKENS:
        found.append(int(logits.argmax()))
        logits = decoder.advance(found[-1:])[-1]
    schedule = load_terms(town / "published").schedule()
    spans = [prompt_span(schedule, len(prompt)), *(step_span(schedule, len(prompt) + i) for i in range(1, TOKENS))]
    return checkpoint.tokenizer.decode(found), [schedule.bootstraps(span) for span in spans]


class Cut(Exception):
    pass


@pytest.fixture(scope="module", params=[True, False], ids=["cache", "no cache"])
def job(request, tmp_path_factory):
    """Two tokens of the smallest model, with low degrees."""
    folder = tmp_path_factory.mktemp("job")
    config = DecoderConfig("gpt2", 3, 4, 1, 1, 1, 8, 16, 1e-5, True)
    parameters = replace(TOY, log_ring=5, levels=7, slots=0)
    terms = Terms("small", config, parameters, Degrees(5, 5, 1, 5, 5, 1, 1), Options(cache=request.param))
    write_keys(folder / "client", terms)
    keys = load_public(folder / "client" / "public", evaluation=True)
    write_request(folder / "request", keys, [1, 2], 2)
    decoder, schedule = random_decoder(config), terms.schedule()
    passages = [[0, 1, 2, 0, 1], [2, 1, 0, 0, 2]]
    meaning = Meaning(decoder, schedule.program, calibrate(decoder, schedule.program, passages, 3))
    asked = load_request(folder / "request", keys)
    return folder, Job(keys, asked, meaning, schedule, model_digest(decoder, passages))


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_server_resumed_after_every_few_operations_gives_the_same_bytes(job):
    folder, job = job
    whole = Service(job, folder / "whole", save_seconds=1e9)
    whole.run(2)
    lives = 0
    while True:
        service, left = Service(job, folder / "cut", save_seconds=0), 7
        watch = service.server.watch

        def cut(op, result, watch=watch):
            nonlocal left
            watch(op, result)
            left -= 1
            if left == 0:
                raise Cut

        service.server.watch = cut
        lives += 1
        try:
            life = service.run(2)
            break
        except Cut:
            pass
    assert lives > 10 and life.operations > 0
    assert files(folder / "cut" / "response") == files(folder / "whole" / "response")
    assert service.work.performed == whole.work.performed == predicted(job, 2)


def test_a_client_finds_nothing_beside_the_vocabulary(job):
    folder, job = job
    run = Service(job, folder / "server", save_seconds=1e9)
    given = []
    run.server.watch = lambda op, result: given.append(result)
    run.run(1)
    keys, parameters = job.keys, job.keys.terms.parameters
    client = OpenFheBackend(parameters, keys.context, secret_key=load_secret(folder / "client", keys))
    (answer,) = read_ciphertexts(folder / "server" / "response", ["token-1.0.ct"], keys)
    beside = slice(job.meaning.config.vocabulary, None)
    (token,) = given[-2]
    assert abs(client.decrypt(token)[beside]).max() > 0.1 and client.level(answer) == parameters.reserve
    assert abs(client.decrypt(answer)[beside]).max() < 1e-4
    np.testing.assert_allclose(client.decrypt(answer)[: beside.start], client.decrypt(token)[: beside.start], atol=1e-4)


def predicted(job, tokens):
    prompt = job.request.prompt
    spans = [prompt_span(job.schedule, prompt), *(step_span(job.schedule, prompt + i) for i in range(1, tokens))]
    return [job.schedule.bootstraps(span) for span in spans]


@pytest.fixture(scope="module")
def other(town):
    """Another client of the same owner, and its request."""
    done("keys", "--terms", town / "published", "--out", town / "other")
    done("encrypt", "--keys", town / "other", "--prompt", PROMPT, "--out", town / "others")
    return town / "other"


@pytest.fixture(scope="module")
def served(town):
    """A response to the request, as a server without a model would make it up: a token's one-hot vector, encrypted."""
    folder, keys = town / "served", load_public(town / "client" / "public")
    request = load_request(town / "request", keys)
    backend = OpenFheBackend(keys.terms.parameters, keys.context, keys.encryption)
    written = write_ciphertexts(folder, "token-1", encrypted(backend, keys.terms.config, [3]))
    write_response(folder, keys, request, 1, written)
    return folder


@pytest.fixture
def copies(town, tmp_path):
    """The client's folders, to be damaged."""
    for name in ("client", "request", "published"):
        shutil.copytree(town / name, tmp_path / name)
    return tmp_path


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edited(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def foreign_context(folder):
    """Keys whose context is another library's, all listed as they should be."""
    flipped(folder / "client" / "public" / "context.bin")
    path = folder / "client" / "public" / "parameters.json"
    facts = json.loads(path.read_text()) | {"library": "openfhe 9"}
    facts["files"] |= listing(path.parent, ["context.bin"])
    facts.pop("digest")
    write_facts(path, facts.pop("kind"), facts)


def retold(folder, **changes):
    """A request that says something else, with the digest that belongs to it."""
    path = folder / "request.json"
    facts = json.loads(path.read_text()) | changes
    facts.pop("digest")
    write_facts(path, facts.pop("kind"), facts)


def relisted(folder, name):
    retold(folder, files={name: {"bytes": 0, "sha256": ""}})


def own_terms(folder):
    """Keys by which tokens would be as good as logits: signs that are hardly steep (found by an attack)."""
    shutil.rmtree(folder / "client")
    terms = load_terms(folder / "published")
    publish(folder / "published", replace(terms, degrees=replace(terms.degrees, steep=0, flat=1)))
    done("keys", "--terms", folder / "published", "--out", folder / "client")


DAMAGE = {
    "a truncated key": (lambda f: cut_short(f / "client/public/automorphism.key"), r"automorphism\.key: has \d+ bytes of \d+"),
    "a missing key": (lambda f: (f / "client/public/relinearisation.key").unlink(), "relinearisation.key: cannot be read"),
    "another's key": (lambda f: flipped(f / "client/public/public.key"), "public.key: is not the file that was listed"),
    "other parameters": (lambda f: edited(f / "client/public/parameters.json", '"levels": 9', '"levels": 8'), "was changed"),
    "no parameters": (lambda f: (f / "client/public/parameters.json").write_text("{"), "truncated or no JSON"),
    "a foreign library": (foreign_context, "made with openfhe 9 for another context than openfhe 1"),
    "a truncated request": (lambda f: cut_short(f / "request/prompt.0.ct"), r"prompt\.0\.ct: has"),
    "a changed request": (lambda f: flipped(f / "request/prompt.0.ct"), "is not the file that was listed"),
    "a file elsewhere": (lambda f: relisted(f / "request", "../client/secret.key"), "no plain file of"),
    "a device": (lambda f: relisted(f / "request", "/dev/zero"), "no plain file of"),
    "a prompt of no length": (lambda f: retold(f / "request", prompt="3"), "prompt: input should be a valid integer"),
    "no files": (lambda f: retold(f / "request", files=[]), "files: input should be a valid dictionary"),
    "other terms": (own_terms, "keys were made for other terms than"),
    "a response as request": (lambda f: edited(f / "request/request.json", "request of", "response of"), "is of kind"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders_are_refused_by_name(town, copies, damage):
    spoil, names = DAMAGE[damage]
    spoil(copies)
    refused(serving(town, copies / "client" / "public", copies / "request", copies / "server"), names)


def serving(town, keys, request, out, *more, model=None):
    given = ["serve", "--terms", town / "published", "--keys", keys, "--request", request]
    return command(*given, "--model", model or town / "letters.yaml", "--out", out, *more)


def refused(result, names):
    """One line, with exit code 2."""
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
    assert re.search(names, result.stderr), result.stderr


def test_one_clients_files_are_no_use_with_anothers(town, other, served, copies):
    assert done("decrypt", "--keys", town / "client", "--response", served).stdout == "d\n"
    refused(serving(town, other / "public", town / "request", copies / "server"), "another set of keys")
    refused(command("decrypt", "--keys", other, "--response", served), "another set of keys")
    refused(command("decrypt", "--keys", town / "client", "--response", served, "--request", town / "others"), "another request")
    shutil.copy(other / "secret.key", copies / "client" / "secret.key")
    refused(command("decrypt", "--keys", copies / "client", "--response", served), "is not the secret of")


def test_who_has_no_secret_key_cannot_decrypt(town, served, copies):
    (copies / "client" / "secret.key").unlink()
    refused(command("decrypt", "--keys", copies / "client", "--response", served), "only the client that made the keys")
    keys = load_public(town / "client" / "public", evaluation=True)
    guess = keys.context.KeyGen().secretKey
    guess.SetKeyTag(keys.tag)
    with pytest.raises(UserError, match="token 1 decrypts to noise"):
        open_response(served, keys, guess)


def test_values_that_are_no_one_hot_vector_are_not_taken_for_a_token(town, served, copies):
    keys = load_public(town / "client" / "public")
    backend = OpenFheBackend(keys.terms.parameters, keys.context, keys.encryption)
    shutil.copytree(served, copies / "served")
    written = write_ciphertexts(copies / "served", "token-1", [backend.encrypt(np.full(7, 1.5))])
    write_response(copies / "served", keys, load_request(town / "request", keys), 1, written)
    refused(command("decrypt", "--keys", town / "client", "--response", copies / "served"), "decrypts to noise")


def test_a_secret_key_that_others_may_read_or_that_is_cut_is_refused(served, copies):
    secret = copies / "client" / "secret.key"
    assert secret.stat().st_mode & 0o777 == 0o600
    secret.chmod(0o640)
    refused(command("decrypt", "--keys", copies / "client", "--response", served), "other users")
    secret.chmod(0o600)
    cut_short(secret)
    refused(command("decrypt", "--keys", copies / "client", "--response", served), "truncated or no secret key")


def test_keys_are_not_written_over(town, copies):
    before = (copies / "client" / "secret.key").read_bytes()
    refused(command("keys", "--terms", copies / "published", "--out", copies / "client"), "holds keys already")
    assert (copies / "client" / "secret.key").read_bytes() == before


def test_requests_and_models_must_fit(town, copies):
    refused(serving(town, town / "client" / "public", town / "request", copies, model="gpt2-tiny"), "vocabulary is 97")
    refused(serving(town, town / "client" / "public", town / "request", copies, "--tokens", 999), "ask for fewer")
    refused(command("encrypt", "--keys", town / "client", "--prompt", "", "--out", copies / "empty"), "one at least")
    refused(command("publish", "--model", "gpt2-tiny", "--secure", "--out", copies / "new"), "give a larger ring")
    refused(command("keys", "--terms", town / "request", "--out", copies / "new"), "terms.json: cannot be read")


def test_a_state_serves_its_own_work_only(job, tmp_path):
    _, job = job
    Service(job, tmp_path / "server").run(1)
    for change, names in (({"model": "x"}, "another model"), ({"request": replace(job.request, digest="x")}, "another request")):
        with pytest.raises(UserError, match=names):
            Service(replace(job, **change), tmp_path / "server").run(1)
    with alone(tmp_path / "server"), pytest.raises(UserError, match="another process"):
        Service(job, tmp_path / "server").run(1)
    assert Service(job, tmp_path / "server").run(1).seconds == []
    next((tmp_path / "server" / "response").glob("*.ct")).unlink()
    with pytest.raises(UserError, match="--restart"):
        Service(job, tmp_path / "server").run(1)
    flipped(tmp_path / "server" / "state.bin")
    with pytest.raises(UserError, match=r"state\.bin: (was changed|truncated)"):
        Service(job, tmp_path / "server").run(1)
    restart(tmp_path / "server")
    assert not (tmp_path / "server" / "state.bin").exists() and not list((tmp_path / "server" / "response").iterdir())
