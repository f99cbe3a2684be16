"""Every command, program and configuration that the documentation shows, run in the order of its page.

What takes long is run smaller, by the tables in commands.py; with SPU_LLM_DOCS=whole (`make test-docs`) as it is shown.
"""

import ast
import dataclasses
import hashlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner
from commands import (
    CODE_NOT_RUN,
    NOT_RUN,
    READ_ONLY,
    ROOT,
    SHELL,
    SMALLER,
    SMALLER_CODE,
    SMALLER_YAML,
    blocks,
    commands,
    inline_commands,
    pages,
)
from forked import start
from small import small_configs

from spu_llm.cli import main
from spu_llm.experiment.schema import CONFIGS, build_experiment, load_experiment, load_model, load_network
from spu_llm.reproduce.manifest import About

CACHE = os.environ.get("SPU_LLM_CACHE")
WHOLE = os.environ.get("SPU_LLM_DOCS") == "whole"
SERVERS = {"dealer": "dealing at", "beaver": "serving at"}
"""Commands that run until they are stopped, and what they say when they serve."""
STARTS, ENDS = 120, 300


def match(rules, text):
    return any(re.search(rule.found, text) for rule in rules)


def applied(rules, text):
    for rule in rules:
        text = rule.apply(text)
    return text


@dataclasses.dataclass
class Desk:
    """What readers of all pages share: configurations, a cache, and what commands have made, by them and what they read."""

    folder: Path
    made: dict[tuple, Path] = dataclasses.field(default_factory=dict)


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("desk")
    if WHOLE:
        (folder / "configs").symlink_to(ROOT / "configs")
    else:
        small_configs(folder / "configs")
        prepare_sparse(folder)
        for path in (folder / "configs" / "experiment").glob("*.yaml"):
            path.write_text(applied(SMALLER_YAML, path.read_text()))
    return Desk(folder)


def prepare_sparse(folder):
    """The file of predictors that comes with the project, for the small model of that name."""
    name = "kjv-relu"
    words = ["--model", folder / f"configs/model/{name}.yaml", "--out", folder / f"configs/comet/{name}.safetensors"]
    sizes = ["--blocks", 8, "--rank", 3, "--length", 16, "--quiet"]
    done = CliRunner().invoke(main, ["prepare", "comet", *map(str, [*words, *sizes])])
    assert done.exit_code == 0, done.output


