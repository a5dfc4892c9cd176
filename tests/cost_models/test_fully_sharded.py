"""ZeRO-3 unit by unit: padding of shards, what waits beside a layer, and what a step's only microbatch does not hold yet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.execution import load_execution
from cost_models.fully_sharded import Units, by_unit
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.memory import stage_memory
from cost_models.memory_bulk import device_bytes
from cost_models.states import Weight, hold
from profiles.hardware import load_cluster
from profiles.model import Attention, Layer, Mlp, Moe, uniform

RUNTIME = load_execution("axisplan")
GQA = Attention(heads=16, kv_heads=4, head_dim=32)


def job(model: str = "dense", global_batch: int = 64) -> Job:
    ffn = Mlp(width=1024) if model == "dense" else Moe(experts=16, top_k=2, width=256)
    spec = uniform(model, Layer(mixer=GQA, ffn=ffn), 4, hidden=512, vocab=1024)
    return Job(spec, load_cluster("h100-sxm:8x8"), RUNTIME, 1024, global_batch)


@pytest.mark.parametrize(("rows", "columns", "tp", "ways"), [(100, 8, 1, 64), (128, 8, 2, 7), (64, 3, 4, 16), (5, 1, 1, 8)])
def test_every_rank_holds_as_many_rows_as_the_first(rows: int, columns: int, tp: int, ways: int) -> None:
    """As ``torch.chunk`` cuts: the first ranks get ceil(rows / ways), and FSDP2 pads the others to it."""
    layout = Layout.parse(f"tp={tp}", tp)
    mine = rows // tp
    chunks = [min(max(mine - rank * -(-mine // ways), 0), -(-mine // ways)) for rank in range(ways)]
    assert sum(chunks) == mine
    assert Weight("w", "mlp", rows, columns, split="tp").padded(layout, RUNTIME, ways) == max(chunks) * ways * columns
    assert (
        Weight("mlp_down", "mlp", rows, columns * tp, split="tp").padded(layout, RUNTIME, ways) == -(-rows // ways) * ways * columns
    )


def test_experts_are_padded_by_experts_and_gates_apart_from_up_projections() -> None:
    layout = Layout.parse("ep=4,dp_shard=8", 8)
    experts = Weight("experts_up", "experts", 512, 64, copies=12, split="expert")
    assert experts.padded(layout, RUNTIME, 2) == 4 * 512 * 64
    both = Weight("mlp_up", "mlp", 2 * 9, 4, split="tp", gated=True)
    assert both.padded(layout, RUNTIME, 8) == 2 * 16 * 4
    assert both.padded(layout, RUNTIME.with_(fused_gate_up=True), 8) == 24 * 4
    assert hold([experts], layout, RUNTIME, (8, 2)).expert == 4 * 512 * 64


def test_a_layer_waits_for_the_one_behind_it_with_the_gathered_ends() -> None:
    """Dense: 2 bytes a gathered element, 4 a reduced one, 2 of the head's own gradient."""
    layout = Layout.parse("zero=3,dp_shard=8", 8)
    units = Units(job(), layout, first=True, last=True)
    layer = 512 * (512 + 2 * 128 + 512) + 3 * 512 * 1024 + 2 * 512
    assert by_unit(job(), layout)
    assert (units.whole(0), units.ahead(0), units.behind(0)) == (2 * layer, 2 * layer, 4 * layer)
    assert units.throughout == 2 * (2 * 1024 * 512 + 512) + 2 * (1024 * 512 + 512)
    assert not by_unit(job(), layout.with_(zero=2))


def test_a_single_microbatch_does_not_hold_all_gradients_at_its_peak() -> None:
    layout = Layout.parse("zero=3,dp_shard=64", 64)
    once, often = (stage_memory(job(global_batch=n), layout)[0] for n in (64, 128))
    assert once.gradients == often.gradients
    assert often.peak_allocated - once.peak_allocated == often.gradients  # in the last layer, whose backward is the first


@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("global_batch", [64, 256])
def test_many_layouts_at_once_need_what_each_needs(model: str, global_batch: int) -> None:
    ep = ",ep=4" if model == "moe" else ""
    texts = [f"tp={tp},pp={pp},zero={zero}{ep}" for tp in (1, 2) for pp in (1, 2) for zero in (2, 3)]
    layouts = [
        Layout.parse(text, 64) for text in (*texts, f"pp=2,schedule=zb-h1,zero=2{ep}", f"pp=2,vpp=2,schedule=zb-v,zero=1{ep}")
    ]
    work = replace(job(model, global_batch), moe_imbalance=1.0)
    assert list(device_bytes(work, layouts)) == pytest.approx(
        [max(s.needed for s in stage_memory(work, x)) for x in layouts], rel=1e-12
    )
