"""Narrow output words: the client gets the value, to 2^-16, from 32 bits a summand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spu import Io, libspu

from spu_llm.runtime import ProtocolConfig
from spu_llm.runtime.shares import join_words, narrow_words, pack, shape_of, unpack

CASES = [("SEMI2K", "FM64", 18), ("SEMI2K", "FM64", 24), ("SEMI2K", "FM128", 18), ("ABY3", "FM64", 14), ("CHEETAH", "FM64", 18)]
VALUES = st.lists(st.floats(-32767, 32767), max_size=20) | st.sampled_from([[0.0], [-32767.99], [32767.999], [-(2**-30)]])


@pytest.mark.parametrize(("name", "ring", "bits"), CASES)
@settings(max_examples=60, deadline=None)
@given(values=VALUES)
def test_round_trip(name, ring, bits, values):
    protocol = ProtocolConfig(name=name, ring=ring, fraction_bits=bits)
    scale = 2 * bits
    raw = np.floor(np.array(values) * 2.0**scale).astype(np.int64)
    raw = np.clip(raw, -(2**62), 2**62)
    parts = Io(protocol.world_size, protocol.spu_config(False)).make_shares(raw.reshape(-1, 1), libspu.Visibility.VIS_SECRET)
    words = [word for rank, part in enumerate(parts) for word in narrow_words(part, rank, scale)]
    assert len(words) == protocol.world_size
    found = join_words(words, shape_of(parts[0]))
    short = raw.reshape(-1, 1) / 2.0**scale - found
    assert found.shape == (len(values), 1)
    assert ((short >= 0) & (short <= protocol.world_size * 2.0**-16)).all()


@pytest.mark.parametrize(("name", "ring", "bits"), CASES)
def test_pack(name, ring, bits):
    protocol = ProtocolConfig(name=name, ring=ring, fraction_bits=bits)
    io = Io(protocol.world_size, protocol.spu_config(False))
    for value in (np.float32(1.5), np.arange(6.0).reshape(2, 3), np.zeros((0, 3))):
        parts = io.make_shares(np.asarray(value), libspu.Visibility.VIS_SECRET)
        assert np.allclose(io.reconstruct([unpack(pack(part)) for part in parts]), value)


def test_public_values_are_not_taken_for_shares():
    protocol = ProtocolConfig()
    (part, _) = Io(2, protocol.spu_config(False)).make_shares(np.arange(3), libspu.Visibility.VIS_PUBLIC)
    with pytest.raises(ValueError, match="not additive"):
        narrow_words(part, 0, 36)
