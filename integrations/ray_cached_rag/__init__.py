"""Ingestion by the machines of a Ray cluster, or by several processes of this machine."""

from cached_rag.errors import needs_extra

with needs_extra("ray", "the integration with Ray", "ray", "pandas", "pyarrow"):
    from ray_cached_rag.cluster import RayConfig

__all__ = ["RayConfig"]
