"""What the documentation shows to be typed: commands, Python and YAML in its fenced blocks, each with its page and line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import spu_llm

ROOT = Path(spu_llm.__file__).parents[1]
SHELL = ("", "console", "sh", "bash", "shell")
"""Languages of blocks that may hold commands; prompts and names of programs tell them from output."""
PROGRAMS = [
    "spu-llm",
    "make",
    "python",
    "python3",
    "pip",
    "git",
    "sudo",
    "apt",
    "apt-get",
    "sh",
    "cd",
    "mkdir",
    "export",
    "source",
    ".",
]
READ_ONLY = ("text", "json", "toml", "markdown", "mermaid", "math", "diff")
"""Languages of blocks that are read and not typed, as are Sphinx's own, which are in braces."""

_PROMPT = re.compile(r"(?P<role>\w*)\$\s+(?P<text>.*)")
_FENCE = re.compile(r"(?P<indent>\s*)(?P<fence>```+|~~~+)\s*(?P<language>[^\s`]*).*")
_INLINE = re.compile(r"(?<!`)`(spu-llm [^`]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """The inside of a fence; `line` is that of its first line."""

    page: str
    line: int
    language: str
    lines: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


@dataclass(frozen=True)
class Command:
    """A command without prompt and comment. role: whose machine it is typed on, if the prompt says so."""

    page: str
    line: int
    text: str
    role: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """What a user reads, by paths from the repository's root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in found if path.exists()]


def blocks(page: str, text: str | None = None) -> Iterator[Block]:
    """Every fenced block of a page (or of a `text` in its place), also inside lists."""
    opened, first, inside = None, 0, []
    for number, line in enumerate((text or (ROOT / page).read_text()).splitlines(), 1):
        fence = _FENCE.fullmatch(line)
        if opened is None and fence:
            opened, first, inside = fence, number + 1, []
        elif opened is not None and line.strip().startswith(opened["fence"]) and not line.strip().strip(opened["fence"][0]):
            yield Block(page, first, opened["language"], tuple(each.removeprefix(opened["indent"]) for each in inside))
            opened = None
        elif opened is not None:
            inside.append(line)
    assert opened is None, f"{page}:{first}: this block is never closed"


def commands(block: Block) -> list[Command]:
    """Those of a shell's block: what follows prompts; without any, lines that begin with a program, or all of a `sh` block's."""
    if block.language not in SHELL:
        return []
    lines = list(_joined(block))
    found = [(number, match["text"], match["role"]) for number, line in lines if (match := _PROMPT.fullmatch(line))]
    if not found:
        every = block.language in ("sh", "bash", "shell")
        found = [(number, line, "") for number, line in lines if every or line.split(" ")[0] in PROGRAMS]
    made = [Command(block.page, number, shlex.join(shlex.split(text, comments=True)), role) for number, text, role in found]
    return [command for command in made if command.text]


def _joined(block: Block) -> Iterator[tuple[int, str]]:
    """(number, line); lines that end in a backslash are one with the next."""
    held, start = "", 0
    for number, line in enumerate(block.lines, block.line):
        start = start if held else number
        held += line
        if held.endswith("\\"):
            held = held[:-1]
        else:
            yield start, held
            held = ""
    assert not held, f"{block.place}: a line ends in a backslash, and nothing follows"


def inline_commands(page: str) -> Iterator[Command]:
    """Commands of `spu-llm` that are named within sentences."""
    fenced = {number for block in blocks(page) for number in range(block.line, block.line + len(block.lines))}
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        if number not in fenced:
            yield from (Command(page, number, text) for text in _INLINE.findall(line))


# What the suite makes of them


@dataclass(frozen=True)
class Rule:
    """Where `found` is in a text, `instead` stands in what is run; `why` nothing is lost by it."""

    found: str
    instead: str
    why: str

    def apply(self, text: str) -> str:
        return re.sub(self.found, self.instead, text)


MODELS = "|".join(sorted((path.stem for path in (ROOT / "configs" / "model").glob("*.yaml")), key=len, reverse=True))
_SMALL = "names of models are looked up in the project; in the reader's folder the models of these names are small"
_FEWER = "each token, passage, step or layer is like the one before"
_ONE = "a prompt of one token is a pass like those after it, so that a command compiles one program"
SMALLER = (
    Rule(r"^spu-llm generate (?!.*--model )", "spu-llm generate --model kjv ", "quickstart.yaml runs smollm2, the default"),
    Rule(rf"^(?!spu-llm arhe simulate)(.*?)--model ({MODELS})(?=\s|$)", r"\1--model configs/model/\2.yaml", _SMALL),
    Rule(rf"--(draft|target) ({MODELS})(?=\s|$)", r"--\1 configs/model/\2.yaml", _SMALL),
    Rule(r"--sparsity ([\w-]+)(?=\s|$)", r"--sparsity configs/comet/\1.safetensors", _SMALL),
    Rule(r"^(spu-llm generate .*--prompt) '[^']*'", r"\1 And", _ONE),
    Rule(r"'generation\.prompt=[^']*'", "generation.prompt=And", _ONE),
    Rule(r"--prompt-tokens \d+", "--prompt-tokens 1", _ONE),
    Rule(r"(?<=\s)--tokens \d+", "--tokens 2", _FEWER),
    Rule(r"^(spu-llm arhe .*)--tokens 2", r"\1--tokens 1", _FEWER),
    Rule(r"new_tokens=\d+", "new_tokens=2", _FEWER),
    Rule(r"--passages \d+", "--passages 4", _FEWER),
    Rule(r"--steps \d+", "--steps 2", _FEWER),
    Rule(r"^(spu-llm generate .*--draft \S+)(?!.*--draft-length)", r"\1 --draft-length 1", "auto compiles passes of all lengths"),
    Rule(r"--width \d+ --heads \d+ --ffn \d+", "--width 48 --heads 3 --ffn 96", "any width runs the same operations"),
    Rule(r"(bench layer .*)--context \d+", r"\1--context 8 --repeats 1", "any number of cache rows runs the same operations"),
    Rule(r"^(spu-llm plan-table .*)--error \S+", r"\1--error 6e-2", "a coarser table is found sooner"),
    Rule(r"^(spu-llm prepare comet .*)", r"\1 --blocks 8 --rank 3", "a small model has 40 neurons a layer"),
    Rule(r"^(spu-llm align .*)", r"\1 --length 16 --held-out 64 --batch 2", "a short text has few sequences"),
    Rule(r"^(spu-llm arhe (run|publish) .*)", r"\1 --log-ring 5 --levels 9 --argmax league", "any ring computes alike"),
)
"""Of commands, one after the other. SPU_LLM_DOCS=whole runs them without these."""

SMALLER_YAML = (
    Rule(rf"(?m)^(model|  draft_model): ({MODELS})(?=\s|$)", r"\1: configs/model/\2.yaml", _SMALL),
    Rule(rf"draft_model: ({MODELS})(?=[,}}])", r"draft_model: configs/model/\1.yaml", _SMALL),
    Rule(r"(?<!\w)prompt: \"[^\"]*\"", "prompt: And", _ONE),
    Rule(r"new_tokens: \d+", "new_tokens: 2", _FEWER),
    Rule(r"draft_length: \d+", "draft_length: 1", _FEWER),
)

SMALLER_CODE = (
    Rule(rf'load_model\("({MODELS})"\)', r'load_model("configs/model/\1.yaml")', _SMALL),
    Rule(r'encode\("[^"]*"\)', 'encode("And")', _ONE),
)

NOT_RUN = (
    Rule(r"^(source|\.) .*activate$", "", "it changes the shell that it is typed in: tests run in that environment"),
    Rule(r"^JAX_ENABLE_X64=1 ray start ", "", "Ray has an environment of its own, where `make test-ray` starts the same nodes"),
)
"""Commands that no test of this environment runs. Of `make` the recipe alone is looked at, since tests are run by it."""

CODE_NOT_RUN = (
    Rule(
        r"^docs/secretflow\.md$",
        "",
        "three parties of SecretFlow: tests/plugin/secretflow_party.py makes the same calls",
    ),
)
"""By page: Python that is compiled, with every name that it imports, and not run."""
