"""Many at once, briefly; `make test-soak` runs it for minutes."""

from __future__ import annotations

import pytest
from conftest import CHUNKS, tiny_model
from faults import world
from soak import flat, work
from soak.several import soak

from cached_rag import Engine, StoreConfig
from cached_rag.rag.index import DocumentIndex

pytestmark = pytest.mark.slow


def test_two_processes_of_three_threads_on_one_index(tmp_path):
    done = soak(tmp_path, processes=2, threads=3, seconds=2, seed=0)
    assert (done.wrong, done.faults) == (0, [])
    assert len(done.counts) >= 8


def test_what_is_not_deleted_is_seen(tmp_path, monkeypatch):
    with world.index(tmp_path / "index") as rag:
        rag.add_texts({"other": world.TEXTS[0]}, progress=False)
        worker = work.Worker(rag, tmp_path, "a", 0, "")
        worker.own_document()
        assert worker.done.faults == []
        monkeypatch.setattr(DocumentIndex, "delete", lambda *_: [])
        worker.own_document()
        assert "what was deleted is found" in worker.done.faults
        assert any(one.startswith("documents.sqlite") for one in worker.done.faults)


def test_wrong_answers_are_seen(tmp_path):
    with world.index(tmp_path / "index") as rag:
        worker = work.Worker(rag, tmp_path, "a", 0, "another answer")
        worker.exact()
        assert worker.done.wrong == 1


def test_nothing_is_kept_of_requests(tmp_path):
    first, last = flat.sizes(tmp_path, [60, 150])
    assert last.files <= first.files
    assert last.threads < first.threads + 8  # OpenMP's helpers come and go; a leak would be 90
    assert last.tensors <= first.tensors + 40


@pytest.mark.parametrize("method", ["auto", "reuse", "prefix", "full"])
def test_what_another_tenant_has_cached_is_as_what_nobody_has(tmp_path, method):
    """All that an answer does, and so the time that it takes, is the same."""
    prompts = [f"{text}\n\nWhat is said here?" for text in CHUNKS[:2]]
    settings = StoreConfig(path=str(tmp_path), namespace="first", learn="recurring")
    with Engine(tiny_model("llama"), settings) as first, first.tenant("other") as other:
        first.encode(CHUNKS[:1], context=None)
        for _ in range(2):
            first.generate(prompts[0], max_tokens=4)
        reports = [other.generate(prompt, method=method, max_tokens=4).report for prompt in prompts]
        known, unknown = ({**vars(one)} for one in reports)
        for name, value in known.items():
            if not name.endswith("_ms") and name not in ("prompt_tokens",):
                assert value == unknown[name], name
        assert first.generate(prompts[0], max_tokens=4).report.cached_tokens > 0
