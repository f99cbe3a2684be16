"""Material dealt ahead gives what live dealing gives, and nothing of it can serve twice: no number, no key, no row's mask."""

import json
import re
import shutil
import stat
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import LLAMA, write_checkpoint, write_tokenizer

from spu_llm.dealer.material import Recorder
from spu_llm.dealer.table import Table
from spu_llm.errors import UserError
from spu_llm.experiment.schema import load_model
from spu_llm.generation import AssistedDecoder
from spu_llm.generation.material import AheadDealer, Facts, open_material
from spu_llm.models import load_checkpoint
from spu_llm.models.calibration_file import calibration_for
from spu_llm.models.published import publish
from spu_llm.runtime import Phase, ProtocolConfig, Session
from spu_llm.runtime.supply import LiveSupply, Masks, Run, StoredSupply, party_folder, put_message, read_key, with_store, write_keys

PREFIX, PROMPT, NEW = (7, 8), [5, 17, 96], 3
CAPACITY = len(PREFIX) + len(PROMPT) + NEW
KEYS = bytes(range(16)), bytes(range(100, 116))


class Room:
    """Two parties without SPU: what each is given lies in `made`."""

    current_phase = "test"

    def __init__(self):
        self.parties = [SimpleNamespace(rank=rank) for rank in (0, 1)]
        self.phases = {self.current_phase: Phase()}

    def place_made(self, name, make):
        self.made = [make(party) for party in self.parties]


def a_run(shift=3, start=4, name="weight", low=0.0):
    """A run of a program with one deal of each kind; its material holds a mask r and r * weight >> shift."""
    recorder = Recorder(lambda count: np.zeros(count, np.int64))
    mask = recorder.uniform((5,))
    weight = recorder.operand("w", np.zeros(5, np.int64))
    product = recorder.derive(lambda r, w: r * w >> shift, mask, weight)
    recorder.table(mask, Table(np.tanh, np.asarray, low, 4, 1, 2), 20, 40)
    recorder.one_hot(lambda r: r & 3, 4, mask)
    recorder.retain("row", product)
    return Run(recorder.specification(), {"w": name}, {"row": "kept"}, {"start": start})


def fill(folder, runs, keys=KEYS):
    """A dealer's work for `runs`; returns the dealer."""
    dealer = Masks(keys)
    dealer.operand_mask("weight", (5,), 1)
    write_keys(folder, keys)
    for rank in (0, 1):
        put_message(party_folder(folder, rank), keys[rank], 0, b"", b"")
    for number, run in enumerate(runs, 1):
        for rank, message in enumerate(dealer.deal(run, number)):
            put_message(party_folder(folder, rank), keys[rank], number, run.digest(), message)
    return dealer


def test_stored_messages_make_the_dealers_values(tmp_path):
    fill(tmp_path, [a_run()])
    room, supply = Room(), StoredSupply(tmp_path)
    weight = supply.operand_mask("weight", (5,), 1)
    supply.provide(room, a_run(), "m")
    material = sum(room.made)
    assert np.array_equal(material[5:10], material[:5] * weight >> 3)
    assert room.phases["test"].bytes > 0


def test_a_folder_serves_once(tmp_path):
    fill(tmp_path, [a_run(), a_run()])
    StoredSupply(tmp_path).provide(Room(), a_run(), "m")  # and there the process is killed
    for rank in (0, 1):
        with pytest.raises(UserError, match=r"material 1 of .+ has been used and must not be used again"):
            with_store(party_folder(tmp_path, rank), lambda store: store.take(1))
    with pytest.raises(UserError, match=r"its material was used before, by a run that ended or broke off"):
        StoredSupply(tmp_path)
    with pytest.raises(UserError, match="holds dealt material already, which serves one generation; choose another --out"):
        write_keys(tmp_path, KEYS)


def test_killed_before_its_first_run(tmp_path):
    """The weights may have been opened under their masks by then."""
    fill(tmp_path, [a_run()])
    StoredSupply(tmp_path)
    with pytest.raises(UserError, match="was used before"):
        StoredSupply(tmp_path)


@pytest.mark.parametrize("at", [0, 40, -1])
def test_changed_material_is_refused(at, tmp_path):
    fill(tmp_path, [a_run()])
    path = party_folder(tmp_path, 1) / "1.material"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"material 1 of .+party-1 was changed since it was dealt, or is another's"):
        StoredSupply(tmp_path).provide(Room(), a_run(), "m")


def test_replayed_material_is_refused(tmp_path):
    """A message under another number, or another party's."""
    fill(tmp_path, [a_run(), a_run()])
    first, second = (party_folder(tmp_path, 0) / f"{number}.material" for number in (1, 2))
    second.write_bytes(first.read_bytes())
    supply = StoredSupply(tmp_path)
    supply.provide(Room(), a_run(), "m")
    with pytest.raises(UserError, match=r"material 2 of .+party-0 was changed since it was dealt, or is another's"):
        supply.provide(Room(), a_run(), "m")


