"""Files that are there whole or not at all, facts that cannot be changed unnoticed, terms for any shape."""

import os
from pathlib import Path

import pytest
from arhe_cases import decoders, degrees, options, parameters
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spu_llm.arhe.files import check_listing, listing, read_facts, whole, write_bytes, write_facts
from spu_llm.arhe.terms import Terms, load_terms, publish
from spu_llm.errors import UserError

several = settings(max_examples=15, deadline=None)
facts = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=6) | st.lists(st.booleans()), max_size=3)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@several
@given(facts, st.data())
def test_facts_come_back_and_any_change_of_a_byte_is_noticed(place, written, data):
    assume(not {"kind", "digest"} & set(written))
    path = place / "facts.json"
    digest = write_facts(path, "x", written)
    assert read_facts(path, "x", "") == {"kind": "x", "digest": digest} | written
    whole_text = path.read_bytes()
    number, byte = data.draw(st.integers(0, len(whole_text) - 2)), data.draw(st.binary(min_size=0, max_size=1))
    path.write_bytes(whole_text[:number] + byte + whole_text[number + 1 :])
    try:
        found = read_facts(path, "x", "")
    except UserError:
        return
    assert found == {"kind": "x", "digest": digest} | written  # white space


@several
@given(st.binary(max_size=40), st.data())
def test_a_listing_tells_what_was_cut_or_changed(place, content, data):
    write_bytes(place / "file", content)
    listed = listing(place, ["file"])
    check_listing(place, listed, "")
    changed = data.draw(st.binary(max_size=40))
    assume(changed != content)
    (place / "file").write_bytes(changed)
    with pytest.raises(UserError, match=r"bytes of|not the file"):
        check_listing(place, listed, "")


def test_a_write_that_breaks_off_leaves_what_was_there(place):
    path = place / "kept"
    write_bytes(path, b"before", private=True)
    with pytest.raises(ZeroDivisionError), whole(path, private=True) as part:
        part.write_bytes(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"before" and not [other for other in place.iterdir() if ".part" in other.name]
    with pytest.raises(UserError, match="cannot be written"):
        write_bytes(place / "kept" / "below", b"")


def test_a_private_file_is_never_open_to_others(place):
    before = os.umask(0)
    try:
        with whole(place / "secret", private=True) as part:
            assert part.stat().st_mode & 0o777 == 0o600
            part.write_bytes(b"x")
    finally:
        os.umask(before)
    assert (place / "secret").stat().st_mode & 0o777 == 0o600


@several
@given(decoders(), parameters, degrees, options, st.lists(st.integers(0, 9), max_size=3), st.booleans())
def test_terms_of_any_shape_come_back(place, config, parameters, degrees, options, prefix, secure):
    terms = Terms("some", config, parameters, degrees, options, tuple(prefix), secure)
    publish(place, terms)
    assert load_terms(place) == terms and load_terms(place).digest == terms.digest


def test_terms_of_another_version_are_refused(place):
    terms = Path(place) / "terms.json"
    write_facts(terms, "terms of AR-HE, 1", {"model": "x", "config": {"shape": "round"}})
    with pytest.raises(UserError, match="no terms that this version knows"):
        load_terms(place)
