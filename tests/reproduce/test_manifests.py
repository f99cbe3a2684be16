"""Manifests: what is refused, who is meant by a name, and that those of the repository find their figures."""

import pytest

from spu_llm.errors import UserError
from spu_llm.pictures import DRAW
from spu_llm.reproduce import check_study, choose, load_studies, page
from spu_llm.reproduce.manifest import load_study, with_needs

ROW = {"what": "seconds", "ours": "plugin", "baselines": ["stock"]}
TABLE = {"title": "Seconds", "ours": "plugin", "baselines": ["stock SPU"]}


@pytest.mark.parametrize("found", load_studies(), ids=lambda study: study.name)
def test_every_committed_manifest_finds_its_committed_figures(found, monkeypatch):
    monkeypatch.setattr(page, "DRAW", dict.fromkeys(DRAW, str))  # which test_page draws
    check_study(found)


def test_the_quick_set_takes_under_20_minutes_and_has_all_four_systems():
    quick = [study.about for study in load_studies() if study.about.quick]
    assert sum(about.quick.minutes for about in quick) <= 20
    assert {about.system for about in quick} >= {"Main figure", "SOAL", "Comet", "POST", "AR-HE"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"colour": "red"}, "unknown key colour"),
        ({"tables": [{**TABLE, "rows": [{**ROW, "oars": "x"}]}]}, "unknown key tables.0.rows.0.oars"),
        ({"tables": [{**TABLE, "rows": [{**ROW, "baselines": []}]}]}, "give one path a baseline"),
        ({"tables": [{**TABLE, "rows": [{**ROW, "ours": "a[["}]}]}, "is no JMESPath"),
        ({"tables": [{**TABLE, "rows": [{**ROW, "file": "../../x.json"}]}]}, "name a file inside the results folder"),
        ({"system": "Else"}, "Main figure"),
        ({"paper": "Theirs, 2025"}, "differs"),
        ({"quick": None}, "no command"),
        ({"pictures": [{"kind": "cake", "title": "Cake"}]}, "is no kind of picture"),
    ],
)
def test_a_wrong_manifest_is_refused_in_one_line(study, settings, words):
    with pytest.raises(UserError, match=words) as caught:
        study("odd", **settings)
    assert "odd/about.yaml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["title: [", "- a list", "", "\0"])
def test_what_is_no_mapping_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "about.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_study(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_no_experiments(tmp_path):
    with pytest.raises(UserError, match="from a checkout"):
        load_studies(tmp_path / "experiments")


def test_names_are_of_experiments_and_systems(study, tmp_path):
    comet, layer, argmax = study("comet", system="Comet"), study("comet_layer", system="Comet"), study("argmax", system="AR-HE")
    every = load_studies(tmp_path / "experiments")
    assert [found.name for found in every] == ["comet", "comet_layer", "argmax"]  # systems as on the page
    assert choose(every, []) == every
    assert choose(every, ["COMET"]) == [comet, layer]
    assert choose(every, [str(comet.folder)]) == [comet]
    assert choose(every, ["ar-he"]) == choose(every, ["arhe"]) == choose(every, ["Argmax"]) == [argmax]
    with pytest.raises(UserError, match="post: neither an experiment nor a system"):
        choose(every, ["post"])


def test_what_is_needed_comes_first(study, tmp_path):
    last, first, middle = study("a", needs=["c"]), study("b"), study("c", needs=["b"])
    every = load_studies(tmp_path / "experiments")
    assert with_needs(every, [last]) == [first, middle, last]
    study("b", needs=["a"])
    with pytest.raises(UserError, match="a needs c needs b needs a"):
        with_needs(load_studies(tmp_path / "experiments"), [last])
    study("c", needs=["d"])
    with pytest.raises(UserError, match="needs d, which is no experiment"):
        load_studies(tmp_path / "experiments")
