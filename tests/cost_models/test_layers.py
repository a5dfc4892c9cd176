"""Operations and kept tensors of layers, against published formulas and counts made by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from cost_models.attention_ops import causal_pairs, rank_pairs
from cost_models.execution import Execution
from cost_models.job import Job
from cost_models.layers import LayerCost, embedding_operations, head_operations, layer_operations
from cost_models.layout import Layout, RecomputeRule
from cost_models.recompute import kept_bytes
from cost_models.states import layer_weights
from cost_models.units import unit_cost
from profiles.hardware import load_cluster
from profiles.huggingface import load_model, model_names
from profiles.model import Attention, Layer, LinearAttention, Mlp, ModelSpec, Moe, StateSpace, uniform
from profiles.operations import Attend, Collective, GroupedMatmul, Matmul

KORTHIKANTI = Execution(attention="unfused", causal_skip=False, attention_dropout=True, hidden_dropout=True, statistics=False)
CLUSTER = load_cluster("h100-sxm:8x8")


def gpt(hidden: int = 12288, heads: int = 96, layers: int = 2) -> ModelSpec:
    mixer = Attention(heads=heads, kv_heads=heads, head_dim=hidden // heads, rotary=False)
    ffn = Mlp(width=4 * hidden, gated=False, activation="gelu")
    return uniform("gpt", Layer(mixer=mixer, ffn=ffn), layers, hidden=hidden, vocab=51200, norm="layer")


def job(model: ModelSpec, execution: Execution | None = None, seq_len: int = 2048, precision: str = "bf16", **more: object) -> Job:
    return Job(model, CLUSTER, execution or Execution(), seq_len, 64, precision, **more)


def cost(model: ModelSpec, execution: Execution | None = None, layer: int = 0, seq_len: int = 2048, **degrees: object) -> LayerCost:
    layout = Layout(**{"sp": degrees.get("tp", 1) > 1, **degrees})
    return layer_operations(job(model, execution, seq_len), layout, model.layer(layer))


def collectives(ops: tuple, axis: str = "tp") -> list[tuple[str, int]]:
    return [(op.kind, int(op.bytes)) for op in ops if isinstance(op, Collective) and op.axis == axis]


# -- Korthikanti et al. 2022 (arXiv:2205.05198), sections 4 and 5 -----------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize(
    ("tp", "sp", "rule", "per_sbh"),
    [
        (1, False, "none", lambda a, s, h, t: 34 + 5 * a * s / h),
        (8, False, "none", lambda a, s, h, t: 10 + 24 / t + 5 * a * s / (h * t)),
        (8, True, "none", lambda a, s, h, t: (34 + 5 * a * s / h) / t),
        (8, True, "selective", lambda a, s, h, t: 34 / t),
        (8, False, "selective", lambda a, s, h, t: 10 + 24 / t),
        (1, False, "full", lambda a, s, h, t: 2),
        (8, False, "full", lambda a, s, h, t: 2),
    ],
)
@pytest.mark.parametrize(("hidden", "heads", "seq_len"), [(12288, 96, 2048), (20480, 128, 2048), (6144, 64, 4096)])
def test_activations_of_a_layer_are_korthikantis(
    hidden: int, heads: int, seq_len: int, tp: int, sp: bool, rule: str, per_sbh: object, micro_batch: int
) -> None:
    model = gpt(hidden, heads)
    one = cost(model, KORTHIKANTI, seq_len=seq_len, tp=tp, sp=sp, micro_batch=micro_batch)
    modules = ("core_attn",) if rule == "selective" else ()
    kept = kept_bytes(one, RecomputeRule(0, None, rule, modules))
    assert kept == pytest.approx(per_sbh(heads, seq_len, hidden, tp) * seq_len * micro_batch * hidden, rel=1e-12)


def test_two_norms_keep_2sbh_each_and_sequence_parallelism_changes_only_the_replicated_10sbh() -> None:
    model, t = gpt(), 8
    sbh = 2048 * 12288
    without, with_sp = (cost(model, KORTHIKANTI, tp=t, sp=sp) for sp in (False, True))
    norms = [s.bytes for s in without.saved if s.name.endswith("norm_input")]
    assert norms == [2 * sbh, 2 * sbh]
    changed = {s.name for s, u in zip(without.saved, with_sp.saved, strict=True) if s.bytes != u.bytes}
    assert sum(s.bytes for s in without.saved if s.name in changed) == 10 * sbh
    assert changed == {
        "attention_norm_input", "attention_norm_output", "mlp_norm_input", "mlp_norm_output",
        "attention_dropout_mask", "mlp_dropout_mask",
    }  # fmt: skip


def test_norm_weights_are_not_split_over_tensor_parallelism() -> None:
    norms = [w for w in layer_weights(gpt(), gpt().layer(0)) if w.part == "norm"]
    assert all(w.local(Layout(tp=8), Execution()) == 12288 for w in norms)


def test_selective_recompute_adds_4bls2h_of_flops_to_a_layer_and_full_one_forward() -> None:
    """NVIDIA/Megatron-LM#523: the term is 16, not 24, B L s^2 h: one forward of attention again (two products, full square)."""
    from cost_models.recompute import recomputed

    one = cost(gpt(), KORTHIKANTI)
    again = recomputed(one.forward, RecomputeRule(0, None, "selective", ("core_attn",)))
    assert sum(op.flops for op in again) == pytest.approx(4 * 2048**2 * 12288)
    assert sum(op.flops for op in recomputed(one.forward, RecomputeRule(0, None, "full"))) == sum(op.flops for op in one.forward)


