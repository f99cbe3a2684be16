"""One OpenMP thread a party where cores are few: seen in parallel regions of the very library that SPU multiplies with."""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from spu_llm.runtime import ProtocolConfig, Session, cores
from spu_llm.runtime.cores import keep_to_one_core

REGION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
THREADS = 4  # as many as SPU asks for


@pytest.fixture(scope="module")
def openmp():
    """The library that SPU's wheel has loaded."""
    return ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)


@pytest.fixture
def thread():
    """A fresh thread; what is run in it leaves others alone."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(60)


def cores_are(monkeypatch, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))


def team(openmp):
    """How many threads run a parallel region for THREADS that the calling thread starts."""
    members = []
    body = REGION(lambda _: members.append(openmp.omp_get_thread_num()))
    openmp.GOMP_parallel(body, None, THREADS, 0)
    assert sorted(members) == list(range(len(members)))
    return len(members)


@pytest.mark.parametrize(("parties", "count"), [(2, 1), (2, 2), (2, 7), (3, 11)])
def test_one_thread_where_cores_are_few(parties, count, openmp, thread, monkeypatch):
    cores_are(monkeypatch, count)
    assert thread(team, openmp) == THREADS
    thread(keep_to_one_core, parties)
    assert thread(team, openmp) == 1
    assert thread(openmp.omp_get_max_active_levels) == 0


@pytest.mark.parametrize(("parties", "count"), [(2, 8), (2, 64), (3, 12)])
def test_nothing_changes_where_there_are_enough(parties, count, openmp, thread, monkeypatch):
    cores_are(monkeypatch, count)
    before = thread(openmp.omp_get_max_active_levels)
    thread(keep_to_one_core, parties)
    assert thread(openmp.omp_get_max_active_levels) == before > 0
    assert thread(team, openmp) == THREADS


def test_other_threads_are_left_alone(openmp, thread, monkeypatch):
    """Threads that were there and threads that come: the rest of the process (JAX, numpy) keeps its cores."""
    cores_are(monkeypatch, 1)
    with ThreadPoolExecutor(1) as before:
        assert before.submit(team, openmp).result(60) == THREADS
        thread(keep_to_one_core, 2)
        assert before.submit(team, openmp).result(60) == THREADS
    with ThreadPoolExecutor(1) as after:
        assert after.submit(team, openmp).result(60) == THREADS
    assert team(openmp) == THREADS


@pytest.mark.parametrize(("count", "want"), [(2, 1), (64, THREADS)])
def test_parties_of_a_session(count, want, openmp, monkeypatch):
    """Where SPU's products run; a party counts the cores that it shares with the others."""
    cores_are(monkeypatch, count)
    with Session(ProtocolConfig()) as session:
        assert [party.submit(team, openmp).result(60) for party in session.parties] == [want, want]


def test_another_openmp_is_no_error(openmp, thread, monkeypatch):
    def missing(*args, **kwargs):
        raise OSError("libgomp.so.1: cannot open shared object file")

    cores_are(monkeypatch, 1)
    monkeypatch.setattr(cores.ctypes, "CDLL", missing)
    thread(keep_to_one_core, 2)
    assert thread(team, openmp) == THREADS
