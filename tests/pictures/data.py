"""Data for every kind of picture: committed results, and small ones that bring out the corners."""

import json
from pathlib import Path

import spu_llm

EXPERIMENTS = Path(spu_llm.__file__).parents[1] / "experiments"


def committed(path):
    return json.loads((EXPERIMENTS / path).read_text())


LAN, WAN = (committed(f"post/{name}.json") for name in ("lan", "wan"))
STEPS = committed("waterfall/result.json")["gpt2"]
VARIED = {**LAN, "variants": {"+ plugin & <more>": LAN["baseline"]}}
GROWTH = {
    "x": [64, 256, 1024],
    "x_name": "tokens of context",
    "panels": [
        {"title": "Time", "unit": "s", "series": {"stock SPU": [1.0, 2.0, None], "plugin <1>": [0.02, 0.03, 0.05]}},
        {"title": "Messages", "unit": "", "series": {"plugin <1>": [15, 15, 15]}},
    ],
}
CASES = {
    "ladder": {"lan": VARIED, "wan": WAN},
    "waterfall": {"plugin": STEPS["steps"], "stock SPU": STEPS["stock"]["steps"]},
    "timeline": LAN,
    "prefix": committed("soal_prefix/result.json"),
    "growth": GROWTH,
    "phases": {"baseline": LAN["baseline"], "+ plugin & <more>": LAN, "this run": WAN},
}
"""By kind."""
