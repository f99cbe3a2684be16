"""Material travels to its own party only, to one folder only, whole, and once, whatever breaks on the way."""

import os
import random
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle

import grpc
import pytest
from identities import Unchecked, make_all
from lives import KEYS, WANTED, Nursery, alive, deal, pull, record, serve

from spu_llm.dealer.store import MaterialStore
from spu_llm.errors import UserError
from spu_llm.runtime.service import Limits, MaterialPuller, MaterialServer, Wanted, server
from spu_llm.runtime.service.wire import METHOD, SERVICE, pack, unpack
from spu_llm.runtime.supply import PARTIES, party_folder, read_key, with_store

ROLES = ("client", "owner")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_all(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def room(made, tmp_path):
    return Room(made, tmp_path)


class Room:
    """A dealer and two parties, each with a folder."""

    def __init__(self, made, folder):
        self.made, self.folder = made, folder
        self.dealt = folder / "dealer" / WANTED.session

    def identity(self, role, kind="right"):
        return Unchecked(self.made / kind, role)

    def server(self, on_open, address="127.0.0.1:0", identity=None):
        return MaterialServer(address, identity or self.identity("dealer"), self.folder / "dealer", on_open)

    def dealer(self, count=5, **options):
        return self.server(lambda wanted: deal(self.folder / "dealer" / wanted.session, count), **options)

    def puller(self, address, role, wanted=WANTED, limits=None, folder=None, kind="right"):
        return MaterialPuller(address, self.identity(role, kind), wanted, self.folder / (folder or role), limits)

    def party(self, role, folder=None):
        return party_folder(self.folder / (folder or role), ROLES.index(role))

    def pull(self, address, *roles, **options):
        """What becomes of both parties' attempts to fetch everything: the errors' texts, or None."""

        def attempt(role):
            try:
                with self.puller(address, role, **options) as puller:
                    puller.wait()
            except UserError as error:
                assert "\n" not in str(error)
                return str(error)

        with ThreadPoolExecutor() as pool:
            return list(pool.map(attempt, roles or ROLES))


def numbers(folder):
    return with_store(folder, MaterialStore.available)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as held:
        return held.getsockname()[1]


def until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_each_party_gets_its_own_material_and_the_dealer_keeps_none(room):
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with room.dealer(8) as dealer:
        assert room.pull(dealer.address) == [None, None]
        assert room.pull(dealer.address) == [None, None]  # nothing is left to do
    for role, rank in zip(ROLES, PARTIES, strict=True):
        assert read_key(room.party(role)) == KEYS[rank]
        assert numbers(room.party(role)) == list(range(8))
        for number in range(8):
            assert with_store(room.party(role), lambda store, n=number: store.take(n)) == record(rank, number)
        assert numbers(party_folder(room.dealt, rank)) == []
    until(lambda: threading.active_count() <= before[0] and len(os.listdir("/proc/self/fd")) <= before[1] + 4)


@contextmanager
def entered(room, address, client=None, owner=None):
    """Both parties' pullers, entered; with limits for each."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        pullers = [room.puller(address, role, limits=limits) for role, limits in zip(ROLES, (client, owner), strict=True)]
        yield [each.result() for each in [pool.submit(stack.enter_context, puller) for puller in pullers]]


def test_entering_waits_for_key_and_first_record_only(room):
    opened = []

    def on_open(wanted):
        dealing = deal(room.dealt, 2)
        time.sleep(1.0)  # a dealer that is at work may take longer than the patience
        opened.append(time.monotonic())
        return dealing

    with room.server(on_open) as dealer, entered(room, dealer.address, Limits(0.5), Limits(0.5)) as pullers:
        assert len(opened) == 1
        for puller, role in zip(pullers, ROLES, strict=True):
            puller.check()
            assert read_key(room.party(role)) and 0 in numbers(room.party(role))


@pytest.mark.parametrize(
    ("role", "kind", "says"),
    [
        ("client", "other", "its certificate is not one of the dealer's"),
        ("client", "expired", r"the dealer refuses .*client\.pem"),
        ("client", "early", r"the dealer refuses .*client\.pem"),
    ],
)
def test_wrong_certificates_are_refused_at_once(room, role, kind, says):
    with room.dealer() as dealer:
        start = time.monotonic()
        with pytest.raises(UserError, match=says):
            room.puller(dealer.address, role, kind=kind).__enter__()
        assert time.monotonic() - start < 8
    assert not room.dealt.exists()


@pytest.mark.parametrize(
    ("role", "kind", "why"), [("dealer", "expired", "expired"), ("owner", "right", "mismatch"), ("dealer", "other", "")]
)
def test_a_wrong_dealer_is_refused_at_once(room, role, kind, why):
    with room.dealer(identity=room.identity(role, kind)) as dealer:
        start = time.monotonic()
        with pytest.raises(UserError, match=f"its certificate is not one of the dealer's .*{why}"):
            room.puller(dealer.address, "client").__enter__()
        assert time.monotonic() - start < 8


def ask(room, address, shown, request):
    """A request under a role's certificate, or None: (status code, details)."""
    files = room.identity(shown or "client")
    own = (files.key.read_bytes(), files.certificate.read_bytes()) if shown else (None, None)
    credentials = grpc.ssl_channel_credentials(files.ca.read_bytes(), *own)
    with (
        grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", "dealer")]) as channel,
        pytest.raises(grpc.RpcError) as raised,
    ):
        list(channel.stream_stream(f"/{SERVICE}/{METHOD}", pack, unpack)(iter([request]), timeout=5))
    return raised.value.code(), raised.value.details()


def test_material_goes_to_the_certificate_whose_it_is(room):
    request = {"session": "session", "description": b"description", "place": "0" * 32, "start": 0}
    with room.dealer() as dealer:
        assert room.pull(dealer.address) == [None, None]
        for shown, asked in (("owner", "client"), ("client", "owner"), ("helper", "client"), ("helper", "helper")):
            code, details = ask(room, dealer.address, shown, {**request, "role": asked})
            assert code == grpc.StatusCode.PERMISSION_DENIED and f"of the {shown} asks for the {asked}'s" in details
        for shown in (None, "dealer"):
            assert ask(room, dealer.address, shown, {**request, "role": "client"})[0] == grpc.StatusCode.UNAVAILABLE
        assert ask(room, dealer.address, "client", {**request, "role": "client", "session": "../up"})[0] == (
            grpc.StatusCode.INVALID_ARGUMENT
        )
        code, details = ask(room, dealer.address, "client", {**request, "role": "client"})
        assert code == grpc.StatusCode.FAILED_PRECONDITION and "goes to another folder of the client" in details


def test_both_parties_must_describe_the_same(room):
    opened = []
    with room.server(opened.append) as dealer, ThreadPoolExecutor() as pool:
        wanted = Wanted("session", b"another")
        client = pool.submit(room.pull, dealer.address, "client")
        owner = pool.submit(room.pull, dealer.address, "owner", wanted=wanted)
        for said in (*client.result(), *owner.result()):
            assert "client and owner describe different generations" in said
    assert not opened
    with room.dealer() as dealer:
        assert room.pull(dealer.address) == [None, None]
        assert "was opened with another description" in room.pull(dealer.address, "client", wanted=wanted)[0]


def test_a_party_alone_is_told_whom_it_waits_for(room):
    with room.dealer() as dealer:
        assert "the owner has not asked" in room.pull(dealer.address, "client", limits=Limits(0.5))[0]
        time.sleep(0.2)  # the dealer hears that it has left
        assert "the client has not asked" in room.pull(dealer.address, "owner", limits=Limits(0.5))[0]
    assert not room.dealt.exists()


def test_what_the_dealer_says_reaches_both(room):
    def refuse(wanted):
        raise UserError("no such model")

    def break_off(wanted):
        dealing = deal(room.dealt, 3)
        until(lambda: dealing.records)
        dealing.records, dealing.error = None, "the disk is full"
        return dealing

    with room.server(refuse) as dealer:
        assert all("no such model" in said for said in room.pull(dealer.address))
    with room.server(break_off) as dealer:
        assert all("the disk is full" in said for said in room.pull(dealer.address))
    assert [numbers(room.party(role)) for role in ROLES] == [[0, 1, 2]] * 2  # what was dealt before that has come


def test_nothing_goes_to_two_folders(room):
    with room.dealer() as dealer:
        assert room.pull(dealer.address, limits=Limits(5)) == [None, None]
        assert "goes to another folder of the client" in room.pull(dealer.address, "client", folder="second")[0]
        assert numbers(room.party("client", "second")) == []
        other = Wanted("other", b"description")
        assert "holds the client's material of session session" in room.pull(dealer.address, "client", wanted=other)[0]
        with room.puller(dealer.address, "client"):
            assert "another process fetches material to it" in room.pull(dealer.address, "client")[0]
    with room.dealer() as dealer:  # a second life remembers it
        assert "goes to another folder of the client" in room.pull(dealer.address, "client", folder="third")[0]
        assert room.pull(dealer.address, "client") == [None]
    foreign = room.party("owner", "foreign")
    foreign.mkdir(parents=True)
    (foreign / "key").write_bytes(KEYS[1])
    assert "did not come this way" in room.pull("127.0.0.1:1", "owner", folder="foreign")[0]


def test_a_folder_brought_back_from_a_copy_is_found_out(room):
    with room.dealer() as dealer, ThreadPoolExecutor() as pool:
        owner = pool.submit(room.pull, dealer.address, "owner")
        with room.puller(dealer.address, "client", limits=Limits(hold_records=2)):
            until(lambda: numbers(room.party("client")) == [0, 1])
            shutil.copytree(room.party("client"), room.folder / "copy")
        assert room.pull(dealer.address, "client") == [None] == owner.result()
        shutil.rmtree(room.party("client"))
        shutil.copytree(room.folder / "copy", room.party("client"))
        assert "material 2 was kept and deleted before" in room.pull(dealer.address, "client")[0]


def test_no_more_is_held_than_the_limits_say(room):
    count, some = 12, 3_000_000
    largest = max(len(record(1, number)) for number in range(count))
    with room.dealer(count) as dealer, entered(room, dealer.address, Limits(hold_records=3), Limits(hold_bytes=some)) as (one, two):
        for number in range(count):
            there = list(range(number, min(number + 3, count)))
            until(lambda: numbers(room.party("client")) == there)  # noqa: B023
            time.sleep(0.1)
            assert numbers(room.party("client")) == there
            with_store(room.party("client"), lambda store: store.take(number))  # noqa: B023
        one.wait()
        until(lambda: held(room.party("owner")) >= some)
        time.sleep(0.2)
        assert held(room.party("owner")) < some + largest
        assert one.finished and not two.finished

        def use_all():
            with_store(room.party("owner"), lambda store: [store.take(number) for number in store.available()])
            return two.finished

        until(use_all)


def held(folder):
    return sum(path.stat().st_size for path in folder.glob("*.material"))


def test_damage_on_the_way_is_noticed(room, monkeypatch):
    whole, sent = server._chunks, []

    def damaged(path, number):
        for message in whole(path, number):
            sent.append(number)
            if "data" in message and number == 3 and sent.count(3) < patience:
                message = {"data": message["data"][:-1] + bytes([message["data"][-1] ^ 1])}
            yield message

    monkeypatch.setattr(server, "_chunks", damaged)
    patience = 6  # so many messages of record 3 have come damaged before one comes whole
    with room.dealer() as dealer:
        assert room.pull(dealer.address) == [None, None]
    assert with_store(room.party("owner"), lambda store: store.take(3)) == record(1, 3)
    patience, again = 10**9, Wanted("again", b"")
    sent.clear()
    room.dealt = room.folder / "dealer" / "again"
    with room.server(lambda wanted: deal(room.dealt, 5)) as dealer:
        said = room.pull(dealer.address, wanted=again, limits=Limits(0.5), folder="again")
    assert all("record 3 came damaged" in each for each in said)
    assert numbers(room.party("owner", "again")) == [0, 1, 2]


def test_a_dealer_that_is_not_there_is_waited_for(room):
    address = f"127.0.0.1:{free_port()}"
    assert all("no material from the dealer for 0.5 s" in said for said in room.pull(address, limits=Limits(0.5)))
    with ThreadPoolExecutor() as pool:
        pulling = pool.submit(room.pull, address, limits=Limits(10))
        time.sleep(1.0)
        with room.dealer(address=address) as dealer:
            assert dealer.address == address
            assert pulling.result() == [None, None]
            with pytest.raises(UserError, match="cannot listen there"):
                room.dealer(address=address)


def start_all(nursery, room, count):
    address = f"127.0.0.1:{free_port()}"
    dealer = nursery.start(serve, room.made / "right", address, room.folder / "dealer", count)
    return address, dealer, {role: start_party(nursery, room, address, role) for role in ROLES}


def start_party(nursery, room, address, role):
    return nursery.start(pull, room.made / "right", address, room.folder / role, role, room.folder / f"{role}.used")


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))


