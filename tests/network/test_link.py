"""Settings of SPU's link, and openings over it through a relay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spu import libspu

from spu_llm.network import NetworkProfile
from spu_llm.network.link import PacedSender, link_options
from spu_llm.network.openings import Opening, time_openings

CALLS = 8  # that yacl has under way of one message
MOST_IN_ONE_CALL = 64 << 20  # brpc's max_body_size


def options(profile, timeout=30_000):
    desc = libspu.link.Desc()
    link_options(desc, profile, timeout)
    return desc


@given(st.floats(1, 20_000), st.floats(0, 300), st.integers(3_000, 900_000))
def test_calls_under_way_fill_the_bandwidth(mbps, delay_ms, timeout):
    desc = options(NetworkProfile(name="x", mode="link", bandwidth_mbps=mbps, delay_ms=delay_ms), timeout)
    under_way, in_a_round_trip = CALLS * desc.http_max_payload_size, mbps * 1e6 / 8 * 2 * delay_ms / 1e3
    assert libspu.link.Desc().http_max_payload_size <= desc.http_max_payload_size < MOST_IN_ONE_CALL
    assert under_way > in_a_round_trip or desc.http_max_payload_size == MOST_IN_ONE_CALL // 2
    assert (desc.recv_timeout_ms, desc.http_timeout_ms) == (timeout, timeout)


def test_settings_for_no_network_in_particular():
    desc = options(NetworkProfile(name="none", mode="none"))
    assert (desc.http_max_payload_size, desc.throttle_window_size) == (libspu.link.Desc().http_max_payload_size, 0)


class Recorder:
    """Stands for a link: bytes under way to each peer, were none to arrive before a message is waited for."""

    def __init__(self):
        self.sent, self.under_way, self.most, self.waits = [], {}, 0, 0

    def send_async(self, rank, data):
        self.sent.append((rank, data))
        self.under_way[rank] = self.under_way.get(rank, 0) + len(data)
        self.most = max(self.most, self.under_way[rank])

    def send(self, rank, data):
        self.sent.append((rank, data))
        self.under_way[rank] = 0
        self.waits += 1


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300_000)), max_size=60), st.floats(0.5, 5))
def test_what_is_under_way_takes_no_more_than_a_quarter_of_the_timeout(messages, mbps):
    recorder = Recorder()
    sender = PacedSender(recorder, NetworkProfile(name="x", mode="link", bandwidth_mbps=mbps), 4_000)
    for rank, size in messages:
        sender.send(rank, bytes(size))
    assert [(rank, len(data)) for rank, data in recorder.sent] == messages
    in_time = mbps * 1e6 / 8
    assert recorder.most <= in_time
    assert recorder.waits <= sum(size for _, size in messages) / (in_time - 1)


def test_a_fast_network_has_64_mb_under_way():
    recorder = Recorder()
    sender = PacedSender(recorder, NetworkProfile(name="none", mode="none"))
    for _ in range(130):
        sender.send(1, bytes(1 << 20))
    assert (recorder.waits, recorder.most) == (2, 63 << 20)


def test_openings_take_the_delay_and_their_bytes():
    link = NetworkProfile(name="x", mode="link", bandwidth_mbps=200, delay_ms=20)
    small, large = time_openings(link, (8, 2_500_000), 3)
    assert small.link_seconds == pytest.approx(0.02, rel=0.25)
    assert 0.12 < large.link_seconds < 0.12 + 3 * large.bare_seconds + 0.03
    assert small.bare_seconds < 0.01
    assert small.model_seconds == pytest.approx(small.bare_seconds + 0.02, rel=1e-3)
    assert large.model_seconds == pytest.approx(small.bare_seconds + 0.12, rel=1e-3)
    assert Opening(8, 0.0, 0.02, 0.021).error == pytest.approx(0.05)
