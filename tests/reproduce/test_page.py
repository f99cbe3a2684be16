"""The page: all that is committed is on it, nothing on it comes from elsewhere, and nothing in results can act on it."""

import json
from html.parser import HTMLParser

import pytest

from spu_llm.errors import UserError
from spu_llm.pictures import DRAW
from spu_llm.reproduce import check_study, load_studies, render_page
from spu_llm.reproduce.page import figure

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>{{ 7 * 7 }}"
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Reader(HTMLParser):
    """Tags with their attributes, text, and whether every tag is closed."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.open = [], [], []
        self.feed(html)
        self.close()
        self.words = " ".join(" ".join(self.text).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        self.text.append(data)


def attributes(reader, *names):
    return [value for _, attrs in reader.tags for name, value in attrs.items() if name in names]


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    studies = load_studies()
    page = render_page(studies, tmp_path_factory.mktemp("out"), "quick")
    return studies, page, Reader(page.html)


def test_every_committed_table_plot_and_picture_is_there(committed):
    studies, page, reader = committed
    assert page.problems == () and reader.open == []
    assert "Not there yet" not in reader.words
    tables = sum(len(study.about.tables) for study in studies)
    pictures = sum(len(study.about.pictures) for study in studies)
    assert sum(tag == "table" for tag, _ in reader.tags) == tables + 1  # and the summary
    images = [attrs for tag, attrs in reader.tags if tag == "img"]
    assert len(images) == sum(len(study.about.plots) for study in studies)
    assert all(image["alt"] and image["src"].startswith("data:image/") for image in images)
    assert sum(tag == "figure" for tag, _ in reader.tags) == len(images) + pictures
    for study in studies:
        texts = [study.about.title, study.about.paper, study.about.differs, *(table.title for table in study.about.tables)]
        for text in filter(None, texts):
            assert " ".join(text.replace("->", "→").split()) in reader.words


def test_nothing_comes_from_elsewhere(committed):
    _, page, reader = committed
    names = attributes(reader, "id")
    assert len(names) == len(set(names))
    for target in attributes(reader, "href", "src", "xlink:href"):
        assert target.startswith("data:") or (target[0] == "#" and target[1:] in names), target[:80]
    assert "@import" not in page.html and not any(tag == "script" for tag, _ in reader.tags)
    assert not any(name.startswith("on") for _, attrs in reader.tags for name in attrs)


def test_figures_are_those_of_the_results(study, tmp_path):
    one = study("one", paper="Theirs, 2025: 5 s", differs="all")
    page = render_page([one], tmp_path, "quick")
    words = Reader(page.html).words
    assert "first: seconds s 2 9.40 4.7x second: seconds s not run 12,346" in words
    assert "Theirs, 2025: 5 s" in words and page.problems == ()


def test_hostile_results_are_text(study, tmp_path):
    result = {"layers": [{"name": HOSTILE, "plugin": HOSTILE, "stock": HOSTILE}]}
    one = study("one", result, title=HOSTILE, paper=HOSTILE, differs=HOSTILE)
    record = {"command": HOSTILE, "commit": HOSTILE, "machine": HOSTILE, "date": HOSTILE, "seconds": 1}
    (one.folder / "made.json").write_text(json.dumps(record))
    page = render_page([one], tmp_path, "quick", {"one": HOSTILE})
    reader = Reader(page.html)
    assert not any(tag in ("script", "img") for tag, _ in reader.tags) and reader.open == []
    assert reader.words.count("<script>alert(1)</script>") >= 9 and "{{ 7 * 7 }}" in reader.words


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"layers": null}', '{"layers": [{}]}'])
def test_missing_and_broken_results_are_said_in_place(study, tmp_path, content):
    pictures = [{"kind": kind, "title": kind, "at": "layers"} for kind in DRAW]
    one = study("one", None, plots=["plot.png"], pictures=pictures)
    if content is not None:
        (one.folder / "result.json").write_text(content)
    page = render_page([one], tmp_path, "quick")
    words = Reader(page.html).words
    assert "plot plot.png" in words and "no figures yet" in words
    assert (content is None) == (page.problems == ())
    assert all(" ".join(problem.split()) in words for problem in page.problems)
    with pytest.raises(UserError, match=r"one/about\.yaml|result\.json"):
        check_study(one)


def test_files_that_are_missing_are_named_beside_the_rows_that_are_there(study, tmp_path):
    row = {"what": "x", "ours": "layers[0].plugin", "baselines": ["layers[0].stock"]}
    table = {"title": "T", "ours": "o", "baselines": ["b"], "rows": [row, {**row, "file": "other.json"}]}
    words = Reader(render_page([study("one", tables=[table])], tmp_path, "quick").html).words
    assert f"x {figure(2.0)} 9.40 4.7x" in words and "Not there yet: other.json." in words
