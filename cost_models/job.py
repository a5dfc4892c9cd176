"""Job: everything that is fixed before a layout is chosen."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from cost_models.execution import Execution
from profiles.hardware import ClusterSpec
from profiles.model import ModelSpec

GIB = 2**30


@dataclass(frozen=True)
class Job:
    """A model, the cluster it trains on, the framework that runs it, and the batch.

    ``seq_len`` in tokens, ``global_batch`` in sequences a step. ``moe_imbalance`` is max / mean tokens of an expert-parallel rank
    (None = the default of ``cost_models.layers``); ``margin`` the share of usable memory kept free; ``memory_limit_bytes``
    replaces the GPU's usable memory.
    """

    model: ModelSpec
    cluster: ClusterSpec
    execution: Execution
    seq_len: int
    global_batch: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    moe_imbalance: float | None = None
    margin: float = 0.08
    memory_limit_bytes: float | None = None
    documents: tuple[tuple[int, int], ...] = ()
    """(length, count) of the documents that sequences are packed from (``cost_models.packing``); () = one document a sequence."""
    lora_rank: int = 0
    """Rank of LoRA adapters beside every linear layer, the weights themselves frozen; 0 = the weights are trained."""
    frozen: tuple[str, ...] = ()
    """Parts of the model that are not trained (``embedding``, ``head``, ``attention``, ``mlp``, ``experts``, ``shared``,
    ``router``, ``norm``, ``state_space``, ``mtp``)."""

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def __hash__(self) -> int:
        """Computed once: a job is the key of every memory of costs, and a model is long to hash."""
        return self._hash

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.seq_len * self.global_batch

    @property
    def limit_bytes(self) -> float:
        """Device bytes a rank may use: usable memory x (1 - margin)."""
        usable = self.memory_limit_bytes if self.memory_limit_bytes is not None else self.cluster.gpu.usable_bytes
        return usable * (1 - self.margin)
