"""The relay that stands for a network: bytes, order, ends of connections, delay, bandwidth, bounded memory, its own end."""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.network import NetworkProfile
from spu_llm.network.emulation import Relay, netem_refusal
from spu_llm.network.emulation_check import Ceiling, check_emulation
from spu_llm.network.relay import Lane

PATIENCE = 10
FAST = NetworkProfile(name="fast", mode="link", bandwidth_mbps=2000, delay_ms=0.5)
SLOW = NetworkProfile(name="slow", mode="link", bandwidth_mbps=80, delay_ms=20)  # 10 MB/s


@pytest.fixture(scope="module")
def server():
    """Where the relay's targets listen."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        listening.settimeout(PATIENCE)
        yield listening


@pytest.fixture(scope="module")
def fast(server):
    with Relay(FAST, at(server), at(server)) as relay:
        yield relay


@pytest.fixture(scope="module")
def slow(server):
    with Relay(SLOW, at(server), at(server)) as relay:
        yield relay


def at(listening):
    return f"127.0.0.1:{listening.getsockname()[1]}"


def where(address):
    host, _, port = address.rpartition(":")
    return host, int(port)


@contextmanager
def ends(server, address):
    """A connection through the relay: the socket that connected, and the one that the target accepted."""
    near = socket.create_connection(where(address), PATIENCE)
    far, _ = server.accept()
    for each in (near, far):
        each.settimeout(PATIENCE)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with near, far:
        yield near, far


def everything(end):
    """All that comes until the other side ends."""
    parts = []
    while part := end.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


def in_background(function, *args):
    """Start it; the returned function waits for its result."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*args)), daemon=True)
    thread.start()

    def result():
        thread.join(PATIENCE)
        return found[0]

    return result


def send_in(end, data, sizes):
    """Send `data` cut into pieces of these sizes, again and again, and end the direction."""
    start = 0
    while start < len(data):
        for size in sizes:
            end.sendall(data[start : start + size])
            start += size
    end.shutdown(socket.SHUT_WR)


pieces = st.lists(st.integers(1, 100_000), min_size=1, max_size=6)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 400_000), st.integers(0, 400_000), pieces, pieces, st.booleans(), st.integers(0, 2**32 - 1))
def test_both_directions_carry_every_byte_in_order(server, fast, forth, back, cut_forth, cut_back, to_b, seed):
    draws = np.random.default_rng(seed)
    there, here = draws.bytes(forth), draws.bytes(back)
    with ends(server, fast.to_b if to_b else fast.to_a) as (near, far):
        waiting = [in_background(everything, far), in_background(everything, near)]
        sending = [in_background(send_in, near, there, cut_forth), in_background(send_in, far, here, cut_back)]
        assert waiting[0]() == there
        assert waiting[1]() == here
        assert [each() for each in sending] == [None, None]


def test_one_direction_may_end_before_the_other(server, fast):
    with ends(server, fast.to_b) as (near, far):
        near.sendall(b"question")
        near.shutdown(socket.SHUT_WR)
        assert everything(far) == b"question"
        far.sendall(b"answer")
        far.close()
        assert everything(near) == b"answer"


def test_a_broken_connection_breaks_on_the_other_side(server, fast):
    with ends(server, fast.to_b) as (near, far):
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        near.close()
        with pytest.raises(ConnectionResetError):
            far.recv(1)


def test_a_party_that_left_is_noticed_by_one_that_only_sends(server, fast):
    with ends(server, fast.to_b) as (near, far):
        far.close()
        with pytest.raises(OSError):
            for _ in range(1000):
                near.sendall(bytes(1000))
                time.sleep(0.005)


def test_a_party_may_come_later_than_the_relay():
    with closing(socket.create_server(("127.0.0.1", 0))) as reserved:
        address = at(reserved)
    with Relay(FAST, address, address) as relay:
        with pytest.raises(ConnectionResetError), socket.create_connection(where(relay.to_b), PATIENCE) as early:
            early.recv(1)
        with closing(socket.create_server(where(address))) as late, ends(late, relay.to_b) as (near, far):
            near.sendall(b"x")
            assert far.recv(1) == b"x"


def test_a_receiver_that_does_not_read_holds_the_sender_up(server, slow):
    data = np.random.default_rng(0).bytes(48 << 20)
    with ends(server, slow.to_b) as (near, far):
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        near.setblocking(False)
        before, sent, quiet = resident(slow), 0, time.monotonic()
        while time.monotonic() < quiet + 0.5:
            try:
                sent += near.send(data[sent : sent + (1 << 16)])
                quiet = time.monotonic()
            except BlockingIOError:
                time.sleep(0.01)
        assert sent < len(data) / 2
        assert resident(slow) - before < 4 << 20
        near.shutdown(socket.SHUT_WR)
        assert everything(far) == data[:sent]


