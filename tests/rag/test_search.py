"""Searching by words beside vectors: codes in any script, filters, changes, and what is refused."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from indexes import WordEmbedding

from cached_rag import CachedRAG, ConfigError
from cached_rag.errors import ModelNotFoundError
from cached_rag.rag.chunks import Chunk
from cached_rag.rag.index import DocumentIndex
from cached_rag.rag.search import WordSearch, fused

PARTS = {
    "a.txt": "the nozzle TX-245 is on shelf 41",
    "b.txt": "the bearing TX-246 is on shelf 19",
    "c.txt": "error E1.5.3 means that the valve sticks",
    "d.txt": "部品番号は日本橋で調べる",
    "e.txt": "हिन्दी में लिखा है",
}
FAR = np.array([0, 0, 1], np.float32)


def put(index, source, text, vector=FAR):
    return index.replace(source, text, [Chunk(source, source, 0, text)], np.stack([vector]))


def sources(index, text, k=1, by="words", **options):
    return [hit.source for hit in index.search(FAR, k, text=text, by=by, **options)]


@pytest.fixture
def index(tmp_path):
    with closing(DocumentIndex(tmp_path / "documents.sqlite")) as index:
        for source, text in PARTS.items():
            put(index, source, text)
        yield index


@pytest.mark.parametrize(
    ("question", "source"),
    [
        ("Where is TX-245?", "a.txt"),
        ("tx-246", "b.txt"),
        ("(TX\u2011245)", "a.txt"),  # a hyphen that does not break
        ("\uff34\uff38\uff0d\uff12\uff14\uff15", "a.txt"),  # full-width
        ("what is E1.5.3", "c.txt"),
        ("日本橋", "d.txt"),
        ("हिन्दी?", "e.txt"),
    ],
)
def test_a_code_or_name_is_found_exactly_in_any_script(index, question, source):
    assert sources(index, question) == [source]


@pytest.mark.parametrize("text", ["", "???", '" OR NEAR(* ^', "zzz", "\x00", "😀"])
def test_what_has_no_word_of_the_index_finds_nothing(index, text):
    assert sources(index, text) == []


def test_a_long_question_is_searched_with(index):
    assert sources(index, "tx-245 " + " ".join(f"a{n}-b{n}" for n in range(5000))) == ["a.txt"]


def test_words_are_found_beside_vectors_and_scores_stay_cosines(index):
    near = np.array([1, 0, 0], np.float32)
    for n in range(30):
        put(index, f"near{n}.txt", f"something else {n}", near)
    found = index.search(near, 3, text="TX-245", by="hybrid")
    assert "a.txt" in [hit.source for hit in found]
    assert {hit.source: hit.score for hit in found}["a.txt"] == 0.0
    assert "a.txt" not in [hit.source for hit in index.search(near, 3, text="TX-245")]
    named = index.search(near, 3, text="TX-245", by="auto")
    assert named == found  # it has a number
    beyond = index.search(near, 3, text="TX-245", by="auto", least=0.5)
    assert [hit.score for hit in beyond] == [1.0] * 3  # what names it comes first, and is too far
    assert index.search(near, 99, text="TX-245", by="auto", least=0.5) != beyond
    assert index.search(near, 99, text="TX-245", by="words", least=0.5) == []
    said = index.search(near, 3, text="Where is the bearing?", by="auto")
    assert said == index.search(near, 3, text="Where is the bearing?") != named


@pytest.mark.parametrize("by", ["words", "hybrid"])
def test_filters_changes_and_deletions_apply_to_words(index, by):
    assert sources(index, "tx-245", by=by, where={"source": "b*"}) == ["b.txt"]
    assert sources(index, "tx-245", by=by, where=lambda hit: hit.source == "b.txt") == ["b.txt"]
    put(index, "b.txt", "now TX-999 is here")
    assert sources(index, "tx-999", by=by) == ["b.txt"]
    assert sources(index, "bearing") == []
    index.delete("b.txt")
    assert "b.txt" not in sources(index, "tx-999", 9, by=by)


def test_what_another_process_writes_is_found_by_its_words(index, tmp_path):
    assert sources(index, "tx-777") == ["a.txt"]
    with closing(DocumentIndex(tmp_path / "documents.sqlite")) as other:
        put(other, "f.txt", "TX-777 new")
        other.delete("a.txt")
    assert sources(index, "tx-777") == ["f.txt"]
    assert "a.txt" not in sources(index, "tx-245", 9)


def test_an_interrupted_search_costs_no_later_one(index, monkeypatch):
    add = WordSearch.add

    def interrupted(self, texts):
        add(self, texts)
        raise KeyboardInterrupt

    monkeypatch.setattr(WordSearch, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sources(index, "tx-245")
    monkeypatch.undo()
    assert sources(index, "tx-245") == ["a.txt"]


def test_the_orders_are_joined_by_reciprocal_rank():
    assert fused([1, 2, 3], [3, 1]) == [1, 3, 2]
    assert fused([5], []) == [5]


def test_a_number_is_free_again_after_its_text_is_dropped():
    search = WordSearch()
    search.add([(1, "one")])
    search.drop([1, 7])
    search.add([(1, "two")])
    assert (search.nearest("one", 1), search.nearest("two", 1)) == ([], [1])


def test_an_index_remembers_how_it_is_searched_and_may_be_opened_otherwise(opened, docs):
    opened(search="words").ingest(docs, progress=False)
    assert opened().settings["search"] == "words"
    assert opened(search="vectors").settings["search"] == "vectors"
    assert opened(search="vectors").ingest(docs, progress=False).unchanged == 3
    assert opened().settings["search"] == "words"


def test_min_score_stays_a_cosine(opened, docs):
    rag = opened(search="words")
    rag.ingest(docs, progress=False)
    (best,) = rag.search("copper", 1)
    assert rag.search("copper", 1, min_score=best.score - 0.01)
    assert not rag.search("copper", 1, min_score=best.score + 0.01)


def test_another_way_to_search_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="auto, hybrid, vectors, words"):
        CachedRAG.open(tmp_path, search="bm25", embedding=WordEmbedding())


def test_a_cross_encoder_is_taken_by_its_folder(opened, docs, tmp_path):
    from sentence_transformers import CrossEncoder
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "copper", "green", "the", "bees"]
    folder = tmp_path / "cross"
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        num_labels=1,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(folder)

    rag = opened(reranker=str(folder))
    rag.ingest(docs, progress=False)
    texts = {hit.text: hit for hit in opened().search("copper green", 3)}
    pairs = [("copper green", text) for text in texts]
    scores = CrossEncoder(str(folder)).predict(pairs, show_progress_bar=False)
    best = list(texts)[int(np.argmax(scores))]
    assert [hit.text for hit in rag.search("copper green", 1)] == [best]


def test_a_reranker_that_is_not_there_says_so(opened, docs, tmp_path):
    rag = opened(reranker=str(tmp_path / "nowhere"))
    rag.ingest(docs, progress=False)
    with pytest.raises(ModelNotFoundError, match="cross-encoder"):
        rag.search("copper", 1)
