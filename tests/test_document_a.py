"""Document A (tensor, hybrid and expert parallelism): the rows about cost, placement and memory. What runs is tested under
tests/planner/runtime.

"Output-split" is Megatron's column-parallel (the document's "row split"), "input-split" its row-parallel.
"""

import pytest

from cost_models.execution import Execution, load_execution
from cost_models.job import Job
from cost_models.layers import layer_operations
from cost_models.layout import Layout
from cost_models.memory import stage_memory
from cost_models.moe_ops import expected_distinct
from cost_models.stage_states import stage_holding, stage_states
from cost_models.states import layer_weights
from profiles.hardware import load_cluster
from profiles.huggingface import load_model
from profiles.model import Attention, Layer, Mlp, ModelSpec, Moe, uniform
from profiles.operations import Collective

D_OUT, D_IN, TOKENS = 4096, 1024, 512
PLAIN = Execution(statistics=False)


def pair(width: int = D_OUT, hidden: int = D_IN) -> ModelSpec:
    """A pair of linear layers, hidden -> width -> hidden."""
    return uniform("pair", Layer(ffn=Mlp(width=width, gated=False), norms=1), 2, hidden=hidden, vocab=1024)


def transformer(**fields: object) -> ModelSpec:
    layer = Layer(mixer=Attention(heads=16, kv_heads=16, head_dim=64), ffn=Mlp(width=4096, gated=False))
    return uniform("t", layer, 8, hidden=1024, vocab=1024, **fields)


def job(model: ModelSpec, execution: Execution = PLAIN, world: int = 8, seq_len: int = TOKENS, batch: int = 64) -> Job:
    return Job(model, load_cluster(f"h100-sxm:1x{world}"), execution, seq_len, batch, moe_imbalance=1.0)


def collectives(model: ModelSpec, layout: Layout, phase: str, axis: str, execution: Execution = PLAIN) -> list[str]:
    cost = layer_operations(job(model, execution), layout, model.layer(0))
    return [op.kind for op in getattr(cost, phase) if isinstance(op, Collective) and op.axis == axis]


# -- parameter and activation memory of a weight split over N --------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_a_split_weight_takes_2_d_out_d_in_over_n_bytes_whichever_way_it_is_split(n: int) -> None:
    weights = {w.name: w for w in layer_weights(pair(), pair().layer(0)) if w.linear}
    for name in ("mlp_up", "mlp_down"):  # output-split, input-split
        assert 2 * weights[name].local(Layout(tp=n), PLAIN) == 2 * D_OUT * D_IN // n


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_an_output_split_layer_keeps_its_whole_input_and_an_input_split_one_its_part(n: int) -> None:
    cost = layer_operations(job(pair()), Layout(tp=n), pair().layer(0))
    kept = {s.name: s.bytes for s in cost.saved}
    assert kept["mlp_norm_output"] == 2 * TOKENS * D_IN
    assert kept["mlp_product"] == 2 * TOKENS * D_OUT // n


# -- communication of a pair of linear layers ------------------------------------------------------------------------------


def test_output_split_then_input_split_costs_one_all_reduce_forward() -> None:
    layout = Layout(tp=4)
    assert collectives(pair(), layout, "forward", "tp") == ["all_reduce"]


def test_in_backward_the_output_split_layer_reduces_its_input_gradient_and_the_input_split_one_nothing() -> None:
    assert collectives(pair(), Layout(tp=4), "backward_input", "tp") == ["all_reduce"]


def pair_collectives(first: str, second: str) -> list[str]:
    """Forward collectives of two linear layers, each output-split or input-split, whose input and output are whole on every rank:
    an output-split layer gives parts, which must be gathered unless the next is input-split; an input-split one gives partial
    sums, which must be reduced."""
    out = []
    for layer, following in ((first, second), (second, "whole")):
        if layer == "output":
            if following != "input":
                out.append("all_gather")
        else:
            out.append("all_reduce")
    return out


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("output", "output", ["all_gather", "all_gather"]),
        ("input", "input", ["all_reduce", "all_reduce"]),
        ("output", "input", ["all_reduce"]),
    ],
)
def test_pairs_of_splits_cost_what_the_document_counts(first: str, second: str, expected: list[str]) -> None:
    assert pair_collectives(first, second) == expected
    if (first, second) == ("output", "input"):
        assert collectives(pair(), Layout(tp=4), "forward", "tp") == expected