def test_one_party_reads_its_own_folder_only(tmp_path):
    fill(tmp_path, [a_run()])
    shutil.rmtree(party_folder(tmp_path, 1))
    supply, room = StoredSupply(tmp_path, ranks=(0,)), Room()
    room.parties = room.parties[:1]
    supply.provide(room, a_run(), "m")
    assert len(room.made) == 1
    assert not supply.operand_mask("weight", (5,), 1).any()


def test_runs_out(tmp_path):
    fill(tmp_path, [a_run()])
    supply = StoredSupply(tmp_path)
    supply.provide(Room(), a_run(), "m")
    with pytest.raises(
        UserError, match=r"party-0: material has run out after 1 program runs; .+`spu-llm deal --tokens N --out FOLDER`"
    ):
        supply.provide(Room(), a_run(), "m")


def test_waits_for_a_dealer_at_work(tmp_path):
    dealer = fill(tmp_path, [])
    supply, room = StoredSupply(tmp_path, patience=30), Room()
    waiting = threading.Thread(target=supply.provide, args=(room, a_run(), "m"))
    waiting.start()
    for rank, message in enumerate(dealer.deal(a_run(), 1)):
        put_message(party_folder(tmp_path, rank), KEYS[rank], 1, a_run().digest(), message)
    waiting.join(30)
    assert len(room.made) == 2


@pytest.mark.parametrize("other", [{"shift": 4}, {"start": 5}, {"name": "other"}, {"low": 0.5}])
def test_material_is_bound_to_its_run(other, tmp_path):
    fill(tmp_path, [a_run()])
    with pytest.raises(UserError, match=r"material 1 of .+party-0 was dealt for another run than this one: deal for this model"):
        StoredSupply(tmp_path).provide(Room(), a_run(**other), "m")