def resident(relay):
    """Bytes of memory that the relay's process holds."""
    return int(Path(f"/proc/{relay.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def round_trip(near, far):
    start = time.monotonic()
    near.sendall(b"12345678")
    far.sendall(far.recv(8))
    near.recv(8)
    return time.monotonic() - start


def test_a_small_message_takes_the_delay_and_no_more(server, slow):
    with ends(server, slow.to_b) as (near, far):
        times = sorted(round_trip(near, far) for _ in range(15))
    assert times[0] > 0.04
    assert times[3] < 0.05


def transfer(server, address, size):
    with ends(server, address) as (near, far):
        sending = in_background(send_in, near, bytes(size), [1 << 18])
        assert len(everything(far)) == size
        sending()


def test_a_long_transfer_takes_its_time_at_the_bandwidth(server, slow):
    start = time.monotonic()
    transfer(server, slow.to_b, 5_000_000)
    assert 0.52 < time.monotonic() - start < 0.65


def test_connections_share_a_direction_and_not_the_other_one(server, slow):
    """A's connection carries A's bytes forth, B's connection carries A's bytes back: together they take twice as long."""
    size = 2_500_000
    with ends(server, slow.to_b) as (a_near, a_far), ends(server, slow.to_a) as (b_near, b_far):
        start = time.monotonic()
        arriving = [in_background(everything, end) for end in (a_far, b_near)]
        sending = [in_background(send_in, end, bytes(size), [1 << 16]) for end in (a_near, b_far)]
        assert [len(each()) for each in arriving] == [size, size]
        same = time.monotonic() - start
        [each() for each in sending]
    with ends(server, slow.to_b) as (a_near, a_far), ends(server, slow.to_a) as (b_near, b_far):
        start = time.monotonic()
        arriving = [in_background(everything, end) for end in (a_far, b_far)]
        sending = [in_background(send_in, end, bytes(size), [1 << 16]) for end in (a_near, b_near)]
        assert [len(each()) for each in arriving] == [size, size]
        opposite = time.monotonic() - start
        [each() for each in sending]
    assert 0.5 < same < 0.65
    assert 0.25 < opposite < 0.35


def test_a_small_message_passes_a_long_transfer_on_another_connection(server, slow):
    with ends(server, slow.to_b) as (near, far), ends(server, slow.to_b) as (busy, sink):
        draining = in_background(everything, sink)
        sending = in_background(send_in, busy, bytes(4_000_000), [1 << 16])
        time.sleep(0.1)
        times = sorted(round_trip(near, far) for _ in range(5))
        sending(), draining()
    assert times[0] > 0.04
    assert times[1] < 0.06


def test_a_cut_link_is_silent_and_goes_on_when_mended(server):
    with Relay(FAST, at(server), at(server)) as relay, ends(server, relay.to_b) as (near, far):
        assert round_trip(near, far) < 1
        relay.cut()
        near.sendall(b"late")
        far.settimeout(0.3)
        with pytest.raises(TimeoutError):
            far.recv(4)
        relay.mend()
        far.settimeout(PATIENCE)
        assert far.recv(4) == b"late"


def test_it_counts_what_it_carries(server):
    with Relay(FAST, at(server), at(server)) as relay, ends(server, relay.to_b) as (near, far):
        near.sendall(bytes(1000))
        far.recv(1000, socket.MSG_WAITALL)
        far.sendall(bytes(10))
        near.recv(10, socket.MSG_WAITALL)
        found = relay.carried()
    assert (found.a_to_b, found.b_to_a, found.connections) == (1000, 10, 1)
    assert 0 < found.deliveries < 10
    assert 0 <= found.late_ms < 1000


START = """
import sys, time
from spu_llm.network import NetworkProfile
from spu_llm.network.emulation import Relay
relay = Relay(NetworkProfile(name="x", mode="none"), "127.0.0.1:1", "127.0.0.1:2")
print(relay.pid, flush=True)
time.sleep(60)
"""


def test_it_ends_with_the_process_that_started_it():
    with subprocess.Popen([sys.executable, "-c", START], stdout=subprocess.PIPE, text=True) as parent:
        relay = int(parent.stdout.readline())
        os.kill(relay, 0)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while Path(f"/proc/{relay}/stat").exists() and " Z " not in Path(f"/proc/{relay}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Sink:
    """Stands for a flow."""

    def arrive(self, item):
        pass


@given(
    st.floats(1e3, 1e9),
    st.floats(0, 0.1),
    st.lists(st.tuples(st.floats(0, 0.05), st.integers(1, 10**6)), min_size=1, max_size=12),
)
def test_bytes_arrive_when_they_have_left_one_after_another_and_travelled(rate, delay, gaps):
    """Against the closed form: a byte has left once all from some earlier one on have, at the rate, for every such start."""
    lane, came, now = Lane(rate, delay), [], 0.0
    for gap, size in gaps:
        now += gap
        came.append((now, size))
        lane.take(now, Sink(), bytes(size))
    for last, (due, _, _) in enumerate(lane.due):
        left = max(came[first][0] + sum(size for _, size in came[first : last + 1]) / rate for first in range(last + 1))
        assert due == pytest.approx(left + delay, rel=1e-9)


def test_the_check_measures_what_was_asked_for(monkeypatch):
    monkeypatch.setattr("spu_llm.network.emulation_check._LONG_SECONDS", 0.2)
    found = check_emulation(SLOW, Ceiling(1.0, 1.0, 0.0))
    assert found.measured_rtt_ms == pytest.approx(40, rel=0.25)
    assert found.measured_mbps == pytest.approx(80, rel=0.25)
    assert found.rtt_error == pytest.approx(found.measured_rtt_ms / 40 - 1)
    assert ("NOT within" in str(found)) == (not found.holds)


def test_the_check_sees_a_link_that_is_not_what_it_should_be(monkeypatch):
    """The relay is given half the bandwidth and twice the delay."""

    def wrong(profile, *addresses):
        return Relay(profile.model_copy(update={"bandwidth_mbps": 40, "delay_ms": 40}), *addresses)

    monkeypatch.setattr("spu_llm.network.emulation_check.Relay", wrong)
    monkeypatch.setattr("spu_llm.network.emulation_check._LONG_SECONDS", 0.1)
    found = check_emulation(SLOW, Ceiling(1.0, 1.0, 0.0))
    assert found.rtt_error > 0.5
    assert found.throughput_error < -0.3
    assert not found.holds


def test_whether_netem_is_there_is_told_or_why_not():
    refusal = netem_refusal()
    assert refusal is None or refusal.strip()
