"""The public interface: small, documented, typed, and free until it is used; and the files that describe the project."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

import spu_llm

ROOT = Path(spu_llm.__file__).parents[1]
HEAVY = ("jax", "flax", "spu", "numpy", "pydantic", "yaml", "matplotlib", "spu_llm.plugin", "spu_llm.runtime")

USES = """
from collections.abc import Iterator
from pathlib import Path
import numpy as np
import spu_llm

def double(x: np.ndarray) -> np.ndarray:
    return x + x

sample = (np.ones((2, 2), np.float32),)
ranges: spu_llm.Ranges = spu_llm.calibrate(double, sample)
plugin: spu_llm.Plugin = spu_llm.enable(double, ranges=ranges, precision=spu_llm.Precision(fraction_bits=14))
material: np.ndarray = plugin.deal(*sample)

@spu_llm.enable(softmax_reference="first")
def triple(x: np.ndarray) -> np.ndarray:
    return 3 * x

with spu_llm.enable(), spu_llm.Session(spu_llm.ProtocolConfig(name="ABY3")) as session:
    session.share("x", sample[0], owner="client")
    session.run(session.compile("double", double, (spu_llm.Slot((2, 2)),)), ("x",), "y")
    found: np.ndarray = session.receive("y")
    model = spu_llm.load_model("kjv")
    decoder = spu_llm.SecureDecoder(session, spu_llm.load_checkpoint(model.locate()).decoder, capacity=8)
    tokens: Iterator[int] = (step.token for step in spu_llm.generate(decoder, [0], 2, spu_llm.Sampler(spu_llm.SamplingConfig())))
try:
    metrics: dict[str, object] = spu_llm.run_experiment(spu_llm.load_experiment(Path("x.yaml")), Path("out"))
except spu_llm.UserError as error:
    print(error, spu_llm.__version__.split("."))
"""
MISUSES = """
import spu_llm
number: int = spu_llm.enable(print)
spu_llm.enable(softmax_reference="median")
spu_llm.Session(protocol="SEMI2K")
spu_llm.Slot(shape="x")
spu_llm.fetch_model("kjv")
"""
MYPY = """
[mypy]
ignore_missing_imports = True
follow_imports = skip
[mypy-spu_llm.*]
follow_imports = normal
ignore_errors = True
"""
"""Other packages are skipped: reading them takes minutes, and the programs use no type of theirs wrongly."""


def listed() -> list[str]:
    return [*spu_llm.__all__]


def test_dir_is_what_is_public():
    named = [name for name in dir(spu_llm) if not (name.startswith("__") and name.endswith("__"))]
    assert named == listed() == sorted(listed())
    assert "__version__" in dir(spu_llm) and re.fullmatch(r"\d+\.\d+\.\d+.*", spu_llm.__version__)


def test_import_is_free():
    code = f"import sys, spu_llm; spu_llm.__version__; print(*({{*{HEAVY}}} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "\n"


def test_star_gives_all():
    space = {}
    exec("from spu_llm import *", space)
    assert sorted({*space} - {"__builtins__"}) == listed()
    assert all(space[name] is getattr(spu_llm, name) for name in listed())


def test_a_type_checker_sees_what_is_imported():
    tree = ast.parse(Path(spu_llm.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {(node.module, alias.name) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    lazy = {(module, name) for module, names in spu_llm._PLACES.items() for name in names}
    assert typed == lazy
    assert sorted(name for _, name in lazy) == listed()


@pytest.mark.parametrize("name", ["generation_of_text", "secure", "_PARTS"])
def test_what_is_not_there_is_no_attribute(name):
    with pytest.raises(AttributeError, match=f"spu_llm.*{name}"):
        getattr(spu_llm, name)


def public(name):
    """A name's function, or its class' own public methods; each with the name to show for it."""
    value = getattr(spu_llm, name)
    if not inspect.isclass(value):
        return [(name, value)]
    own = {key: inspect.unwrap(each.fget if isinstance(each, property) else each) for key, each in vars(value).items()}
    starts = () if issubclass(value, BaseModel | Exception) else ("__init__", "__call__")
    return [(f"{name}.{key}", each) for key, each in own.items() if inspect.isfunction(each) and (key[0] != "_" or key in starts)]


@pytest.mark.parametrize("name", listed())
def test_every_name_is_documented_and_typed(name):
    assert len(inspect.getdoc(getattr(spu_llm, name)).split()) >= 8
    for shown, function in public(name):
        if not shown.endswith("__init__"):  # the class' own text says what it takes
            assert inspect.getdoc(function), shown
        signature = inspect.signature(function)
        untyped = [each.name for each in signature.parameters.values() if each.annotation is each.empty and each.name != "self"]
        assert not untyped and signature.return_annotation is not signature.empty, (shown, untyped)


def test_page_shows_every_name():
    page = (ROOT / "docs" / "api.md").read_text()
    assert sorted(re.findall(r"^\.\. auto\w+:: spu_llm\.(\w+)$", page, re.MULTILINE)) == listed()


def test_mypy_checks_programs_that_use_it(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "uses.py").write_text(USES)
    (tmp_path / "misuses.py").write_text(MISUSES)
    (tmp_path / "mypy.ini").write_text(MYPY)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "uses.py", "misuses.py"]
    found = subprocess.run(command, cwd=tmp_path, env=os.environ | {"MYPYPATH": str(ROOT)}, capture_output=True, text=True)
    errors = re.findall(r"^(\w+\.py):(\d+): error", found.stdout, re.MULTILINE)
    wrong = [number for number, line in enumerate(MISUSES.splitlines(), 1) if line and not line.startswith("import")]
    assert errors == [("misuses.py", str(number)) for number in wrong], found.stdout + found.stderr


def test_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert all(cited[key] for key in ("message", "title", "abstract", "authors", "keywords"))
    assert cited["version"] == spu_llm.__version__
    assert cited["license"] in (ROOT / "LICENSE").read_text().replace("Apache License", "Apache-2.0")
    for work in [cited, *cited["references"]]:
        assert {"type", "title", "authors"} <= set(work)
        assert all(set(author) == {"name"} for author in work["authors"])
    for work in cited["references"]:
        assert work["type"] in ("article", "conference-paper") and isinstance(work["year"], int)
        assert all(each["type"] in ("doi", "url", "swh", "other") and each["value"] for each in work.get("identifiers", []))
    assert len(cited["references"]) == 4


def test_changelog_has_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings and (headings[0] == "Unreleased" or headings[0].startswith(f"{spu_llm.__version__} "))
    assert spu_llm.__version__ in text
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= {
        "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits",
    }  # fmt: skip
