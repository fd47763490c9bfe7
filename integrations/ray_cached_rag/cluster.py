"""The connection to a Ray cluster. Knows no documents."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import ray

from cached_rag.errors import ClusterError

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # else each pool says on stderr that it might be restarted
}


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
    options: dict[str, Any] = {
        "address": address,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    if address == "local":
        own = max(math.ceil(cpus), os.cpu_count() or 1)
        options |= {"num_cpus": own, "include_dashboard": False}
    try:
        # Else workers would import modules from this process's current folder and from that of its
        # script, where documents may be.
        with TemporaryDirectory() as empty:
            ray.init(**options, runtime_env={"working_dir": empty})
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
