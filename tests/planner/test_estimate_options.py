"""Every choice that moves memory or time is reached from ``axisplan estimate``, with the value that it must have."""

from __future__ import annotations

import json
from typing import Any

import pytest

DENSE = ("llama-3-8b", "--cluster", "h100-sxm:1x8", "--seq-len", "4k", "--global-batch", "64")
MOE = ("qwen3-30b-a3b", "--cluster", "h100-sxm:8x8", "--seq-len", "4k", "--global-batch", "512", "--moe-imbalance", "1")


def said(invoke: Any, model: tuple[str, ...], layout: str, *options: str) -> dict[str, Any]:
    code, out, err = invoke("estimate", *model, "--layout", layout, "--json", *options)
    assert code == 0, err
    found = json.loads(out)
    found["first"] = found["memory"][0]
    return found


@pytest.mark.parametrize(
    ("execution", "optimizer", "share"),
    [("megatron", "sgd", 8 / 12), ("axisplan", "sgd", 8 / 12), ("axisplan", "adamw8bit", (4 + 2 * (1 + 4 / 256)) / 12)],
)
def test_an_optimizer_s_states_are_a_share_of_adam_s_and_its_step_is_shorter(
    invoke: Any, execution: str, optimizer: str, share: float
) -> None:
    adam, other = (
        said(invoke, DENSE, "tp=2,zero=1", "--execution", execution, "--optimizer", name) for name in ("adamw", optimizer)
    )
    assert other["first"]["optimizer"] / adam["first"]["optimizer"] == pytest.approx(share, rel=1e-6)
    assert other["seconds"]["optimizer"] < adam["seconds"]["optimizer"]


@pytest.mark.parametrize("execution", ["megatron", "axisplan"])
def test_muon_keeps_one_moment_of_matrices_and_its_products_take_longer(invoke: Any, execution: str) -> None:
    adam, muon = (said(invoke, DENSE, "tp=8,zero=0", "--execution", execution, "--optimizer", n) for n in ("adamw", "muon"))
    embeddings = 2 * 128256 * 4096 / 8.03e9
    lower, upper = 8 / 12, (8 + 4 * embeddings) / 12
    assert lower < muon["first"]["optimizer"] / adam["first"]["optimizer"] <= upper * 1.01
    assert muon["seconds"]["optimizer"] > adam["seconds"]["optimizer"]


def test_offload_moves_states_and_activations_out_of_the_gpu(invoke: Any) -> None:
    """Activations under the execution of a published harness, which no target of emission limits."""
    plain, states, kept = (
        said(invoke, DENSE, f"tp=2,zero=1{offload}", "--execution", "simumax")
        for offload in ("", ",offload=optimizer", ",offload=activations")
    )
    assert states["first"]["optimizer"] == 0
    assert states["seconds"]["optimizer"] > plain["seconds"]["optimizer"]
    assert kept["first"]["activations"] < 0.2 * plain["first"]["activations"]
    assert kept["first"]["optimizer"] == plain["first"]["optimizer"]


def test_recompute_by_module_by_layer_and_whole_order_memory_and_time(invoke: Any) -> None:
    modes = ("none", "selective(layernorm,mlp)", "0-15:full/16-31:none", "full")
    found = [said(invoke, DENSE, f"tp=2,zero=1,recompute={mode}", "--execution", "megatron") for mode in modes]
    kept = [f["first"]["activations"] for f in found]
    again = [f["seconds"].get("recompute", 0.0) for f in found]
    assert kept[0] > kept[1] > kept[3]
    assert kept[0] > kept[2] > kept[3]
    assert again[0] == 0
    assert again[2] == pytest.approx(again[3] / 2, rel=0.01)
    assert found[0]["mfu"] * found[0]["step_seconds"] == pytest.approx(found[3]["mfu"] * found[3]["step_seconds"])


def test_packed_documents_shorten_attention_by_their_pairs(invoke: Any) -> None:
    whole, packed = (said(invoke, DENSE, "tp=2,zero=1", "--execution", "megatron", *d) for d in ((), ("--documents", "512x8")))
    pairs = (512 * 513 / 2 * 8) / (4096 * 4097 / 2)
    assert pairs < packed["seconds"]["attention"] / whole["seconds"]["attention"] < 3 * pairs
    assert packed["first"]["activations"] == whole["first"]["activations"]


def test_experts_axes_capacity_dispatcher_and_imbalance_each_move_what_they_should(invoke: Any) -> None:
    def of(layout: str, *options: str) -> dict[str, Any]:
        return said(invoke, MOE, layout, "--execution", "megatron", *options)

    base = of("ep=8,etp=1,zero=1,recompute=full")
    split = of("tp=2,ep=4,etp=2,zero=1,recompute=full")
    assert base["first"]["parameters"] < of("ep=4,etp=1,zero=1,recompute=full")["first"]["parameters"]
    assert "etp" in split["bytes_sent"]
    assert "etp" not in base["bytes_sent"]
    padded = of("ep=8,etp=1,zero=1,recompute=full,capacity=1.5")
    assert padded["seconds"]["matmul"] > 1.1 * base["seconds"]["matmul"]
    hot = said(invoke, (*MOE[:-1], "1.5"), "ep=8,etp=1,zero=1,recompute=full", "--execution", "megatron")
    for cause in ("matmul", "communication.ep"):
        assert hot["seconds"][cause] > 1.1 * base["seconds"][cause]
    even, uneven = (said(invoke, (*MOE[:-1], n), "ep=8,etp=1,zero=1", "--execution", "megatron") for n in ("1", "1.5"))
    assert uneven["first"]["activations"] > 1.05 * even["first"]["activations"]
    for ep, share in ((8, 1.0), (4, 0.5)):  # a gather sends ep - 1 rows where an all-to-all sends 8 (ep - 1) / ep
        exchanged, gathered = (of(f"ep={ep},etp=1,zero=1,recompute=full{d}") for d in ("", ",dispatcher=allgather"))
        sent = [sum(f["bytes_sent"]["ep"].values()) for f in (gathered, exchanged)]
        assert sent[0] / sent[1] == pytest.approx(share, rel=1e-6)


@pytest.mark.parametrize(
    ("fact", "figure", "more"),
    [("communicator_bytes=1073741824", "device", 2**29), ("workspace_bytes=1073741824", "peak_reserved", 2**30 - 2**26)],
)
def test_a_fact_of_the_execution_moves_its_figure_by_its_bytes(invoke: Any, fact: str, figure: str, more: float) -> None:
    plain, moved = (
        said(invoke, DENSE, "zero=1,recompute=full", "--execution", "megatron", *s) for s in ((), ("--set", f"execution.{fact}"))
    )
    assert moved["first"][figure] - plain["first"][figure] == pytest.approx(more, rel=0.05)
    assert moved["step_seconds"] == plain["step_seconds"]


def test_graphs_take_the_host_out_of_the_step_and_the_pool_counts_on_the_device(invoke: Any) -> None:
    small = ("llama-3.2-1b", *DENSE[1:3], "--seq-len", "512", "--global-batch", "64")
    eager, graphs = (
        said(invoke, small, "zero=1,recompute=full", "--execution", "megatron", *s)
        for s in ((), ("--set", "execution.graphs=full", "--set", "execution.graph_pool_ratio=1"))
    )
    assert eager["seconds"]["host"] > 0
    assert graphs["seconds"].get("host", 0) == 0
    assert graphs["first"]["device"] - eager["first"]["device"] == pytest.approx(eager["first"]["activations"], rel=0.05)
