"""CachedRAG on the tiny model with a word-count embedding: ingest, ask, change, fail, resume."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from pathlib import PurePath

import pytest
from conftest import CHUNKS
from indexes import WordEmbedding

from cached_rag import CachedRAG, ConfigError, Engine
from cached_rag.errors import (
    ContextOverflowError,
    DocumentError,
    IndexMismatchError,
    ModelNotFoundError,
    StoreFullError,
)
from cached_rag.library.encode import primer
from cached_rag.library.library import Library
from cached_rag.rag.answer import Prompts
from cached_rag.rag.chunks import Embedder


def ingest(rag, path, **options):
    return rag.ingest(path, progress=False, **options)


def test_ingest_ask_and_ask_again(opened, docs):
    rag = opened(first_exact=True)
    summary = ingest(rag, docs)
    assert (summary.added, summary.encoded, summary.skipped) == (3, 3, ())
    answer = rag.ask("Why does copper turn green in the air?", k=2, max_tokens=6)
    assert answer.sources[0].source.endswith("b.txt")
    assert answer.report.modules_hit == 2
    exact = rag.ask("Why does copper turn green in the air?", k=2, max_tokens=6, method="full")
    repaired = rag.ask(
        "Why does copper turn green in the air?", k=2, max_tokens=6, recompute_ratio=1
    )
    assert repaired.text == exact.text
    stream = rag.stream("Why does copper turn green in the air?", k=2, max_tokens=6)
    assert "".join(stream) == answer.text == stream.answer.text
    first = rag.ask("Why does copper turn green in the air?", k=1, max_tokens=6, method="prefix")
    assert first.report.modules_hit == 1  # the best chunk stands behind its own prefix: lossless
    assert first.report.charged_recompute < 0.7


def test_an_answer_without_chunks_hears_nothing_of_another_questions(opened, docs):
    rag = opened()
    ingest(rag, docs)
    rag.stream("Why does copper turn green in the air?", k=2, max_tokens=2)  # and not yet begun
    other = rag.ask("Who are you?", where={"source": "nothing*"}, answer_anyway=True, max_tokens=2)
    assert other.sources == ()
    assert "retrieved" not in " ".join(other.report.notes)


def test_an_empty_path_is_not_this_folder(opened, docs, monkeypatch):
    monkeypatch.chdir(docs)
    rag = opened()
    for ask in (lambda: ingest(rag, ""), lambda: next(rag.watch(""))):
        with pytest.raises(DocumentError, match="the path is empty"):
            ask()
    assert ingest(rag, ".").added == 3


def test_bounds_reach_the_store(tmp_path):
    bounds = {"memory_bytes": 1000, "disk_bytes": 2000, "sequence_bytes": 3000}
    with CachedRAG.open(tmp_path, embedding=WordEmbedding(), **bounds) as rag:
        assert {name: getattr(rag._folder.store, name) for name in bounds} == bounds


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memory_bytes": 1000}, "memory_bytes: the engine that was given"),
        ({"model": "another", "dtype": "float32"}, "model, dtype: the engine"),
        ({"max_rows": 1}, "max_rows: the engine"),
        ({"namespace": "one"}, "namespace: an index keeps"),
        ({"memroy_bytes": 1000}, "did you mean memory_bytes"),
        ({"primers": 9}, "primers must be 1 to 3, not 9"),
        ({"parse_seconds": "a"}, "parse_seconds is a number"),
        ({"candidates": "24"}, "candidates is a whole number"),
        ({"candidates": 0}, "candidates must be at least 1"),
        ({"reranker": 5}, "reranker is a cross-encoder's name"),
    ],
)
def test_a_setting_that_cannot_apply_is_refused(tmp_path, engine, given, said):
    with pytest.raises(ConfigError, match=said):
        CachedRAG.open(tmp_path, engine=engine, **given)


def test_an_engine_that_was_given_stays_open(tmp_path, engine):
    for name in ("one", "other"):
        with CachedRAG.open(tmp_path / name, engine=engine, embedding=WordEmbedding()) as rag:
            assert rag.add_texts({"a": CHUNKS[0]}, progress=False).added == 1
    assert engine.generate("copper?", max_tokens=1).token_ids


def test_an_embedding_model_may_be_a_path(tmp_path):
    with CachedRAG.open(tmp_path / "index", embedding=tmp_path / "mini") as rag:
        assert rag.settings["embedding"] == str(tmp_path / "mini")
        with pytest.raises(ModelNotFoundError, match="mini"):
            rag.embedder  # noqa: B018


def test_models_named_by_a_relative_path_are_found_from_any_folder(
    tmp_path, model_folder, monkeypatch
):
    (tmp_path / "tiny").symlink_to(model_folder, target_is_directory=True)
    (tmp_path / "elsewhere").mkdir()
    for place, named in ((".", "./tiny"), ("elsewhere", None), ("elsewhere", "../tiny")):
        monkeypatch.chdir(tmp_path / place)
        with CachedRAG.open(tmp_path / "index", named, embedding=WordEmbedding()) as rag:
            rag.add_texts({place: CHUNKS[0]}, progress=False)
            assert rag.settings["model"] == str(tmp_path / "tiny")
            assert rag.ask("copper?", max_tokens=1).text
    with (
        Engine.load("../tiny") as engine,  # another spelling
        CachedRAG.open(tmp_path / "index", engine=engine, embedding=WordEmbedding()) as rag,
    ):
        assert rag.ask("copper?", max_tokens=1).text


def test_an_index_whose_model_was_moved_is_opened_with_its_new_path(tmp_path, model_folder):
    old, new, other = (tmp_path / name for name in ("old", "new", "other"))
    for folder in (old, other):
        shutil.copytree(model_folder, folder)
    said = {"embedding": WordEmbedding(), "system": "/no_think Be brief."}
    with CachedRAG.open(tmp_path / "index", old, **said) as rag:
        rag.add_texts({"a": CHUNKS[0]}, progress=False)
    with pytest.raises(IndexMismatchError, match="was made with system '/no_think"):
        CachedRAG.open(tmp_path / "index", system="Be long.")
    with pytest.raises(IndexMismatchError, match="was made with model"):
        CachedRAG.open(tmp_path / "index", other)
    old.rename(new)
    with CachedRAG.open(tmp_path / "index", new, embedding=WordEmbedding()) as rag:
        assert rag.ask("copper?", max_tokens=1).report.cached_tokens > 0
    with (
        CachedRAG.open(tmp_path / "index", embedding=WordEmbedding()) as rag,
        pytest.raises(ModelNotFoundError, match=f"no model folder at {old}"),
    ):
        rag.ask("copper?")


def test_an_adapter_named_by_a_relative_path_is_found_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "lora").mkdir()
    monkeypatch.chdir(tmp_path)
    for named, kept in (("./lora", str(tmp_path / "lora")), ("someone/lora", "someone/lora")):
        with CachedRAG.open("index", adapter=named, embedding=WordEmbedding()) as rag:
            assert rag.settings["adapter"] == kept


def test_ingesting_again_does_only_what_is_new(opened, docs):
    rag = opened()
    ingest(rag, docs)
    again = ingest(rag, docs)
    assert (again.added, again.unchanged, again.encoded) == (0, 3, 0)
    (docs / "b.txt").write_text("About b\n\nSilver does not turn green, it turns black in the air.")
    (docs / "d.txt").write_text("About d\n\nA fourth document arrives here, about nothing much.")
    changed = ingest(rag, docs)
    assert (changed.added, changed.unchanged, changed.encoded) == (2, 2, 2)
    assert "Silver" in rag.search("silver turns black", 1)[0].text
    assert all("Copper" not in hit.text for hit in rag.search("copper", 10))
    assert len(rag.engine.library.table) == 4
    (docs / "a.txt").unlink()
    assert ingest(rag, docs).deleted == 0
    assert ingest(rag, docs, delete_missing=True).deleted == 1
    assert len(rag.engine.library.table) == 3


def test_bad_files_are_skipped_and_the_rest_ingested(opened, docs):
    (docs / "empty.txt").write_text("")
    (docs / "broken.pdf").write_bytes(b"%PDF-nonsense")
    summary = ingest(opened(), docs)
    assert summary.added == 3
    assert sorted(path.rpartition("/")[2] for path, _ in summary.skipped) == [
        "broken.pdf",
        "empty.txt",
    ]
    with pytest.raises(DocumentError, match="no file or folder"):
        ingest(opened(), docs / "nowhere")
    assert ingest(opened(), PurePath(docs)).unchanged == 3  # whatever is a path to Python
    with pytest.raises(ConfigError, match="one at a time"):
        ingest(opened(), [docs / "a.txt"])
    ingest(opened(), docs)
    for bad in ({"k": "3"}, {"k": 0}, {"min_score": "0.2"}):
        with pytest.raises(ConfigError, match=r"k (must be|is)|min_score is a number"):
            opened().search("copper", **bad)
    for ask in (opened().ask, opened().search):
        with pytest.raises(ConfigError, match="needs some text"):
            ask(None)
        with pytest.raises(ConfigError, match="a history is a list"):
            ask("copper", history=None)
    for texts in (["Copper turns green."], {"a": None}, {5: "Copper"}):
        with pytest.raises(ConfigError, match="given by name"):
            opened().add_texts(texts)
    with pytest.raises(ConfigError, match="max_tokens is a whole number, not None"):
        opened().ask("copper", max_tokens=None)


def test_what_was_emptied_answers_no_more_and_what_cannot_be_read_does(opened, docs):
    rag = opened()
    ingest(rag, docs)
    (docs / "a.txt").write_text("")
    (docs / "b.txt").write_bytes(b"\x00\x01" * 40)
    summary = ingest(rag, docs)
    assert summary.deleted == 1
    assert summary.skipped[0][1].endswith("the file is empty")
    assert len(summary.skipped) == 2
    line, *named = str(summary).splitlines()
    assert " deleted, 2 skipped (see `skipped`); " in line
    assert named == [f"skipped {reason}" for _, reason in summary.skipped]
    assert {one.source for one in rag.documents()} == {"docs/b.txt", "docs/c.txt"}
    assert len(rag.engine.library.table) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, StoreFullError("the disk is full")])
def test_an_interrupted_ingest_resumes(opened, docs, monkeypatch, error):
    rag = opened()
    original, count = Library.put, []

    def failing(self, *what):
        count.append(1)
        if len(count) == 6:  # the prefix and all three chunks are in, one of them twice
            raise error
        original(self, *what)

    monkeypatch.setattr(Library, "put", failing)
    with pytest.raises(error if isinstance(error, type) else StoreFullError):
        ingest(rag, docs)
    monkeypatch.undo()
    assert rag.index.pending()
    rag.close()
    again = opened()
    summary = ingest(again, docs)
    assert (summary.added, summary.unchanged, summary.encoded) == (0, 3, 2)
    assert not again.index.pending()


def test_damaged_kv_is_recomputed_and_mended_in_the_background(opened, docs, tmp_path, caplog):
    rag = opened()
    ingest(rag, docs)
    whole = rag.ask("copper green", k=3, max_tokens=4, method="full").text
    rag.close()
    for path in (tmp_path / "index" / "kv").glob("blobs/*/*"):
        path.write_bytes(path.read_bytes()[:-9])
    again = opened()
    with caplog.at_level(logging.WARNING):
        answer = again.ask("copper green", k=3, max_tokens=4)
    assert answer.text == whole
    assert answer.report.modules_missed == 3
    assert "computed anew" in caplog.text
    again.engine.write_back.drain()
    assert again.ask("copper green", k=3, max_tokens=4).report.modules_missed == 0
    assert ingest(again, docs).encoded == 0


def test_two_processes_worth_of_engines_share_an_index(opened, docs):
    writer, reader = opened(), opened()
    ingest(writer, docs)
    assert reader.ask("copper green", k=3, max_tokens=2).report.modules_hit == 3


def test_other_settings_are_refused(opened, docs):
    ingest(opened(), docs)
    with pytest.raises(IndexMismatchError, match="was made with codec 'raw', not 'int8'"):
        CachedRAG.open(opened().path, codec="int8")


def test_a_typo_binds_no_index(opened, docs, tmp_path, monkeypatch):
    monkeypatch.setenv("CACHED_RAG_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelNotFoundError):  # before a document is read
        CachedRAG.open(tmp_path / "index", "./no-such-model", codec="int8")
    mistaken = CachedRAG.open(tmp_path / "index", "no-such/model", codec="int8")
    with mistaken, pytest.raises(ModelNotFoundError):
        ingest(mistaken, docs)
    rag = opened()
    assert ingest(rag, docs).added == 3
    with pytest.raises(IndexMismatchError, match="model 'llama', not"):
        CachedRAG.open(tmp_path / "index", "no-such/model")


def test_an_emptied_index_may_be_made_anew(opened, docs):
    rag = opened(primers=1)
    ingest(rag, docs)
    for file in docs.iterdir():
        file.unlink()
    assert ingest(rag, docs, delete_missing=True).deleted == 3
    (docs / "a.txt").write_text(CHUNKS[0])
    other = opened(primers=2)
    assert ingest(other, docs).added == 1
    assert other.index.settings()["primers"] == "2"
    with pytest.raises(IndexMismatchError, match="primers '2', not '1'"):
        ingest(rag, docs)


def test_of_two_first_ingests_with_different_settings_one_is_refused(opened, docs, monkeypatch):
    first, second = opened(first_exact=False), opened(first_exact=True)
    embed, was_late = WordEmbedding.embed, []

    def embedding_late(self, texts):
        if self is second.embedder and not was_late:
            was_late.append(ingest(first, docs))  # meanwhile the other one is done
        return embed(self, texts)

    monkeypatch.setattr(WordEmbedding, "embed", embedding_late)
    with pytest.raises(IndexMismatchError, match="first_exact 'False', not 'True'"):
        ingest(second, docs)
    assert was_late
    assert first.index.count() == (3, 3)


def test_no_model_is_loaded_to_ask_an_empty_index(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr(Embedder, "load", lambda _: pytest.fail("loads the embedding model"))
    with CachedRAG.open(tmp_path / "index", model_folder) as rag:
        for ask in (rag.ask, rag.search):
            with pytest.raises(ConfigError, match="is empty; ingest"):
                ask("anything")
        assert rag.loaded is None


def test_questions_that_cannot_be_answered_say_why(opened, docs):
    rag = opened()
    with pytest.raises(ConfigError, match="is empty; ingest"):
        rag.ask("anything")
    ingest(rag, docs)
    with pytest.raises(ConfigError, match="needs some text"):
        rag.ask("  ")
    with pytest.raises(ContextOverflowError, match="shorter question"):
        rag.ask("why " * 2000)
    fitting = rag.ask("copper " * 10, k=3, max_tokens=850)  # room for fewer chunks than asked
    assert len(fitting.sources) < 3


def test_retrieved_chunks_can_follow_an_order_seen_before(opened, docs):
    rag = opened(sequence_bytes=1 << 24)
    ingest(rag, docs)
    first = rag.ask("lighthouse lamp copper", k=2, max_tokens=2)
    order = [hit.text for hit in first.sources]
    other = "copper green oxygen lamp"
    assert [hit.text for hit in rag.search(other, k=2)] == order[::-1]
    again = rag.ask(other, k=2, max_tokens=2, reorder=True)
    assert [hit.text for hit in again.sources] == order
    assert again.report.charged_recompute < first.report.charged_recompute
    few = rag.ask(other, k=2, max_tokens=900, reorder=True)
    assert [hit.text for hit in few.sources] == order[1:]  # the nearest is not left out
    with pytest.raises(ConfigError, match="a search gives the nearest"):
        rag.search(other, reorder=True)


def test_retrieval_brings_chunks_into_memory(opened, docs):
    ingest(opened(), docs)
    rag = opened()
    memory = rag.engine.library.shelf.store.tiers[0]
    assert len(memory.held) == 0
    hits = rag.search("copper green", 2)
    rag.engine.prefetch([hit.text for hit in hits])
    deadline = time.monotonic() + 60
    while len(memory.held) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(memory.held) == 2


def test_a_prompt_that_surely_fits_is_tokenised_once(opened, docs, monkeypatch):
    rag = opened()
    ingest(rag, docs)
    calls = []
    tokenize = rag.engine.tokenization.tokenize
    monkeypatch.setattr(
        type(rag.engine.tokenization), "tokenize", lambda _, r: calls.append(r) or tokenize(r)
    )
    rag.ask("copper", k=1, max_tokens=2)
    assert len(calls) == 1


@pytest.mark.parametrize("primers", [1, 2])
@pytest.mark.parametrize("first_exact", [False, True])
def test_an_index_keeps_how_it_encodes(primers, first_exact, opened, docs):
    rag = opened(primers=primers, first_exact=first_exact)
    rag.ingest(docs, progress=False)
    names = {behind.context for behind in rag.engine.library.encoded_after()}
    own = primer(primers).name
    assert names == ({"", own} if first_exact else {own})
    assert rag.ask("What turns green?", k=2, method="reuse", max_tokens=2).report.modules_hit == 2


def test_a_model_without_a_chat_template_is_given_a_page_to_go_on_with(opened, docs, monkeypatch):
    rag = opened(first_exact=True)
    tokenization = rag.engine.tokenization
    monkeypatch.setattr(tokenization.tokenizer, "chat_template", None)
    ingest(rag, docs)
    assert rag.ask("Why is it green?", k=2, max_tokens=4).report.modules_hit == 2
    whole = rag.ask("Why is it green?", k=2, max_tokens=4, method="full")
    options = {"method": "cacheblend", "recompute_ratio": 1.0}
    assert rag.ask("Why is it green?", k=2, max_tokens=4, **options).text == whole.text

    prompts = Prompts(rag.engine, "Be brief.")
    control = tokenization.tokenizer.bos_token
    earlier = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    page = prompts.rendered(prompts.messages(f"And {control}?", ["A text."], earlier))
    assert page.text == (
        "Be brief.\n\nA text.\n\nQuestion: Why?\n\nAnswer: So.\n\n"
        f"Question: And {control}?\n\nAnswer:"
    )
    assert tokenization.tokenizer.bos_token_id not in tokenization.tokenize(page).ids
    assert "\nQuestion:" in prompts.stop


def test_chunks_too_short_to_be_modules_are_not_introduced_anew_by_each_question(
    opened, tmp_path, monkeypatch
):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("Copper is green.")
    rag = opened(first_exact=True)
    ingest(rag, tmp_path / "docs")
    rag.ask("Why is copper green?", max_tokens=2)
    monkeypatch.setattr(Engine, "register", lambda *_: pytest.fail("registered again"))
    assert rag.ask("Why is copper green?", max_tokens=2).sources


def test_what_is_added_while_another_thread_searches_is_found(opened, monkeypatch):
    rag = opened()
    rag.add_texts({"a": CHUNKS[0]}, progress=False)
    database, added = rag.index._database, []

    def rows(query, *parameters, read=database.rows):
        found = read(query, *parameters)
        if query.startswith("SELECT id, vector") and not added:  # the search is built from this
            added.append(True)
            rag.add_texts({"b": "Herons stand in the reeds."}, progress=False)
        return found

    monkeypatch.setattr(database, "rows", rows)
    rag.search("lighthouse")
    assert added
    assert "b" in [hit.source for hit in rag.search("herons", k=9)]


@pytest.mark.parametrize("system", ["Prefer the first chunk to later ones.", "? Question: ?"])
def test_a_head_is_all_that_stands_before_the_first_chunk(system, opened, docs):
    rag = opened(system=system)
    rag.ingest(docs, progress=False)
    head = rag._asking().prompts.head().text
    (hit,) = rag.search("copper", 1)
    prompt = (
        rag._asking().prompts.rendered(rag._asking().prompts.messages("copper?", [hit.text])).text
    )
    assert prompt.startswith(head + hit.text)


@pytest.mark.parametrize("chunk_tokens", [4000, 960])
def test_chunks_that_the_model_cannot_read_are_refused_before_the_index_has_them(
    chunk_tokens, docs, tmp_path, engine
):
    def opened(tokens):
        options = {"engine": engine, "embedding": WordEmbedding()}
        return CachedRAG.open(tmp_path / "index", chunk_tokens=tokens, **options)

    with opened(chunk_tokens) as rag:
        for add in (lambda: rag.ingest(docs), lambda: rag.add_texts({"a": "text"})):
            with pytest.raises(ConfigError, match=f"of {chunk_tokens} tokens, .*context of 1024"):
                add()
        assert rag.index.settings() == {}
    with opened(800) as rag:
        assert rag.ingest(docs, progress=False).encoded == 3


class Whole(WordEmbedding):
    """An embedding that takes whole characters only, as sentence-transformers' do."""

    def embed(self, texts):
        for text in texts:
            text.encode()
        return super().embed(texts)