def test_keys_are_private(tmp_path):
    fill(tmp_path, [])
    for rank in (0, 1):
        path = party_folder(tmp_path, rank) / "key"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and read_key(path.parent) == KEYS[rank]
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    with pytest.raises(UserError, match="may be read by other users; chmod 600"):
        StoredSupply(tmp_path)
    path.write_bytes(b"short")
    with pytest.raises(UserError, match="holds 5 bytes, not the 16 of a key"):
        StoredSupply(tmp_path)
    with pytest.raises(UserError, match="key: cannot be read"):
        StoredSupply(tmp_path / "none")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The YAML of a tiny model with a text to calibrate on, its checkpoint and calibration."""
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder / "tiny", LLAMA | {"num_hidden_layers": 1})
    write_tokenizer(folder / "tiny", 97)
    checkpoint = load_checkpoint(folder / "tiny")
    random = np.random.default_rng(0)
    lines = [checkpoint.tokenizer.decode(random.integers(0, 97, length).tolist()) for length in [30] * 40 + [3] * 40]
    (folder / "text.txt").write_text("\n".join(line.replace("\n", " ") for line in lines))
    path = folder / "tiny.yaml"
    path.write_text(json.dumps({"name": "tiny", "path": "tiny", "prefix": PREFIX, "calibration": "text.txt"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPU_LLM_CACHE", str(folder / "cache"))
        yield path, checkpoint, calibration_for(load_model(str(path)), checkpoint)[0]


@pytest.fixture(scope="module")
def dealt(model, tmp_path_factory):
    """What `spu-llm deal` leaves, in a process of its own, and what it says."""
    folder = tmp_path_factory.mktemp("dealt") / "material"
    code = "from spu_llm.cli.deal import deal_command; deal_command()"
    counts = ["--prompt-tokens", str(len(PROMPT)), "--tokens", str(NEW)]
    command = [sys.executable, "-c", code, "--model", str(model[0]), *counts, "--out", str(folder), "--quiet"]
    return folder, subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_deal_reports_what_it_left(dealt):
    folder, done = dealt
    assert done.returncode == 0, done.stderr
    said = re.search(
        r"9 program runs dealt for 3 passes; ([\d.]+) MB to each party, .+ MB a pass; ([\d.]+) MB on disk now", done.stdout
    )
    sizes = [[path.stat().st_size for path in party_folder(folder, rank).glob("*.material")] for rank in (0, 1)]
    assert float(said[2]) == pytest.approx(sum(map(sum, sizes)) / 1e6, abs=0.1) and len(sizes[0]) == 10
    assert float(said[1]) == pytest.approx(max(map(sum, sizes)) / 1e6, abs=0.1)
    everything = done.stdout + done.stderr + (folder / "material.json").read_text()
    assert not any(read_key(party_folder(folder, rank)).hex() in everything for rank in (0, 1))


def decoding(model, supply):
    """A session, and a decoder set up in it."""
    _, checkpoint, calibration = model
    session = Session(ProtocolConfig())
    decoder = AssistedDecoder(session, checkpoint.decoder, calibration, CAPACITY, PREFIX, supply=supply)
    decoder.set_up(len(PROMPT))
    return session, decoder


@pytest.fixture(scope="module")
def live(model):
    """Logits of each pass with a dealer at hand, and the masks of cache rows after it; then two roll backs."""
    supply, logits, masks = LiveSupply(), [], []
    session, decoder = decoding(model, supply)
    with session:
        for start, tokens in ((2, PROMPT), (5, [11]), (6, [12]), (6, [13]), (5, [14, 15])):
            decoder.roll_back(start)
            logits.append(decoder.advance(tokens)[-1])
            masks.append({name: mask.copy() for name, mask in supply.dealer.masks.items() if name.startswith("cache")})
    return logits, masks


def test_no_mask_of_a_row_serves_twice(live):
    """A row that is written, be it again, gets a mask that no row had before; the others keep theirs."""
    seen: set[bytes] = set()
    before: dict[tuple[str, int], bytes] = {}
    for masks, written in zip(live[1], ((2, 6), (5, 6), (6, 7), (6, 7), (5, 7)), strict=True):
        after = {(name, row): mask.tobytes() for name, part in masks.items() for row, mask in enumerate(part)}
        changed = {key[1] for key in after if after[key] != before.get(key)}
        assert changed == (set(range(*written)) if before else set(range(CAPACITY)))
        fresh = [mask for key, mask in after.items() if mask != before.get(key)]
        assert len(set(fresh)) == len(fresh) and not seen & set(fresh)
        seen |= set(fresh)
        before = after


def test_dealt_ahead_is_as_good_as_live(model, dealt, live, tmp_path):
    """The same logits within fixed-point error, though the dealer never saw a weight; then the material has run out."""
    folder = shutil.copytree(dealt[0], tmp_path / "material")
    facts = Facts("tiny", len(PREFIX), len(PROMPT), NEW, CAPACITY)
    session, decoder = decoding(model, open_material(folder, facts))
    with session:
        for tokens, logits in zip((PROMPT, [11], [12]), live[0], strict=False):
            assert np.abs(decoder.advance(tokens)[-1] - logits).max() < 0.05
        with pytest.raises(UserError, match="has run out after 9 program runs"):
            decoder.advance([13])
    with pytest.raises(UserError, match="was used before"):
        open_material(folder, facts)


def test_another_order_of_passes_is_refused(model, dealt, tmp_path):
    folder = shutil.copytree(dealt[0], tmp_path / "material")
    session, decoder = decoding(model, StoredSupply(folder))
    with session, pytest.raises(UserError, match="was dealt for another run than this one"):
        decoder.advance(PROMPT[:1])


def test_dealer_can_follow_a_roll_back(model, tmp_path):
    """A known order with roll backs is dealt like any other, and never more than `ahead` passes lie on disk."""
    _, checkpoint, calibration = model
    published = publish(checkpoint.decoder.config, PREFIX, calibration)
    dealer = AheadDealer(published, Facts("tiny", 2, 1, 4, CAPACITY), tmp_path / "out")
    dealer.set_up()
    for length in (2, 3, 3):
        dealer.roll_back(length)
        dealer.wait(4)
        dealer.advance(1)
    assert dealer.runs == 9 and dealer.bytes_on_disk > sum(dealer.sent)
    waiting = threading.Thread(target=dealer.wait, args=(3,), daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    for rank in (0, 1):
        for number in (1, 2, 3):
            with_store(party_folder(tmp_path / "out", rank), lambda store, number=number: store.take(number))
    waiting.join(10)
    assert not waiting.is_alive()


def test_refuses_another_generation_before_using_anything(dealt):
    folder = dealt[0]
    for change, line in (
        ({"prompt_tokens": 4}, r"was dealt for prompt_tokens 3, but this run has 4; .+ --prompt-tokens 4 --tokens 3 --capacity 8"),
        ({"new_tokens": 4}, r"was dealt for new_tokens 3, but this run has 4"),
        ({"model": "smollm2"}, r"was dealt for model tiny, but this run has smollm2"),
    ):
        with pytest.raises(UserError, match=line):
            open_material(folder, Facts(**{**vars(Facts("tiny", 2, 3, 3, 8)), **change}))
    with pytest.raises(UserError, match="holds no dealt material"):
        open_material(folder / "no", Facts("tiny", 2, 3, 3, 8))
    assert all(0 in with_store(party_folder(folder, rank), lambda store: store.available()) for rank in (0, 1))
