"""Every layout computes what one process computes: loss and every gradient, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

ONE = "micro_batch=8"


def slow(*layouts: str) -> list[Any]:
    """Cases that CI runs and ``make test`` leaves out."""
    return [pytest.param(layout, marks=pytest.mark.slow) for layout in layouts]


DENSE = [
    (2, "tp=2", "llama"), (2, "tp=2,sp=false", "llama"), (2, "tp=2", "gpt"), (2, "tp=2,sp=false", "mqa"), (2, "tp=2", "mqa"),
    (2, "pp=2,schedule=gpipe,stages=1|3", "llama"), (2, "pp=2,micro_batch=2", "gpt"),
    (2, "pp=2,vpp=2,schedule=interleaved,micro_batch=2", "gpt"), (2, "dp=2,zero=0,micro_batch=2", "llama"),
    (2, "dp=2,zero=1", "gpt"), (2, "dp=2,zero=2,micro_batch=2", "llama"), (2, "pp=2,schedule=zb-h1", "llama"),
    (2, "pp=2,schedule=zb-v", "gpt"), (2, "pp=2,schedule=dualpipe-v", "llama"),
    (4, "tp=4", "llama"), (4, "tp=4", "mqa"), (4, "tp=2,pp=2", "gpt"), (4, "tp=2,pp=2,sp=false,micro_batch=2", "mqa"),
    (4, "tp=2,dp=2,zero=1", "mqa"), (4, "pp=2,dp=2,zero=2", "gpt"), (4, "pp=4,micro_batch=2", "llama"),
    (4, "dp_replicate=2,dp_shard=2,zero=1", "llama"), (4, "tp=2,pp=2,vpp=2,schedule=interleaved,recompute=full", "gpt"),
    (4, "pp=2,dp=2,zero=1,schedule=zb-h1,recompute=0-1:full/2-3:selective", "mqa"), (4, "tp=2,pp=2,order=tp-pp-dp", "llama"),
    (2, "dp=2,zero=3,micro_batch=2", "llama"), (4, "dp_replicate=2,dp_shard=2,zero=3", "gpt"), (4, "tp=2,dp=2,zero=3", "mqa"),
    (4, "pp=2,dp=2,zero=3,micro_batch=1", "gpt"), (4, "pp=2,vpp=2,dp=2,zero=3,recompute=full", "llama"),
    (4, "pp=2,dp=2,zero=3,schedule=zb-h1", "gpt"), (4, "pp=2,dp=2,zero=3,schedule=zb-v", "llama"),
    (4, "pp=2,dp=2,zero=3,schedule=dualpipe-v,micro_batch=1", "mqa"), (4, "pp=2,dp=2,zero=2,schedule=zb-v,micro_batch=2", "gpt"),
]  # fmt: skip
CONTEXT = [
    (4, "cp=4,cp_kind=ulysses,micro_batch=2", "gpt"),
    (2, "cp=2", "llama"), (2, "cp=2,cp_kind=ulysses", "mqa"), (2, "cp=2,cp_kind=allgather", "gpt"), (4, "cp=4", "gpt"),
    (4, "cp=4,cp_kind=ulysses", "mqa"), (4, "cp=4,cp_kind=ring2xulysses2", "llama"), (4, "tp=2,cp=2", "mqa"),
    (4, "cp=2,pp=2", "gpt"), (4, "cp=2,pp=2,cp_kind=ulysses,recompute=selective,schedule=zb-h1", "llama"),
    (4, "cp=2,dp=2,zero=3", "llama"), (4, "cp=2,dp=2,zero=0", "window"), (4, "cp=4,zero=2", "window"),
]  # fmt: skip
EXPERTS = [
    (2, "ep=2,dp=2", "moe"), (2, "tp=2,ep=2", "moe-v3"), (2, "tp=2,etp=2", "moe-qwen2"), (2, "tp=2,etp=2,sp=false", "moe-v3"),
    (2, "dp=2,ep=1,zero=1", "moe-qwen2"), (2, "cp=2,ep=2", "moe-v3"), (2, "pp=2,schedule=zb-h1", "moe-v3"),
    (4, "ep=4,dp=4,micro_batch=2", "moe-qwen2"), (4, "tp=2,dp=2,ep=4", "moe-v3"), (4, "tp=2,dp=2,ep=2,etp=2", "moe"),
    (4, "pp=2,dp=2,ep=2,zero=3", "moe-v3"), (4, "tp=2,dp=2,ep=2,zero=2", "moe"), (4, "dp=4,ep=2,zero=3", "moe-v3"),
    (4, "dp_replicate=2,dp_shard=2,ep=2,zero=1", "moe"), (4, "cp=2,dp=2,ep=2,etp=2,recompute=full", "moe-qwen2"),
    (4, "cp=2,tp=2,ep=4,sp=false,recompute=selective(moe)", "moe-v3"),
]  # fmt: skip
LATENT = [
    (2, "tp=2", "mla-lite"), (2, "tp=2,sp=false", "mla"), (2, "cp=2", "mla"), (2, "pp=2,schedule=zb-v", "mla-lite"),
    (4, "tp=2,cp=2,cp_kind=ulysses,ep=4", "mla"), (4, "tp=2,pp=2,ep=2,recompute=selective(mla_up_proj,core_attn,moe_act)", "mla"),
    (4, "pp=2,dp=2,ep=2,zero=3,recompute=full", "mla"),
]  # fmt: skip


EIGHT = [
    (8, "tp=2,cp=2,pp=2", "llama"), (8, "pp=2,ep=2,dp=4,zero=3", "moe-v3"), (8, "tp=2,dp=4,ep=4,etp=1", "moe"),
    (8, "cp=4,cp_kind=ring2xulysses2,dp=2", "llama"), (8, "tp=2,pp=2,dp=2,zero=2,schedule=zb-v", "llama"),
    (8, "tp=2,cp=2,dp=2,ep=8,zero=1", "moe-v3"), (8, "dp_replicate=2,dp_shard=2,cp=2,zero=3", "mqa"),
    (8, "pp=4,vpp=2,schedule=interleaved,dp=2,micro_batch=1", "gpt"), (8, "tp=8", "mqa"), (8, "tp=4,cp=2,ep=4,etp=2", "mla"),
    (8, "dp_replicate=2,dp_shard=2,pp=2,ep=2,zero=3,recompute=full", "moe"),
    (8, "tp=2,pp=2,cp=2,ep=2,schedule=dualpipe-v,micro_batch=2", "mla"),
    (8, "cp=8", "gpt"), (8, "cp=8,cp_kind=ulysses", "mqa"), (8, "tp=2,pp=2,dp=2,ep=4,order=tp-pp-dp,zero=1", "moe-qwen2"),
    (8, "pp=8,micro_batch=1", "llama8"),
]  # fmt: skip
DROPPED = "recompute=selective(layernorm,mlp_act,moe_act,mla_up_proj)"
RECOMPUTED = [
    (2, f"tp=2,{DROPPED}", "llama"), (2, f"tp=2,sp=false,{DROPPED}", "mla"), (2, f"cp=2,{DROPPED}", "mla"),
    (2, f"pp=2,schedule=zb-h1,{DROPPED}", "moe-v3"), (2, "tp=2,recompute=selective(mla_up_proj,core_attn,moe)", "mla"),
    (2, "dp=2,zero=3,recompute=selective(layernorm,mlp)", "llama"), (2, "tp=2,etp=2,recompute=selective(layernorm,shared_experts)", "moe-v3"),
    (4, f"tp=2,dp=2,ep=4,zero=3,{DROPPED}", "moe-v3"), (4, f"tp=2,pp=2,schedule=zb-v,{DROPPED}", "llama"),
]  # fmt: skip
VARIANTS = [
    (2, "tp=2", "olmo2"), (2, "tp=2,etp=2", "sinks"), (2, "cp=2", "sinks"), (2, "cp=2,cp_kind=ulysses", "sinks"), (2, "tp=2", "gated"),
    (2, "pp=2,schedule=zb-h1", "sinks"), (2, "dp=2,zero=3", "sinks"), (2, "tp=2", "cohere"), (2, "pp=2,schedule=zb-v", "olmo2"),
    (4, "tp=4,sp=false", "olmo2"), (4, "cp=4,cp_kind=ring2xulysses2", "sinks"), (4, "tp=2,dp=2,ep=2,etp=2", "sinks"),
    (4, "tp=4", "gated"), (4, "tp=4", "cohere"), (4, "pp=2,dp=2,zero=0,schedule=zb-v", "llama"),
    (4, "pp=2,dp=2,zero=0,schedule=zb-h1,recompute=full", "moe-v3"),
]  # fmt: skip
MATRIX = [
    pytest.param(*case, marks=pytest.mark.verify if case[0] == 8 else [] if number % 7 == 0 else pytest.mark.slow)
    for number, case in enumerate(DENSE + CONTEXT + EXPERTS + LATENT + EIGHT + RECOMPUTED + VARIANTS)
]
"""Of those of up to 4 processes every seventh runs always, the others in CI; those of 8 processes in ``make verify``."""


@pytest.mark.parametrize(("world", "layout", "model"), MATRIX)
def test_loss_and_every_gradient_equal_one_process(
    gradients: Callable[..., dict[str, Any]], world: int, layout: str, model: str
) -> None:
    compare(gradients, world, layout, model)


def compare(gradients: Callable[..., dict[str, Any]], world: int, layout: str, model: str, one: str = ONE, **facts: Any) -> None:
    expected, got = gradients(1, one, model=model, **facts), gradients(world, layout, model=model, **facts)
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert set(got) == set(expected)
    for name, value in expected.items():
        if name != "loss":
            floor = 1e-15  # a key's bias without rotary positions has no gradient at all: rounding is compared with rounding
            assert np.abs(got[name] - value).max() <= 1e-9 * np.abs(value).max() + floor, name


@pytest.mark.parametrize("mask", ["random", "one"])
@pytest.mark.parametrize("layout", ["cp=4", *slow("cp=2,dp=2", "cp=4,cp_kind=ring2xulysses2", "cp=2,pp=2,micro_batch=2")])
def test_uneven_loss_masks_count_over_the_whole_batch(gradients: Callable[..., dict[str, Any]], layout: str, mask: str) -> None:
    """Case E01: with one valid token in the batch, three of four ranks have none."""
    compare(gradients, 4, layout, "llama", source={"mask": mask})


@pytest.mark.parametrize(
    "layout", ["cp=4,cp_kind=ring2xulysses2", *slow("cp=4", "cp=4,cp_kind=ulysses", "cp=4,cp_kind=allgather", "tp=2,pp=2")]
)
def test_attention_stays_inside_documents_of_packed_sequences(gradients: Callable[..., dict[str, Any]], layout: str) -> None:
    compare(gradients, 4, layout, "llama" if "ulysses=4" not in layout else "gpt", source={"documents": True})


@pytest.mark.parametrize("layout", ["dp=4,ep=4,zero=3", *slow("dp=4,ep=4", "tp=2,dp=2,ep=2,etp=2", "dp=2,pp=2,ep=2,micro_batch=2")])
def test_ranks_whose_experts_get_no_token_do_not_hang(gradients: Callable[..., dict[str, Any]], layout: str) -> None:
    """Case D01: all tokens choose experts 0 to 3, so the ranks of experts 4 to 7 have none."""
    compare(gradients, 4, layout, "moe-v3", force=True)


@pytest.mark.parametrize("layout", ["pp=2,dp=2,zero=2", *slow("pp=4,micro_batch=2", "pp=2,tp=2")])
def test_both_ends_of_a_pipeline_hold_the_same_tied_embedding(processes: Callable[..., list[Any]], layout: str) -> None:
    """Case F05: two copies, trained as one."""
    assert processes(4, "tied_copies", layout=layout, steps=3) == [True] * 4
