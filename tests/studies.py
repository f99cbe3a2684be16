"""Experiments in a folder of their own, for the tests of reproduce."""

import json

import pytest
import yaml

from spu_llm.reproduce.manifest import load_study

ROW = {"what": "{name}: seconds", "each": "layers", "ours": "plugin", "baselines": ["stock"], "unit": "s"}
TABLE = {"title": "Seconds", "ours": "plugin", "baselines": ["stock SPU"], "rows": [ROW]}
RESULT = {"layers": [{"name": "first", "plugin": 2.0, "stock": 9.4}, {"name": "second", "plugin": None, "stock": 12345.6}]}


@pytest.fixture
def study(tmp_path):
    """Makes an experiment of tmp_path/experiments from the settings of its manifest, with committed results."""

    def make(name, result=RESULT, **settings):
        folder = tmp_path / "experiments" / name
        folder.mkdir(parents=True, exist_ok=True)
        command = {"command": 'echo "running"; cp "$FROM" "$OUT/result.json"', "minutes": 1}
        about = {"title": f"Title of {name}", "system": "SOAL", "quick": command, "tables": [TABLE], **settings}
        (folder / "about.yaml").write_text(yaml.safe_dump(about))
        if result is not None:
            (folder / "result.json").write_text(json.dumps(result))
        return load_study(folder)

    return make
