"""What the parties of a generation on a SecretFlow device give each other, and which devices are refused."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from spu import libspu

from spu_llm.dealer.material import Specification, Uniform
from spu_llm.errors import UserError
from spu_llm.generation import SamplingConfig

pytest.importorskip("secretflow")


from spu_llm.secretflow.device import check_device, to_share
from spu_llm.secretflow.ends import ClientEnd, DealerEnd, OwnerEnd


def ends():
    client, owner, dealer = ClientEnd(0), OwnerEnd(1), DealerEnd()
    dealer.begin(client.key(), owner.key())
    for end in (client, owner, dealer):
        end.learn(Specification((Uniform((3,)),)))
    return client, owner, dealer


def opened(info, *chunks):
    content = libspu.ValueChunk()
    content.ParseFromString(to_share(info, chunks).share_chunks[0])
    return np.frombuffer(content.content, np.int64)


def test_material_serves_once():
    client, owner, dealer = ends()
    seen = set()
    for _ in range(3):
        first, second = dealer.deal(0, {}, {}, {})
        seen.add(tuple(opened(*client.expand(0, first)) + opened(*owner.expand(0, second))))
        with pytest.raises(UserError, match=r"material .+ was used before, or is out of order"):
            client.expand(0, first)
    seen.add(tuple(dealer.deal_whole(0, {}, {}, {})))
    assert len(seen) == 4
    others = ends()[2].deal_whole(0, {}, {}, {})
    assert tuple(others) not in seen  # keys are new in every decoder


def test_tokens_outside_the_vocabulary_are_refused():
    client = ClientEnd(0)
    assert client.begin(np.asarray([[3, 11]]), SamplingConfig()) == 2
    with pytest.raises(UserError, match="outside the model's vocabulary of 11"):
        client.one_hots("block", 0, (2, 4), 3, 11)
    assert client.one_hots("within", 0, (1, 3), 3, 11).tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(
    ("protocol", "field", "parties", "dealer", "message"),
    [
        ("ABY3", "FM64", ("alice", "bob"), "carol", "runs .*ABY3"),
        ("SEMI2K", "FM128", ("alice", "bob"), "carol", "has the ring .*FM128"),
        ("SEMI2K", "FM64", ("alice", "bob", "carol"), "dave", "has the parties alice, bob, carol"),
        ("SEMI2K", "FM64", ("alice", "bob"), "bob", "dealer bob is a party of the SPU device"),
        ("SEMI2K", "FM64", ("alice", "bob"), "carol", "set JAX_ENABLE_X64=1"),
    ],
)
def test_unfit_devices_are_refused(protocol, field, parties, dealer, message):
    conf = SimpleNamespace(protocol=getattr(libspu.ProtocolKind, protocol), field=getattr(libspu.FieldType, field))
    device = SimpleNamespace(conf=conf, actors=dict.fromkeys(parties))
    other = SimpleNamespace(party=dealer)
    with jax.experimental.disable_x64(), pytest.raises(UserError, match=message):
        check_device(device, other, ["alice", "bob"])
