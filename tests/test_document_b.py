"""Document B (context parallelism): the rows about cost, placement and memory."""

import pytest

from cost_models.attention_ops import causal_pairs, rank_pairs
from cost_models.execution import Execution
from cost_models.job import Job
from cost_models.layer_cost import Local
from cost_models.layers import layer_operations
from cost_models.layout import Layout
from cost_models.memory import stage_memory
from cost_models.packing import rank_shares
from cost_models.stage_states import stage_holding, stage_states
from cost_models.state_bytes import shards
from profiles.hardware import load_cluster
from profiles.model import Attention, Layer, Mlp, uniform
from profiles.operations import Attend, Collective, Matmul, wire_bytes

MODEL = uniform("m", Layer(mixer=Attention(heads=16, kv_heads=16, head_dim=64), ffn=Mlp(width=4096)), 4, hidden=1024, vocab=1024)
GROUPED = uniform("g", Layer(mixer=Attention(heads=16, kv_heads=4, head_dim=64), ffn=Mlp(width=4096)), 4, hidden=1024, vocab=1024)


def job(seq_len: int = 8192, model: object = MODEL) -> Job:
    return Job(model, load_cluster("h100-sxm:1x8"), Execution(), seq_len, 16)  # type: ignore[arg-type]


def attention(layout: Layout) -> Attend:
    return next(op for op in layer_operations(job(), layout, MODEL.layer(0)).forward if isinstance(op, Attend))


def exchanged(layout: Layout, phase: str = "forward", model: object = MODEL) -> list[Collective]:
    cost = layer_operations(job(model=model), layout, model.layer(0))  # type: ignore[attr-defined]
    return [op for op in getattr(cost, phase) if isinstance(op, Collective) and op.axis in ("ring", "ulysses")]


def test_sequence_parallelism_splits_norm_regions_and_context_parallelism_every_token() -> None:
    sp, cp = Local(job(), Layout(tp=4, sp=True)), Local(job(), Layout(cp=4))
    assert (sp.tokens, sp.split_tokens) == (8192, 2048)
    assert (cp.tokens, cp.split_tokens) == (2048, 2048)
    assert attention(Layout(cp=4)).flops * 4 == pytest.approx(attention(Layout()).flops)


def test_weights_are_replicated_over_context_parallelism_and_zero_shards_them_over_dp_shard_times_cp() -> None:
    layout = Layout(cp=4, dp_shard=2, zero=3)
    assert stage_holding(job(), layout, 0)[0].all == MODEL.parameters.total
    assert shards(layout)[0] == 8
    assert stage_states(job(), layout, 0).parameters == 2 * MODEL.parameters.total / 8


def test_a_later_token_needs_all_earlier_keys_and_projections_need_no_other_token() -> None:
    """t0 t1 on GPU 0, t2 t3 on GPU 1: rank 1 computes 7 of the 10 pairs, 4 of them against GPU 0's keys."""
    assert rank_pairs(4, 2, balanced=False) == 7 == causal_pairs(2) + 2 * 2
    whole, split = (layer_operations(job(), x, MODEL.layer(0)) for x in (Layout(), Layout(cp=2)))
    rows = [{op.m for op in c.forward if isinstance(op, Matmul)} for c in (whole, split)]
    assert rows == [{8192}, {4096}]
    assert {op.name for op in split.forward if isinstance(op, Collective)} == {"ring_kv"}


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_ring_of_n_needs_n_minus_1_passes_of_keys_and_values(n: int) -> None:
    (ring,) = exchanged(Layout(cp=n))
    assert (ring.kind, ring.count) == ("send_recv", n - 1)
    assert ring.bytes == 2 * (8192 // n) * 1024 * 2


def test_four_ranks_see_blocks_0_3_2_1() -> None:
    assert [(0 - turn) % 4 for turn in range(4)] == [0, 3, 2, 1]


def test_ulysses_exchanges_q_k_v_for_heads_and_the_output_back() -> None:
    first, second = exchanged(Layout(cp=4, cp_kind="ulysses"))
    tensor = 8192 // 4 * 1024 * 2
    assert (first.kind, first.bytes) == ("all_to_all", 3 * tensor)
    assert (second.kind, second.bytes) == ("all_to_all", tensor)
    assert attention(Layout(cp=4, cp_kind="ulysses")).heads == 4
    assert attention(Layout(cp=4, cp_kind="ulysses")).q_len == 8192
    assert attention(Layout(cp=4)).q_len == 2048


@pytest.mark.parametrize("n", [2, 4, 8])
def test_ulysses_moves_q_k_v_and_o_once_and_a_ring_k_and_v_n_minus_1_times(n: int) -> None:
    ulysses = sum(wire_bytes(op.kind, op.bytes, n) for op in exchanged(Layout(cp=n, cp_kind="ulysses")))
    ring = sum(op.bytes * op.count for op in exchanged(Layout(cp=n)))
    tensor = 8192 // n * 1024 * 2
    assert ulysses == 4 * tensor * (n - 1) / n
    assert ring == 2 * tensor * (n - 1)
    assert ring / ulysses == n / 2


def test_with_few_key_value_heads_a_ring_moves_less_and_ulysses_sends_a_head_to_every_rank() -> None:
    (ring,) = exchanged(Layout(cp=8), model=GROUPED)
    assert ring.bytes == 2 * 1024 * 256 * 2
    first, _ = exchanged(Layout(cp=8, cp_kind="ulysses"), model=GROUPED)
    assert first.bytes == 1024 * (1024 + 2 * 8 * 64) * 2


def test_causal_balance_of_8_tokens_over_2_ranks() -> None:
    assert rank_shares([8], 2, balanced=False) == [10, 26]
    assert rank_shares([8], 2) == [18, 18]
    assert rank_pairs(8, 2) * 2 == causal_pairs(8) == 36


def test_context_parallelism_divides_activations_not_weights_so_the_peak_is_not_one_nth() -> None:
    one, four = (stage_memory(job(), Layout(cp=n, zero=0))[0] for n in (1, 4))
    assert four.activations * 4 == pytest.approx(one.activations)
    assert four.states == one.states
    assert four.peak_allocated > one.peak_allocated / 4


def test_the_peak_counts_blocks_in_flight() -> None:
    layer = MODEL.layer(0)
    plain, more = (
        layer_operations(
            Job(MODEL, job().cluster, Execution(ring_buffers=n), 8192, 16), Layout(cp=4), layer.model_copy(update={"ffn": None})
        )
        for n in (0, 2)
    )
    assert more.transient - plain.transient == 2 * (2 * 2048 * 1024 * 2)


@pytest.mark.parametrize("kind", ["ring", "ulysses", "allgather"])
def test_backward_communicates_too(kind: str) -> None:
    assert exchanged(Layout(cp=4, cp_kind=kind), "backward_input")


def test_more_ring_ranks_mean_less_local_compute_and_more_passes() -> None:
    few, many = Layout(cp=2), Layout(cp=8)
    assert attention(many).flops < attention(few).flops
    assert exchanged(many)[0].count > exchanged(few)[0].count
