"""Nothing is used twice: not in order or out of it, not after a crash at any moment, not by two processes."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spu_llm
from spu_llm.dealer.store import LIMIT, Counter, MaterialStore
from spu_llm.errors import UserError

LIVES = 200
CHILD = """
import os, random, sys
from spu_llm.dealer.store import Counter, MaterialStore
folder, report, seed = sys.argv[1], os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND), int(sys.argv[3])
store, counter, choose = MaterialStore(folder), Counter(folder + "/counter"), random.Random(seed)
assert "numpy" not in sys.modules
os.write(1, b"ready")
while True:
    while len(store.available()) < 4:
        number = store.next_number()
        store.put(number, b"material %d" % number * 500)
        os.write(report, b"put %d\\n" % number)
    number = choose.choice(store.available())
    assert store.take(number) == b"material %d" % number * 500
    os.write(report, b"taken %d\\n" % number)
    os.write(report, b"counted %d\\n" % counter.take())
"""


ROOT = str(Path(spu_llm.__file__).parent.parent)


def child(code: str, *arguments: str) -> list[str]:
    """A command that starts fast: without site packages."""
    return [sys.executable, "-S", "-E", "-c", f"import sys; sys.path.insert(0, {ROOT!r})\n{code}", *arguments]


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    made = MaterialStore(tmp_path / "new" / "store" if request.param == "folder" else None)
    yield made
    made.close()


def test_put_and_take_in_any_order(store):
    assert store.available() == []
    assert store.next_number() == 0
    for number in (2, 0, 20):
        store.put(number, b"material %d" % number)
    assert store.available() == [0, 2, 20]
    assert store.next_number() == 21
    assert store.take(2) == b"material 2"
    assert store.take(20) == b"material 20"
    assert store.next_number() == 21
    assert store.take(0) == b"material 0"
    assert store.available() == []
    assert store.next_number() == 21
    store.put(21, b"")
    assert store.take(21) == b""


def test_refuses_a_number_twice(store):
    store.put(3, b"a")
    store.put(5, b"b")
    with pytest.raises(UserError, match=r"material 3 was put in .+ before: the next free number is 6"):
        store.put(3, b"c")
    assert store.take(3) == b"a"
    with pytest.raises(UserError, match=r"material 3 of .+ has been used and must not be used again: take one of the 1 left"):
        store.take(3)
    with pytest.raises(UserError, match=r"material 3 was put in .+ before"):
        store.put(3, b"c")
    assert store.available() == [5]


def test_material_runs_out(tmp_path):
    store = MaterialStore(tmp_path)
    store.put(0, b"")
    remedy = "make more with `spu-llm deal --tokens N --out FOLDER`"
    with pytest.raises(UserError, match=f"material 7 is not in {tmp_path}, 1 left: {remedy}"):
        store.take(7)
    with pytest.raises(UserError, match="material -1 is not in"):
        store.take(-1)
    with pytest.raises(UserError, match="is not in this process's memory, 0 left: deal more"):
        MaterialStore(None).take(0)


def test_refuses_numbers_out_of_bounds(store):
    for number in (-1, LIMIT):
        with pytest.raises(ValueError, match="outside"):
            store.put(number, b"")


@settings(deadline=None)  # it writes files
@given(steps=st.lists(st.tuples(st.sampled_from(["put", "take", "reopen"]), st.integers(0, 40)), max_size=40))
def test_folder_behaves_like_a_set(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("store")
    store, there, ever = MaterialStore(folder), set(), set()
    for step, number in steps:
        if step == "reopen":
            store.close()
            store = MaterialStore(folder)
        elif step == "put" and number not in ever:
            store.put(number, b"%d" % number)
            there.add(number)
            ever.add(number)
        elif step == "take" and number in there:
            assert store.take(number) == b"%d" % number
            there.remove(number)
        else:
            with pytest.raises(UserError):
                store.put(number, b"") if step == "put" else store.take(number)
        assert store.available() == sorted(there)
        assert store.next_number() == max(ever, default=-1) + 1
    store.close()


def wait_for_lines(report, count):
    """Until so many more lines are reported, however slow the machine is."""
    wanted = report.read_bytes().count(b"\n") + count
    while report.read_bytes().count(b"\n") < wanted:
        time.sleep(0.0005)


def test_killed_at_any_moment(tmp_path):
    """200 processes, one after another, each killed while it puts and takes; it reports a number after it used it."""
    report, moment = tmp_path / "report", random.Random(0)
    report.touch()
    for life in range(LIVES):
        command = child(CHILD, str(tmp_path / "store"), str(report), str(life))
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout.read(5) == b"ready", process.stderr.read().decode()
            wait_for_lines(report, moment.randrange(10))
            time.sleep(moment.uniform(0, 0.003))
            process.kill()
            assert process.wait() == -signal.SIGKILL, process.stderr.read().decode()
    events = [line.split() for line in report.read_text().splitlines()]
    put, taken, counted = ([int(number) for kind, number in events if kind == name] for name in ("put", "taken", "counted"))
    assert len(taken) > LIVES
    assert len(set(taken)) == len(taken)
    assert counted == sorted(set(counted))
    assert put == sorted(set(put))
    store = MaterialStore(tmp_path / "store")
    assert not set(store.available()) & set(taken)
    assert store.next_number() > max(put)


class Crash(Exception):
    """The power fails here."""


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_crash_before_the_mark_lasts_returns_nothing(tmp_path, monkeypatch, call):
    store = MaterialStore(tmp_path)
    store.put(0, b"a")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(Crash):
            store.take(0)
    with pytest.raises(UserError, match="has been used"):
        store.take(0)  # whatever the disk did, this process does not try again


def fail(*_):
    raise Crash


def test_crash_between_mark_and_deletion(tmp_path, monkeypatch):
    store = MaterialStore(tmp_path)
    store.put(0, b"a")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        with pytest.raises(Crash):
            store.take(0)
    assert (tmp_path / "0.material").exists()
    check_used(store, tmp_path)


def test_deletion_undone_by_the_power(tmp_path):
    store = MaterialStore(tmp_path)
    store.put(0, b"a")
    store.take(0)
    (tmp_path / "0.material").write_bytes(b"a")
    check_used(store, tmp_path)


def check_used(store: MaterialStore, folder: Path) -> None:
    """After opening again, number 0 is gone."""
    store.close()
    store = MaterialStore(folder)
    assert store.available() == []
    assert store.next_number() == 1
    assert not (folder / "0.material").exists()
    with pytest.raises(UserError, match="has been used"):
        store.take(0)


def test_mark_lost_after_the_file_grew(tmp_path):
    """The size of the marks' file lasted, the byte did not: no number that it can stand for is dealt."""
    store = MaterialStore(tmp_path)
    store.put(9, b"a")
    store.take(9)
    store.close()
    (tmp_path / "used").write_bytes(bytes(2))
    assert MaterialStore(tmp_path).next_number() == 16


