"""What a GPU, a link and a cluster can do: ``GpuProfile.seconds(operation)``, ``Link.seconds(collective)``, ``ClusterSpec``.

One door to four rooms: ``profiles.gpu`` (curves and memory of a GPU), ``profiles.links`` (one collective on one link),
``profiles.cluster`` (domains, hierarchical collectives) and ``profiles.catalogue`` (names and files). Forms, constants and held-out
errors: docs/hardware.md.
"""

from __future__ import annotations

from profiles.catalogue import cluster_names, describe, gpu_names, load_cluster, load_gpu, load_link, to_yaml
from profiles.cluster import ClusterSpec, Level, Pool
from profiles.gpu import AttentionCurve, Constant, GpuFacts, GpuProfile, GroupedCurve, MatmulCurve, TrafficCurve
from profiles.links import CollectiveCurve, Link

__all__ = [
    "AttentionCurve",
    "ClusterSpec",
    "CollectiveCurve",
    "Constant",
    "GpuFacts",
    "GpuProfile",
    "GroupedCurve",
    "Level",
    "Link",
    "MatmulCurve",
    "Pool",
    "TrafficCurve",
    "cluster_names",
    "describe",
    "gpu_names",
    "load_cluster",
    "load_gpu",
    "load_link",
    "to_yaml",
]
