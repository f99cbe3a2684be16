"""Running, going on, failing and being interrupted, on the command line as users meet it."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from spu_llm.cli import main
from spu_llm.reproduce import record
from spu_llm.reproduce.record import Record

COPY = {"command": 'echo run >>"$COUNT"; cp "$FROM" "$OUT/result.json"', "minutes": 1}


@pytest.fixture
def spu_llm(study, tmp_path, monkeypatch):
    """`spu-llm reproduce` with the experiments of a folder, of which $COUNT counts the runs."""
    (tmp_path / "from.json").write_text(json.dumps({"layers": [{"name": "quick", "plugin": 1.0, "stock": 3.0}]}))
    monkeypatch.setenv("FROM", str(tmp_path / "from.json"))
    monkeypatch.setenv("COUNT", str(tmp_path / "count"))
    monkeypatch.setattr("spu_llm.reproduce.manifest.EXPERIMENTS", tmp_path / "experiments")

    def invoke(*arguments, quiet=True):
        return CliRunner().invoke(main, ["reproduce", *arguments, "--out", str(tmp_path / "out"), *["--quiet"] * quiet])

    return invoke


@pytest.fixture
def count(tmp_path):
    return lambda: len((tmp_path / "count").read_text().split()) if (tmp_path / "count").exists() else 0


def test_a_finished_run_is_repeated_only_when_its_sources_change(spu_llm, study, tmp_path, count):
    one = study("one", quick=COPY)
    (one.folder / "run.sh").write_text("true")
    assert spu_llm().exit_code == 0 and spu_llm("one").exit_code == 0 and count() == 1
    (one.folder / "result.json").write_text("{}")  # a result, which decides nothing
    study("one", quick=COPY, title="Another title")
    assert spu_llm().exit_code == 0 and count() == 1
    (one.folder / "run.sh").write_text("false")
    (tmp_path / "out/reproduce/one/part.json").touch()
    assert spu_llm().exit_code == 0 and count() == 2
    assert not (tmp_path / "out/reproduce/one/part.json").exists()  # of other sources
    (tmp_path / "out/reproduce/one/part.json").touch()
    assert spu_llm("--again").exit_code == 0 and count() == 3
    assert not (tmp_path / "out/reproduce/one/part.json").exists()
    study("one", quick={**COPY, "command": COPY["command"] + "; true"})
    assert spu_llm().exit_code == 0 and count() == 4


def test_a_record_says_what_made_the_result(spu_llm, study, tmp_path):
    study("one", quick=COPY)
    spu_llm("one")
    made = Record.load(tmp_path / "out/reproduce/one.quick.json")
    assert made is not None and made.command == COPY["command"] and made.size == "quick" and 0 <= made.seconds < 60
    assert made.commit == record.commit() and "Python 3." in made.machine and os.uname().nodename not in made.machine
    page = (tmp_path / "out/index.html").read_text()
    assert "quick, run here" in page and "3.0x" in page and "committed result" in page and "of older sources" not in page
    study("one", quick={**COPY, "command": "true"})
    spu_llm("--page")
    assert "of older sources" in (tmp_path / "out/index.html").read_text()


def test_a_full_run_comes_after_what_it_needs_and_renews_the_committed_results(spu_llm, study, tmp_path):
    write = {"command": f'cp "$FROM" "{tmp_path}/experiments/late/result.json"; test ! -e "$OUT/result.json"', "minutes": 3}
    late, early = study("late", full=write, needs=["zero"], quick=COPY), study("zero", quick=COPY)
    assert spu_llm("late").exit_code == 0 and spu_llm("late", "--full").exit_code == 0
    for found in (late, early):  # which has no other command than the quick one
        assert json.loads((found.folder / "result.json").read_text())["layers"][0]["name"] == "quick"
        made = json.loads((found.folder / "made.json").read_text())
        assert made["size"] == "full" and "digest" not in made
    assert not (tmp_path / "out/reproduce/zero.quick.json").exists()
    assert "full, run here" in (tmp_path / "out/index.html").read_text()


def test_the_others_run_when_one_fails(spu_llm, study, tmp_path, count):
    study("bad", quick={"command": 'touch "$OUT/part"; echo some; echo "why <it> failed" >&2; exit 3; echo no', "minutes": 1})
    study("good", quick=COPY)
    result = spu_llm()
    assert result.exit_code == 1 and count() == 1
    assert "bad: exit 3: why <it> failed" in result.output and "bad/log.txt" in result.output and "failed: bad" in result.output
    page = (tmp_path / "out/index.html").read_text()
    assert "The run failed: exit 3: why &lt;it&gt; failed" in page and "Failed in this run: bad" in page
    assert spu_llm().exit_code == 1 and count() == 1  # good is finished
    assert (tmp_path / "out/reproduce/bad/part").exists()  # goes on with what it has


def test_what_needs_a_failed_run_is_not_run(spu_llm, study, count):
    study("bad", full={"command": "false", "minutes": 1})
    study("good", full=COPY, needs=["bad"])
    result = spu_llm("good", "--full")
    assert result.exit_code == 1 and "good: needs bad, which failed" in result.output and count() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_what_it_started_and_says_how_to_go_on(spu_llm, study, tmp_path, count, number):
    child = tmp_path / "child"
    study("a", quick=COPY)
    study("b", quick={"command": f"sleep 60 & echo $! >{child}.part; mv {child}.part {child}; wait", "minutes": 1})

    def interrupt():
        until = time.monotonic() + 60
        while not child.exists() and time.monotonic() < until:
            time.sleep(0.02)
        if child.exists():
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    result = spu_llm("a", "b")
    thread.join()
    assert result.exit_code == 130
    assert result.output.splitlines()[-1].startswith("interrupted; go on with: spu-llm reproduce a b --out")
    assert ended(int(child.read_text()))
    study("b", quick=COPY)
    assert spu_llm("a", "b").exit_code == 0 and count() == 2  # a was finished


def ended(process):
    status = Path(f"/proc/{process}/stat")
    return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_a_command_that_ends_leaves_nothing_running(spu_llm, study, tmp_path):
    study("one", quick={"command": f'sleep 60 & echo $! >{tmp_path}/child; cp "$FROM" "$OUT/result.json"', "minutes": 1})
    assert spu_llm().exit_code == 0
    assert ended(int((tmp_path / "child").read_text()))


def test_one_bar_goes_over_all_of_them(spu_llm, study, tmp_path):
    study("one", quick={**COPY, "minutes": 3})
    study("two", quick=COPY)
    shown = spu_llm(quiet=False).output
    assert "two:  75%" in shown and "of about 4 min" in shown
    assert spu_llm(quiet=False).output == f"{tmp_path / 'out/index.html'}\n"  # nothing left to run


def test_list_says_what_is_finished(spu_llm, study):
    study("one", quick=COPY)
    study("two", full=COPY, quick=None)
    spu_llm("one")
    lines = spu_llm("--list").output.splitlines()
    assert [line.split() for line in lines[1:3]] == [["one", "SOAL", "1", "-", "quick"], ["two", "SOAL", "-", "1", "-"]]


def test_what_has_no_quick_size_is_said(spu_llm, study, count):
    study("two", full=COPY, quick=None)
    result = spu_llm("two")
    assert result.exit_code == 0 and "two: has no quick size; --full runs it" in result.output and count() == 0


def test_an_unknown_name_is_one_line(spu_llm, study):
    study("one")
    result = spu_llm("no_such")
    assert result.exit_code == 2 and result.output.startswith("error: no_such: ") and result.output.count("\n") == 1


def test_a_run_that_writes_nothing_it_shows_has_failed(spu_llm, study, tmp_path):
    one = study("one", quick={"command": "true", "minutes": 1}, full={"command": "true", "minutes": 1})
    for size in ((), ("--full",)):
        found = spu_llm(*size)
        assert found.exit_code == 1 and "wrote none of result.json" in found.output
    assert Record.load(tmp_path / "out/reproduce/one.full.json") is None and not (one.folder / "made.json").exists()
