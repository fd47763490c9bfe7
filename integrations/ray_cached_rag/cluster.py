"""Which Ray cluster, how many workers of what size, and documents on their way through them.

Ray Data works through batches of documents by a pool of actors, of which each is a `Worker`. Knows
no document's contents.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import ray
from ray.data import ActorPoolStrategy, from_items
from ray.exceptions import RayError

from cached_rag import CachedRAGError, ConfigError
from cached_rag.errors import ClusterError, MissingPackageError
from cached_rag.spi import IngestRecipe, IngestTask, IngestWorker, PreparedBatch, PreparedDocument

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # else each pool says on stderr that it might be restarted
}
# How often a batch is begun whose worker dies each time, before its documents are skipped.
MOST_ATTEMPTS = 3


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
            ConfigError: what embeds cannot be sent to them.
            CachedRAGError: what a worker raised.
        """
        size = self.documents_per_task
        batches = [tuple(tasks[at : at + size]) for at in range(0, len(tasks), size)]
        if not batches:
            return
        try:
            ray.cloudpickle.dumps(recipe.embedding)
        except Exception as error:  # whatever is in it raises what it likes
            raise ConfigError(
                f"the embedding {recipe.embedding!r} cannot be sent to workers ({error}); give one "
                "that pickle takes, or a model's name"
            ) from error
        cpus, gpus = self.cpus_per_worker, self.gpus_per_worker
        with connected(self.address, (self.workers or 1) * cpus):
            yield from _prepared(recipe, batches, self.workers or room(cpus, gpus), self)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


@contextmanager
def connected(address: str, cpus: float) -> Iterator[None]:
    """A connection to a cluster; one that this process has already is used, and stays.

    Args:
        cpus: how many a cluster of this machine alone has at least, whether it has them or not.

    Raises:
        ClusterError: there is no such cluster, or it does not answer.
    """
    if ray.is_initialized():
        yield
        return
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        own = max(math.ceil(cpus), os.cpu_count() or 1)
        options |= {"num_cpus": own, "include_dashboard": False}
    try:
        # Else workers would import modules from this process's current folder and from that of its
        # script, where documents may be.
        with TemporaryDirectory() as empty:
            ray.init(address, **options, runtime_env={"working_dir": empty})
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ClusterError(
            f"cannot reach a Ray cluster at {address!r}: {error}. Start one (`ray start --head`, "
            'then `--ray auto`), give its address, or take "local"'
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def room(cpus: float, gpus: float) -> int:
    """How many workers of so many CPUs and GPUs the cluster has room for.

    Raises:
        ClusterError: for none.
    """
    has = ray.cluster_resources()
    most = has.get("CPU", 0) // cpus
    if gpus:
        most = min(most, has.get("GPU", 0) // gpus)
    if most < 1:
        raise ClusterError(
            f"the cluster has {has.get('CPU', 0):g} CPUs and {has.get('GPU', 0):g} GPUs, and each "
            f"worker is to have {cpus:g} and {gpus:g}; ask for less, or add machines"
        )
    return int(most)


def _prepared(
    recipe: IngestRecipe, batches: Sequence[tuple[IngestTask, ...]], workers: int, config: RayConfig
) -> Iterator[PreparedBatch]:
    """What actors make of batches, in their order.

    A worker that dies is started anew, and the batch that it had is done again: Ray Data asks Ray
    for both, without a bound. So the attempts are counted.

    Raises:
        ClusterError, CachedRAGError: see `RayConfig.prepare`.
    """
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    attempts = ray.remote(num_cpus=0)(Attempts).remote()
    rows = [{"number": number, "tasks": batch} for number, batch in enumerate(batches)]
    data = from_items(rows, override_num_blocks=len(rows)).map_batches(
        Worker,
        fn_constructor_args=(recipe, attempts),
        batch_size=1,
        compute=ActorPoolStrategy(size=min(workers, len(rows))),
        num_cpus=config.cpus_per_worker,
        num_gpus=config.gpus_per_worker,
    )
    data.context.enable_progress_bars = False  # the ingestion has its own
    data.context.execution_options.preserve_order = True
    try:
        for row in data.iter_rows():
            made: Any = row["made"]
            if isinstance(made, CachedRAGError):
                raise made
            yield made
    except RayError as error:
        raise ClusterError(f"the workers failed: {error}. Ingest again, and it goes on") from error


class Attempts:
    """Counts how often each batch was begun. An actor of its own, which outlives the workers."""

    def __init__(self) -> None:
        self._begun = Counter[int]()

    def begin(self, number: int) -> int:
        """Which attempt at a batch this is, from 1."""
        self._begun[number] += 1
        return self._begun[number]


class Worker:
    """Holds the models, and prepares one batch of documents a call."""

    def __init__(self, recipe: IngestRecipe, attempts: Any) -> None:
        self._recipe, self._attempts = recipe, attempts
        self._worker: IngestWorker | None = None

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """A row with a batch of tasks becomes one with what was made of it.

        Errors of this library come back as values, as Ray would hide them in its own.
        """
        made = np.empty(1, dtype=object)
        made[0] = self._made(int(rows["number"][0]), rows["tasks"][0])
        return {"made": made}

    def _made(self, number: int, tasks: tuple[IngestTask, ...]) -> PreparedBatch | CachedRAGError:
        if ray.get(self._attempts.begin.remote(number)) > MOST_ATTEMPTS:
            return _given_up(tasks)
        try:
            if self._worker is None:
                _hide_gpus_of_others()
                self._worker = self._recipe.open()
            return self._worker.prepare(tasks)
        except MissingPackageError as error:  # which are not missing here
            return ClusterError(f"a worker lacks packages: {error}")
        except CachedRAGError as error:
            return error


def _hide_gpus_of_others() -> None:
    """To a worker without GPUs Ray shows all of the machine, and torch would take the first."""
    if not ray.get_runtime_context().get_accelerator_ids().get("GPU"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _given_up(tasks: tuple[IngestTask, ...]) -> PreparedBatch:
    """Documents that may be what killed their workers, all of them skipped."""
    return PreparedBatch(
        tuple(
            PreparedDocument(
                task.source,
                skipped=f"{task.path}: {MOST_ATTEMPTS} workers died while they had it and "
                f"{len(tasks) - 1} others; ingest with documents_per_task=1 to see which is to "
                "blame, or give workers more memory",
            )
            for task in tasks
        )
    )
