"""Dealer's and parties' processes for tests, which can be killed at any moment and live again."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from spu_llm.dealer.store import MaterialStore
from spu_llm.network.certificates import Identity
from spu_llm.runtime.service import Dealing, Limits, MaterialPuller, MaterialServer, Wanted
from spu_llm.runtime.supply import PARTIES, party_folder, with_store, write_keys

KEYS = bytes(range(16)), bytes(range(100, 116))
WANTED = Wanted("session", b"description")
NURSERY = """
import json, os, signal, sys, traceback
sys.path.insert(0, sys.argv[1])
import lives
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    name, arguments = json.loads(line)
    pid = os.fork()
    if pid == 0:
        try:
            getattr(lives, name)(*arguments)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    print(pid, flush=True)
"""


def record(rank, number):
    """What is dealt for a party: of 0 to 2.2 MB, and no two alike."""
    seed = hashlib.sha256(b"%d %d" % (rank, number)).digest()
    return seed * (number * 7919 % 70_000)


def deal(folder, count, pause=0.0):
    """A generation's records, dealt in a thread; goes on where an earlier life left off."""
    if not folder.exists():
        write_keys(folder, KEYS)
    dealing = Dealing(folder)

    def work():
        dealt = [with_store(party_folder(folder, rank), MaterialStore.next_number) for rank in PARTIES]
        for number in range(min(dealt), count):
            for rank in (rank for rank in PARTIES if number >= dealt[rank]):
                data = record(rank, number)
                with_store(party_folder(folder, rank), lambda store, number=number, data=data: store.put(number, data))
            time.sleep(pause)
        dealing.records = count

    threading.Thread(target=work, daemon=True).start()
    return dealing


def serve(certificates, address, folder, count):
    """A dealer's life."""
    folder = Path(folder)
    identity = Identity(Path(certificates), "dealer")
    with MaterialServer(address, identity, folder, lambda wanted: deal(folder / wanted.session, count, 0.01)):
        time.sleep(3600)


def pull(certificates, address, folder, role, report):
    """A party's life: fetches all there is and uses it as it comes; writes to the report what it has used, and when all is done."""
    rank = ("client", "owner").index(role)
    folder = party_folder(Path(folder), rank)
    identity = Identity(Path(certificates), role)
    with MaterialPuller(address, identity, WANTED, folder.parent, Limits(20, hold_records=4)) as puller:
        while not puller.finished or with_store(folder, MaterialStore.available):
            puller.check()
            use(folder, rank, report)
        puller.wait()
    note(report, "done")


def use(folder, rank, report):
    def take(store):
        for number in store.available():
            assert store.take(number) == record(rank, number)
            note(report, number)

    with_store(folder, take)
    time.sleep(0.01)


def note(report, what):
    with open(report, "a") as file:
        file.write(f"{what}\n")


class Nursery:
    """Starts lives fast: one process that has imported everything forks for each. All end with the context."""

    def __enter__(self):
        command = [sys.executable, "-c", NURSERY, os.path.dirname(__file__)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._pids = []
        return self

    def start(self, function, *arguments):
        """A life's process id."""
        self._process.stdin.write(json.dumps([function.__name__, [str(a) if isinstance(a, Path) else a for a in arguments]]) + "\n")
        self._process.stdin.flush()
        self._pids.append(int(self._process.stdout.readline()))
        return self._pids[-1]

    def __exit__(self, *_):
        for pid in self._pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self._process.communicate()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