def test_crash_within_a_put(tmp_path, monkeypatch):
    store = MaterialStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(Crash):
            store.put(0, b"a")
    assert list(tmp_path.glob("*.partial"))
    store.close()
    store = MaterialStore(tmp_path)
    assert store.available() == []
    assert not list(tmp_path.glob("*.partial"))
    store.put(0, b"b")
    assert store.take(0) == b"b"


def test_what_is_made_to_last_and_when(tmp_path, monkeypatch):
    """Linux tells what file a handle is. New folders and files are synced by their folder, data and marks by themselves."""
    real, synced = os.fsync, []

    def fsync(handle: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{handle}")), sorted(path.name for path in folder.iterdir())))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = tmp_path / "new" / "store"
    store = MaterialStore(folder)
    assert synced == [(place, ["used"]) for place in (folder, folder.parent, tmp_path)]
    synced.clear()
    store.put(0, b"a")
    assert synced == [(folder / "0.partial", ["0.partial", "used"]), (folder, ["0.material", "used"])]
    synced.clear()
    store.take(0)
    assert synced == [(folder / "used", ["0.material", "used"])]
    assert [path.name for path in folder.iterdir()] == ["used"]


def test_only_the_owner_can_read(tmp_path):
    store = MaterialStore(tmp_path / "store")
    store.put(0, b"a")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "store").iterdir()} == {0o600}
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["MaterialStore", "Counter"])
def test_one_process_at_a_time(tmp_path, kind):
    place = str(tmp_path / "place")
    held = {"MaterialStore": MaterialStore, "Counter": Counter}[kind](place)
    command = child(f"from spu_llm.dealer.store import {kind}; {kind}(sys.argv[1])", place)
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1
    assert f"UserError: {place}" in refused.stderr
    assert "in use by another process" in refused.stderr
    with pytest.raises(UserError, match="in use by another process"):
        type(held)(place)
    held.close()
    subprocess.run(command, check=True)


def test_a_forked_process_may_not_use_it(tmp_path, monkeypatch):
    store, counter = MaterialStore(tmp_path), Counter(tmp_path / "counter")
    store.put(0, b"")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for use in (lambda: store.put(1, b""), lambda: store.take(0), counter.take):
        with pytest.raises(RuntimeError, match="forked"):
            use()


def test_closed(tmp_path):
    store, counter = MaterialStore(tmp_path), Counter(tmp_path / "counter")
    store.put(0, b"")
    for each in (store, counter):
        each.close()
    for use in (lambda: store.put(1, b""), lambda: store.take(0), counter.take):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_counter(tmp_path):
    path = tmp_path / "new" / "counter"
    counter = Counter(path)
    assert [counter.take(), counter.take(5), counter.take()] == [0, 1, 6]
    counter.close()
    counter = Counter(path)
    assert counter.take() == 7
    with pytest.raises(ValueError, match="0 numbers"):
        counter.take(0)
    memory = Counter(None)
    assert [memory.take(3), memory.take()] == [0, 3]


def test_counter_crash_before_it_lasts(tmp_path, monkeypatch):
    counter = Counter(tmp_path / "counter")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(Crash):
            counter.take()
    assert counter.take() == 1


@pytest.mark.parametrize("content", [b"\0", bytes(16), bytes(8) + b"\xff" * 9])
def test_damaged_counter(tmp_path, content):
    (tmp_path / "counter").write_bytes(content)
    for _ in range(2):
        with pytest.raises(UserError, match="is damaged"):
            Counter(tmp_path / "counter")