# -- documents and Megatron's TP -------------------------------------------------------------------------------------------


def test_tensor_parallelism_costs_two_all_reduces_forward_and_two_backward() -> None:
    one = cost(gpt(), tp=8, sp=False)
    size = 2 * 2048 * 12288
    assert collectives(one.forward) == collectives(one.backward_input) == [("all_reduce", size)] * 2
    assert collectives(one.backward_weight) == []


def test_sequence_parallelism_moves_the_same_bytes_and_megatron_gathers_once_more_in_backward() -> None:
    size = 2 * 2048 * 12288
    megatron, dtensor = cost(gpt(), tp=8), cost(gpt(), Execution(keeps_gathered_input=True), tp=8)
    assert collectives(megatron.forward) == [("all_gather", size), ("reduce_scatter", size)] * 2
    assert collectives(megatron.backward_input) == [("all_gather", size), ("reduce_scatter", size)] * 2
    assert collectives(megatron.backward_weight) == [("all_gather", size)] * 2
    assert collectives(dtensor.backward_weight) == []
    assert dtensor.saved_bytes - megatron.saved_bytes == 2 * size * 7 // 8


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_matrix_flops_of_forward_follow_the_weights_and_backward_is_twice_that(tp: int) -> None:
    model = load_model("llama-3.1-8b")
    one = cost(model, tp=tp)
    weights = sum(w.elements for w in layer_weights(model, model.layer(0)) if w.linear)
    products = [op.flops for op in one.forward if isinstance(op, Matmul)]
    assert sum(products) == pytest.approx(2 * 2048 * weights / tp)
    backward = [op.flops for op in one.backward_input + one.backward_weight if isinstance(op, Matmul)]
    assert sum(backward) == pytest.approx(2 * sum(products))
    attention = [op for op in one.forward if isinstance(op, Attend)]
    assert sum(op.flops for op in attention) == pytest.approx(4 * (2048 * 2049 // 2) * 128 * 32 / tp)


def test_kv_heads_are_whole_where_tp_exceeds_them() -> None:
    model = load_model("qwen3-30b-a3b")
    kept = {s.name: s.bytes for s in cost(model, tp=8, layer=0).saved}
    assert kept["key_value"] == 2048 * 2 * 128 * 2
    kv = [w for w in layer_weights(model, model.layer(0)) if w.name in ("k", "v")]
    assert [w.local(Layout(tp=8), Execution()) for w in kv] == [128 * 2048] * 2


# -- causal pairs ----------------------------------------------------------------------------------------------------------


def pairs_by_hand(length: int, owned: range | list[int], window: int | None, chunk: int | None) -> int:
    def seen(i: int) -> int:
        first = 0 if window is None else max(0, i + 1 - window)
        return i + 1 - max(first, i // chunk * chunk if chunk else 0)

    return sum(seen(i) for i in owned)


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (1, None), (5, None), (16, None), (64, None), (None, 8), (None, 12)])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("balanced", [True, False])
def test_pairs_of_the_busiest_rank_are_counted_exactly(window: int | None, parts: int, balanced: bool, chunk: int | None) -> None:
    length = 32
    block = length // (2 * parts)
    ranks = [
        [*range(r * block, (r + 1) * block), *range(length - (r + 1) * block, length - r * block)]
        if balanced
        else list(range(r * 2 * block, (r + 1) * 2 * block))
        for r in range(parts)
    ]
    most = max(pairs_by_hand(length, own, window, chunk) for own in ranks)
    assert rank_pairs(length, parts, balanced=balanced, window=window, chunk=chunk) == most
    assert causal_pairs(length, window, chunk) == pairs_by_hand(length, range(length), window, chunk)


def test_eight_tokens_over_two_ranks_have_10_and_26_pairs_contiguous_and_18_each_balanced() -> None:
    assert causal_pairs(4) == 10
    assert rank_pairs(8, 2, balanced=False) == 26
    assert rank_pairs(8, 2) == 18


# -- context parallelism ---------------------------------------------------------------------------------------------------


def test_ring_passes_key_values_n_minus_1_times_and_their_gradients_n_times_in_backward() -> None:
    model = load_model("llama-3.1-8b")
    one = cost(model, seq_len=8192, cp=4)
    block = 8192 // 4 * 2 * 8 * 128 * 2
    ring = [(op.name, op.bytes, op.count) for op in one.forward if isinstance(op, Collective)]
    assert ring == [("ring_kv", block, 3)]
    back = [(op.name, op.bytes, op.count) for op in one.backward_input if isinstance(op, Collective)]
    assert sorted(back) == [("ring_kv", block, 3), ("ring_kv_gradient", block, 4)]


def test_ulysses_moves_query_key_value_and_output_and_ring_only_key_value() -> None:
    model = gpt(4096, 32)
    one = cost(model, seq_len=8192, cp=4, cp_kind="ulysses")
    tokens, element = 8192 // 4, 2
    assert collectives(one.forward, "ulysses") == [
        ("all_to_all", 3 * tokens * 4096 * element),
        ("all_to_all", tokens * 4096 * element),
    ]
    ring = cost(model, seq_len=8192, cp=4)
    assert [(op.bytes * op.count) for op in ring.forward if isinstance(op, Collective)] == [3 * 2 * tokens * 4096 * element]


def test_context_parallelism_divides_activations_and_compute_not_weights() -> None:
    model = load_model("llama-3.1-8b")
    one, four = cost(model, seq_len=8192), cost(model, seq_len=8192, cp=4)
    assert four.saved_bytes * 4 == one.saved_bytes
    flops = [sum(op.flops for op in c.forward) for c in (one, four)]
    assert flops[1] * 4 == pytest.approx(flops[0])
    weight = [w.local(Layout(cp=4), Execution()) for w in layer_weights(model, model.layer(0))]
    assert weight == [w.elements for w in layer_weights(model, model.layer(0))]


def test_gathered_key_values_cost_an_all_gather_and_a_reduce_scatter_in_backward() -> None:
    one = cost(load_model("llama-3.1-8b"), seq_len=8192, cp=4, cp_kind="allgather")
    full = 8192 * 2 * 8 * 128 * 2
    assert collectives(one.forward, "ring") == [("all_gather", full)]
    assert sorted(collectives(one.backward_input, "ring")) == [("all_gather", full), ("reduce_scatter", full)]


# -- experts ---------------------------------------------------------------------------------------------------------------

MOE = load_model("qwen3-30b-a3b")


def routed(one: LayerCost) -> dict[str, float]:
    return {s.name: s.bytes for s in one.saved if s.name.startswith("experts") and s.name != "experts_route"}


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_routed_activations_do_not_depend_on_expert_parallelism_and_weights_fall_with_it(ep: int) -> None:
    """Case A06, NVIDIA/Megatron-LM PR#6782: EP ranks exchange tokens, they do not remove them."""
    balanced = job(MOE, moe_imbalance=1.0)
    base, here = (layer_operations(balanced, Layout(ep=e, dp_shard=8), MOE.layer(0)) for e in (1, ep))
    assert routed(base) == routed(here)
    assert routed(here)["experts_product"] == 8 * 2048 * 768 * 2
    experts = sum(w.local(Layout(ep=ep), Execution()) for w in layer_weights(MOE, MOE.layer(0)) if w.part == "experts")
    assert experts == 128 // ep * 3 * 2048 * 768


def test_routed_activations_are_split_by_tensor_parallelism_and_grow_with_top_k() -> None:
    balanced = job(MOE, moe_imbalance=1.0)
    one = layer_operations(balanced, Layout(), MOE.layer(0))
    for etp in (1, 4):
        split = layer_operations(balanced, Layout(tp=4, etp=etp, sp=True), MOE.layer(0))
        assert routed(split)["experts_product"] * 4 == routed(one)["experts_product"]
    layer = MOE.layer(0)
    double = layer.model_copy(update={"ffn": layer.ffn.model_copy(update={"top_k": 16})})
    assert routed(layer_operations(balanced, Layout(), double))["experts_product"] == 2 * routed(one)["experts_product"]


def test_expert_parallelism_costs_two_all_to_alls_forward_and_two_backward() -> None:
    one = layer_operations(job(MOE, moe_imbalance=1.0), Layout(ep=8, dp_shard=8), MOE.layer(0))
    size = 2048 * 8 * 2048 * 2
    assert collectives(one.forward, "ep") == collectives(one.backward_input, "ep") == [("all_to_all", size)] * 2


def test_a_hot_rank_grows_compute_buffers_and_communication_alike() -> None:
    calm, hot = (layer_operations(job(MOE, moe_imbalance=f), Layout(ep=8, dp_shard=8), MOE.layer(0)) for f in (1.0, 1.5))
    for find in (
        lambda c: sum(op.flops for op in c.forward if isinstance(op, GroupedMatmul)),
        lambda c: routed(c)["experts_product"],
        lambda c: sum(op.bytes for op in c.forward if isinstance(op, Collective)),
    ):
        assert find(hot) == pytest.approx(1.5 * find(calm))


def test_expert_tensor_parallelism_gathers_and_scatters_tokens_and_shared_experts_follow_tp() -> None:
    model = load_model("deepseek-v3")
    layout = Layout(tp=4, etp=2, ep=4, dp_shard=2, sp=True)
    one = layer_operations(job(model, moe_imbalance=1.0), layout, model.layer(10))
    assert [k for k, _ in collectives(one.forward, "etp")] == ["all_gather", "reduce_scatter"]
    shared = [op for op in one.forward if isinstance(op, Matmul) and op.name == "shared_up"]
    assert [(op.n, op.k) for op in shared] == [(2 * 2048 // 4, 7168)]
    experts = [op for op in one.forward if isinstance(op, GroupedMatmul)]
    assert [(op.n, op.k, op.groups) for op in experts] == [(2 * 2048 // 2, 7168, 64), (7168, 2048 // 2, 64)]


def test_capacity_1_pads_to_the_mean_and_an_all_gather_dispatch_moves_every_token() -> None:
    layer = MOE.layer(0)
    capped = layer_operations(job(MOE), Layout(ep=8, dp_shard=8, capacity=1.0), layer)
    assert routed(capped)["experts_product"] == 8 * 2048 * 768 * 2
    gathered = layer_operations(job(MOE), Layout(ep=8, dp_shard=8, dispatcher="allgather"), layer)
    size = 8 * 2048 * 2048 * 2
    assert collectives(gathered.forward, "etp_ep") == [("all_gather", size), ("reduce_scatter", size)]


def test_imbalance_is_one_without_expert_parallelism_and_grows_with_it_by_default() -> None:
    from cost_models.moe_ops import imbalance, imbalance_of

    moe = MOE.layer(0).ffn
    assert isinstance(moe, Moe)
    found = [imbalance(job(MOE), ep, moe) for ep in (1, 2, 8, 64)]
    assert found[0] == 1.0
    assert found == sorted(found)
    assert 1.0 < found[-1] < 1.6
    assert imbalance_of((1, 1, 6, 0), (0, 0, 1, 1)) == 1.5


# -- every layer kind ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", model_names())
def test_linear_flops_of_every_built_in_model_follow_its_weights(name: str) -> None:
    """Each linear weight meets each token once forward (experts: top_k of them)."""
    model = load_model(name)
    for index in set(model.pattern):
        layer = model.kinds[index]
        one = layer_operations(job(model, Execution(vocab_multiple=1)), Layout(), layer)
        expected = 0.0
        for w in layer_weights(model, layer):
            if w.linear or w.name in ("router", "shared_gate"):
                share = layer.ffn.top_k / layer.ffn.experts if w.split == "expert" else 1.0
                expected += 2 * 2048 * w.elements * share
        found = sum(op.flops for op in one.forward if isinstance(op, (Matmul, GroupedMatmul)) and op.name != "scan")
        assert found == pytest.approx(expected), (name, index)


def test_a_parallel_block_keeps_and_reduces_one_tensor_for_both_halves() -> None:
    mixer = Attention(heads=32, kv_heads=32, head_dim=128)
    beside = uniform("p", Layer(mixer=mixer, ffn=Mlp(width=16384), norms=1, parallel=True), 2, hidden=4096, vocab=32000)
    serial = uniform("s", Layer(mixer=mixer, ffn=Mlp(width=16384)), 2, hidden=4096, vocab=32000)
    one, two = cost(beside, tp=8, sp=False), cost(serial, tp=8, sp=False)
    assert len(collectives(one.forward)) == 1
    assert len(collectives(two.forward)) == 2
    assert two.saved_bytes - one.saved_bytes == 2 * 2 * 2048 * 4096 + 4 * 2048


@pytest.mark.parametrize(
    "mixer",
    [
        StateSpace(heads=64, head_dim=64, state=128, groups=8),
        StateSpace(version=1, heads=4096, head_dim=1, state=16, dt_rank=128),
        LinearAttention(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
        LinearAttention(form="lightning", key_heads=32, value_heads=32, key_dim=96, value_dim=96),
    ],
)
def test_mixers_without_softmax_cost_linearly_in_the_sequence_and_split_by_heads(mixer: StateSpace | LinearAttention) -> None:
    model = uniform("m", Layer(mixer=mixer, ffn=None, norms=1), 2, hidden=2048, vocab=32000)
    short, long, split = cost(model), cost(model, seq_len=4096), cost(model, tp=8)
    flops = [sum(op.flops for op in c.forward) for c in (short, long, split)]
    assert flops[1] == pytest.approx(2 * flops[0])
    assert long.saved_bytes == pytest.approx(2 * short.saved_bytes)
    assert flops[2] < flops[0] / 6


def test_an_mtp_module_is_a_layer_a_projection_and_a_head() -> None:
    model = load_model("deepseek-v3")
    layout, work = Layout(), job(model, moe_imbalance=1.0)
    parts = [unit_cost(work, layout, "mtp"), layer_operations(work, layout, model.layer(60)), head_operations(work, layout)]
    flops = [sum(op.flops for op in p.forward) for p in parts]
    assert flops[0] == pytest.approx(flops[1] + flops[2] + 2 * 2048 * 2 * 7168 * 7168)


# -- head and embedding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "gib"), [(9216, 2.61), (103756, 29.39), (205280, 58.14)])
def test_fp32_logits_are_tokens_by_vocabulary_over_tp_by_4_bytes(tokens: int, gib: float) -> None:
    """Case A17, THUDM/slime#1951: vocabulary 152,064 at TP 2."""
    model = uniform("q", load_model("llama-3.1-8b").layer(0), 2, hidden=4096, vocab=152064)
    fp32 = Execution(logit_saved_bytes=4, logit_peak_bytes=4)
    head = head_operations(job(model, fp32, seq_len=tokens), Layout(tp=2, sp=True))
    assert next(s.bytes for s in head.saved if s.name == "logits") / 2**30 == pytest.approx(gib, abs=0.01)


def test_a_chunked_loss_keeps_one_chunk_of_logits() -> None:
    """ISEEKYAN/Megatron-LM PR#132: 8,192 x 151,936 x 4 bytes = 4.637 GiB; a chunk of 1,024 tokens 0.580 GiB."""
    model = uniform("q", load_model("llama-3.1-8b").layer(0), 2, hidden=4096, vocab=151936)
    fp32 = Execution(logit_saved_bytes=4, logit_peak_bytes=4, weight_gradient_bytes=0)
    whole = head_operations(job(model, fp32, seq_len=8192), Layout())
    assert next(s.bytes for s in whole.saved if s.name == "logits") / 2**30 == pytest.approx(4.637, abs=0.001)
    chunked = head_operations(job(model, fp32.with_(loss_chunk_tokens=1024), seq_len=8192), Layout())
    assert not any(s.name == "logits" for s in chunked.saved)
    assert chunked.transient / 2**30 == pytest.approx(0.580, abs=0.001)


def test_the_vocabulary_is_padded_to_a_multiple_of_tp() -> None:
    head = head_operations(job(gpt(), Execution(vocab_multiple=128)), Layout(tp=8, sp=True))
    assert next(op.n for op in head.forward if isinstance(op, Matmul)) == 51200 // 8
    odd = uniform("o", gpt().layer(0), 2, hidden=1024, vocab=50257)
    head = head_operations(job(odd, Execution(vocab_multiple=128)), Layout(tp=8, sp=True))
    assert next(op.n for op in head.forward if isinstance(op, Matmul)) * 8 == 51200


def test_the_embedding_has_no_input_gradient_of_its_own() -> None:
    assert [op for op in embedding_operations(job(gpt()), Layout()).backward_input if not isinstance(op, Collective)] == []


# -- arrays ----------------------------------------------------------------------------------------------------------------

LAYOUTS = [
    Layout(tp=tp, sp=tp > 1, cp=cp, ep=ep, etp=etp, micro_batch=mb, dp_shard=dp, cp_kind=kind)
    for tp, cp, ep, etp, mb, dp, kind in [
        (1, 1, 1, 1, 1, 8, "ring"), (2, 2, 4, 1, 2, 8, "ring"), (4, 4, 8, 2, 1, 4, "ring"), (8, 2, 2, 4, 4, 2, "ulysses"),
        (2, 4, 8, 1, 1, 2, "ulysses"),
        (2, 4, 1, 1, 3, 1, "ring2xulysses2"),
    ]
]  # fmt: skip


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b"])
def test_arrays_of_degrees_cost_what_each_layout_costs(name: str) -> None:
    model = load_model(name)
    fields = ("tp", "sp", "ring", "ulysses", "ep", "etp", "micro_batch")
    arrays = SimpleNamespace(
        cp_kind="ring", dispatcher="alltoall", capacity=0.0, **{f: np.array([getattr(x, f) for x in LAYOUTS]) for f in fields}
    )
    work = job(model, seq_len=4096)
    for build in (*(lambda d, k=k: layer_operations(work, d, k) for k in model.kinds), lambda d: head_operations(work, d)):
        many = build(arrays)
        for place, layout in enumerate(LAYOUTS):
            one = build(layout)
            assert np.broadcast_to(many.saved_bytes, len(LAYOUTS))[place] == pytest.approx(one.saved_bytes)
            assert np.broadcast_to(many.transient, len(LAYOUTS))[place] == pytest.approx(one.transient)
            flops = sum(op.flops for op in many.operations())
            assert np.broadcast_to(flops, len(LAYOUTS))[place] == pytest.approx(sum(op.flops for op in one.operations()))
            for axis in ("tp", "ring", "ulysses", "ep", "etp"):
                moved = [
                    sum(np.broadcast_to(op.bytes * op.count * (getattr(d, axis) > 1), len(LAYOUTS))[p] for op in c.operations()
                        if isinstance(op, Collective) and op.axis == axis)
                    for c, d, p in ((many, arrays, place), (one, layout, 0))
                ]  # fmt: skip
                assert moved[0] == pytest.approx(moved[1])


def test_a_state_space_scan_does_the_four_products_of_the_chunked_algorithm() -> None:
    """Mamba-2, arXiv:2405.21060, section 6: BMM(T/Q, Q, Q, N) and BMM(T/Q, Q, P, Q), of which causality leaves half, BMM(T/Q, N, P, Q) and
    BMM(T/Q, Q, P, N); the projections beside them are 2 FLOPs a weight and token, of all but convolution, scalars and norms."""
    mixer = StateSpace(heads=64, head_dim=64, state=128, groups=8)
    model = uniform("m", Layer(mixer=mixer, norms=1), 2, hidden=2048, vocab=32000)
    work = job(model, seq_len=4096)
    cost = layer_operations(work, Layout(), model.kinds[0])
    scan = sum(op.flops for op in cost.forward if isinstance(op, Matmul) and op.name == "scan")
    heads, width, state, chunk = 64, 64, 128, 256
    assert scan / 4096 == chunk * state * 8 + chunk * width * heads + 4 * state * width * heads
    linear = sum(op.flops for op in cost.forward if isinstance(op, Matmul) and op.name != "scan")
    weights = sum(w.elements for w in layer_weights(model, model.kinds[0]) if w.linear)
    assert linear / 4096 == 2 * weights


def test_the_gated_delta_rule_does_the_products_of_its_chunked_form() -> None:
    """arXiv:2412.06464, section 3.3: as linear attention, and K K^T, the inverse times K and times V (causal halves), and the corrected
    keys' read of the state."""
    mixer = LinearAttention(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
    model = uniform("d", Layer(mixer=mixer, norms=1), 2, hidden=2048, vocab=32000)
    cost = layer_operations(job(model, seq_len=4096), Layout(), model.kinds[0])
    scan = sum(op.flops for op in cost.forward if isinstance(op, Matmul) and op.name == "scan")
    key = value = 128
    linear = 64 * (key + value) + 4 * key * value
    correction = 64 * (2 * key + value) + 2 * key * value
    assert scan / 4096 == 32 * (linear + correction)
    again = sum(op.flops for op in cost.backward_input if isinstance(op, Matmul) and op.name == "scan")
    assert again == 2 * scan


def test_an_eager_layer_norm_keeps_its_16_bit_input_and_an_eager_rms_norm_fp32_copies() -> None:
    """MPT without checkpoints: input and output of two norms, q, k, v, attention's output, GELU's input and output: 32 h bytes a token,
    and two fp32 statistics a norm, one a head."""
    eager = Execution(attention="fa2", elementwise="eager", fused_qkv=False)
    kept = cost(gpt(), eager)
    tokens, hidden, heads = 2048, 12288, 96
    assert sum(t.bytes for t in kept.saved) == tokens * (32 * hidden + 2 * 8 + 4 * heads)
    chain = cost(gpt().model_copy(update={"norm": "rms"}), eager)
    assert sum(t.bytes for t in chain.saved) == tokens * (32 * hidden + 2 * 4 * hidden + 2 * 4 + 4 * heads)
