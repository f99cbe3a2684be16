"""Rules of the house that code can break: layering, and imports that change nothing."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import spu_llm

PACKAGE = Path(spu_llm.__file__).parent
ORDER = ["errors", "progress", "pictures", "network", "dealer", "primitives", "runtime", "plugin", "models", "soal", "generation"]
ORDER += ["post", "comet", "arhe", "bench", "experiment", "secretflow", "reproduce", "cli", "__main__"]
"""Lower first. A module may import from its own part and from parts before it."""


def imports(path: Path):
    """Parts of spu_llm that a file imports."""
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            yield from [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("spu_llm."):
            yield node.module.split(".")[1]


def test_lower_layers_import_no_higher_ones():
    files = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem != "__init__"]
    assert len(files) > 20
    for path in files:
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for part in imports(path):
            assert ORDER.index(part) <= ORDER.index(own), f"{path} imports {part}"


def needed(name: str, path: Path, known: set[str]):
    """Modules that a module imports, for types and within functions too."""
    base = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            source = ".".join([*base[: len(base) + 1 - node.level], *filter(None, [node.module])])
            yield from (f"{source}.{alias.name}" if f"{source}.{alias.name}" in known else source for alias in node.names)


def test_modules_import_in_no_circle():
    paths = {path.relative_to(PACKAGE.parent).with_suffix(""): path for path in PACKAGE.rglob("*.py")}
    named = {".".join(place.parts).removesuffix(".__init__"): path for place, path in paths.items()}
    graph = {name: {*needed(name, path, {*named})} for name, path in named.items()}
    assert {*named} >= set().union(*graph.values())
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_models_do_not_know_the_runtime():
    for path in (PACKAGE / "models").glob("*.py"):
        assert "runtime" not in set(imports(path)), path


def test_import_changes_nothing():
    code = (
        "import jax, os; before = (jax.config.jax_enable_x64, os.getcwd(), set(os.environ.items()));"
        "import spu_llm.cli;"
        "assert before == (jax.config.jax_enable_x64, os.getcwd(), set(os.environ.items()));"
        "import sys; assert 'openfhe' not in sys.modules"  # which Python 3.11 cannot have
    )
    subprocess.run([sys.executable, "-c", code], check=True)
