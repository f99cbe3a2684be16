"""Writes configuration.md, the reference of all settings, from the schema by which they are checked.

Command: .venv/bin/python docs/schema_page.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spu_llm.experiment.schema import Experiment

PAGE = Path(__file__).with_name("configuration.md")

_INTRODUCTION = """\
# Configuration

Every key that the YAML of an experiment may have, for `spu-llm run` and `spu-llm party`. `docs/schema_page.py` writes this page
from the schema that checks the files; unknown keys are refused. `--set key.key=value` changes any of them on the command line.

`model`, `network` and `decoding.draft_model` may be names: of files in the folders `model` and `network` beside the config's own
folder, or in the project's `configs`; or paths of YAML files that hold the section in question. Paths in a model's file are
relative to that file, all others to where the command is run. [The guide](guide-experimenter.md) shows whole files.
"""

_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "{} letter or more",
    "pattern": "like `{}`",
}
_TYPES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "object": "mapping"}


def page() -> str:
    """The page as it should be."""
    schema = Experiment.model_json_schema()
    sections = [_section("Experiment", schema), *(_section(name, schema["$defs"][name]) for name in _met(schema))]
    return "\n".join([_INTRODUCTION, *sections])


def _met(schema: dict[str, Any]) -> list[str]:
    """Sections in the order in which a reader meets them."""
    met: list[str] = []
    waiting = [schema]
    while waiting:
        found = [name for name in _references(waiting.pop(0)["properties"]) if name not in met]
        met += dict.fromkeys(found)
        waiting += [schema["$defs"][name] for name in dict.fromkeys(found)]
    return met


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from _references(each)


def _section(name: str, schema: dict[str, Any]) -> str:
    rows = [_row(key, field, key in schema.get("required", ())) for key, field in schema["properties"].items()]
    table = ["| key | what | default | meaning |", "|---|---|---|---|", *rows]
    return "\n".join([f"## {name}", "", _linked(schema["description"]), "", *table, ""])


def _row(key: str, field: dict[str, Any], required: bool) -> str:
    default = "required" if required else _default(field.get("default"))
    meaning = " ".join(_linked(field.get("description", "")).split())
    return "| " + " | ".join(text.replace("|", "\\|") for text in (f"`{key}`", _kind(field), default, meaning)) + " |"


def _linked(text: str) -> str:
    """With links in place of names of pages beside this one."""
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


def _default(value: Any) -> str:
    if value is None:
        return ""
    return "its own defaults" if isinstance(value, dict) and value else f"`{json.dumps(value)}`"


def _kind(field: dict[str, Any]) -> str:
    """What a value may be, in words."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field:
        return " or ".join(_kind(option) for option in field["anyOf"] if option.get("type") != "null")
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_kind(field['items'])}s"
    if field.get("format") == "path":
        return "path"
    bounds = ", ".join(
        text.format(f"{field[key]:g}" if key != "pattern" else field[key]) for key, text in _BOUNDS.items() if key in field
    )
    return _TYPES[field["type"]] + (f" ({bounds})" if bounds else "")


if __name__ == "__main__":
    PAGE.write_text(page())