class Reader:
    """Someone who types what a page shows, in a folder with the project's configs and experiments and nothing else."""

    def __init__(self, desk, folder):
        self.desk, self.folder, self._names, self._ports, self._servers = desk, folder, {}, defaultdict(free_port), []
        (folder / "configs").symlink_to(desk.folder / "configs")
        for name in ("experiments", "Makefile", "requirements"):
            (folder / name).symlink_to(ROOT / name)

    def read(self, page):
        try:
            for block in blocks(page):
                self._read(block)
        finally:
            for server in self._servers:
                server.kill()

    def _read(self, block):
        if block.language == "python":
            self._program(block)
        elif block.language in ("yaml", "yml"):
            self._settings(block)
        elif block.language in SHELL:
            self._type(commands(block))
        else:
            known = block.language in READ_ONLY or block.language.startswith("{")
            assert known, f"{block.place}: commands.py does not say what a block of {block.language} is"

    # Python and YAML

    def _program(self, block):
        if match(CODE_NOT_RUN, block.page):
            return check_imports(block)
        text = block.text if WHOLE else applied(SMALLER_CODE, block.text)
        exec(compile("\n" * (block.line - 1) + text, block.page, "exec"), self._names)

    def _settings(self, block):
        """Kept under the name in its first line, if any; and checked by whom it is for."""
        text = self._placed(block.text if WHOLE else applied(SMALLER_YAML, block.text))
        named = re.match(r"# ([\w./-]+\.ya?ml)\b", text)
        path = self.folder / (named[1] if named else "shown.yaml")
        path.write_text(text)
        check_settings(path, yaml.safe_load(text))

    # Commands

    def _type(self, typed):
        parties = []
        for command in typed:
            text = self._placed(command.text if WHOLE else applied(SMALLER, command.text), command.role)
            program, *words = shlex.split(text)
            if match(NOT_RUN, command.text):
                continue
            elif program == "make":
                check_recipe(words, command)
            elif program == "spu-llm" and words[0] in SERVERS:
                self._servers.append(self._serve(words, command))
            elif program == "spu-llm" and words[0] == "party":
                parties.append((command, start(words, self.folder, command.role)))
            elif program == "spu-llm":
                self._run(words, command)
            else:
                pytest.fail(f"{command.place}: no rule for {command.text!r}; give it one in tests/docs")
        for command, party in parties:
            assert party.wait(ENDS) == 0, f"{command.place}: {command.text}: {party.errors.read_text()}"

    def _placed(self, text, role=""):
        """The text with hosts and ports of this machine: the same port for the same address."""

        def here(found):
            host = f"{role}.example" if found[1] == "0.0.0.0" and role else found[1].replace("127.0.0.1", "localhost")
            return f"localhost:{self._ports[host, found[2]]}"

        return re.sub(r"\b(localhost|127\.0\.0\.1|0\.0\.0\.0|[\w.-]+\.example):(\d+)", here, text)

    def _serve(self, words, command):
        server = start(words, self.folder, f"server-{len(self._servers)}")
        until(lambda: SERVERS[words[0]] in server.out.read_text() or server.process.exitcode is not None)
        assert server.process.exitcode is None, f"{command.place}: {command.text}: {server.errors.read_text()}"
        return server

    def _run(self, words, command):
        """In this process; or what it made when another page had it with the same files."""
        key = (*words, *(digest(self.folder / word) for word in words))
        if key not in self.desk.made:
            before = self._files()
            done = CliRunner(env={"SPU_LLM_CACHE": CACHE} if words[0] == "fetch" else None).invoke(main, words)
            assert done.exit_code == 0, f"{command.place}: {command.text}: {done.output or done.exception!r}"
            self.desk.made[key] = self._keep([path for path, when in self._files().items() if before.get(path) != when])
        shutil.copytree(self.desk.made[key], self.folder, dirs_exist_ok=True)

    def _keep(self, paths):
        """A folder with copies of these files."""
        kept = self.desk.folder / f"made-{len(self.desk.made)}"
        kept.mkdir()
        for path in paths:
            copy = kept / path.relative_to(self.folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        return kept

    def _files(self):
        """Those of the reader, with their times."""
        return {path: path.stat().st_mtime_ns for path in own_files(self.folder)}


def own_files(folder):
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield from own_files(path)
        elif path.is_file() and not path.is_symlink():
            yield path


def digest(path):
    """Of what a reader's file or folder holds; empty where there is none."""
    if path.is_symlink() or not path.exists():
        return ""
    found = [path] if path.is_file() else sorted(own_files(path))
    return hashlib.sha256(b"".join(each.name.encode() + each.read_bytes() for each in found)).hexdigest()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as held:
        return held.getsockname()[1]


def until(true, seconds=STARTS):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def check_settings(path, raw):
    """By what reads such a file; what is a part of an experiment's is checked within one."""
    if "mode" in raw:
        load_network(str(path))
    elif "path" in raw or "package" in raw:
        assert load_model(str(path)).locate().exists()
    elif "tables" in raw:
        About.model_validate(raw)
    elif {"model", "network"} <= set(raw):
        load_experiment(path)
    else:
        whole = {"model": "kjv", "network": "none", "generation": {"prompt": "x"}}
        build_experiment(whole | raw, CONFIGS, path.name)


def check_imports(block):
    """That what a program imports is there; dots in its dicts stand for what is left out."""
    for node in ast.walk(ast.parse(block.text.replace(", ...}", "}"))):
        if isinstance(node, ast.ImportFrom):
            module = import_module(node.module)
            assert all(hasattr(module, each.name) for each in node.names), f"{block.place}: {ast.unparse(node)}"
        elif isinstance(node, ast.Import):
            [import_module(each.name) for each in node.names]


def check_recipe(words, command):
    """That `make` knows what to do, and that commands of `spu-llm` in it are there."""
    done = subprocess.run(["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command.place}: {command.text}: {done.stderr}"
    for text in re.findall(r"^\S*(spu-llm .*)", done.stdout, re.MULTILINE):
        check_words(dataclasses.replace(command, text=text))


def check_words(command):
    """Each part of a command's name, and each of its options, up to a word that stands for any."""
    found = main
    for word in shlex.split(command.text)[1:]:
        if word.isupper():
            return
        if isinstance(found, click.Group) and not word.startswith("-"):
            assert word in found.commands, f"{command.place}: {command.text}: no command {word}"
            found = found.commands[word]
        elif word.startswith("--"):
            known = {name for option in found.params for name in option.opts} | {"--help", "--version"}
            assert word.split("=")[0] in known, f"{command.place}: {command.text}: no option {word}"


@pytest.mark.parametrize("page", pages())
def test_what_a_page_shows_runs(page, desk, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if not WHOLE:
        monkeypatch.setenv("SPU_LLM_CACHE", str(desk.folder / "cache"))
    Reader(desk, tmp_path).read(page)


@pytest.mark.parametrize("page", pages())
def test_commands_in_sentences_are_there(page):
    for command in inline_commands(page):
        check_words(command)


PAGE = """
Text `spu-llm fetch x` in a sentence.

- a list
  ```console
  $ spu-llm run x.yaml \\
      --out "a b"  # said so
  output
  owner$ spu-llm party
  ```

```
make demo    # a comment
something else
```
```sh
anything goes
# but comments
```
````markdown
```
spu-llm no command
```
````
"""


def test_commands_are_found_by_prompts_and_programs():
    found = [(command.line, command.role, command.text) for block in blocks("x.md", PAGE) for command in commands(block)]
    assert found[:2] == [(6, "", "spu-llm run x.yaml --out 'a b'"), (9, "owner", "spu-llm party")]
    assert found[2:] == [(13, "", "make demo"), (17, "", "anything goes")]


def test_every_rule_is_used():
    """Of the tables: a rule that no page needs any more goes."""
    shown = [block for page in pages() for block in blocks(page)]
    typed = [command.text for block in shown for command in commands(block)]
    settings = [block.text for block in shown if block.language in ("yaml", "yml")]
    for path in (ROOT / "configs" / "experiment").glob("*.yaml"):
        settings.append(path.read_text())
    programs = [block.text for block in shown if block.language == "python"]
    for rules, texts in ((SMALLER, typed), (SMALLER_CODE, programs), (SMALLER_YAML, settings)):
        changed = {rule.found: False for rule in rules}
        for text in texts:
            for rule in rules:
                after = rule.apply(text)
                changed[rule.found] |= after != text
                text = after
        assert all(changed.values()), [found for found, used in changed.items() if not used]
    assert all(any(re.search(rule.found, text) for text in typed) for rule in NOT_RUN)
    assert all(any(re.search(rule.found, page) for page in pages()) for rule in CODE_NOT_RUN)
