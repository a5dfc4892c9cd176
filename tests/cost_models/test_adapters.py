"""LoRA and frozen parts: what is computed, kept and held for what is not trained, and for adapters beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.execution import load_execution
from cost_models.flops import flops_per_token, training_per_token
from cost_models.job import Job
from cost_models.layers import embedding_operations, head_operations, layer_operations
from cost_models.layout import Layout
from cost_models.memory import stage_memory
from cost_models.memory_bulk import device_bytes
from cost_models.passes import unit_weights
from cost_models.stage_states import stage_holding
from cost_models.step import estimate
from profiles.errors import InputError
from profiles.hardware import load_cluster
from profiles.huggingface import load_model
from profiles.operations import GroupedMatmul, Matmul, Pointwise


def job(model: str = "llama-3.1-8b", execution: str = "megatron", **facts: object) -> Job:
    return Job(load_model(model), load_cluster("h100-sxm:1x8"), load_execution(execution), 4096, 16, **facts)  # type: ignore[arg-type]


def products(operations: tuple[object, ...], name: str = "") -> float:
    return sum(float(op.flops) for op in operations if isinstance(op, (Matmul, GroupedMatmul)) and name in op.name)


def layer(work: Job, layout: Layout, kind: int = 0):  # type: ignore[no-untyped-def]
    return layer_operations(work, layout, work.model.kinds[kind])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("execution", ["megatron", "axisplan"])
def test_lora_runs_no_weight_gradient_but_its_adapters(execution: str, tp: int) -> None:
    """A layer of 8B: forward and input gradient as ever; beside each product of m x n x k, forward 2 m r (k + n), the same for the input
    gradient, the same for the adapter's own weights (arXiv:2106.09685, section 4.1)."""
    layout = Layout(tp=tp, sp=tp > 1)
    plain, lora = (layer(job(execution=execution, **f), layout) for f in ({}, {"lora_rank": 8}))
    m = 4096
    shapes = [
        (4096 // tp, 4096),
        (1024 // tp, 4096),
        (1024 // tp, 4096),
        (4096, 4096 // tp),
        *([(14336 // tp, 4096)] * 2 if execution == "axisplan" else [(28672 // tp, 4096)]),  # PEFT: gate and up apart
        (4096, 14336 // tp),
    ]
    adapters = sum(2 * m * 8 * (n + k) for n, k in shapes)
    assert products(lora.forward) - products(plain.forward) == adapters
    assert products(lora.backward_input) - products(plain.backward_input) == adapters
    assert products(lora.backward_weight) == adapters
    assert products(plain.backward_weight) == products(plain.forward)


def test_lora_of_experts_has_a_pair_for_each_expert() -> None:
    layout = Layout(ep=8, dp_shard=8)
    work = job("mixtral-8x7b", lora_rank=4, lora_targets=("experts",))
    cost, width, h = layer(work, layout), 14336, 4096
    rows = next(op.tokens for op in cost.forward if isinstance(op, GroupedMatmul))
    assert products(cost.backward_weight) == pytest.approx(2 * rows * 4 * ((h + 2 * width) + (width + h)))
    held, trained = stage_holding(work, layout, 0)
    assert trained.expert == 32 * 4 * ((h + 2 * width) + (width + h))
    assert trained.dense == 0
    assert held.dense == stage_holding(job("mixtral-8x7b"), layout, 0)[0].dense


def test_adapters_stand_beside_the_targets_alone() -> None:
    work = job(lora_rank=8, lora_targets=("attention",))
    cost = layer(work, Layout())
    assert {op.name for op in cost.backward_weight} == {"qkv.adapter", "projection.adapter"}
    trained = stage_holding(work, Layout(), 0)[1]
    assert trained.all == 32 * 8 * ((4096 + 4096) + 2 * (1024 + 4096) + (4096 + 4096))
    assert unit_weights(work, Layout(), 0).all * 32 == trained.all
    assert unit_weights(work, Layout(), "head").all == 0


def test_a_frozen_layer_keeps_no_input_for_its_weights() -> None:
    """SwiGLU in 16 bits: norm output 2h, product 2f are needed by nothing but the weights' gradients; gate and up, 4f, by the
    activation's backward."""
    plain, frozen = (layer(job(**f), Layout()) for f in ({}, {"frozen": ("mlp",)}))
    gone = {s.name for s in plain.saved}
    left = {s.name for s in frozen.saved}
    assert gone - left == {"mlp_norm_output", "mlp_product"}
    assert plain.saved_bytes - frozen.saved_bytes == 2 * 4096 * (4096 + 14336)
    assert products(frozen.backward_weight, "mlp") == 0
    assert products(frozen.backward_weight) == products(plain.forward, "qkv") + products(plain.forward, "projection")


def test_where_only_the_head_is_trained_backward_stays_out_of_the_layers() -> None:
    work = job(frozen=("embedding", "attention", "mlp", "norm"))
    cost = layer(work, Layout())
    assert (cost.backward_input, cost.backward_weight, cost.saved) == ((), (), ())
    assert embedding_operations(work, Layout()).backward_weight == ()
    assert products(head_operations(work, Layout()).backward_weight) == 2 * 4096 * 4096 * 128256
    whole = layer(job(frozen=("attention", "mlp", "norm")), Layout())
    assert whole.backward_input


def test_what_is_frozen_is_neither_reduced_nor_updated_nor_looked_up_backward() -> None:
    layout = Layout.parse("dp_shard=8,zero=1")
    work = replace(job(), frozen=("embedding", "head"))
    whole, part = (estimate(j, layout) for j in (job(), work))
    ends = 2 * 128256 * 4096
    assert part.bytes_sent["dp"]["nvlink"] / whole.bytes_sent["dp"]["nvlink"] == pytest.approx(1 - ends / 8.03e9, rel=2e-3)
    assert part.seconds["optimizer"] == pytest.approx(whole.seconds["optimizer"] * (1 - ends / 8.03e9), rel=2e-3)
    assert not any(isinstance(op, Pointwise) for op in embedding_operations(work, layout).backward_weight)


def test_adapters_need_less_memory_and_less_time() -> None:
    layout = Layout.parse("dp_shard=8,zero=1")
    whole, lora = (estimate(job(**f), layout) for f in ({}, {"lora_rank": 16}))
    assert 2 / 3 < lora.step_seconds / whole.step_seconds < 0.85
    assert lora.memory[0].gradients < 0.02 * whole.memory[0].gradients
    assert lora.memory[0].parameters == pytest.approx(whole.memory[0].parameters, rel=0.01)
    assert stage_memory(job(lora_rank=16), layout)[0].activations == pytest.approx(whole.memory[0].activations, rel=0.01)


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ({"frozen": ("brain",)}, "frozen"), ({"lora_targets": ("attention",)}, "lora_rank"), ({"lora_rank": -1}, "lora_rank"),
        ({"lora_rank": 8, "lora_targets": ("head",)}, "lora_targets"), ({"lora_rank": 8, "frozen": ("mlp",)}, "frozen"),
        ({"lora_alpha": 16.0}, "lora_rank"),
    ],
)  # fmt: skip
def test_settings_of_adapters_that_mean_nothing_are_refused(facts: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as refused:
        job(**facts)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("model", "facts"),
    [
        ("llama-3.1-8b", {}), ("llama-3.1-8b", {"lora_rank": 8}), ("llama-3.1-8b", {"frozen": ("mlp", "norm")}),
        ("llama-3.1-8b", {"frozen": ("embedding", "attention", "mlp", "norm")}), ("mixtral-8x7b", {"frozen": ("experts",)}),
        ("mixtral-8x7b", {"lora_rank": 4, "lora_targets": ("experts",)}), ("mixtral-8x7b", {"frozen": ("router", "head")}),
    ],
)  # fmt: skip
def test_model_flops_are_those_of_the_operations(model: str, facts: dict[str, object]) -> None:
    """One microbatch on one GPU: the products of forward and both backward passes (attention's, which recomputes scores, apart)."""
    work = job(model, **facts)
    layout = Layout()
    costs = [layer(work, layout, kind) for kind in work.model.pattern]
    costs += [embedding_operations(work, layout), head_operations(work, layout)]
    counted = sum(products(c.operations()) for c in costs) / work.seq_len
    each = flops_per_token(work.model, work.seq_len)
    backward = 3 if any(op for c in costs[:-2] for op in c.backward_input) else 1
    assert training_per_token(work) == pytest.approx(counted + backward * each.attention_causal, rel=1e-9)


def test_packed_documents_count_fewer_attention_flops() -> None:
    plain, packed = (training_per_token(job(**f)) for f in ({}, {"documents": ((1024, 1),)}))
    scores = flops_per_token(job().model, 4096).attention_causal
    assert plain - packed == pytest.approx(3 * scores * (1 - 4 * 1024 * 1025 / (4096 * 4097)), rel=1e-9)


def test_packed_documents_of_mixed_length_make_context_parallel_ranks_wait() -> None:
    """The ranks that share a sequence have unequal pairs; attention takes as long as the busiest rank's."""
    mixed = ((512, 40), (4096, 1))
    seconds = {}
    for cp in (1, 8):
        for documents in ((), mixed):
            work = replace(job(documents=documents), global_batch=8)
            seconds[cp, documents] = estimate(work, Layout(cp=cp, dp_shard=8 // cp, zero=1)).seconds["attention"]
    assert seconds[1, mixed] < 0.6 * seconds[1, ()]
    assert seconds[8, mixed] / seconds[8, ()] > 1.1 * seconds[1, mixed] / seconds[1, ()]


def test_an_estimate_says_what_packing_means() -> None:
    """Documents of 1,024 in sequences of 4,096: a quarter of the pairs; one of 8,192 that is not cut would double a microbatch."""
    layout = Layout.parse("dp_shard=8,zero=1")
    even, long = (estimate(job(documents=d), layout) for d in (((1024, 1),), ((1024, 99), (8192, 1))))
    assert even.packed["pairs_share"] == pytest.approx(4 * 1024 * 1025 / (4096 * 4097))
    assert even.packed["worst_tokens"] == 4096
    assert long.packed["worst_activation_bytes"] == 2 * max(s.activations for s in long.memory)
    assert "packed" not in estimate(job(), layout).to_json()


@pytest.mark.parametrize("execution", ["megatron", "torchtitan", "axisplan"])
@pytest.mark.parametrize(
    "facts",
    [
        {"lora_rank": 16}, {"lora_rank": 16, "lora_targets": ("attention",)}, {"frozen": ("mlp", "experts")},
        {"frozen": ("embedding", "attention", "mlp", "norm")}, {"documents": ((512, 10), (4096, 1))},
    ],
)  # fmt: skip
def test_memory_in_bulk_is_that_of_each_layout_where_not_all_is_trained(facts: dict[str, object], execution: str) -> None:
    for chunk in (0, 1024):
        work = job(execution=execution, **facts)
        work = replace(work, execution=work.execution.with_(loss_chunk_tokens=chunk))
        texts = ("tp=2,zero=1", "tp=4,pp=2,zero=3", "cp=2,zero=3,recompute=full", "tp=2,pp=2,micro_batch=2,zero=1,recompute=full")
        chosen = [Layout.parse(text, 8) for text in texts]
        for layout, needed in zip(chosen, device_bytes(work, chosen), strict=True):
            assert max(s.needed for s in stage_memory(work, layout)) == pytest.approx(needed, rel=1e-12)
