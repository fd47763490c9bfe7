"""The small world in which faults are tried: a tiny model, texts, and their right KV."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import CHUNKS, tiny_model
from indexes import WordEmbedding

from cached_rag import PRIMER, CachedRAG, Engine, StoreConfig
from cached_rag.backends.base import Backend
from cached_rag.backends.llama_cpp.loading import load_llama_cpp
from cached_rag.engine.report import Report
from cached_rag.kv import holdings
from cached_rag.kv.buffer import ModuleKV
from cached_rag.rag.answer import Prompts
from cached_rag.rag.folder import DEFAULTS

MODEL = "llama"
TEXTS = [f"Note {number} of the keeper. {CHUNKS[number % 3]}" for number in range(12)]
QUESTION = "What turns green in the air?"
PROMPT = "\n\n".join(TEXTS[:6]) + f"\n\n{QUESTION}"
# Of what is computed in other batches, fp32 differs by so much.
_ROUNDING = 1e-3


def sure_tokens() -> int:
    """How many tokens of the answer to `PROMPT` are no near ties, so that batches make them, too.

    llama.cpp keeps KV in fp16; its first token wins by .8 of a logit.
    """
    return 1 if "FAULTS_GGUF" in os.environ else 4


@functools.cache
def model() -> Backend:
    """The tiny model; or that of the GGUF file which FAULTS_GGUF names, by llama.cpp."""
    file = os.environ.get("FAULTS_GGUF")
    return load_llama_cpp(file, threads=1) if file else tiny_model(MODEL)


def engine(folder: Path | str, **options: object) -> Engine:
    """An engine whose KV is in a folder."""
    settings = {"sequence_bytes": 0, "write_back": False, "learn_prefixes": False} | options
    return Engine(model(), StoreConfig(path=str(folder), **settings))  # type: ignore[arg-type]


@contextmanager
def index(folder: Path, **options: object) -> Iterator[CachedRAG]:
    """An index that keeps its KV in its own folder."""
    settings = {"embedding": WordEmbedding(), "chunk_tokens": 128}
    with (
        engine(folder / "kv", **options) as store,
        CachedRAG.open(folder, engine=store, **settings) as rag,  # type: ignore[arg-type]
    ):
        yield rag


def write_documents(folder: Path) -> None:
    """A file for each text."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_text(text)


@functools.cache
def right_kv() -> dict[tuple[int, ...], list[ModuleKV]]:
    """By its tokens, the KV of every text, behind everything that stands before texts here."""
    found: dict[tuple[int, ...], list[ModuleKV]] = {}
    with Engine(model(), StoreConfig(sequence_bytes=0, write_back=False)) as clean:
        clean.encode(TEXTS, context=None)
        clean.encode(TEXTS, context=PRIMER)
        clean.encode(TEXTS, Prompts(clean, DEFAULTS["system"]).head(), context=(PRIMER, None))
        for tier in clean.library.shelf.memory:
            for kv in tier.held.values():
                found.setdefault(kv.token_ids, []).append(kv)
    return found


def nowhere() -> Path:
    """A new folder, until the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def is_right(kv: ModuleKV) -> bool:
    """Whether keys and values are what the model computes for these tokens."""
    return any(
        one.start == kv.start
        and (one.keys - kv.keys).abs().max() <= _ROUNDING
        and (one.values - kv.values).abs().max() <= _ROUNDING
        for one in right_kv().get(kv.token_ids, ())
    )


def wrong_modules(store: Engine) -> int:
    """How many modules in an engine's folder differ from what the model computes."""
    disk = store.library.shelf.disk
    assert disk is not None
    wrong = 0
    for kvs in right_kv().values():
        for behind in store.library.encoded_after():
            kv = store.library.shelf.fetch(behind, kvs[0].token_ids)
            wrong += kv is not None and not is_right(kv)
    return wrong


def wrong_in_prompt(store: Engine) -> int:
    """How many placements of a prompt have KV that the model would not compute."""
    _, plan = store.plan(PROMPT, "reuse", Report("reuse"))
    kvs = [place.kv for place in plan.placements if place.source is not None]
    return sum(isinstance(kv, ModuleKV) and kv.seq_len > 4 and not _is_part(kv) for kv in kvs)


def _is_part(kv: ModuleKV) -> bool:
    """As `is_right`, for KV of which a few tokens at the ends may have been cut off."""
    for ids, kvs in right_kv().items():
        for one in kvs:
            at = kv.start - one.start
            if at >= 0 and ids[at : at + kv.seq_len] == kv.token_ids:
                part = one.slice(at, at + kv.seq_len)
                if (part.keys - kv.keys).abs().max() <= _ROUNDING:
                    return (part.values - kv.values).abs().max() <= _ROUNDING
    return False


def litter(folder: Path) -> list[str]:
    """What a folder's store has that it should not have, after `prune`."""
    with engine(folder) as store:
        assert store.library.shelf.disk is not None
        # A killed process may leave a file without a row, or a row without a file: a miss.
        harmless = ("litter", "is missing")
        problems = [problem.reason for problem in store.library.shelf.disk.check()]
        found = [one for one in problems if not any(word in one for word in harmless)]
        store.library.shelf.disk.prune()
        found += [p.reason for p in store.library.shelf.disk.check()]
    return found + [f"orphan {key}" for key in holdings.strays(folder)]
