"""One rank of a job of any size, in this process: a fake process group, fake CPU tensors, and the runtime's own Trainer.

Nothing is sent and nothing is computed; shapes, dtypes, collectives and lifetimes are those of the real program. What the program
reads on the host (a loss, a norm, how many rows an expert got) is answered here: numbers with 1, rows from the plan.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.moe_ops import imbalance
from planner.runtime import fully_sharded, model, train
from planner.runtime.data import Batch
from planner.runtime.expert import Dispatcher
from planner.runtime.mesh import Mesh
from planner.runtime.pipeline import Pipeline
from planner.runtime.settings import TrainSettings
from planner.runtime.train import Trainer
from profiles.errors import AxisplanError, InputError

CPU = torch.device("cpu")
PRECISIONS = ("fp32", "bf16")


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[None]:
    """Be ``rank`` of ``world`` ranks that are not there. Raises InputError for a rank outside the world."""
    if not 0 <= rank < world:
        raise InputError("rank", rank, f"the plan has ranks 0 to {world - 1}", min(max(rank, 0), world - 1))
    if dist.is_initialized():
        raise AxisplanError("a dry run needs a process of its own: this one has joined a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    forget_meshes()
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    try:
        with warnings.catch_warnings():  # of functions that torch will rename, and of what a fake group cannot do
            warnings.filterwarnings("ignore", module=r"torch\.|planner\.runtime")
            log.setLevel(logging.CRITICAL)  # an operation without a fake form is told once, in one line
            yield
    finally:
        log.setLevel(before)
        dist.destroy_process_group()


def forget_meshes() -> None:
    """DTensor remembers its answers by mesh, and equal meshes are one to it: an earlier world's groups would come back."""
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes of objects replaced for a while."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.callback(setattr, owner, name, owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name))
            setattr(owner, name, value)
        yield


def without_fakes(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` run on real tensors: meshes compute with rank numbers."""

    def call(*arguments: Any, **named: Any) -> Any:
        with unset_fake_temporarily():
            return function(*arguments, **named)

    return call


def routed(factor: float) -> Callable[[Dispatcher, Tensor], list[int]]:
    """Split sizes of a rank that receives ``factor`` times the mean: its own rows leave evenly, its share arrives evenly."""

    def read(self: Dispatcher, sizes: Tensor) -> list[int]:
        rows = self.rows  # type: ignore[attr-defined]
        sent = spread(rows, self.ep.size)
        arriving = spread(arriving_rows(rows, factor if self.ep.size > 1 else 1.0), self.ep.size * self.local)
        return sent + arriving * self.etp.size

    return read


def arriving_rows(rows: int, factor: float) -> int:
    """Rows that arrive at the busiest rank where each sends ``rows``."""
    return round(rows * factor)


def spread(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` numbers that differ by one at most."""
    low, more = divmod(total, parts)
    return [low + (i < more) for i in range(parts)]


def counted(plan: Callable[..., Any]) -> Callable[..., Any]:
    """``Dispatcher.plan`` that leaves the number of rows where ``routed`` finds it."""

    def call(self: Dispatcher, expert: Tensor) -> Any:
        self.rows = expert.numel()  # type: ignore[attr-defined]
        return plan(self, expert)

    return call


@contextmanager
def program(job: Job, layout: Layout, rank: int) -> Iterator[Trainer]:
    """The Trainer of ``rank`` with fake tensors; what is called on it inside the context is the real program.

    Raises InputError for what the runtime does not run.
    """
    if job.execution.name != "axisplan":
        raise InputError(
            "execution",
            job.execution.name,
            "the dry run traces this repository's runtime: plan with --execution axisplan",
            "axisplan",
        )
    if job.precision not in PRECISIONS:
        raise InputError("precision", job.precision, f"the runtime trains in {' or '.join(PRECISIONS)}", "bf16")
    if job.optimizer != "adamw":
        raise InputError("optimizer", job.optimizer, "the runtime has adamw", "adamw")
    if layout.offload:
        raise InputError("offload", "+".join(layout.offload), "the runtime does not offload", "none")
    moe = job.model.moe
    factor = float(imbalance(job, layout.ep, moe)) if moe is not None else 1.0
    settings = TrainSettings(
        seq_len=job.seq_len, global_batch=job.global_batch, precision=job.precision, lora_rank=job.lora_rank, lora_targets=job.lora_targets,
        lora_alpha=job.lora_alpha, frozen=job.frozen,
    )  # fmt: skip
    changes: tuple[tuple[Any, str, Any], ...] = (
        (train, "Mesh", without_fakes(Mesh)),
        (Mesh, "sharding", without_fakes(Mesh.sharding)),
        (DeviceMesh, "_get_mesh_tensor_from_full_mesh", staticmethod(without_fakes(DeviceMesh._get_mesh_tensor_from_full_mesh))),
        (model, "fill", lambda *_: None),
        (fully_sharded, "fill", lambda *_: None),
        (Pipeline, "_release", lambda self: self._sent.clear()),  # a fake transfer never says that it has come to its end
        (Dispatcher, "read", routed(factor)),
        (Dispatcher, "plan", counted(Dispatcher.plan)),
    )
    if layout.zero == 3 and layout.dp_shard * layout.cp > 1:  # built on no device: FSDP2 cuts a parameter into a view a rank
        changes += ((train, "Decoder", without_fakes(model.Decoder)), (fully_sharded, "shard", without_fakes(fully_sharded.shard)))
    with fake_rank(rank, layout.world), replaced(*changes), FakeTensorMode(allow_non_fake_inputs=True):
        yield Trainer(job.model, layout, settings, CPU)


def batch_of(trainer: Trainer) -> Batch:
    """A step's sequences of this rank: fake ids."""
    settings = trainer.settings
    shape = (settings.global_batch // trainer.layout.dp, settings.seq_len)
    return Batch(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))


def rank_of_stage(layout: Layout, stage: int) -> int:
    """The first rank of a pipeline rank. Raises InputError for one that is not there."""
    if not 0 <= stage < layout.pp:
        raise InputError("stage", stage, f"the plan has stages 0 to {layout.pp - 1}", min(max(stage, 0), layout.pp - 1))
    return layout.rank_at({"pp": stage})


def exact_factor(job: Job, layout: Layout) -> float | None:
    """``job.moe_imbalance`` as whole rows make it, for the formula to be compared with the trace; None without experts."""
    moe = job.model.moe
    if moe is None:
        return None
    tokens = layout.micro_batch * job.seq_len // layout.cp
    rows = math.ceil(tokens / layout.tp) * moe.top_k
    return arriving_rows(rows, float(imbalance(job, layout.ep, moe))) / rows
