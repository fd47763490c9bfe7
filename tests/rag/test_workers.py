"""Ingestion by workers gives the index that ingestion without them gives. Here they are no others.

On a real cluster: `integrations/test_ray_ingest.py`.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from conftest import CHUNKS, tiny_model
from indexes import WordEmbedding, assert_same_index, ingest, rows
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from cached_rag import CachedRAG, ConfigError, Engine, StoreConfig
from cached_rag.backends.transformers import loading
from cached_rag.errors import ClusterError, StoreError
from cached_rag.kv.remote import RemoteTier
from cached_rag.library import encode
from cached_rag.rag import workers
from cached_rag.rag.workers import Preparation

pytestmark = pytest.mark.slow


@dataclass
class Here:
    """Workers that are this process; all that goes to them and comes back is sent, as it were."""

    per_task: int = 2
    fails_after: int | None = None
    opened: int = 0
    encoded: int = 0

    def prepare(self, recipe, tasks):
        worker = pickle.loads(pickle.dumps(recipe)).open()
        self.opened += 1
        with worker.preparation.engine:
            for number, begin in enumerate(range(0, len(tasks), self.per_task)):
                if number == self.fails_after:
                    raise ClusterError("the machine is gone")
                made = worker.prepare(tasks[begin : begin + self.per_task])
                self.encoded += made.encoded
                yield pickle.loads(pickle.dumps(made))


@pytest.fixture
def docs(tmp_path, monkeypatch):
    """Long documents, which are encoded each by itself, then short ones, then bad ones."""
    monkeypatch.setattr(workers, "_GROUP_CHUNKS", 8)
    monkeypatch.setattr(encode, "BATCH_TOKENS", 512)
    folder = tmp_path / "docs"
    folder.mkdir()
    for number, lines in enumerate((17, 19, 3, 5, 4)):
        told = "\n\n".join(f"{number}.{n} {CHUNKS[n % 3]}" for n in range(lines))
        (folder / f"{number}.txt").write_text(f"About {number}\n\n{told}")
    (folder / "3-broken.pdf").write_bytes(b"%PDF-nonsense")
    (folder / "empty.txt").write_text("")
    return folder


@pytest.fixture
def opened(tmp_path, model_folder):
    made = []

    def open_it(index, **options):
        options = {"chunk_tokens": 64, "embedding": WordEmbedding(), "dtype": "float32"} | options
        rag = CachedRAG.open(tmp_path / index, model_folder, **options)
        made.append(rag)
        return rag

    yield open_it
    for rag in made:
        rag.close()


@pytest.mark.parametrize("how", [{}, {"first_exact": True, "primers": 2}], ids=str)
def test_the_index_is_the_one_that_a_single_process_makes(opened, docs, how):
    alone, helped = opened("alone", **how), opened("helped", **how)
    here = Here()
    wanted, found = ingest(alone, docs), ingest(helped, docs, ray=here)
    assert replace(found, seconds=0) == replace(wanted, seconds=0)
    assert here.encoded == found.encoded  # by the workers, that is, and nothing by who asked
    assert len(found.skipped) == 2
    assert_same_index(helped, alone)
    question = "Why does copper turn green in the air?"
    answers = [rag.ask(question, k=3, max_tokens=8) for rag in (helped, alone)]
    assert answers[0].text == answers[1].text
    assert answers[0].report.modules_missed == 0


def test_workers_on_a_cpu_without_bf16_load_as_the_asking_process_does(opened, docs, monkeypatch):
    monkeypatch.setattr(loading, "fastest_dtype", lambda _: torch.float32)
    assert ingest(opened("index", dtype=None), docs, ray=Here()).added == 5


def test_an_address_is_that_of_a_ray_cluster(opened, docs, monkeypatch):
    asked = []
    ray = SimpleNamespace(RayConfig=lambda address: asked.append(address) or Here())
    monkeypatch.setitem(sys.modules, "ray_cached_rag", ray)
    assert ingest(opened("index"), docs, ray="host:1").added == 5
    assert asked == ["host:1"]


def test_what_is_encoded_in_the_same_batches_is_the_same_to_the_bit(opened, docs):
    for short in ("2.txt", "3.txt", "4.txt"):
        (docs / short).unlink()
    alone, helped = opened("alone"), opened("helped")
    ingest(alone, docs)
    ingest(helped, docs, ray=Here(per_task=1))
    assert not assert_same_index(helped, alone)


def test_again_workers_send_back_only_what_is_new(opened, docs, monkeypatch):
    rag = opened("index")
    ingest(rag, docs, ray=Here())
    monkeypatch.setattr(WordEmbedding, "embed", None)  # nothing is embedded again
    again = ingest(rag, docs, ray=Here())
    assert (again.added, again.unchanged, again.encoded) == (0, 5, 0)
    monkeypatch.undo()
    (docs / "2.txt").write_text("About 2\n\nSilver does not turn green, it turns black in the air.")
    (docs / "4.txt").unlink()
    changed = ingest(rag, docs, ray=Here(), delete_missing=True)
    assert (changed.added, changed.unchanged, changed.encoded, changed.deleted) == (1, 3, 1, 1)
    alone = opened("alone")
    ingest(alone, docs)
    wanted, found = ({chunk[1:] for chunk in rows(one)["chunks"]} for one in (alone, rag))
    assert found == wanted


def test_an_interrupted_ingestion_goes_on(opened, docs):
    rag, alone = opened("index"), opened("alone")
    with pytest.raises(ClusterError, match="gone"):
        ingest(rag, docs, ray=Here(fails_after=2))
    assert [one.is_encoded for one in rag.documents()] == [True, True, True]
    done = ingest(rag, docs, ray=Here())
    assert (done.added, done.unchanged) == (2, 3)
    ingest(alone, docs)
    assert_same_index(rag, alone)


def test_documents_of_an_ingestion_without_workers_are_finished_by_them(opened, docs, monkeypatch):
    rag, alone = opened("index"), opened("alone")
    monkeypatch.setattr(Preparation, "encode", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ingest(rag, docs)
    monkeypatch.undo()
    assert len(rag.index.pending()) == 5
    here = Here()
    done = ingest(rag, docs, ray=here)
    assert (done.added, done.unchanged, rag.index.pending()) == (0, 5, [])
    assert here.encoded == done.encoded == ingest(alone, docs).encoded > 20
    assert_same_index(rag, alone)


def test_kv_that_was_lost_on_the_way_is_computed(opened, docs):
    rag, alone = opened("index"), opened("alone")

    def lossy(self, recipe, tasks):
        for number, batch in enumerate(Here().prepare(recipe, tasks)):
            blobs = list((rag.path / "kv" / "blobs").glob("[0-9a-f]*/*"))
            if number == 0:
                max(blobs, key=lambda file: file.stat().st_mtime_ns).unlink()
            yield batch

    summary = ingest(rag, docs, ray=type("Lossy", (), {"prepare": lossy})())
    assert summary.encoded == ingest(alone, docs).encoded + 1
    assert_same_index(rag, alone)


def test_a_remote_store_spares_workers_the_folder(opened, docs, tmp_path, monkeypatch):
    stores = []

    class Elsewhere(Here):
        def prepare(self, recipe, tasks):
            stores.append((recipe.store.path, recipe.sees))
            return super().prepare(recipe, tasks)

    (tmp_path / "remote").mkdir()
    rag, alone = opened("index", remote=f"file://{tmp_path / 'remote'}"), opened("alone")
    workers = Elsewhere()
    done = ingest(rag, docs, ray=workers)
    assert stores == [(None, (str(docs),))]
    assert workers.encoded == done.encoded == ingest(alone, docs).encoded
    assert rows(rag) == rows(alone)
    answer = rag.ask("Why does copper turn green in the air?", k=3, max_tokens=8)
    assert answer.report.modules_missed == 0
    monkeypatch.setattr(RemoteTier, "drain", lambda *_: 2)
    with pytest.raises(StoreError, match="KVs could not be sent"):
        ingest(rag, docs, ray=Here())


# peft 0.21 asks transformers 5.23 for what that calls by another name now
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")
def test_models_and_adapters_by_relative_paths_are_found_by_workers(
    docs, tmp_path, model_folder, monkeypatch
):
    (tmp_path / "tiny").symlink_to(model_folder, target_is_directory=True)
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(
        tmp_path / "lora"
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with CachedRAG.open(
        "index", "tiny", adapter="lora", embedding=WordEmbedding(), chunk_tokens=64
    ) as rag:
        monkeypatch.chdir("elsewhere")
        here = Here()
        assert ingest(rag, docs, ray=here).added
        assert here.encoded


def test_what_workers_cannot_do_is_refused_before_they_are_asked(docs, tmp_path):
    here = Here()
    in_memory = Engine(tiny_model("llama"), StoreConfig())
    with (
        CachedRAG.open(tmp_path / "other", engine=in_memory, embedding=WordEmbedding()) as rag,
        pytest.raises(ConfigError, match="in memory only"),
    ):
        ingest(rag, docs, ray=here)
    assert here.opened == 0


def test_a_worker_refuses_to_make_kv_that_nobody_finds(opened, docs, monkeypatch):
    rag = opened("index")
    recipes = []

    class Recording:
        def prepare(self, recipe, tasks):
            recipes.append(recipe)
            assert (rag.path / recipe.sees[1]).exists()
            return iter(())

    ingest(rag, docs, ray=Recording())
    (recipe,) = recipes
    with pytest.raises(ClusterError, match=rf"does not see {recipe.sees[1]}"):
        recipe.open()  # the folder is not looked for any more, so its token is gone
    seen = replace(recipe, sees=(str(docs),))
    seen.open().preparation.engine.close()
    with pytest.raises(ClusterError, match="other weights or settings"):
        replace(seen, options=recipe.options | {"dtype": "bfloat16"}).open()
