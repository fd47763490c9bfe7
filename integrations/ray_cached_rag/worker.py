"""What runs in a worker's process: a class of which Ray makes an actor."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import numpy as np
import ray

from cached_rag import CachedRAGError
from cached_rag.errors import ClusterError, MissingPackageError
from cached_rag.spi import IngestRecipe, IngestTask, IngestWorker, PreparedBatch, PreparedDocument

# How often a batch is begun whose worker dies each time, before its documents are skipped.
MOST_ATTEMPTS = 3


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
        except MissingPackageError as error:  # cannot be sent to another process as it is
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
