"""What is deleted is gone: from every tier, whoever put it there, whatever happens meanwhile."""

from __future__ import annotations

import itertools
import sqlite3
import threading
from array import array
from contextlib import closing, contextmanager

import pytest
from conftest import CHUNKS, tiny_model
from doubles import Recording
from indexes import WordEmbedding
from typer.testing import CliRunner

from cached_rag import BatchConfig, CachedRAG, Engine, Schema, StoreConfig
from cached_rag.cli.main import app
from cached_rag.errors import StoreError
from cached_rag.kv import disk, holdings
from cached_rag.kv.catalog import Catalog
from cached_rag.kv.disk import DiskStore
from cached_rag.kv.tiers import MemoryStore, TieredStore

LONG = " ".join(CHUNKS * 3)
HEAD = [{"role": "system", "content": "Answer from the texts."}, {"role": "user", "content": "X"}]


@pytest.fixture
def kept(tmp_path):
    return StoreConfig(path=str(tmp_path / "kv"))


def left(folder):
    """Texts that the catalog knows, and files that belong to none."""
    with closing(Catalog(folder / "catalog.sqlite", "")) as catalog:
        makers = catalog.makers()
    known = set()
    for maker in makers:
        with closing(Catalog(folder / "catalog.sqlite", maker.model)) as catalog:
            known |= catalog.text_digests()
    return len(known), len(holdings.strays(folder))


def num_files(folder):
    return len(list((folder / "blobs").glob("*/*.safetensors")))


