"""Sparse decoding by SPU's own operations against a float64 model that computes what is chosen, on three protocols."""

import numpy as np
import pytest
from opt_reference import run, tiny
from sparse_cases import chooser, separated

from spu_llm.comet.network import all_heads, network_for
from spu_llm.comet.renewal import SHUFFLE
from spu_llm.comet.secure import SparseSecureDecoder
from spu_llm.runtime import ProtocolConfig, Session

PREFIX = (7, 8)
TOGETHER, ALONE = [5, 17, 26, 2], [30, 11, 12]
TOKENS = np.array([*PREFIX, *TOGETHER, *ALONE])
CAPACITY = 12
ERROR = 0.1


def started(decoder, layers, name, renew=None, kind=SparseSecureDecoder):
    """A session with a sparse decoder set up in it."""
    session = Session(ProtocolConfig(name=name))
    secure = kind(session, network_for(session.protocol, decoder, layers), CAPACITY, PREFIX, renew=renew)
    secure.set_up()
    return session, secure


@pytest.fixture(scope="module")
def usual():
    """A model of two layers and three heads, and predictors of 2 of 4 blocks and 2 heads."""
    decoder = tiny(ffn=12)
    return decoder, separated(decoder, TOKENS, len(PREFIX), 4, 2, 2)


@pytest.mark.parametrize("name", ["SEMI2K", "ABY3"])
def test_logits_equal_what_is_chosen(name, usual):
    """Of a pass of several tokens, which skips no head, of single ones, which do, and again after a renewal and a roll-back.

    Masks alone are opened: of blocks in every pass, of heads in those that skip them.
    """
    decoder, layers = usual
    want = run(decoder, TOKENS, chooser(layers, len(PREFIX), range(2, 6)))[0]
    session, secure = started(decoder, layers, name, renew=4)
    with session:
        set_up = session.phases[SHUFFLE].messages
        found = [secure.advance(TOGETHER, last_only=False), secure.advance(ALONE[:1])]
        assert 0 < set_up < session.phases[SHUFFLE].messages
        secure.advance([28])
        secure.roll_back(7)
        found.append(secure.advance(ALONE[1:2]))
        secure.score(ALONE[2:])
        found.append(secure.row(0)[None])
        opened = sorted((program.name, program.reveals) for program in session.programs if program.reveals)
    assert opened == [("layer 0", 1), ("layer 0", 2), ("layer 1", 1), ("layer 1", 1)]
    assert np.abs(np.concatenate(found) - want[2:]).max() < ERROR


def test_on_cheetah(usual):
    """No head is skipped, and a pass of several tokens computes all and opens nothing."""
    decoder, layers = usual
    choose = chooser(all_heads(layers), len(PREFIX))

    def choose_later(i, y, before, hidden):
        neurons, heads = choose(i, y, before, hidden)
        neurons[2:4] = True
        return neurons, heads

    want = run(decoder, TOKENS, choose_later)[0]
    session, secure = started(decoder, layers, "CHEETAH", renew=1)
    with session:
        found = [*secure.advance(TOGETHER[:2], last_only=False), *(secure.advance([token])[0] for token in TOGETHER[2:])]
        opened = sorted(program.reveals for program in session.programs if program.name.startswith("layer"))
    assert np.abs(np.stack(found) - want[2:6]).max() < ERROR
    assert opened == [0, 1]


def places(secure):
    """By layer and kind, which of the owner's heads or blocks stands at each place; the same for every part that is shuffled."""
    found = {}
    for i, layer in enumerate(secure._network.params["layers"]):
        for kind in ("heads", "neurons"):
            names = secure._params["layers"][i][kind]
            size = len(layer[kind]["query_bias" if kind == "heads" else "up_bias"])
            (found[i, kind],) = {place_of(secure.session.receive(names[part]), layer[kind][part], part, size) for part in names}
    return found


def place_of(now, own, part, size):
    """The nearest of the owner's for each place: SPU rounds them."""
    axis = int(part == "second" or (now.ndim == 2 and part in ("query", "key_value", "up")))
    now, own = (_parted(each, axis, size) for each in (now, own))
    return tuple(np.abs(own - each).max(1).argmin() for each in now)


def _parted(x, axis, size):
    lead = x.shape[:axis]
    return np.moveaxis(np.asarray(x, np.float64).reshape(*lead, size, -1), axis, 0).reshape(size, -1)


class Watched(SparseSecureDecoder):
    """Notes the orders under which each pass discloses what is active."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.orders = []

    def _layers(self, n, *order):
        self.orders.append(places(self))
        super()._layers(n, *order)


@pytest.fixture(scope="module")
def watched(usual):
    """Orders at set-up and at three tokens, of which two serve each order, and the cache after the first and the last."""
    session, secure = started(*usual, "SEMI2K", renew=2, kind=Watched)
    caches = []
    with session:
        for token in (5, 17, 26):
            secure.advance([token])
            caches.append([session.receive(f"cache.1.{part}") for part in ("keys", "values")])
    return secure.orders, caches


def test_orders_are_renewed(watched):
    """Cache rows move with their heads."""
    (_, first, second, third), caches = watched
    assert first == second != third
    where = [first[1, "heads"].index(head) for head in third[1, "heads"]]
    for old, new in zip(caches[0], caches[-1], strict=True):
        np.testing.assert_allclose(new[:3], old[:3][:, where], atol=2**-15)


def test_set_up_tells_nothing_of_orders(watched):
    """A token that all know, under an order, tells the owner what stands at the places that are active."""
    (set_up, first, _, _), _ = watched
    assert set_up != first
