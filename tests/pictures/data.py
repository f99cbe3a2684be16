"""Data for every kind of picture: committed results, and small ones that bring out the corners."""

import json
from pathlib import Path

import spu_llm
from spu_llm.pictures import runs_of

EXPERIMENTS = Path(spu_llm.__file__).parents[1] / "experiments"


def committed(path):
    return json.loads((EXPERIMENTS / path).read_text())


NAME = r"+ plugin & <more> \1 $x^2$"
"""Of a variant: all of it is text."""
LAN, WAN = (committed(f"post/{name}.json") for name in ("lan", "wan"))
STEPS = committed("waterfall/result.json")["gpt2"]
VARIED = {**LAN, "variants": {NAME: LAN["baseline"]}}
GROWTH = {
    "x": [64, 256, 1024],
    "x_name": "tokens of context",
    "panels": [
        {"title": "Time", "unit": "s", "series": {"stock SPU": [1.0, 2.0, None], "plugin <1>": [0.02, 0.03, 0.05]}},
        {"title": "Messages", "unit": "", "series": {"plugin <1>": [15, 15, 15]}},
    ],
}
CASES = {
    "ladder": {"lan": runs_of(VARIED), "wan": runs_of(WAN)},
    "waterfall": {"plugin": STEPS["steps"], "stock SPU": STEPS["stock"]["steps"]},
    "timeline": LAN,
    "prefix": committed("soal_prefix/result.json"),
    "growth": GROWTH,
    "phases": {"baseline": LAN["baseline"], NAME: LAN, "this run": WAN},
}
"""By kind."""
