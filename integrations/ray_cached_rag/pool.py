"""A pool of actors that work through batches of documents, by Ray Data."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.data import ActorPoolStrategy, from_items
from ray.exceptions import RayError

from cached_rag import CachedRAGError
from cached_rag.errors import ClusterError
from cached_rag.spi import IngestRecipe, IngestTask, PreparedBatch
from ray_cached_rag.worker import Attempts, Worker


def prepared(
    recipe: IngestRecipe,
    batches: Sequence[tuple[IngestTask, ...]],
    workers: int,
    cpus: float,
    gpus: float,
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
        num_cpus=cpus,
        num_gpus=gpus,
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
