"""The model and the generation of own.yaml as arrays, for crypten_gpt2.py.

python experiments/peers/export.py results/peers/model.npz
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from spu_llm.experiment.prompt import encode_prompt
from spu_llm.experiment.schema import load_experiment
from spu_llm.models import load_checkpoint
from spu_llm.models.tokenizer import need_tokenizer

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "comet_peers"))
from make import arrays  # noqa: E402


def main(path: Path) -> None:
    case = load_experiment(HERE / "own.yaml").main
    checkpoint = load_checkpoint(case.model.locate())
    prompt = encode_prompt(case, need_tokenizer(checkpoint.tokenizer, case.model))
    np.savez(path, **arrays(case, checkpoint.decoder, prompt, case.generation.new_tokens))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
