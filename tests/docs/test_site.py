"""The documentation's site: it builds without a warning, asks nothing of other sites, and says what the code says."""

import ast
import re
import runpy
from functools import cache
from html import unescape
from html.parser import HTMLParser

import click
from commands import ROOT, blocks
from sphinx.cmd.build import main as sphinx_build

from spu_llm.cli import main as spu_llm_command
from spu_llm.experiment.schema import load_network

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Tags that make a browser fetch something, and where they name it."""


class Loads(HTMLParser):
    """Addresses that a page loads."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        address = dict(attrs).get(LOADED.get(tag, ""))
        self.found += [address] if address else []


def test_site(tmp_path):
    """One test, since building takes the time: broken links, missing anchors and unlisted pages are warnings."""
    built = tmp_path / "site"
    options = ["-q", "-W", "--keep-going", "-n", "-c", str(ROOT / "docs"), "-d", str(tmp_path / "trees"), "-b", "html"]
    assert sphinx_build([*options, str(ROOT), str(built)]) == 0
    pages = sorted(built.rglob("*.html"))
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= {path.stem for path in pages}
    for path in pages:
        loads = Loads()
        loads.feed(path.read_text())
        assert len(loads.found) > 3, path
        assert not [address for address in loads.found if re.match(r"(\w+:)?//", address)], path
    for path in built.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", path.read_text()), path
    check_commands(unescape(re.sub("<[^>]+>", "", (built / "docs" / "commands.html").read_text())))


def check_commands(text):
    """Every command is there, with all its options."""
    assert ".. option::" not in text  # understood, not printed
    found = list(named(spu_llm_command, "spu-llm"))
    assert len(found) > 30
    for name, command in found:
        start = text.find(f"{name} [OPTIONS]")
        assert start > 0, name
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert text.find(max(option.opts, key=len), start) > 0, (name, option.opts)


def named(command, name):
    """The command and all below it, by their full names."""
    yield name, command
    for each, below in getattr(command, "commands", {}).items():
        yield from named(below, f"{name} {each}")


def test_configuration_page_is_current():
    """Made anew by `.venv/bin/python docs/schema_page.py`."""
    generator = runpy.run_path(str(ROOT / "docs" / "schema_page.py"))
    assert generator["PAGE"].read_text() == generator["page"]()


def test_every_setting_has_a_meaning():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE)
    assert len(rows) > 50
    assert not [key for key, meaning in rows if len(meaning) < 10]


@cache
def said():
    """All texts of the package, with … where a value stands."""
    return [text for path in sorted((ROOT / "spu_llm").rglob("*.py")) for text in texts(ast.parse(path.read_text()))]


def texts(node):
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    elif isinstance(node, ast.Constant):
        yield from [node.value] if isinstance(node.value, str) else []
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def quoted():
    """Messages of the page: the first cell of each row."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    return [match[2].strip() for match in re.finditer(r"^\| (`+)(.+?)\1 \|", page, re.MULTILINE)]


def test_messages_are_ours():
    assert len(quoted()) > 40
    unknown = [message for message in quoted() if not any(message in text for text in said())]
    assert not unknown


def shown(page, language):
    return [block.text for block in blocks(page) if block.language == language]


def test_network_profile_of_extending(tmp_path):
    path = tmp_path / "satellite.yaml"
    path.write_text(shown("docs/extending.md", "yaml")[0])
    assert load_network(str(path)).seconds(1.0, 10, 50_000_000 // 8) == 1.0 + 10 * 0.3 + 1.0


def test_primitive_of_extending(capsys):
    """It gives what the page says it does, in as many messages and bytes."""
    exec("\n".join(shown("docs/extending.md", "python")), {})
    assert capsys.readouterr().out.split() == shown("docs/extending.md", "text")[0].split()
