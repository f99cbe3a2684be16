"""What alice got in secretflow_generation_party.py, against plaintext."""

import json

import numpy as np

from spu_llm.models import PlainDecoder, load_checkpoint

ERROR = 0.1  # as in test_assisted.py


def check_generation(checkpoint, out):
    """Two prompts in one conversation, then the first again from the start: tokens as in plaintext, logits near."""
    from secretflow_generation_party import NEW, PREFIX, PROMPTS  # it imports SecretFlow

    found = json.loads(out.read_text())
    plain = PlainDecoder(load_checkpoint(checkpoint).decoder, 20)
    for i, prompt in enumerate([*PROMPTS, PROMPTS[0]]):
        if i in (0, 2):
            plain.length = 0
            plain.advance(PREFIX)
        assert len(found[i]) == NEW
        tokens = prompt
        for token, logits in found[i]:
            want = plain.advance(tokens)[-1]
            assert np.abs(want - np.asarray(logits)).max() < ERROR
            assert token == want.argmax()
            tokens = [token]
    assert found[0] != found[2]  # roundings are of new masks
