"""What differs between TorchTitan's releases: names of the batch's fields, and the data loader (targets.md 2.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cost_models.job import Job
from cost_models.layout import Layout
from planner.emit.environment import DEEPEP
from planner.emit.options import Option


@dataclass(frozen=True)
class Release:
    """``training`` and ``parallelism``: the fields that hold the batch; ``dataloader``: an expression with ``{dataset}``, a literal."""

    title: str
    imports: str
    dataloader: str
    training: Callable[[Job, Layout], dict[str, Any]]
    parallelism: Callable[[Job, Layout], dict[str, Any]]


def sequences(job: Job, layout: Layout) -> dict[str, Any]:
    """``local_batch_size`` is what one accumulation step takes: a whole pipeline's microbatches, or one micro batch."""
    microbatches = layout.microbatches(job.global_batch)
    return {
        "local_batch_size": layout.micro_batch * (microbatches if layout.pp > 1 else 1),
        "global_batch_size": job.global_batch,
        "seq_len": job.seq_len,
    }


def tokens(job: Job, layout: Layout) -> dict[str, Any]:
    """Token slots of a data-parallel rank's microbatch, before context and tensor parallelism, and of a step."""
    return {
        "num_tokens_per_microbatch_per_dp_rank": layout.micro_batch * job.seq_len,
        "num_tokens_per_train_step": job.global_batch * job.seq_len,
        "max_context_length": job.seq_len,
    }


RELEASES = {
    "0.3": Release(
        "0.3.0",
        "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader\n",
        "HuggingFaceTextDataLoader.Config(dataset={dataset})",
        sequences,
        lambda job, layout: {"pipeline_parallel_microbatch_size": layout.micro_batch},
    ),
    "main": Release(
        "main (August 2026)",
        "from torchtitan.components.data import ConcatThenSplitPackingConfig, GrainDataLoader\n"
        "from torchtitan.hf_datasets.text_datasets import DATASETS\n",
        "GrainDataLoader.Config(dataset=ConcatThenSplitPackingConfig(dataset=DATASETS[{dataset}]))",
        tokens,
        lambda job, layout: {"num_pp_microbatches": layout.microbatches(job.global_batch)},
    ),
}
OPTIONS = {"release": Option(r"0\.3|main", "is 0.3 (PyPI's) or main (its repository's)", "main", "0.3"), **DEEPEP}
