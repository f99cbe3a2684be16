"""The report of an experiment: all its runs, in order; nothing in metrics can act on the page."""

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import spu_llm
from spu_llm.experiment import render_report

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def metrics():
    """Committed ones: a baseline, variants, with Comet and with drafts."""
    return json.loads((Path(spu_llm.__file__).parents[1] / "experiments/main/small.json").read_text())


@pytest.fixture(scope="module")
def page(metrics):
    return render_report(metrics)


def rows(page):
    """Cells of every table's every row."""
    found: list[list[str]] = []
    parser = HTMLParser()
    within = []
    parser.handle_starttag = lambda tag, _: (within.append(tag), found.append([]) if tag == "tr" else None)
    parser.handle_endtag = lambda tag: within.pop() if within and within[-1] == tag else None
    parser.handle_data = lambda text: found[-1].append(text.strip()) if within and within[-1] in ("td", "th") else None
    parser.feed(page)
    return found


def test_every_run_is_in_the_tables_in_order(metrics, page):
    names = ["baseline", *metrics["variants"], "this run"]
    assert len(names) > 3
    found = rows(page)
    costs = [row for row in found if row[1:2] == ["decode, a token"]]
    assert [row[0] for row in costs] == names
    runs = [metrics["baseline"], *metrics["variants"].values(), metrics]
    assert [row[4] for row in costs] == [f"{run['decode']['seconds_per_token']:.2f}" for run in runs]
    errors = [row for row in found if len(row) == 8 and row[0] in names and "%" in row[1]]
    assert [row[2] for row in errors] == [f"{run['accuracy']['max_logit_error']:.4f}" for run in runs]


def test_speedups_are_against_the_baseline(metrics, page):
    for name, run in (*metrics["variants"].items(), ("this run", metrics)):
        assert f"Decoding of {name} is <b>{run['speedup']:.2f} times</b> as fast as the baseline" in page


def test_drafts_are_held_against_the_same_without_drafts(metrics, page):
    drafted = [run for run in (*metrics["variants"].values(), metrics) if run.get("post")]
    assert page.count("Tokens that came of each pass") == 2 * len(drafted)  # in words below, and for who cannot see it
    alike = sum(
        any(not other.get("post") and bool(other.get("comet")) == bool(run.get("comet")) for other in metrics["variants"].values())
        for run in drafted
    )
    assert page.count(">token by token<") == alike > 0


def test_a_run_alone(metrics):
    alone = {key: value for key, value in metrics.items() if key not in ("baseline", "variants", "speedup", "post", "comet")}
    page = render_report(alone)
    assert page.count("<svg") == 1 and "Drafts" not in page and "Sparsity" not in page and "as fast as" not in page


def test_a_single_token_has_no_ladder(metrics):
    """Nothing was decoded after the first token, so no bar has a length."""
    short = copy.deepcopy(metrics)
    for run in (short, short["baseline"], *short["variants"].values()):
        run["decode"] |= {key: 0 for key in run["decode"]}
        if run.get("post"):
            run["post"]["rounds"] = []
    page = render_report(short)
    assert page.count("<svg") == 1 and "Seconds a token" not in page


def test_text_is_only_text(metrics):
    hostile = {**metrics, "text": HOSTILE, "prompt": HOSTILE, "variants": {HOSTILE: metrics["variants"]["post"]}}
    page = render_report(hostile)
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=\"(?!#)", page)
