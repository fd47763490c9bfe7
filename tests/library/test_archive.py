"""Conversations that outlive the process: found by tokens, exact, and deleted with texts."""

from __future__ import annotations

import errno
import sqlite3
import stat
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CHUNKS, NEW_PROMPTS, ask, shuffled, tiny_model
from tiny_architectures import write_architecture

from cached_rag import ConfigError, Engine, StoreConfig
from cached_rag.backends.llama_cpp.loading import load_llama_cpp
from cached_rag.errors import StoreError
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.holdings import FOLDER, drop, forget, unused
from cached_rag.kv.kept import KeptPrompt, KeptPrompts, least_worth
from cached_rag.library import archive
from cached_rag.library.sequences import PromptKV

HEAD = "You answer questions about the documents below, briefly and exactly, in one sentence each."
OPTIONS = {"max_tokens": 8, "ignore_eos": True}
FIRST = ask(*CHUNKS, system=HEAD)


def on_disk(folder, **options):
    return StoreConfig(path=str(folder), **options)


def later_turn(answer, messages=FIRST):
    said = {"role": "assistant", "content": answer.text}
    return [*messages, said, {"role": "user", "content": "And then?"}]


def asked_once(folder, model=None, **options):
    with Engine(model or tiny_model("llama"), on_disk(folder, **options)) as engine:
        return engine.generate(FIRST, **OPTIONS)


def again(folder, messages, model=None, **options):
    """Another process's answer to a prompt, and how many tokens it took over."""
    with Engine(model or tiny_model("llama"), on_disk(folder, **options)) as engine:
        made = engine.generate(messages, **OPTIONS)
        return made.token_ids, made.report.cached_tokens


def files(folder):
    return sorted((folder / FOLDER / "blobs").rglob("*.safetensors"))


def kept(folder):
    found = KeptPrompts(folder / FOLDER)
    try:
        return found.all()
    finally:
        found.close()


