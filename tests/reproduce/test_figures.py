"""Figures against JMESPath's own answers, and odd results."""

import json
import math

import jmespath
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spu_llm.errors import UserError
from spu_llm.reproduce.figures import Results
from spu_llm.reproduce.manifest import Rows
from spu_llm.reproduce.manifest import Table as Spec
from spu_llm.reproduce.page import figure, times

KEYS = st.sampled_from(["a", "b", "c"])
NUMBERS = st.floats(allow_nan=True) | st.integers(-(10**9), 10**9)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
PATHS = st.sampled_from(
    [
        "a",
        "a.b",
        "@",
        "[]",
        "*",
        "a[0].c",
        "[?a > `1`].b | [0]",
        "sum(a)",
        "max_by(@, &a)",
        "sort_by(@, &a)[0].b",
        "[?a >= b]",
        "join(a, b)",
        "{a: b, c: a}",
    ]
)


@pytest.fixture
def odd(study):
    return study("odd", tables=[])


def rows(study, data, whole=True, **spec):
    (study.folder / "odd.json").write_text(json.dumps(data))
    table = Spec(title="T", ours="o", baselines=["b"] * len(spec.get("baselines", [])), rows=[Rows(file="odd.json", **spec)])
    return Results(study, study.folder, whole).table(table).rows


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=JSON, each=st.none() | PATHS, ours=PATHS, baseline=PATHS, whole=st.booleans())
def test_any_result_gives_rows_or_one_line(odd, data, each, ours, baseline, whole):
    try:
        found = rows(odd, data, whole, what="{a}" if each else "x", each=each, ours=ours, baselines=[baseline])
    except UserError as error:
        assert "\n" not in str(error)
        return
    for row in found:
        assert isinstance(figure(row.ours), str)
        assert row.baselines[0].times is None or times(row.baselines[0].times).endswith("x")


def finite(value):
    return value if math.isfinite(value) else str(value)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.lists(st.fixed_dictionaries({"name": st.text(max_size=3), "s": st.fixed_dictionaries({"x": NUMBERS})}), min_size=1),
    scale=st.sampled_from([1, 1e-6, 100]),
)
def test_figures_are_what_jmespath_finds(odd, data, scale):
    found = rows(odd, {"all": data}, what="of {s[x]}", each="all[]", ours="s.x", scale=scale)
    expected = jmespath.search("all[].s.x", json.loads(json.dumps({"all": data})))
    assert [figure(row.ours) for row in found] == [figure(finite(value * scale)) for value in expected]
    assert [row.what for row in found] == [f"of {value}" for value in expected]


def test_ratios_say_how_many_times_as_good_ours_is(odd):
    data = {"ours": 2.0, "theirs": 9.4, "none": 0, "text": "out of memory", "null": None}
    names = ["theirs", "none", "text", "null"]

    def ratios(better):
        (row,) = rows(odd, data, what="x", ours="ours", baselines=names, better=better)
        assert [baseline.value for baseline in row.baselines] == [9.4, 0, "out of memory", None]
        return [baseline.times and times(baseline.times) for baseline in row.baselines]

    assert ratios("lower") == ["4.7x", None, None, None]
    assert ratios("higher") == ["0.21x", None, None, None]
    assert ratios("neither") == [None] * 4


def test_what_was_not_run_is_said_and_what_is_not_there_is_wrong(odd):
    data = {"a": [{"b": None}, {"b": None, "c": 1}]}
    assert [row.ours for row in rows(odd, data, what="x", each="a", ours="b")] == [None, None]
    assert [row.ours for row in rows(odd, data, what="x", each="a", ours="c")] == [None, 1]  # some items have it
    for path in ({"each": "a", "ours": "d"}, {"each": "z", "ours": "c"}, {"ours": "c.d"}):
        with pytest.raises(UserError, match=r"odd/about.yaml, table 'T': .* correct the path"):
            rows(odd, data, what="x", **path)
    with pytest.raises(UserError, match="keys of the item: b"):
        rows(odd, data, what="{nothing}", each="a", ours="b")


def test_quick_results_leave_rows_out(odd):
    data = {"a": [{"b": None}, {"b": 3, "c": 1}]}
    assert [row.ours for row in rows(odd, data, False, what="x", each="a", ours="b")] == [3]
    assert rows(odd, data, False, what="x", each="z", ours="c") == rows(odd, data, False, what="x", ours="c") == ()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (48.86, "48.9"), (27.0312, "27.0"), (3.0, "3"), (2708866, "2,708,866"), (12345.6, "12,346"), (0.00037712, "0.000377"),
        (1.5e-7, "1.50e-07"), (0, "0"), (-0.5, "-0.500"), (None, "not run"), ("n/a", "n/a"), (99.96, "100"), (9.996, "10.0"),
    ],
)  # fmt: skip
def test_three_digits_and_thousands_apart(value, text):
    assert figure(value) == text


def test_a_picture_that_a_quick_run_lacks_is_left_out(study):
    one = study("one", pictures=[{"kind": "growth", "title": "Growth", "at": "nothing"}])
    (picture,) = one.about.pictures
    assert Results(one, one.folder, whole=False).picture(picture) is None
    with pytest.raises(UserError, match="nothing finds nothing in"):
        Results(one, one.folder).picture(picture)