def test_all_texts_go_that_are_deleted_at_the_same_time(kept, tmp_path):
    texts = [f"{number} {CHUNKS[number % 3]}" for number in range(120)]
    with Engine(tiny_model("llama"), kept) as engine:
        assert engine.encode(texts, context=None).encoded == len(texts)
        with_texts = num_files(tmp_path / "kv")
        counts = []

        def delete(mine):
            counts.extend(engine.forget([text]) for text in mine)

        threads = [threading.Thread(target=delete, args=(texts[n::4],)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert counts == [1] * len(texts)
        assert len(engine.library.table) == 0
        assert left(tmp_path / "kv") == (0, 0)
        assert num_files(tmp_path / "kv") == with_texts - len(texts)


def test_what_another_process_encoded_goes_too(kept, tmp_path):
    model = tiny_model("llama")
    with Engine(model, kept) as one, Engine(model, kept) as other:
        prefix = other.head(HEAD, "X")
        other.encode(CHUNKS, context=None)
        other.encode(
            CHUNKS, prefix, context=None
        )  # behind a prefix that the first has not heard of
        kept_files = num_files(tmp_path / "kv") - 6
        assert one.forget(CHUNKS) == 6
        assert left(tmp_path / "kv") == (0, 0)
        assert num_files(tmp_path / "kv") == kept_files
        held = other.library.shelf.memory_bytes()
        other.library.refresh()
        assert other.library.shelf.memory_bytes() < held
        messages = [HEAD[0], {"role": "user", "content": "\n\n".join(CHUNKS)}]
        assert other.generate(messages, max_tokens=2).report.modules_hit == 0


def test_a_removal_that_was_interrupted_is_finished_at_the_next_open(kept, tmp_path, monkeypatch):
    def killed(self, key):
        raise KeyboardInterrupt

    with Engine(tiny_model("llama"), kept) as engine:
        engine.encode(CHUNKS, context=None)
        with monkeypatch.context() as patched:
            patched.setattr(DiskStore, "delete", killed)
            with pytest.raises(KeyboardInterrupt):
                engine.forget(CHUNKS[:2])
        assert left(tmp_path / "kv") == (1, 2)
    with Engine(tiny_model("llama"), kept) as engine:
        assert left(tmp_path / "kv") == (1, 0)
        assert engine.encode(CHUNKS, context=None).encoded == 2


def test_a_text_goes_in_every_codec(tmp_path):
    for codec in ("raw", "int8"):
        with Engine(tiny_model("llama"), StoreConfig(str(tmp_path / "kv"), codec)) as engine:
            engine.encode(CHUNKS[:1], context=None)
            files = num_files(tmp_path / "kv")
            if codec == "int8":
                engine.forget(CHUNKS[:1])
                assert num_files(tmp_path / "kv") == files - 2


@contextmanager
def opened(tmp_path, **options):
    engine = Engine(tiny_model("llama"), StoreConfig(path=str(tmp_path / "index" / "kv")))
    options |= {"embedding": WordEmbedding(), "first_exact": False}
    with engine, CachedRAG.open(tmp_path / "index", engine=engine, **options) as rag:
        yield rag


@pytest.fixture
def docs(tmp_path):
    (tmp_path / "docs").mkdir()
    for name, chunk in zip("abc", CHUNKS, strict=True):
        (tmp_path / "docs" / f"{name}.txt").write_text(f"About {name}\n\n{chunk}")
    return tmp_path / "docs"


@pytest.mark.parametrize("what", ["deleted", "changed"])
def test_a_document_whose_deletion_was_interrupted_is_gone_at_the_next_open(
    tmp_path, docs, monkeypatch, what
):
    def killed(*_):
        raise KeyboardInterrupt

    with opened(tmp_path) as rag:
        rag.ingest(docs, progress=False)
        (text,) = rag.index.texts("docs/a.txt")
        (docs / "a.txt").write_text("Something else entirely")
        act = {
            "deleted": lambda: rag.delete("docs/a.txt"),
            "changed": lambda: rag.ingest(docs, progress=False),
        }[what]
        with monkeypatch.context() as patched:
            patched.setattr(Engine, "forget", killed)
            with pytest.raises(KeyboardInterrupt):
                act()
    with opened(tmp_path) as rag:
        assert rag.engine.library.table.get(text) is None
        assert left(tmp_path / "index" / "kv") == (2, 0)
        assert rag.index.unneeded() == []


def test_a_deletion_that_cannot_be_finished_stops_no_question(tmp_path, docs, caplog):
    with opened(tmp_path) as rag:
        rag.ingest(docs, progress=False)
    catalog = tmp_path / "index" / "kv" / "catalog.sqlite"
    content = catalog.read_bytes()
    catalog.write_bytes(b"no database" * 1000)
    with opened(tmp_path) as rag:
        (text,) = rag.index.texts("docs/a.txt")
        with pytest.raises(StoreError, match=r"docs/a.txt is deleted, but not its KV: .*catalog"):
            rag.delete("docs/a.txt")
        assert [one.source for one in rag.documents()] == ["docs/b.txt", "docs/c.txt"]
    with opened(tmp_path) as rag:
        assert "KV of deleted documents stays for now" in caplog.text
        assert rag.ask("copper?", k=1, max_tokens=2).sources[0].source == "docs/b.txt"
        assert rag.index.unneeded() == [text]
    catalog.write_bytes(content)
    with opened(tmp_path) as rag:
        assert rag.index.unneeded() == []
    assert left(tmp_path / "index" / "kv") == (2, 0)


def test_a_deletion_behind_a_damaged_head_is_finished_when_ingestion_has_mended_it(tmp_path, docs):
    with opened(tmp_path) as rag:
        rag.ingest(docs, progress=False)
    with closing(sqlite3.connect(tmp_path / "index" / "kv" / "catalog.sqlite")) as catalog:
        catalog.execute("UPDATE encodings SET token_ids = zeroblob(8)")
        catalog.commit()
    files = num_files(tmp_path / "index" / "kv")
    with opened(tmp_path) as rag:
        with pytest.raises(StoreError, match="ingest the documents again, which mends it"):
            rag.delete("docs/a.txt")
        (docs / "a.txt").unlink()
        rag.ingest(docs, progress=False)
        assert num_files(tmp_path / "index" / "kv") == files
    with opened(tmp_path) as rag:
        assert rag.index.unneeded() == []
    assert left(tmp_path / "index" / "kv") == (2, 0)
    assert num_files(tmp_path / "index" / "kv") == files - 1


class DeletedMeanwhile(MemoryStore):
    """Of each entry that is read another thread deletes it just then."""

    def get(self, key, token_ids):
        kv = super().get(key, token_ids)
        self.tiers.delete(key)
        return kv


def test_a_reader_does_not_bring_back_what_is_deleted(engine):
    engine.encode(CHUNKS[:1], context=None)
    (behind,) = engine.library.encoded_after()
    ids = engine.library.table.get(CHUNKS[0]).token_ids
    key, kv = engine.library.shelf.key(behind, ids), engine.library.shelf.fetch(behind, ids)
    slow = DeletedMeanwhile(1 << 30)
    slow.tiers = TieredStore([MemoryStore(1 << 30), slow])
    slow.put(key, kv)
    assert slow.tiers.get(key, ids).token_ids == ids
    assert key not in slow.tiers
    assert slow.tiers.tiers[0].nbytes == 0


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_text_that_is_forgotten_while_it_is_encoded_leaves_nothing(
    kept, tmp_path, monkeypatch, is_kept
):
    monkeypatch.setattr("cached_rag.library.encode.BATCH_TOKENS", 16)
    texts = [f"{number} {CHUNKS[0]}" for number in range(6)]
    with Engine(tiny_model("llama"), kept if is_kept else None) as engine:
        once = itertools.count()
        summary = engine.encode(
            texts, progress=lambda _: next(once) or engine.forget(texts), context=None
        )
        assert summary.encoded == len(texts)
        assert len(engine.library.table) == 0
        behinds = engine.library.encoded_after()
        ids = [engine.tokenization.literal(text).ids for text in texts]
        assert not any(engine.library.shelf.holds(behind, i) for behind in behinds for i in ids)
        if is_kept:
            assert left(tmp_path / "kv") == (0, 0)


def test_a_text_that_is_forgotten_while_its_kv_is_written_leaves_nothing_for_a_kill(
    kept, tmp_path, monkeypatch
):
    write, put, kept_keys = disk.write_blob, DiskStore.put, []

    def forgotten_first(draft, key, kv, *given):
        if kv.token_ids == ids:
            assert other.forget([LONG]) == 0
        return write(draft, key, kv, *given)

    def put_then_killed(self, key, *given):  # a kill may come right after it
        put(self, key, *given)
        kept_keys.append(key in self)

    with Engine(tiny_model("llama"), kept) as engine, Engine(tiny_model("llama"), kept) as other:
        ids = tuple(engine.tokenization.literal(LONG).ids)
        monkeypatch.setattr(disk, "write_blob", forgotten_first)
        monkeypatch.setattr(DiskStore, "put", put_then_killed)
        engine.encode([LONG], context=None)
    assert kept_keys[-1:] == [False]
    assert left(tmp_path / "kv") == (0, 0)


@pytest.mark.parametrize("when", ["before", "during"])
def test_answers_that_are_kept_do_not_serve_a_text_that_was_deleted(when):
    engine = Engine(tiny_model("llama"), StoreConfig(sequence_bytes=1 << 26))
    engine.encode([LONG], context=None)
    prompt = f"{LONG} Why?"
    options = {"max_tokens": 6, "method": "full"}
    assert engine.generate(prompt, **options).report.cached_tokens == 0
    assert engine.generate(prompt, **options).report.cached_tokens > 128
    if when == "before":
        engine.forget([LONG])
        assert engine.sequences.nbytes == 0
    else:
        stream = engine.stream(prompt, **options)
        next(stream)
        engine.forget([LONG])
        again = engine.generate(prompt, **options)  # beside the one that began before
        assert again.report.cached_tokens == 0
        "".join(stream)
    other = engine.generate("What was never forgotten is kept. " * 20, max_tokens=2)
    assert other.report.cached_tokens == 0
    assert engine.sequences.nbytes > 0


def test_a_prompt_that_ends_while_its_text_is_deleted_leaves_nothing():
    model = Recording(tiny_model("llama"), before=lambda batch: engine.forget([LONG]))
    engine = Engine(model, StoreConfig(sequence_bytes=1 << 26))
    engine.encode([LONG], context=None)
    options = {"max_tokens": 2, "method": "full"}
    assert engine.generate(f"{LONG} Why?", **options).report.output_tokens == 2
    model.before = lambda batch: None
    assert engine.generate(f"{LONG} Why?", **options).report.cached_tokens == 0


def test_sequences_go_with_what_they_were_made_of():
    kept = StoreConfig(sequence_bytes=1 << 24, keeps_repaired=True)
    with Engine(tiny_model("llama"), kept) as engine:
        engine.encode(CHUNKS, context=None)
        prompt = "\n\n".join([*CHUNKS, "Why?"])
        engine.generate(prompt, max_tokens=2)
        held = engine.sequences.nbytes
        engine.forget(CHUNKS[1:2])
        assert 0 < engine.sequences.nbytes < held / 2  # the last chunk has read the second
        engine.forget(CHUNKS[:1])
        assert engine.sequences.nbytes == 0


def test_a_question_does_not_bring_back_a_chunk_that_is_deleted_meanwhile(
    tmp_path, docs, monkeypatch
):
    with opened(tmp_path) as rag, opened(tmp_path) as other:
        rag.ingest(docs, progress=False)
        search = rag.index.search

        def deleted_then(*given, **options):
            found = search(*given, **options)
            other.delete("docs/a.txt")
            return found

        monkeypatch.setattr(rag.index, "search", deleted_then)
        rag.ask("Who lit the lamp?", k=3, max_tokens=2)
        rag.engine.write_back.drain()
        assert len(rag.engine.library.table) == 2
        assert left(tmp_path / "index" / "kv") == (2, 0)


def test_an_ingest_takes_back_what_others_delete_meanwhile(tmp_path, docs, monkeypatch):
    with opened(tmp_path) as rag, opened(tmp_path) as other:
        encode = Engine.encode

        def deleted_first(self, *args, **options):
            if other.index.roots.sources():
                other.delete(other.index.roots.sources()[0])
            return encode(self, *args, **options)

        monkeypatch.setattr(Engine, "encode", deleted_first)
        rag.ingest(docs, progress=False)
        assert len(rag.documents()) == 2
        assert left(tmp_path / "index" / "kv") == (2, 0)


def test_verify_and_prune_know_what_no_document_needs(tmp_path, docs):
    run, index = CliRunner().invoke, str(tmp_path / "index")
    schema = Schema.from_string(
        '<schema name="trip"><module name="a">Rome is old.</module></schema>'
    )
    with opened(tmp_path) as rag:
        rag.ingest(docs, progress=False)
        schema.encode(rag.engine)
        assert run(app, ["store", "verify", "--index", index]).exit_code == 0
        rag.engine.encode(
            ["A text that somebody encoded beside the index, of some length."], context=None
        )
    with closing(DiskStore(tmp_path / "index" / "kv")) as disk:
        before = len(disk)
    found = run(app, ["store", "verify", "--index", index])
    assert (found.exit_code, "no document has" in found.output) == (1, True)
    assert run(app, ["store", "prune", "--index", index]).exit_code == 0
    with closing(sqlite3.connect(tmp_path / "index" / "kv" / "catalog.sqlite")) as catalog:
        catalog.execute("DELETE FROM modules WHERE anchor LIKE 'About a%'")
        catalog.commit()
    found = run(app, ["store", "verify", "--index", index])
    assert (found.exit_code, "nothing knows of" in found.output) == (1, True)
    assert run(app, ["store", "prune", "--index", index]).exit_code == 0
    assert run(app, ["store", "verify", "--index", index]).exit_code == 0
    with closing(DiskStore(tmp_path / "index" / "kv")) as disk:
        assert len(disk) == before - 2  # the schema's is still there


def test_nothing_of_a_deleted_document_stays_on_disk(tmp_path, docs):
    def holding(data):
        files = [path for path in (tmp_path / "index").rglob("*") if path.is_file()]
        return [path.name for path in files if data in path.read_bytes()]

    with opened(tmp_path) as rag, opened(tmp_path):
        rag.ingest(docs, progress=False)
        (text,) = rag.index.texts("docs/a.txt")
        ids = array("i", rag.engine.library.table.get(text).token_ids).tobytes()
        assert holding(text.encode())
        assert len(holding(ids)) > 1  # the catalog's, and the KV's
        rag.delete("docs/a.txt")
        assert holding(text.encode()) == holding(ids) == []


def test_a_deletion_that_could_not_be_read_is_read_later(kept, monkeypatch):
    """By another process: what it has in memory goes, though the database was busy at first."""
    model = tiny_model("llama")
    with Engine(model, kept) as one, Engine(model, kept) as other:
        one.encode(CHUNKS, context=None)
        other.library.refresh()
        assert len(other.library.table) == 3
        one.forget(CHUNKS[:1])

        def busy(_):
            raise StoreError("it is being written")

        with monkeypatch.context() as patched:
            patched.setattr(Catalog, "generation", busy)
            other.library.refresh()  # which is only noted
        assert len(other.library.table) == 3
        other.library.refresh()
        assert len(other.library.table) == 2


@pytest.mark.parametrize("failing", ["text_digests", "modules", "prefixes"])
def test_a_catalog_that_cannot_be_read_for_once_loses_no_deletion(kept, monkeypatch, failing):
    model, prompt = tiny_model("llama"), f"{LONG}\n\nWho?"
    with Engine(model, kept) as one, Engine(model, kept) as other:
        other.encode([LONG], context=None)
        for _ in range(2):
            held = one.generate(prompt, max_tokens=2)
        assert held.report.kept_tokens > 100
        assert one.library.shelf.memory_bytes() > 0
        other.forget([LONG])
        catalog, left_to_fail = one.library._catalog, [1]
        real = getattr(catalog, failing)

        def read(*args, **options):
            if left_to_fail:
                left_to_fail.clear()
                raise StoreError("the disk hiccups")
            return real(*args, **options)

        monkeypatch.setattr(catalog, failing, read)
        one.library.refresh()
        assert not left_to_fail
        before = one.library.shelf.memory_bytes()
        assert one.generate(prompt, max_tokens=2).report.kept_tokens == 0
        assert one.library.shelf.memory_bytes() < before
        assert len(one.library.table) == 0


@pytest.mark.parametrize("method", ["full", "prefix", "auto"])
@pytest.mark.parametrize("is_known", [True, False])
def test_what_prompts_left_of_a_text_goes_by_whatever_method(method, is_known):
    with Engine(tiny_model("llama"), StoreConfig(write_back=False)) as engine:
        if is_known:
            engine.register([LONG])
        prompt = f"{LONG}\n\nWho?"
        for _ in range(2):
            held = engine.generate(prompt, method=method, max_tokens=2)
        assert held.report.kept_tokens > 100
        engine.forget([LONG])
        assert engine.generate(prompt, method=method, max_tokens=2).report.kept_tokens == 0


@pytest.mark.parametrize("method", ["full", "reuse"])
def test_what_prompts_left_of_a_part_of_a_text_goes_too(method):
    whole, part = " ".join(CHUNKS * 4), " ".join(CHUNKS * 3)
    with Engine(tiny_model("llama"), StoreConfig(write_back=False)) as engine:
        engine.encode([whole], context=None)
        engine.prefetch([whole])
        for _ in range(2):
            held = engine.generate(f"{part}\n\nWho?", method=method, max_tokens=2)
        assert held.report.kept_tokens > 100
        engine.forget([whole])
        assert engine.library.handed_over._texts == {}  # nor is the text held
        after = engine.generate(f"{part}\n\nWho?", method=method, max_tokens=2)
        assert after.report.kept_tokens == 0


@pytest.mark.parametrize("method", ["full", "prefix"])
def test_a_prompt_that_waits_while_its_text_is_forgotten_leaves_nothing(method):
    bound = BatchConfig(max_rows=1)
    with Engine(tiny_model("llama"), StoreConfig(write_back=False), bound) as engine:
        engine.encode([LONG], context=None)
        first = engine.stream("Something else", max_tokens=5, ignore_eos=True)
        next(first)
        waiting = engine.stream(f"{LONG}\n\nWho?", method=method, max_tokens=2)
        waiting.start()
        engine.forget([LONG])
        "".join(first)
        waiting.result()
        after = engine.generate(f"{LONG}\n\nWho?", method=method, max_tokens=2)
        assert after.report.kept_tokens == 0


def test_what_another_engine_made_known_goes_from_this_ones_memory_too(kept):
    model, prompt = tiny_model("llama"), f"{LONG}\n\nWho?"
    with Engine(model, kept) as one, Engine(model, kept) as other:
        one.generate(prompt, max_tokens=2)
        other.encode([LONG], context=None)
        assert one.forget([LONG]) == 1
        assert one.generate(prompt, max_tokens=2).report.kept_tokens == 0


def test_a_text_that_another_process_forgot_can_be_registered_again(kept):
    model = tiny_model("llama")
    with Engine(model, kept) as one, Engine(model, kept) as other:
        one.register([LONG])
        other.forget([LONG])
        one.register([LONG])
        assert one.generate(f"{LONG}\n\nWho?", max_tokens=2).report.modules_missed == 1


def test_engines_of_one_tenant_know_the_same_without_a_store():
    with Engine(tiny_model("llama"), StoreConfig(write_back=False, sequence_bytes=0)) as first:
        one, other, stranger = first.tenant("a"), first.tenant("a"), first.tenant("b")
        one.encode([LONG])
        for engine in (one, other):
            assert engine.generate(f"{LONG}\n\nWho?", max_tokens=2).report.modules_hit == 1
        assert stranger.generate(f"{LONG}\n\nWho?", max_tokens=2).report.modules_hit == 0
        one.prefetch([LONG])
        assert other.forget([LONG]) == 1
        assert one.generate(f"{LONG}\n\nWho?", max_tokens=2).report.modules_hit == 0
        assert one.library.handed_over._texts == {}
        assert one._encoder._last == {}  # where a removed text may stand before others


def test_a_tenant_that_comes_back_without_a_store_can_delete_all_it_had():
    with Engine(tiny_model("llama"), StoreConfig(write_back=False)) as first:
        empty = first.library.shelf.memory_bytes()
        one, other = first.tenant("a"), first.tenant("a")
        one.encode([LONG])
        one.generate(f"{LONG}\n\nWho?", max_tokens=2)
        one.close()
        held = first.library.shelf.memory_bytes()
        assert held > empty  # another engine of this tenant knows it
        other.close()
        assert first.library.shelf.memory_bytes() < held / 10  # the head's stays
        back = first.tenant("a")
        back.forget([LONG])
        assert back.generate(f"{LONG}\n\nWho?", max_tokens=2).report.kept_tokens == 0
