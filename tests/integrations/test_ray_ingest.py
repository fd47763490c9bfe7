"""Ingestion on a Ray cluster of this machine: workers that are killed, an asker that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from conftest import CHUNKS
from indexes import WordEmbedding, assert_same_index, ingest
from ray import cloudpickle
from ray_cached_rag import RayConfig
from ray_cached_rag.cluster import MOST_ATTEMPTS, Attempts, Worker, connected, room

from cached_rag import CachedRAG, ConfigError, StoreConfig
from cached_rag.errors import ClusterError
from cached_rag.rag.index import DocumentIndex
from cached_rag.spi import IngestRecipe, IngestTask

pytestmark = pytest.mark.slow

# Workers do not have the tests' modules, so what comes from them is sent whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["indexes"])

ASKER = """
import sys
sys.path.insert(0, {tests!r})
from test_ray_ingest import Pausing, opened_at, CONFIG
from dataclasses import replace
with opened_at({index!r}, {model!r}, Pausing({flag!r})) as rag:
    rag.ingest({docs!r}, progress=False, ray=replace(CONFIG, workers=1, address={address!r}))
"""
CONFIG = RayConfig(workers=2, documents_per_task=1)


class Pausing(WordEmbedding):
    """Says in a file which process embeds the document about 5, and then waits to be killed."""

    def __init__(self, flag):
        self.flag = flag

    def embed(self, texts):
        if any("About 5" in text for text in texts) and not os.path.exists(self.flag):
            with open(self.flag + ".new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(self.flag + ".new", self.flag)
            time.sleep(600)
        return super().embed(texts)


class Counting:
    """The cluster, and how many chunks its workers prefilled."""

    encoded = 0

    def prepare(self, recipe, tasks):
        for batch in CONFIG.prepare(recipe, tasks):
            self.encoded += batch.encoded
            yield batch


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with a trap, which is the current one while the cluster begins."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "cached_rag.py").write_text("raise SystemExit('imported from among documents')")
    return folder


@pytest.fixture(scope="module")
def cluster(here):
    before = os.getcwd()
    os.chdir(here)
    with connected("local", 2):
        os.chdir(before)
        yield ray.get_runtime_context().gcs_address


@pytest.fixture
def docs(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(8):
        told = "\n\n".join(f"{number}.{n} {CHUNKS[n % 3]}" for n in range(9))
        (folder / f"{number}.txt").write_text(f"About {number}\n\n{told}")
    (folder / "2-broken.pdf").write_bytes(b"%PDF-nonsense")
    return folder


def opened_at(index, model, embedding):
    return CachedRAG.open(index, model, embedding=embedding, chunk_tokens=64, dtype="float32")


@pytest.fixture
def alone(tmp_path, model_folder, docs):
    with opened_at(tmp_path / "alone", model_folder, WordEmbedding()) as rag:
        yield rag, ingest(rag, docs)


def wait_for(is_so):
    deadline = time.monotonic() + 900  # a cluster may be slow to begin
    while not is_so():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def kill_who_paused(flag):
    wait_for(lambda: os.path.exists(flag))
    os.kill(int(Path(flag).read_text()), signal.SIGKILL)


def test_a_killed_worker_loses_nothing(tmp_path, model_folder, docs, alone, cluster):
    flag = str(tmp_path / "flag")
    killer = threading.Thread(target=kill_who_paused, args=(flag,))
    killer.start()
    with opened_at(tmp_path / "helped", model_folder, Pausing(flag)) as rag:
        counting = Counting()
        found = ingest(rag, docs, ray=counting)
        killer.join()
        assert os.path.exists(flag)  # so a worker was killed
        assert counting.encoded == found.encoded  # and the others, or the next, did its work
        assert replace(found, seconds=0) == replace(alone[1], seconds=0)
        assert_same_index(rag, alone[0])


def test_a_killed_asker_goes_on_where_it_was(tmp_path, model_folder, docs, alone, cluster):
    flag, index = str(tmp_path / "flag"), tmp_path / "helped"
    names = {"tests": str(Path(__file__).parent), "index": str(index), "model": model_folder}
    names |= {"flag": flag, "docs": str(docs), "address": cluster}
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, "-W", "ignore", "-c", ASKER.format(**names)]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}) as asker:
        wait_for(lambda: os.path.exists(flag))
        with closing(DocumentIndex(index / "documents.sqlite")) as written:
            wait_for(lambda: len(written.documents()) - len(written.pending()) >= 3)
        asker.kill()
    with opened_at(index, model_folder, WordEmbedding()) as rag:
        before = rag.documents()
        assert 3 <= len(before) <= 5  # in order, so nothing behind the one that paused
        done = ingest(rag, docs, ray=replace(CONFIG, workers=1))
        assert (done.added, done.unchanged) == (8 - len(before), len(before))
        assert 0 < done.encoded < alone[1].encoded
        assert_same_index(rag, alone[0])


def test_workers_import_nothing_from_the_folder_that_was_the_current_one(cluster, here):
    def seen():
        import cached_rag

        return sys.path, cached_rag.__file__

    path, package = ray.get(ray.remote(num_cpus=0)(seen).remote())
    assert not any(Path(entry).is_relative_to(here) for entry in path)
    assert not Path(package).is_relative_to(here)


def test_an_error_of_a_worker_comes_as_itself(cluster):
    recipe = IngestRecipe({}, {}, StoreConfig(), None, "", "/nowhere", ("/nowhere",))
    with pytest.raises(ClusterError, match=r"a worker on .* does not see /nowhere"):
        list(replace(CONFIG, workers=1).prepare(recipe, [IngestTask("a", "/nowhere/a.txt")]))


def test_documents_that_kill_each_worker_are_given_up(cluster):
    attempts = Attempts()
    assert [attempts.begin(7) for _ in range(MOST_ATTEMPTS)] == [1, 2, 3]
    actor = SimpleNamespace(begin=SimpleNamespace(remote=lambda n: ray.put(attempts.begin(n))))
    worker = Worker(None, actor)  # it has no recipe, so it could do nothing
    made = worker({"number": [7], "tasks": [(IngestTask("a", "/a.txt"),)]})["made"][0]
    assert "3 workers died" in made.documents[0].skipped


def test_a_worker_that_does_not_fit_is_refused(cluster):
    with pytest.raises(ClusterError, match=r"has 2 CPUs .* have 3 and 0;"):
        room(3, 0)
    with pytest.raises(ClusterError, match=r"and 0 GPUs.* have 1 and 0\.5;"):
        room(1, 0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"address": " "},
        {"workers": 0},
        {"cpus_per_worker": 0},
        {"gpus_per_worker": -1},
        {"gpus_per_worker": 1.5},
        {"documents_per_task": 0},
    ],
)
def test_bad_settings_are_refused(options):
    with pytest.raises(ConfigError):
        RayConfig(**options)


def test_an_embedding_that_cannot_be_sent_is_named_before_there_is_a_cluster():
    recipe = IngestRecipe({}, {}, StoreConfig(), threading.Lock(), "", "/nowhere", ())
    with pytest.raises(ConfigError, match=r"the embedding .*lock.* cannot be sent to workers"):
        list(RayConfig("nowhere:1").prepare(recipe, [IngestTask("a", "/nowhere/a.txt")]))


def test_an_ingestion_of_nothing_needs_no_cluster(tmp_path):
    assert list(RayConfig("nowhere:1").prepare(None, [])) == []
