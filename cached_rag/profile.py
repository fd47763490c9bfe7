"""How fast this machine prefills this model, and how fast each tier hands out KV. Measured once.

Kept in the user's cache directory, per model and machine. Knows times; decides nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from cached_rag.assemble import KVBuffer
from cached_rag.fingerprint import digest
from cached_rag.fuse import prefill_rows
from cached_rag.kv import ModuleKV
from cached_rag.model import LanguageModel
from cached_rag.resolve import cache_dir
from cached_rag.store import DiskStore

_TOKENS, _REPEATS = 512, 3


@dataclass(frozen=True)
class Profile:
    """Rates of one model on one machine.

    Attributes:
        prefill_tokens_per_s: tokens prefilled in all layers.
        memory_bytes_per_s, disk_bytes_per_s: KV put into a prompt's buffer from there; the disk
            read anew, checksums and all.
        kv_bytes_per_token: of the model.
    """

    prefill_tokens_per_s: float
    memory_bytes_per_s: float
    disk_bytes_per_s: float
    kv_bytes_per_token: int

    def compute_s(self, tokens: float) -> float:
        """Seconds to prefill so many tokens."""
        return tokens / self.prefill_tokens_per_s

    def load_s(self, tokens: float, tier: str) -> float:
        """Seconds to have so many tokens' KV from "memory" or "disk"."""
        rates = {"memory": self.memory_bytes_per_s, "disk": self.disk_bytes_per_s}
        return tokens * self.kv_bytes_per_token / rates[tier]


def profile_of(model: LanguageModel, *, fresh: bool = False) -> Profile:
    """The kept profile, or one measured now (a second or two), which is kept.

    Args:
        fresh: measure even if one is kept.
    """
    machine = (platform.node(), platform.machine(), str(os.cpu_count()), str(model.device))
    path = cache_dir() / "profiles" / f"{digest(model.fingerprint, *machine)}.json"
    if path.is_file() and not fresh:
        try:
            return Profile(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            path.unlink()  # of an earlier version, or cut short
    profile = measure(model)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(dataclasses.asdict(profile)), encoding="utf-8")
    temporary.replace(path)
    return profile


def measure(model: LanguageModel) -> Profile:
    """Medians of a few rounds, on random tokens."""
    count = min(_TOKENS, model.context_length // 2)
    ids = torch.randint(0, 100, (1, count), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    buffer = KVBuffer.like(model.shapes, count)

    def prefill() -> None:
        prefill_rows(model.decoder, buffer, ids)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    computing = _median_s(prefill)
    kv = buffer.read(0, count, tuple(ids[0].tolist()))
    host = ModuleKV(kv.token_ids, 0, kv.keys.cpu(), kv.values.cpu())
    placing = _median_s(lambda: buffer.place(host, 0, model.rule))
    with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
        reading = _reading_s(Path(folder), host, buffer, model)
    return Profile(
        prefill_tokens_per_s=round(count / computing, 1),
        memory_bytes_per_s=round(host.nbytes / placing, 1),
        disk_bytes_per_s=round(host.nbytes / reading, 1),
        kv_bytes_per_token=model.shapes.bytes_per_token,
    )


def _reading_s(folder: Path, kv: ModuleKV, buffer: KVBuffer, model: LanguageModel) -> float:
    store = DiskStore(folder)
    store.put("profile", kv)
    store.close()

    def read() -> float:
        forget_pages(folder)
        fresh = DiskStore(folder)  # which checks what it reads
        began = time.perf_counter()
        source = fresh.open("profile", kv.token_ids)
        assert source is not None
        buffer.place(source, 0, model.rule)
        taken = time.perf_counter() - began
        fresh.close()
        return taken

    return statistics.median(read() for _ in range(_REPEATS))


def forget_pages(folder: Path) -> None:
    """Ask the system to drop the files' pages, so that they are read from the disk again."""
    if not hasattr(os, "posix_fadvise"):
        return  # then what is measured is the page cache
    for path in folder.rglob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _median_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
