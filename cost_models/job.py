"""Job: everything that is fixed before a layout is chosen."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import NamedTuple

from cost_models.execution import Execution
from cost_models.hashing import HashedOnce
from profiles.errors import InputError
from profiles.hardware import ClusterSpec
from profiles.model import ModelSpec

GIB = 2**30
ADAPTED = ("attention", "mlp", "experts", "shared", "state_space", "mtp")
"""Parts of a model whose linear layers LoRA adapters may stand beside."""
PARTS = (*ADAPTED, "embedding", "head", "router", "norm")
"""Parts of a model that may be frozen: ``states.Weight.part``."""
MAX_RANK = 65536


class MeasuredLayer(NamedTuple):
    """One layer kind on one rank, measured: seconds of a microbatch's forward and backward, bytes kept between them."""

    kind: int
    tp: int
    micro_batch: int
    seq_len: int
    forward: float
    backward: float
    saved_bytes: float


@dataclass(frozen=True)
class Job(HashedOnce):
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
    routing: tuple[tuple[int, float], ...] = ()
    """(ep, max / mean tokens of a rank) from a routing histogram, for every ep that divides the experts; it goes before ``moe_imbalance``."""
    margin: float = 0.08
    memory_limit_bytes: float | None = None
    documents: tuple[tuple[int, int], ...] = ()
    """(length, count) of the documents that sequences are packed from (``cost_models.packing``); () = one document a sequence."""
    lora_rank: int = 0
    """Rank of LoRA adapters beside linear layers (arXiv:2106.09685), all other weights frozen; 0 = the weights are trained."""
    lora_targets: tuple[str, ...] = ()
    """Parts (``ADAPTED``) whose linear layers carry adapters; () = all of them."""
    lora_alpha: float = 0.0
    """The adapters' output is scaled by ``lora_alpha / lora_rank``; 0 = by one. Costs nothing."""
    frozen: tuple[str, ...] = ()
    """Parts of the model (``PARTS``) that are not trained."""
    measured: tuple[MeasuredLayer, ...] = ()
    """Layers measured on the machine, which go before analytic prices (``cost_models.measured``)."""

    def __post_init__(self) -> None:
        """Raises InputError for a part that no model has, and for adapters' settings without a rank."""
        for field, given, known in (("frozen", self.frozen, PARTS), ("lora_targets", self.lora_targets, ADAPTED)):
            for part in given:
                if part not in known:
                    close = difflib.get_close_matches(part, known, 1)
                    raise InputError(field, part, f"is one of {', '.join(known)}", close[0] if close else known[0])
        if not 0 <= self.lora_rank <= MAX_RANK:
            raise InputError("lora_rank", self.lora_rank, f"is a rank from 0 to {MAX_RANK}", 16)
        if not 0 <= self.lora_alpha < 1e9:
            raise InputError("lora_alpha", self.lora_alpha, "is a scale of at least 0", 2 * self.lora_rank)
        if not self.lora_rank and (self.lora_targets or self.lora_alpha):
            raise InputError("lora_rank", self.lora_rank, "adapters need a rank above 0", 16)
        if self.lora_rank and self.frozen:
            raise InputError(
                "frozen", ",".join(self.frozen), "goes without LoRA, which freezes every weight but its adapters", None
            )

    def with_imbalance(self, factor: float | None) -> Job:
        """The same job where the busiest rank of any expert-parallel group has ``factor`` times the mean (None: the default)."""
        return replace(self, moe_imbalance=factor, routing=())

    def trains(self, part: str) -> bool:
        """Whether the weights of a part (their adapters apart) are trained."""
        return not self.lora_rank and part not in self.frozen

    def adapts(self, part: str) -> bool:
        """Whether the linear layers of a part carry adapters."""
        return self.lora_rank > 0 and part in (self.lora_targets or ADAPTED)

    __hash__ = HashedOnce.__hash__  # a job is the key of every memory of costs, and a model is long to hash

    @property
    def gathered_element(self) -> float:
        """Bytes of a parameter on the wire and in a gathered buffer."""
        return 4.0 if self.precision == "fp32" else self.execution.gather_bytes

    @property
    def reduced_element(self) -> float:
        """Bytes of a gradient on the wire, and of a reduced one."""
        return 4.0 if self.precision == "fp32" else self.execution.reduce_bytes

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.seq_len * self.global_batch

    @property
    def limit_bytes(self) -> float:
        """Device bytes a rank may use: usable memory x (1 - margin)."""
        usable = self.memory_limit_bytes if self.memory_limit_bytes is not None else self.cluster.gpu.usable_bytes
        return usable * (1 - self.margin)
