"""What programs open to everyone is uniform in the ring, whatever the inputs are: each byte of it, and from one run to the next."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import enable_x64
from scipy import stats

from spu_llm.dealer.generator import Dealer, receive
from spu_llm.primitives import functions
from spu_llm.primitives.attention import SoftmaxPlan, softmax
from spu_llm.primitives.compare import relu
from spu_llm.primitives.contract import contract
from spu_llm.primitives.dealing import Dealing, with_material
from spu_llm.primitives.fixed import Fixed
from spu_llm.primitives.lookup import lookup
from spu_llm.primitives.scale import scale
from spu_llm.primitives.select import one_hot
from spu_llm.primitives.truncate import truncate
from spu_llm.runtime import ProtocolConfig, Session, Slot

N = 4096
BITS = 20
KEYS = b"a" * 16, b"b" * 16  # the test is the same on every run
LEAST = 1e-6
SOFTMAX = SoftmaxPlan(functions.exponential(-8.0, 3.0, 16, 0, 4), functions.reciprocal(0.5, 30.0, 64))

# Function of x [N], and how many values of x's size it opens.
PROGRAMS = {
    "truncate": (lambda x: truncate(x, 4), 1),
    "lookup": (lambda x: truncate(lookup(x, functions.gelu()), 12), 2),
    "scale": (lambda x: scale(x, Fixed(x.raw[::-1], BITS), 10, 12), 2),
    "contract": (lambda x: contract("n,n->", x, Fixed(x.raw[::-1], BITS), 10), 2),
    "relu": (lambda x: relu(x, 40), 3),
    "one_hot": (lambda x: one_hot(Fixed(x.raw, 0), 8), 1),
    "softmax": (lambda x: softmax(x.reshape(-1, 2), np.ones(2, np.int64), SOFTMAX), 3),
}
CONSTANT = {
    "0": np.zeros(N, np.int64),
    "1": np.ones(N, np.int64),
    "-3 / 4": np.full(N, -3 << (BITS - 2)),
    "largest": np.full(N, 7 << BITS),
}


@pytest.fixture
def seen(monkeypatch):
    """Every value that programs traced from here on open, in order."""
    values = []

    def flush(self):
        requests = list(self.pending)
        original(self)
        values.extend(request.result.reshape(-1) for request in requests)

    original = Dealing.flush
    monkeypatch.setattr(Dealing, "flush", flush)
    return values


def openings(seen, function, inputs):
    """[inputs, values]: what is opened in a run of the function on each of `inputs`, run numbers 1, 2, ..."""
    with enable_x64():
        dealt = with_material(lambda raw: function(Fixed(raw, BITS)), [jax.ShapeDtypeStruct((N,), np.int64)], {}, {}, True)

    def program(material, raw):
        seen.clear()
        results = dealt(material, raw)
        return results, jnp.concatenate(seen)

    with Session(ProtocolConfig()) as session:
        specification = dealt.specification
        compiled = session.compile("opened", program, (Slot((specification.words,), np.int64), Slot((N,), np.int64)))
        found = []
        for run, raw in enumerate(inputs, 1):
            messages = Dealer(KEYS).deal(specification, run).messages
            words = [receive(specification, party, KEYS[party], run, messages[party]) for party in (0, 1)]
            session.place("material", words)
            session.share("raw", raw, "client")
            count = compiled.outputs.num_leaves - 1
            session.run(compiled, ("material", "raw"), ([f"result{i}" for i in range(count)], "opened"))
            found.append(np.asarray(session.receive("opened")))
    return np.stack(found)


def byte_chances(values):
    """The chance of a chi-square as large as that of each byte of int64 values."""
    table = values.reshape(-1).view(np.uint8).reshape(-1, 8)
    return [stats.chisquare(np.bincount(table[:, i], minlength=256)).pvalue for i in range(8)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_opened_values_are_uniform(name, seen):
    function, count = PROGRAMS[name]
    found = openings(seen, function, [*CONSTANT.values(), CONSTANT["0"]])
    assert found.shape[1] >= count * N
    for values in found:
        assert min(byte_chances(values)) > LEAST
        assert min(byte_chances(values[1:] - values[:-1])) > LEAST  # and independent of their neighbours
    for other in found[1:]:
        assert stats.ks_2samp(found[0], other).pvalue > LEAST  # other inputs, the same distribution
    assert min(byte_chances(found[0] - found[-1])) > LEAST  # the same inputs, other masks
    assert len(np.unique(found)) == found.size  # no mask twice


def test_opened_values_do_not_hang_on_the_inputs(seen):
    """Of random inputs: no byte of what is opened tells of the input's."""
    raw = np.random.default_rng(0).choice([0, 1 << BITS], N)
    found = openings(seen, PROGRAMS["lookup"][0], [raw])[0][:N]
    top = found.view(np.uint8).reshape(N, 8)[:, 7]
    table = np.stack([np.bincount(top[raw == value], minlength=256) for value in (0, 1 << BITS)])
    assert stats.chi2_contingency(table).pvalue > LEAST


@pytest.mark.parametrize("bits", [63, 60])
def test_a_bad_mask_would_be_found(bits):
    random = np.random.default_rng(0)
    values = 5 + random.integers(0, 2**bits, 2 * N)
    assert min(byte_chances(values)) < LEAST
    assert min(byte_chances(random.integers(-(2**63), 2**63 - 1, 2 * N))) > LEAST