@pytest.mark.parametrize("way", ["search", "ask", "stream", "chat"])
def test_half_a_character_cannot_be_searched_for(way, opened, docs):
    rag = opened()
    rag.ingest(docs, progress=False)
    rag._folder._embedder = Whole()
    chat = rag.chat(max_tokens=2)
    asks = {"search": rag.search, "ask": rag.ask, "stream": rag.stream, "chat": chat.ask}
    for _ in range(2):
        with pytest.raises(ConfigError, match="half of a surrogate pair at character 7"):
            asks[way]("copper \ud83d green?")
        chat.ask("copper?")


def test_several_questions_are_answered_together_as_each_alone(opened, docs):
    rag = opened()
    rag.ingest(docs, progress=False)
    questions = ["copper green?", "and lighthouses?", "bees?"]
    options = {"k": 1, "max_tokens": 4}
    together = rag.ask_many(questions, **options)
    alone = [rag.ask(question, **options) for question in questions]
    assert [(a.question, a.text) for a in together] == [(a.question, a.text) for a in alone]
    assert [a.sources for a in together] == [a.sources for a in alone]
    assert rag.ask_many([]) == []
    with pytest.raises(ConfigError, match="several"):
        rag.ask_many("bees?")
    with pytest.raises(ConfigError):
        rag.ask_many(["bees?", " "])


def test_ingestion_leaves_the_event_loop_free_and_tells_how_far_it_is(opened, docs):
    rag, told = opened(), []
    loop_ran = threading.Event()

    def tell(what, done, total):
        assert loop_ran.wait(60)  # set by the loop, while this thread ingests
        told.append((what, done, total))

    async def run():
        task = asyncio.create_task(rag.aingest(docs, progress=tell))
        await asyncio.sleep(0)
        loop_ran.set()
        return await task

    assert asyncio.run(run()).added == 3
    for what in ("reading", "prefilling"):
        steps = [(done, total) for name, done, total in told if name == what]
        assert steps[0][0] == 0
        assert steps[-1][0] == steps[-1][1] > 0
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
