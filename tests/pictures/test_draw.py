"""Every kind of picture: well-formed, labelled, of the page's colours, and with nothing of another picture's."""

import re
from xml.etree import ElementTree

import pytest
from colours import contrast
from data import CASES, GROWTH, LAN, NAME, STEPS, VARIED

from spu_llm.pictures import DRAW
from spu_llm.pictures.ladder import runs_of

SVG = "{http://www.w3.org/2000/svg}"
DRAWN = {kind: DRAW[kind](data) for kind, data in CASES.items()}
LABELS = {
    "ladder": [NAME, "2.41 s", "6.16 s", "2.71x", "558", "Seconds a token on wan"],
    "waterfall": ["stock SPU: 310 messages", "plugin: 15 messages", "all of plugin", "qkv product", "exponentials", "down product"],
    "timeline": ["drafted, rejected", "Tokens so far: 31 in 74.6 s and 7 passes", "token by token"],
    "prefix": ["no prefix", "after the prefix", "8 medians", "position in a passage", "the prefix itself"],
    "growth": ["stock SPU", "plugin <1>", "Time, s", "Messages", "1024", "tokens of context"],
    "phases": ["set-up", "prefill", "a token", NAME, "Messages sent"],
}


def texts(svg):
    return [("".join(element.itertext())).strip() for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_every_kind_is_tested():
    assert set(CASES) == set(LABELS) == set(DRAW)


@pytest.mark.parametrize("kind", DRAW)
def test_labels_are_text(kind):
    found = texts(DRAWN[kind])
    for label in LABELS[kind]:
        assert label in found, found


@pytest.mark.parametrize("kind", DRAW)
def test_a_reader_who_does_not_see_it_is_told(kind):
    root = ElementTree.fromstring(DRAWN[kind])
    assert root.get("role") == "img" and len(root.get("aria-label")) > 40


@pytest.mark.parametrize("kind", DRAW)
def test_colours_are_the_pages_or_stand_out_in_light_and_dark(kind):
    svg = DRAWN[kind]
    used = set(re.findall(r"(?:fill|stroke|color)(?:=\"|: ?)([^\";]+)", svg))
    assert "currentColor" in used
    for colour in {each for each in used if not each.startswith("url(")} - {"currentColor", "none"}:
        assert re.fullmatch("#[0-9a-f]{6}", colour), colour
        assert min(contrast(colour, page) for page in ("#ffffff", "#121212")) >= 3, colour
    for element in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        assert "fill: currentColor" in element.get("style", "fill: currentColor")


def test_pictures_of_one_page_share_no_ids():
    ids = [set(re.findall(r'\bid="([^"]*)"', svg)) for svg in DRAWN.values()]
    assert sum(map(len, ids)) == len(set.union(*ids))
    for svg, own in zip(DRAWN.values(), ids, strict=True):
        assert set(re.findall(r'(?:url\(|href=")#([^")]*)', svg)) <= own


def test_drawing_twice_gives_the_same():
    assert DRAW["growth"](GROWTH) == DRAWN["growth"]


def test_nothing_comes_from_outside():
    for svg in DRAWN.values():
        places = {*re.findall(r'(?:href|src)="([^#"][^"]*)"', svg), *re.findall(r"url\(([^#)][^)]*)\)", svg)}
        assert not places and "<style" not in svg and "<metadata" not in svg


def test_runs_are_in_the_order_of_the_ladder():
    assert list(runs_of(VARIED)) == ["baseline", NAME, "this run"]
    assert list(runs_of(WITHOUT_BASELINE)) == ["this run"]


WITHOUT_BASELINE = {key: value for key, value in LAN.items() if key != "baseline"}


def test_ladder_of_metrics_is_the_ladder_of_their_runs():
    assert DRAW["ladder"](VARIED) == DRAW["ladder"](runs_of(VARIED)) == DRAW["ladder"]({"lan": runs_of(VARIED)})


def test_times_as_fast_are_those_of_the_metrics():
    assert f"{LAN['speedup']:.3g}x" in texts(DRAWN["ladder"])


def test_steps_of_the_timeline_add_up():
    """Heights of the columns: every drafted token and the model's own, none twice."""
    svg = DRAW["timeline"](LAN["post"])
    assert "token by token" not in texts(svg)
    label = ElementTree.fromstring(svg).get("aria-label")
    assert [int(n) for n in re.findall(r"(\d+) of 9", label)] == [made["steps"] for made in LAN["post"]["rounds"]]


@pytest.mark.parametrize("found", [STEPS, STEPS["stock"]], ids=["plugin", "stock"])
def test_committed_steps_add_up_to_the_layer(found):
    for kind in ("messages", "bytes"):
        assert sum(step[kind] for step in found["steps"]) == found[kind]