@pytest.fixture(scope="module")
def whole_states(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return load_llama_cpp(str(write_architecture(path, "qwen35")), threads=1)


@pytest.mark.parametrize("family", ["llama", "gemma4", "lfm2", "qwen3_5", "granite4_h", ""])
def test_a_conversation_goes_on_in_another_process(family, tmp_path, whole_states):
    model = tiny_model(family) if family else whole_states
    messages = later_turn(asked_once(tmp_path, model))
    with Engine(model, NEW_PROMPTS) as engine:
        plain = engine.generate(messages, method="full", **OPTIONS)
    for _ in range(2):
        token_ids, cached = again(tmp_path, messages, model)
        assert token_ids == plain.token_ids
        assert cached > 0.8 * plain.report.prompt_tokens
    assert again(tmp_path, messages, model, namespace="other") == (token_ids, 0)  # controls
    assert again(tmp_path / "other", messages, model) == (token_ids, 0)


def test_what_others_can_go_on_from_stays_when_a_prompt_is_asked_again(tmp_path):
    model = tiny_model("qwen3_5")
    beginning = " ".join(shuffled(n) for n in range(5))
    first, again, other = (f"{beginning} {question}" for question in ("Why?", "How so?", "Who?"))
    options = {**OPTIONS, "method": "full"}

    def cached(*prompts):
        with Engine(model, on_disk(tmp_path)) as engine:
            return [engine.generate(one, **options).report.cached_tokens for one in prompts][-1]

    common = cached(first, again)
    before, held = kept(tmp_path), files(tmp_path)
    assert any(len(one.stated) > 2 for one in before)
    assert cached(again) > common - 20
    assert [one.stated for one in kept(tmp_path)] == [one.stated for one in before]
    assert files(tmp_path) == held
    assert cached(other) > 0.9 * len(model.tokenizer(beginning)["input_ids"])


def test_it_is_written_when_it_goes_on_and_all_when_the_engine_closes(tmp_path):
    with Engine(tiny_model("llama"), on_disk(tmp_path)) as engine:
        first = engine.generate(FIRST, **OPTIONS)
        writing = engine._resources.shared.archive._writing
        writing.drain()
        assert kept(tmp_path) == []
        engine.generate(later_turn(first), **OPTIONS)
        writing.drain()
        (one,) = kept(tmp_path)
        assert len(one.ids) > 170
        engine.generate(ask(CHUNKS[2], system=HEAD), **OPTIONS)
        writing.drain()
        assert len(kept(tmp_path)) == 1
    assert len(kept(tmp_path)) == 2
    names = [*(tmp_path / FOLDER).glob("*.sqlite*"), *files(tmp_path)]
    assert names
    assert {stat.S_IMODE(path.stat().st_mode) for path in names} == {0o600}


def test_what_was_repaired_serves_the_same_method_where_it_goes_on(tmp_path):
    model = tiny_model("llama")
    with Engine(model, on_disk(tmp_path)) as engine:
        engine.encode(CHUNKS, engine.head(FIRST, CHUNKS[0]))
        first = engine.generate(FIRST, **OPTIONS)
        assert first.report.cached_tokens
    (one,) = kept(tmp_path)
    assert one.repair
    assert one.exact_length < one.least < len(one.ids)
    own = [end for _, end in one.pieces.values() if end > one.exact_length]
    assert own
    messages = later_turn(first)
    with Engine(model, on_disk(tmp_path)) as engine:
        assert engine.generate(messages, **OPTIONS).report.cached_tokens > one.least
        exact = engine.generate(messages, method="prefix", **OPTIONS).report
        assert exact.cached_tokens <= one.exact_length


@pytest.mark.parametrize("how", ["engine", "folder"])
def test_a_text_that_is_forgotten_goes_from_it(how, tmp_path):
    with Engine(tiny_model("llama"), on_disk(tmp_path)) as engine:
        engine.encode(CHUNKS)
        engine.generate(FIRST, **OPTIONS)
        engine.generate(ask(CHUNKS[2], system=HEAD), **OPTIONS)
    assert len(kept(tmp_path)) == 2
    before = len(files(tmp_path))
    if how == "folder":
        forget(tmp_path, [CHUNKS[0]])
    else:
        with Engine(tiny_model("llama"), on_disk(tmp_path)) as engine:
            engine.forget([CHUNKS[0]])
    (left,) = kept(tmp_path)
    assert not left.has("", ids_of(CHUNKS[0]))
    assert 0 < len(files(tmp_path)) < before
    names = {path.name.partition(".")[0] for path in files(tmp_path)}
    assert names == {*left.pieces, *left.states}


def test_a_text_that_is_forgotten_before_it_is_written_is_not(tmp_path):
    with Engine(tiny_model("llama"), on_disk(tmp_path)) as engine:
        engine.register(CHUNKS)
        first = engine.generate(FIRST, **OPTIONS)
        archive = engine._resources.shared.archive
        with archive._lock:  # the writer waits
            engine.generate(later_turn(first), **OPTIONS)
            engine.forget(CHUNKS[:1])
        archive._writing.drain()
    assert [one for one in kept(tmp_path) if len(one.ids) > 100] == []


def ids_of(text):
    return tiny_model("llama").tokenizer(text)["input_ids"][2:-2]


def test_what_others_forgot_is_not_written_afterwards(tmp_path):
    def has(text):
        return sum(one.has("", ids_of(text)) for one in kept(tmp_path))

    other = ask(CHUNKS[2], system=HEAD)
    with Engine(tiny_model("llama"), on_disk(tmp_path)) as engine:
        engine.encode(CHUNKS)
        for prompt in (FIRST, other):
            first = engine.generate(prompt, **OPTIONS)
        running = engine.stream(later_turn(first, other), **OPTIONS)
        next(iter(running))
        forget(tmp_path, CHUNKS[2:])
        running.result()
        engine._resources.shared.archive._writing.drain()
        assert kept(tmp_path) == []
        engine.generate(FIRST, **OPTIONS)
        forget(tmp_path, CHUNKS[:1])  # and no question follows
    assert kept(tmp_path) == []
    with Engine(tiny_model("llama"), on_disk(tmp_path)) as engine:  # control
        engine.encode(CHUNKS)
        engine.generate(FIRST, **OPTIONS)
    assert has(CHUNKS[0])


def test_a_text_that_is_forgotten_while_it_is_written_is_not_kept(tmp_path, monkeypatch):
    def forgotten_meanwhile(prompts, new):
        forget(tmp_path, CHUNKS[:1])  # just before the row is written
        tell(prompts, new)

    tell = KeptPrompts.tell
    with Engine(tiny_model("llama"), on_disk(tmp_path)) as engine:
        engine.encode(CHUNKS)
        engine.generate(FIRST, **OPTIONS)
        monkeypatch.setattr(KeptPrompts, "tell", forgotten_meanwhile)
    assert kept(tmp_path) == []
    assert files(tmp_path) == []


def test_a_tenant_who_comes_back_has_nothing_of_what_others_forgot(tmp_path):
    with Engine(tiny_model("llama"), on_disk(tmp_path)) as engine:
        for forgotten in ([], CHUNKS[:1]):
            with engine.tenant("a") as tenant:
                tenant.encode(CHUNKS)
                tenant.generate(FIRST, **OPTIONS)
            with Engine(tiny_model("llama"), on_disk(tmp_path, namespace="a")) as other:
                other.forget(forgotten)
            with engine.tenant("a") as tenant:
                reused = tenant.generate(FIRST, **OPTIONS).report.kept_tokens
            assert (reused > 100) == (not forgotten)


def test_what_waits_to_be_written_takes_no_memory_beyond_the_bound(tmp_path):
    with Engine(tiny_model("llama"), on_disk(tmp_path)) as engine:
        archive = busy = engine._resources.shared.archive
        engine._resources.shared.activity.begin(busy)
        first = engine.generate(FIRST, **OPTIONS)
        engine.generate(later_turn(first), **OPTIONS)
        assert len(archive._waiting) == 1
        engine.sequences.clear()
        assert len(archive._waiting) == 0
        engine._resources.shared.activity.end(busy)
        archive._writing.drain()
        assert kept(tmp_path) == []


def test_what_was_used_last_is_written_last_so_it_goes_last(tmp_path):
    with Engine(tiny_model("llama"), on_disk(tmp_path)) as engine:
        written, waiting = engine._resources.shared.archive, []
        engine._resources.shared.activity.begin(written)
        for number in range(4):
            first = ask(shuffled(number), system=f"{number}. {HEAD}")
            engine.generate(later_turn(engine.generate(first, **OPTIONS), first), **OPTIONS)
            waiting.append(tuple(engine.sequences._kept[-1].ids.tolist()))
        engine._resources.shared.activity.end(written)
        written._writing.drain()
        assert [one.ids for one in kept(tmp_path)] == waiting


@pytest.mark.parametrize("written", [1, 3])
def test_what_was_used_last_is_written_first_when_the_time_is_short(
    written, tmp_path, monkeypatch, caplog
):
    now = iter([0] * (1 + written))
    with Engine(tiny_model("llama"), on_disk(tmp_path)) as engine:
        engine._resources.shared.archive._writing._capacity = 2
        for number in range(3):
            engine.generate(ask(shuffled(number), system=f"{number}. {HEAD}"), **OPTIONS)
        asked = [tuple(one.ids.tolist()) for one in engine.sequences._kept]
        assert len(asked) == 3
        clock = SimpleNamespace(monotonic=lambda: next(now, 100))
        monkeypatch.setattr(archive, "time", clock)
        engine.sequences.close(1)
        monkeypatch.undo()
        assert [one.ids for one in kept(tmp_path)] == asked[3 - written :]
        assert ("2 of the prompts" in caplog.text) == (written == 1)
        engine.sequences.clear()


def test_a_table_that_cannot_be_used_keeps_no_forgotten_text_in_use(tmp_path):
    prompts = [ask(CHUNKS[at], CHUNKS[1], system=HEAD) for at in (0, 2)]
    with Engine(tiny_model("llama"), on_disk(tmp_path, write_back=False)) as engine:
        engine.encode(CHUNKS)
        for prompt in prompts:
            engine.generate(prompt, method="full", **OPTIONS)
        for path in (tmp_path / FOLDER).glob("prompts.sqlite*"):
            path.write_bytes(b"no table" * 1000)
        with pytest.raises(StoreError, match="not a usable index"):
            forget(tmp_path, [CHUNKS[0], CHUNKS[2]])
        for prompt in prompts:
            assert not engine.generate(prompt, method="prefix", **OPTIONS).report.kept_tokens
        with pytest.raises(StoreError, match="not a usable index"):
            engine.forget([CHUNKS[1]])


@pytest.mark.parametrize("how", ["forget", "prune"])
@pytest.mark.parametrize("what", ["told", "name"])
def test_a_damaged_row_goes_with_its_pieces(how, what, tmp_path):
    asked_once(tmp_path)
    with Engine(tiny_model("llama"), on_disk(tmp_path, sequence_disk_bytes=0)) as engine:
        engine.register(CHUNKS)
    with closing(sqlite3.connect(tmp_path / FOLDER / "prompts.sqlite")) as table, table:
        table.execute(f"UPDATE prompts SET {what} = replace({what}, '1', '2')")
    assert files(tmp_path)
    if how == "forget":
        forget(tmp_path, CHUNKS[:1])
    with closing(KeptPrompts(tmp_path / FOLDER)) as found:
        if how == "prune":
            assert found.prune()[0]
        assert found._database.rows("SELECT * FROM prompts") == []
        assert found.check() == []
    assert files(tmp_path) == []


def test_what_prompts_left_goes_with_the_kv_of_a_model(tmp_path):
    for dtype in (torch.bfloat16, torch.float32):
        asked_once(tmp_path, tiny_model("llama", dtype))
    assert len({one.model for one in kept(tmp_path)}) == 2
    for holding in unused(tmp_path, "llama", ["float32"]):
        drop(tmp_path, holding)
    assert {one.model for one in kept(tmp_path)} == {tiny_model("llama").fingerprint}


def test_damage_is_computed_anew_and_said(tmp_path, caplog):
    messages = later_turn(asked_once(tmp_path))
    good, cached = again(tmp_path / "fresh", messages)
    assert cached == 0
    for path in files(tmp_path):
        data = bytearray(path.read_bytes())
        data[-20] ^= 0xFF
        path.write_bytes(data)
    assert again(tmp_path, messages) == (good, 0)
    assert "damaged" in caplog.text
    assert again(tmp_path, messages)[1] > 150  # and kept again


def test_what_cannot_be_read_for_a_while_is_kept(tmp_path, monkeypatch):
    def refused(_):
        raise OSError(errno.EMFILE, "Too many open files")

    messages = later_turn(asked_once(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("cached_rag.kv.disk.TensorFile.at", refused)
        assert again(tmp_path, messages, finish_seconds=0)[1] == 0
    assert again(tmp_path, messages)[1] > 150


def test_pieces_that_a_killed_process_did_not_write_are_no_error(tmp_path):
    first = asked_once(tmp_path)
    files(tmp_path)[0].unlink()
    messages = later_turn(first)
    good, _ = again(tmp_path / "fresh", messages)
    assert again(tmp_path, messages)[0] == good


@pytest.mark.parametrize("finish_seconds", [0, 30])
def test_another_key_finds_nothing_and_leaves_it(finish_seconds, tmp_path):
    messages = later_turn(asked_once(tmp_path, signing_key="k" * 16))
    ask_again = partial(again, tmp_path, messages, finish_seconds=finish_seconds)
    for options in ({"signing_key": "x" * 16}, {}):
        assert ask_again(**options)[1] == 0
    assert len(kept(tmp_path)) >= 1 + 2 * (finish_seconds > 0)
    assert ask_again(signing_key="k" * 16)[1] > 150


def test_a_prompts_tokens_are_spelled_once_for_all_texts_that_are_forgotten():
    prompt = KeptPrompt("m", "", "", tuple(range(100)), (100,))
    found = [prompt.has("", ids) for ids in ((98, 99), (0,), (9, 8), (), (9, 9), (1, 2, 3))]
    assert found == [True, True, False, False, False, True]
    assert prompt._spelled is prompt._spelled


def test_what_is_told_while_the_table_is_read_is_not_missed(tmp_path, monkeypatch):
    prompts = KeptPrompts(tmp_path / FOLDER)
    first, second = (KeptPrompt("m", "", "", ids, (2,)) for ids in ((1, 2), (3, 4)))
    prompts.tell(first)
    sound = prompts._database.sound

    def told_meanwhile(rows):
        monkeypatch.undo()
        prompts.tell(second)
        return sound(rows)

    monkeypatch.setattr(prompts._database, "sound", told_meanwhile)
    assert prompts.all() == [first]
    assert prompts.all() == [first, second]
    prompts.close()


def test_two_processes_share_a_folder(tmp_path):
    model = tiny_model("llama")
    with Engine(model, on_disk(tmp_path)) as one, Engine(model, on_disk(tmp_path)) as other:
        first = one.generate(FIRST, **OPTIONS)
        second = one.generate(later_turn(first), **OPTIONS)
        one._resources.shared.archive._writing.drain()
        found = other.generate(later_turn(first), **OPTIONS)
        assert found.token_ids == second.token_ids
        assert found.report.cached_tokens > 150


def test_settings_that_cannot_apply_are_refused(tmp_path):
    for wrong in ({}, {"path": str(tmp_path), "sequence_bytes": 0}):
        with pytest.raises(ConfigError, match="needs a path, and sequence_bytes"):
            StoreConfig(sequence_disk_bytes=1, **wrong)
    with Engine(tiny_model("llama"), on_disk(tmp_path, sequence_disk_bytes=0)) as engine:
        engine.generate(FIRST, **OPTIONS)
    assert not (tmp_path / FOLDER).exists()
    with pytest.raises(ValueError, match="do not make up"):
        KeptPrompt("m", "", "", (1, 2, 3), (2,))


# What goes first -----------------------------------------------------------------------------


def test_what_was_used_longest_ago_goes_where_all_costs_alike():
    assert least_worth([{"a": (10, 100)}, {"b": (90, 900)}, {"c": (5, 50)}]) == 0


def test_a_state_of_a_few_tokens_goes_before_one_of_many():
    large, small = {"a": (4000, 600)}, {"b": (100, 510)}
    assert least_worth([large, small]) == 1
    assert least_worth([{"a": (200, 600)}, {"b": (100, 510)}]) == 0  # control: age counts, too


def test_what_others_have_too_is_no_reason_to_drop():
    shared = {"head": (1000, 1000)}
    found = [{**shared, "a": (10, 500)}, {**shared, "b": (400, 500)}, shared]
    assert least_worth(found) == 0
    assert least_worth([shared, {**shared, "b": (400, 500)}]) == 1  # the first frees nothing


def test_a_prompt_that_is_cut_otherwise_leaves_none_of_its_former_pieces(tmp_path):
    found, ids = KeptPrompts(tmp_path / FOLDER), tuple(range(64))
    kv = torch.zeros(1, 1, 64, 16)

    def piece(begin, end):
        return ModuleKV(ids[begin:end], 0, kv[:, :, begin:end], kv[:, :, begin:end, :0])

    for ends in ((16, 40, 64), (16, 64)):
        one = KeptPrompt("model", "", "", ids, ends, exact_length=64)
        found.tell(one)
        found.fill(one, piece, None)
        assert found.all() == [one]
        assert len(files(tmp_path)) == len(ends)
    found.close()


def test_a_removal_that_was_cut_short_is_finished(tmp_path, monkeypatch):
    found, ids = KeptPrompts(tmp_path / FOLDER), tuple(range(64))
    kv = torch.zeros(1, 1, 64, 16)
    one = KeptPrompt("model", "", "", ids, (64,))
    found.tell(one)
    found.fill(one, lambda *_: ModuleKV(ids, 0, kv, kv[..., :0]), None)

    def killed(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(found, "_delete", killed)
        with pytest.raises(KeyboardInterrupt):
            found.forget("", "", ids[:9])
    assert len(files(tmp_path)) == 1
    found.forget("", "", ids[:9])
    assert files(tmp_path) == []
    found.close()


def test_the_disk_is_bounded(tmp_path):
    found = KeptPrompts(tmp_path / FOLDER, max_bytes=3 * 5000)
    try:
        for number in range(5):
            ids = tuple(range(number * 100, number * 100 + 64))
            one = KeptPrompt("model", "", "", ids, (64,))
            kv = torch.full((1, 1, 64, 16), float(number))
            found.tell(one)
            found.fill(one, lambda *_, ids=ids, kv=kv: ModuleKV(ids, 0, kv, kv[..., :0]), None)
        left = [one.ids[0] for one in found.all()]
        assert left[-1] == 400
        assert len(left) < 5
        assert found.nbytes <= 3 * 5000
        assert found.check() == []
        assert found.prune() == (0, 0)
    finally:
        found.close()


def test_memory_keeps_to_its_bound_with_what_is_brought_back(tmp_path):
    first = asked_once(tmp_path)
    size = sum(path.stat().st_size for path in files(tmp_path))
    with Engine(tiny_model("llama"), on_disk(tmp_path, sequence_bytes=size // 2)) as engine:
        assert engine.generate(later_turn(first), **OPTIONS).report.cached_tokens > 150
        assert engine.sequences.nbytes <= size // 2


def test_a_prompt_goes_on_at_its_stops_only():
    ids = np.arange(300)
    one = PromptKV("", ids, (), 300, stops=(120, 250))
    assert one.usable(np.arange(400), "") == 250
    assert one.usable(np.arange(200), "") == 120
    assert PromptKV("", ids, (), 300).usable(np.arange(200), "") == 200  # control
