"""The fault campaign's judges see faults where there are some; `make test-faults` runs it whole."""

from __future__ import annotations

import contextlib
import random
import sys

import pytest
import torch
from faults import conversations, flips, forged, kills, mounts, pressure, replaced, untrusted, world
from faults.campaigns import CAMPAIGNS
from faults.far import DAMAGES

from cached_rag.backends import resolve
from cached_rag.backends.transformers import loading
from cached_rag.backends.transformers.complete import copied
from cached_rag.errors import DocumentError
from cached_rag.kv import blob
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.kept import KeptPrompts
from cached_rag.rag import reading_process
from cached_rag.rag.document import DocumentLimits
from cached_rag.rag.readers import load_document

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_trial_of_each_is_survived(name, tmp_path):
    if name == "surroundings" and not mounts.can_mount():
        pytest.skip("this process may mount no file system")
    outcomes = CAMPAIGNS[name](1, tmp_path / name, random.Random(1))
    assert outcomes
    assert [(one.fault, one.faults) for one in outcomes if one.survived < one.trials] == []
    assert all(one.trials == 1 for one in outcomes)


def test_without_a_key_forged_kv_is_seen_as_wrong(tmp_path):
    with world.engine(tmp_path) as engine:
        engine.encode(world.TEXTS, context=None)
    _, wrong, _ = forged.tried(tmp_path, random.Random(0))
    assert wrong > 0


def test_answers_that_differ_are_seen(tmp_path):
    lack = pressure.Lack()
    with world.engine(tmp_path) as engine:
        engine.encode(world.TEXTS, context=None)
        expected = [[-1]] * 6
        wrong, found = pressure.tried(engine, lack, "full", expected)
    assert (wrong, found) == (12, [])


@pytest.mark.parametrize("what", DAMAGES)
def test_damages_change_something(what):
    values, chance = [bytes(range(200)), b"another"], random.Random(0)
    assert all(DAMAGES[what](values, chance) != values[0] for _ in range(20))


def test_without_checksums_damage_is_seen_as_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(blob, "layer_sums", lambda tensors, *_: ["0"] * len(tensors["keys"]))
    monkeypatch.setattr(flips, "DAMAGES", {"zeroed": flips.DAMAGES["512 bytes zeroed"]})
    outcomes = flips.campaign(3, tmp_path, random.Random(2))
    assert sum(one.wrong for one in outcomes if "KV files" in one.fault) > 0


def test_weights_that_are_not_looked_at_are_seen_as_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "copied", lambda model: copied(model) and "the same")
    monkeypatch.setattr(resolve, "_is_sound", lambda _: True)
    monkeypatch.setattr(replaced, "CHANGES", {})
    named, over, damaged = replaced.campaign(1, tmp_path, random.Random(0))
    assert named.wrong > 0
    assert over.wrong > 0
    assert damaged.survived < damaged.trials


def test_a_module_of_other_numbers_is_seen(tmp_path):
    with world.engine(tmp_path) as store:
        store.encode(world.TEXTS, context=None)
        assert world.wrong_modules(store) == 0
        behind, (chunk, *_) = store.library.encoded_after()[0], list(store.library.table)
        kv = store.library.shelf.fetch(behind, chunk.token_ids)
        spoilt = ModuleKV(kv.token_ids, kv.start, kv.keys + 0.01, kv.values)
        store.library.put(behind, spoilt, chunk.text_digest)
        assert world.wrong_modules(store) == 1
        assert not world.is_right(spoilt)
        assert torch.isfinite(spoilt.keys).all()


def test_what_is_left_over_is_seen(tmp_path):
    with world.engine(tmp_path) as store:
        store.encode(world.TEXTS[:1], context=None)
        (kv, *_) = world.right_kv()[next(iter(store.library.table)).token_ids]
        store.library.shelf.disk.put("a" * 40, kv)  # which no text has
    assert any("orphan" in fault for fault in world.litter(tmp_path))


# Follows links, and opens until one leads elsewhere, so that it does on a busy machine, too.
NAIVE = f"""
import contextlib, os, time
from cached_rag.rag import document
def opened(path, inside):
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY)
            if os.pread(file, 100, 0) != {untrusted.SOUND.encode()}:
                return file
            os.close(file)
    return os.open(path, os.O_RDONLY)
document._descriptor = opened
main()
"""


def test_a_secret_that_is_read_by_a_link_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(
        reading_process, "_CODE", reading_process._CODE.removesuffix("main()\n") + NAIVE
    )
    assert untrusted.swaps(20, tmp_path, random.Random(0)).wrong > 0


def test_a_text_that_is_too_long_is_seen(tmp_path):
    documents = untrusted.make_documents(tmp_path)

    def load(path):
        return load_document(path, DocumentLimits(max_characters=1 << 40)).text

    _, _, found = untrusted.tried_bomb(documents, random.Random(0), load)
    assert "characters were read" in found[0]


def test_a_module_that_is_imported_from_among_documents_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(reading_process, "trusted_path", lambda _: ["", *sys.path])
    tries = []
    for number in range(8):
        documents = untrusted.make_documents(tmp_path / f"{number}")
        with contextlib.suppress(DocumentError):  # as its parser is not there
            tries.append(untrusted.tried_module(documents, random.Random(number)))
    ran = len(list(tmp_path.glob("*/docs/ran")))
    assert ran > 0


@pytest.mark.parametrize("seconds", [0.05])
def test_a_child_that_ends_by_itself_is_no_trial(tmp_path, seconds):
    with pytest.raises(AssertionError, match="ended by itself"):
        kills.killed(lambda *_: None, tmp_path, random.Random(0), seconds + 1)


def kept_conversations(folder):
    conversations.campaign(0, folder, random.Random(0))
    return folder / "sound"


def test_conversations_go_on_from_what_was_kept(tmp_path):
    assert conversations.wrong_answers(kept_conversations(tmp_path)) == (0, 6)


def test_without_checksums_damaged_conversations_are_seen_as_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(blob, "layer_sums", lambda tensors, *_: ["0"] * len(tensors["keys"]))
    folder = kept_conversations(tmp_path)
    for file in folder.rglob("*.safetensors"):
        data = file.read_bytes()
        part = slice(len(data) // 4, len(data) // 2)
        file.write_bytes(data[: part.start] + bytes(len(data[part])) + data[part.stop :])
    wrong, went_on = conversations.wrong_answers(folder)
    assert wrong > 0
    assert went_on > 0


def test_a_forgotten_text_that_is_still_kept_is_seen(tmp_path, monkeypatch):
    folder = kept_conversations(tmp_path)
    monkeypatch.setattr(KeptPrompts, "forget", lambda *_: 0)
    assert conversations.left_behind(folder) == ["a forgotten text is still kept"] * 6
    monkeypatch.undo()
    assert conversations.left_behind(kept_conversations(tmp_path)) == []