def test_a_transformer_layer_costs_2_all_reduces_forward_and_2_backward() -> None:
    for phase in ("forward", "backward_input"):
        assert collectives(transformer(), Layout(tp=4), phase, "tp") == ["all_reduce", "all_reduce"]


def test_sequence_parallelism_moves_the_same_bytes_forward_and_megatron_gathers_a_block_s_input_again() -> None:
    from profiles.operations import wire_bytes

    def sent(layout: Layout, phase: str, execution: Execution = PLAIN) -> float:
        cost = layer_operations(job(transformer(), execution), layout, transformer().layer(0))
        return sum(wire_bytes(op.kind, op.bytes, 4) for op in getattr(cost, phase) if isinstance(op, Collective))

    reduce, scatter = Layout(tp=4), Layout(tp=4, sp=True)
    assert sent(reduce, "forward") == sent(scatter, "forward")
    assert sent(reduce, "backward_input") == sent(scatter, "backward_input")
    assert sent(scatter, "backward_weight") == sent(scatter, "forward") / 2
    kept = Execution(keeps_gathered_input=True)
    assert sent(scatter, "backward_weight", kept) == 0
    gathered, parts = (
        layer_operations(job(transformer(), e), scatter, transformer().layer(0)).saved_bytes for e in (kept, Execution())
    )
    assert gathered - parts == 2 * 2 * TOKENS * 1024 * 3 // 4


def test_the_two_executions_differ_in_that_fact() -> None:
    assert not load_execution("megatron").keeps_gathered_input
    assert load_execution("torchtitan").keeps_gathered_input


# -- placement -------------------------------------------------------------------------------------------------------------


def test_4_x_4_x_2_is_32_gpus_with_tp_in_the_node_pp_across_nodes_and_dp_outermost() -> None:
    layout = Layout(tp=4, pp=4, dp_shard=2, order="tp-pp-dp")
    assert layout.world == 32
    assert layout.group(0, "tp") == (0, 1, 2, 3)
    assert layout.group(0, "pp") == (0, 4, 8, 12)
    assert layout.group(0, "dp") == (0, 16)


def test_data_and_pipeline_on_4_gpus() -> None:
    layout = Layout(pp=2, dp_shard=2, order="tp-pp-dp")
    assert list(layout.groups("pp")) == [(0, 1), (2, 3)]
    assert list(layout.groups("dp")) == [(0, 2), (1, 3)]


def test_pipeline_and_tensor_on_4_gpus() -> None:
    """Stages {1, 2} and {3, 4}, numbered from 1, TP inside each stage."""
    layout = Layout(tp=2, pp=2, order="tp-pp-dp")
    assert [tuple(r + 1 for r in g) for g in layout.groups("tp")] == [(1, 2), (3, 4)]
    assert list(layout.groups("pp")) == [(0, 2), (1, 3)]


# -- what each axis divides ------------------------------------------------------------------------------------------------


def states_of(layout: Layout, model: ModelSpec | None = None) -> tuple[int, float]:
    """(parameters held, bytes of them after ZeRO) of the first rank."""
    work = job(model or transformer(), world=layout.world)
    return int(stage_holding(work, layout, 0)[0].all), stage_states(work, layout, 0).parameters


def test_data_parallelism_leaves_parameters_whole_under_zero_0_to_2_and_shards_them_under_zero_3() -> None:
    whole = 2 * transformer().parameters.total
    for zero in (0, 1, 2):
        assert states_of(Layout(dp_shard=8, zero=zero))[1] == whole
    assert states_of(Layout(dp_shard=8, zero=3))[1] == whole / 8
    assert states_of(Layout(dp_shard=2, cp=4, zero=3))[1] == whole / 8
    assert states_of(Layout(dp_shard=2, dp_replicate=4, zero=3))[1] == whole / 2


def test_a_pipeline_stage_holds_the_parameters_of_its_layers() -> None:
    model = transformer()
    layer = sum(w.elements for w in layer_weights(model, model.layer(0)))
    middle = job(model, world=4)
    assert stage_holding(middle, Layout(pp=4), 1)[0].all == 2 * layer


def test_tensor_parallelism_divides_parameters_except_norms() -> None:
    model = transformer()
    norms = model.parameters.norm
    assert states_of(Layout(tp=8))[0] == (model.parameters.total - norms) // 8 + norms


