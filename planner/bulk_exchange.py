"""Least seconds of an exchange of tokens that sends one copy to each node (DeepEP, HybridEP), by arrays of degrees.

``passes.exchange_of`` with arrays. The part that stays inside a node is left out where the group leaves it: how much of a group a node holds
depends on the rank order, and with it how long that part takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.job import Job
from cost_models.moe_ops import expected_distinct
from cost_models.passes import nodes_reached
from profiles.model import Moe

Floats = npt.NDArray[np.float64]


def deduplicated_seconds(job: Job, degrees: Any, size: Any, ranks: Any, stride: Any) -> Floats:
    """Seconds of one all-to-all of ``size`` bytes over expert groups of ``ranks`` ranks ``stride`` apart."""
    execution, cluster = job.execution, job.cluster
    tokens = degrees.micro_batch * job.seq_len / degrees.cp / np.where(degrees.sp, degrees.tp, 1)
    overhead = execution.exchange_seconds + execution.deduplicated_token_seconds * tokens
    nodes = -(-degrees.ep * degrees.etp // cluster.gpus_per_node)
    efficiency = 1.0 if cluster.levels[0].size > cluster.gpus_per_host else execution.deduplicated_efficiency
    inside = cluster.collective_seconds("all_to_all", size / efficiency, ranks, stride)
    leaving = size * _outside(job, nodes, degrees.ep) / execution.deduplicated_network_efficiency
    across = cluster.collective_seconds("all_to_all", leaving, ranks, stride)
    out: Floats = np.where(nodes == 1, inside, across) + overhead
    return out


def _outside(job: Job, nodes: Any, ep: Any) -> Floats:
    """The share of bytes that leaves a node, at least over the model's mixtures."""
    moes = {layer.ffn for layer in job.model.kinds if isinstance(layer.ffn, Moe)}
    out = np.ones(np.shape(ep))
    for n, e in {*zip(np.ravel(nodes).tolist(), np.ravel(ep).tolist(), strict=True)}:
        if n > 1:
            shares = (nodes_reached(moe, n) / float(expected_distinct(moe.experts, moe.top_k, e)) for moe in moes)
            out[(nodes == n) & (ep == e)] = min(1.0, *shares)
    return out