def used(room, role):
    report = room.folder / f"{role}.used"
    return report.read_text().split() if report.exists() else []


def test_kills_lose_and_double_nothing(room):
    """Dealer and parties are killed again and again while they work: each record is used once, but for one that a kill took."""
    count, choose, kills = 80, random.Random(5), {"dealer": 0, "client": 0, "owner": 0}
    with Nursery() as nursery:
        address, dealer, parties = start_all(nursery, room, count)
        until(lambda: all(used(room, role) for role in ROLES))
        for victim in cycle(kills):
            time.sleep(choose.uniform(0.05, 0.3))
            if all("done" in used(room, role) for role in ROLES):
                break
            if victim == "dealer":
                kill(dealer)
                dealer = nursery.start(serve, room.made / "right", address, room.folder / "dealer", count)
            elif "done" in used(room, victim):
                continue
            elif alive(parties[victim]):
                kill(parties[victim])
                parties[victim] = start_party(nursery, room, address, victim)
            else:
                assert "done" in used(room, victim), f"the {victim} failed"
            kills[victim] += 1
    for role, rank in zip(ROLES, PARTIES, strict=True):
        found = [int(number) for number in used(room, role) if number != "done"]
        assert len(set(found)) == len(found)
        lost = set(range(count)) - set(found)
        assert len(lost) <= kills[role]  # a kill between the mark of a record and its use loses that one
        assert numbers(party_folder(room.dealt, rank)) == []
    assert min(kills.values()) >= 2


def test_a_frozen_dealer_is_noticed(room):
    with Nursery() as nursery:
        address = f"127.0.0.1:{free_port()}"
        dealer = nursery.start(serve, room.made / "right", address, room.folder / "dealer", 10**6)
        with ThreadPoolExecutor() as pool:
            pulling = pool.submit(room.pull, address, limits=Limits(1.0))
            until(lambda: numbers(room.party("owner")))
            os.kill(dealer, signal.SIGSTOP)
            start = time.monotonic()
            assert all("no material from the dealer for 1 s" in said for said in pulling.result())
            assert time.monotonic() - start < 8