def test_expert_parallelism_divides_experts_alone() -> None:
    moe = uniform(
        "moe",
        Layer(mixer=Attention(heads=16, kv_heads=16, head_dim=64), ffn=Moe(experts=8, top_k=2, width=1024)),
        4,
        hidden=1024,
        vocab=1024,
    )
    parts = moe.parameters
    assert states_of(Layout(ep=8, dp_shard=8, zero=0), moe)[0] == parts.total - parts.routed_experts * 7 // 8


def test_activations_of_a_fixed_batch_fall_with_data_parallelism_and_with_stages_layers() -> None:
    work = job(transformer(), batch=8)
    one, eight = (stage_memory(work, Layout(micro_batch=m, dp_shard=d))[0].activations for m, d in ((8, 1), (1, 8)))
    assert one == 8 * eight
    same = stage_memory(work, Layout(micro_batch=1, dp_shard=1))[0].activations
    assert same == eight  # at a fixed microbatch more data ranks free nothing


@pytest.mark.parametrize(
    ("layout", "axis", "kinds"),
    [
        (Layout(tp=4), "tp", {"all_reduce"}),
        (Layout(tp=4, sp=True), "tp", {"all_gather", "reduce_scatter"}),
        (Layout(ep=4, dp_shard=4), "ep", {"all_to_all"}),
    ],
)
def test_each_axis_uses_the_collectives_the_document_names(layout: Layout, axis: str, kinds: set[str]) -> None:
    mixer = Attention(heads=16, kv_heads=16, head_dim=64)
    ffn = Moe(experts=8, top_k=2, width=1024) if axis == "ep" else Mlp(width=4096)
    model = uniform("m", Layer(mixer=mixer, ffn=ffn), 2, hidden=1024, vocab=1024)
    assert set(collectives(model, layout, "forward", axis)) == kinds


# -- mixtures of experts ---------------------------------------------------------------------------------------------------


def test_top_2_of_8_experts_activates_a_quarter_of_expert_parameters_and_more_of_all() -> None:
    model = load_model("mixtral-8x7b")
    parts = model.parameters
    rest = parts.total - parts.routed_experts
    assert (parts.active - rest) / parts.routed_experts == 2 / 8
    assert parts.active / parts.total > 0.27


def test_with_one_expert_a_gpu_rank_i_holds_expert_i_and_tokens_travel_there() -> None:
    layout = Layout(ep=4, dp_shard=4)
    experts = 4
    local = experts // layout.ep
    assert [layout.coordinates(rank)["ep"] for rank in range(4)] == [0, 1, 2, 3]
    assert 2 // local == layout.coordinates(2)["ep"]  # GPU 0's token for E2 goes to GPU 2


def test_expert_parallelism_costs_two_all_to_alls_a_layer_forward_and_two_backward() -> None:
    model = load_model("mixtral-8x7b")
    for phase in ("forward", "backward_input"):
        assert collectives(model, Layout(ep=8, dp_shard=8), phase, "ep") == ["all_to_all", "all_to_all"]


def test_gshard_placement_replicates_attention_and_norms_and_shards_experts() -> None:
    model = load_model("mixtral-8x7b")
    layout = Layout(ep=8, dp_shard=8)
    for weight in layer_weights(model, model.layer(0)):
        share = 8 if weight.part == "experts" else 1
        assert weight.local(layout, PLAIN) * share == weight.elements


def test_deepseek_v3s_layout_is_a_plan_with_4_experts_a_gpu() -> None:
    model = load_model("deepseek-v3")
    layout = Layout.parse("tp=1,pp=16,ep=64,zero=1,schedule=dualpipe", 2048)
    assert (layout.world, layout.dp, layout.edp) == (2048, 128, 2)
    assert model.moe is not None
    assert model.moe.experts // layout.ep == 4
    assert expected_distinct(model.moe.experts, 8, 8) > 4
    work = Job(model, load_cluster("h800-sxm:256x8"), load_execution("megatron"), 4096, 15360, "fp8", moe_imbalance=1.0)
    stages = stage_memory(work, layout)
    once = stage_memory(work, layout.with_(schedule="1f1b"))
    assert sum(s.parameters for s in stages) == pytest.approx(2 * sum(s.parameters for s in once), rel=0.04)
