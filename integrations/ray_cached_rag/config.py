"""Which Ray cluster, and how many workers of what size. Knows no document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cached_rag import ConfigError
from cached_rag.spi import IngestRecipe, IngestTask, PreparedBatch
from ray_cached_rag.cluster import connected, room
from ray_cached_rag.pool import prepared


@dataclass(frozen=True)
class RayConfig:
    """Workers of a Ray cluster that prepare documents; see `CachedRAG.ingest`.

    Attributes:
        address: "local" for a cluster of this machine alone, which ends with the ingestion; "auto"
            for the one that runs on this machine; or another's, as "host:port" or
            "ray://host:10001". If this process is connected to Ray already, that cluster is used.
        workers: how many processes; None for as many as the cluster's CPUs and GPUs allow. Each
            holds the language model and the embedding model.
        cpus_per_worker: CPUs of each, and threads that it computes with.
        gpus_per_worker: GPUs of each; .5 has two workers share one.
        documents_per_task: how many documents a worker takes at a time. Only these have to be read
            again if it dies.

    Raises:
        ConfigError: a value is out of range.
    """

    address: str = "local"
    workers: int | None = None
    cpus_per_worker: float = 1.0
    gpus_per_worker: float = 0.0
    documents_per_task: int = 8

    def __post_init__(self) -> None:
        _require(bool(self.address.strip()), 'address is empty; "local" is this machine')
        _require(self.workers is None or self.workers >= 1, f"workers must be 1 or more: {self}")
        _require(self.cpus_per_worker > 0, f"cpus_per_worker must be more than 0: {self}")
        gpus = self.gpus_per_worker
        _require(gpus >= 0, f"gpus_per_worker cannot be negative: {self}")
        _require(gpus <= 1 or gpus % 1 == 0, f"more than one GPU must be whole GPUs: {self}")
        _require(self.documents_per_task >= 1, f"documents_per_task must be 1 or more: {self}")

    def prepare(self, recipe: IngestRecipe, tasks: Sequence[IngestTask]) -> Iterator[PreparedBatch]:
        """Have tasks done by workers; their batches come in the order of the tasks.

        Raises:
            ClusterError: the cluster cannot be reached, is too small, or its workers failed.
            CachedRAGError: what a worker raised.
        """
        size = self.documents_per_task
        batches = [tuple(tasks[at : at + size]) for at in range(0, len(tasks), size)]
        if not batches:
            return
        cpus, gpus = self.cpus_per_worker, self.gpus_per_worker
        with connected(self.address, (self.workers or 1) * cpus):
            yield from prepared(recipe, batches, self.workers or room(cpus, gpus), cpus, gpus)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
