"""cases.md group B: layout legality. Each test names its case."""

from __future__ import annotations

import pytest

from cost_models.layout import Layout, even_split
from cost_models.states import layer_weights
from planner.emit.megatron.layout import layout_string
from planner.emit.megatron.reading import layers_of
from planner.legality import check, evaluation_violations, limits_of, padded_vocab, read_layout, ulysses_degrees, violations
from planner.space import Space, read_wishes
from profiles.errors import InputError
from profiles.model import ModelSpec
from tests.planner.jobs import decoder, job


def broken(found: list, rule: str):
    return next((v for v in found if v.rule == rule), None)


def test_b01_kv_heads_bound_tp_where_they_are_not_replicated() -> None:
    torchtitan = job("qwen3-30b-a3b", "h100-sxm:1x8", 4096, 64, "torchtitan")
    found = broken(violations(torchtitan, read_layout(torchtitan, "tp=8")), "kv_heads_divide_tp")
    assert found is not None
    assert "4 KV heads" in found.message and "1, 2, 4" in found.message
    assert found.nearest == 4
    megatron = job("qwen3-30b-a3b", "h100-sxm:1x8", 4096, 64, "megatron")
    assert broken(violations(megatron, read_layout(megatron, "tp=8,etp=1")), "kv_heads_divide_tp") is None

    def shared(execution: str, tp: int) -> int:
        """Elements of K's and V's matrices on a rank: all of attention's less query and output."""
        of = job("qwen3-30b-a3b", "h100-sxm:1x8", 4096, 64, execution)
        weights = layer_weights(of.model, of.model.layer(0))
        held = sum(
            w.local(Layout(tp=tp, sp=True), of.execution) for w in weights if w.part == "attention" and w.rows > 1 and w.columns > 1
        )
        return held - 2 * 2048 * 32 * 128 // tp

    whole = 2 * 2048 * 4 * 128
    assert shared("axisplan", 4) == shared("axisplan", 8) == whole // 4, "a head is replicated, not cut"
    assert shared("megatron", 8) == whole // 8, "Megatron-Core's one matrix of Q, K and V is cut evenly, and heads gathered"


@pytest.mark.parametrize(
    ("heads", "kv", "legal"),
    [
        (40, 8, [1, 2, 4, 8, 40]),
        (28, 4, [1, 2, 4, 28]),
        (32, 8, [1, 2, 4, 8, 16, 32]),
        (32, 32, [1, 2, 4, 8, 16, 32]),
        (12, 1, [1, 2, 3, 4, 6, 12]),
    ],
)
def test_b02_ulysses_degrees_need_query_and_kv_heads(heads: int, kv: int, legal: list[int]) -> None:
    assert ulysses_degrees(heads, kv) == legal


def test_b02_a_refusal_names_the_heads_that_failed() -> None:
    for degree, rule in ((5, "kv_heads_divide_ulysses"), (3, "query_heads_divide_ulysses")):
        j = job(decoder(heads=40, kv_heads=8, hidden=320), f"h100-sxm:{degree}x8", 15360, 40)
        layout = Layout(cp=degree, cp_kind="ulysses", dp_shard=8)
        wrong = broken(violations(j, layout), rule)
        assert wrong is not None
        assert ("8 KV heads" if rule.startswith("kv") else "40 query heads") in wrong.message
    both = job(decoder(heads=40, kv_heads=8, hidden=320), "h100-sxm:4x4", 15360, 40)
    beside = broken(violations(both, Layout(tp=2, cp=8, cp_kind="ulysses", sp=True)), "query_heads_divide_ulysses")
    assert beside is not None and "tp" in beside.message, "heads divide by tp * cp"


def test_b03_etp_left_out_is_tp_for_megatron_and_the_message_says_so() -> None:
    j = job("qwen3-30b-a3b", "h100-sxm:1x4", 4096, 64, "megatron")
    found = violations(j, read_layout(j, "tp=4,ep=4"))
    wrong = broken(found, "experts_fill_the_stage")
    assert wrong is not None and wrong.field == "etp" and wrong.nearest == 1
    assert "etp left out is tp" in wrong.message
    assert not violations(j, read_layout(j, "tp=4,ep=4,etp=1"))
    eight = job("qwen3-30b-a3b", "h100-sxm:1x8", 4096, 64, "megatron")
    nearest = broken(violations(eight, read_layout(eight, "pp=2,ep=8")), "experts_fill_the_stage")
    assert nearest is not None and nearest.field == "ep" and nearest.nearest == 4


@pytest.mark.parametrize(
    ("text", "edp_shard"),
    [
        ("tp=2,cp=2,dp_shard=2,ep=4", 2), ("tp=2,cp=2,dp_shard=2,ep=8", 1), ("dp_shard=8,ep=8", 1), ("tp=2,dp_shard=4,ep=2", 4),
        ("tp=2,cp=2,dp_shard=2,ep=16", None), ("dp_shard=8,cp=8", None),
    ],
)  # fmt: skip
def test_b04_six_layouts_are_legal_or_not_and_say_how_far_experts_are_sharded(text: str, edp_shard: int | None) -> None:
    j = job("qwen3-30b-a3b", "h100-sxm:1x8", 4096, 64, "torchtitan")
    layout = read_layout(j, text)
    assert bool(violations(j, layout)) == (edp_shard is None)
    assert edp_shard is None or layout.edp_shard == edp_shard


def test_b04_world_products_are_refused() -> None:
    j = job("qwen3-30b-a3b", "h100-sxm:1x8", 4096, 64, "torchtitan")
    assert broken(violations(j, read_layout(j, "tp=2,cp=2,dp_shard=2,ep=16")), "experts_fill_the_stage") is not None
    wrong = broken(violations(j, read_layout(j, "dp_shard=8,cp=8")), "degrees_fill_the_world")
    assert wrong is not None and "8 GPUs" in wrong.message


def test_b05_an_interleaved_pipeline_needs_as_many_microbatches_as_stages() -> None:
    j = job(decoder(layers=32), "h100-sxm:8x8", 64, 128, "megatron")
    wrong = broken(violations(j, read_layout(j, "pp=2,vpp=2,micro_batch=4")), "enough_microbatches")
    assert wrong is not None and wrong.field == "global_batch" and wrong.nearest == 256
    for word in ("global batch 128", "micro_batch 4", "dp 32", "pp = 2"):
        assert word in wrong.message


def test_b05_an_evaluation_batch_is_checked_by_itself() -> None:
    """15B, PP 2, VP 2, MBS 4, DP 32: 256 sequences train, and evaluating 128 of them has one microbatch for two stages."""
    j = job(decoder(layers=32), "h100-sxm:8x8", 64, 256, "megatron")
    layout = read_layout(j, "pp=2,vpp=2,micro_batch=4")
    assert check(j, layout)["legal"] and check(j, layout, 256)["legal"]
    (found,) = evaluation_violations(j, layout, 128)
    assert (found.rule, found.field, found.value, found.nearest) == ("enough_microbatches", "eval_batch", 128, 256)
    for word in ("evaluation", "global batch 128", "micro_batch 4", "dp 32", "pp = 2"):
        assert word in found.message
    assert check(j, layout, 128)["legal"] is False


@pytest.mark.parametrize(("layers", "pp", "mtp"), [(43, 6, 1), (61, 16, 1), (78, 11, 2), (61, 8, 0)])
def test_b13_a_layout_string_says_every_layer_and_keeps_mtp_with_the_loss(layers: int, pp: int, mtp: int) -> None:
    counts = even_split(layers, pp)
    text = layout_string(counts, mtp)
    assert layers_of(text) == counts and sum(layers_of(text)) == layers
    assert text.startswith("E") and text.endswith({0: "L", 1: "mL", 2: "m*2L"}[mtp])
    assert "m" not in text.rpartition("|")[0]


def test_b13_mtp_before_the_last_stage_is_refused_where_it_is_read() -> None:
    with pytest.raises(InputError, match="before the last stage"):
        layers_of("Et*2|t*2|m|L")


@pytest.mark.parametrize(("layers", "pp"), [(30, 4), (61, 16), (27, 8), (126, 16), (7, 5), (43, 6), (78, 11)])
def test_b06_stages_hold_every_layer(layers: int, pp: int) -> None:
    assert sum(even_split(layers, pp)) == layers
    j = job(decoder(layers=layers), f"h100-sxm:{pp}x8", 64, 64 * pp, "megatron")
    assert sum(layers_of(layout_string(even_split(layers, pp), 0))) == layers
    short = Layout(pp=pp, dp_shard=8, stages=(layers // pp,) * pp)
    assert (broken(violations(j, short), "stages_hold_all_layers") is not None) == (layers % pp != 0)


def test_b07_fewer_microbatches_than_stages_hang_and_are_refused() -> None:
    j = job(decoder(layers=8), "h100-sxm:1x8", 64, 4, "torchtitan")
    assert broken(violations(j, read_layout(j, "pp=8")), "enough_microbatches") is not None
    three = job(decoder(layers=9), "h100-sxm:3x1", 64, 8, "torchtitan")
    assert broken(violations(three, read_layout(three, "pp=3,micro_batch=3")), "batch_divides") is not None


def test_b08_the_sequence_divides_over_cp_tp_and_the_precision() -> None:
    def found(seq: int, text: str, precision: str = "bf16") -> list:
        j = job(decoder(heads=8), "h100-sxm:1x8", seq, 8, precision=precision)
        return violations(j, read_layout(j, text))

    wrong = broken(found(8190, "cp=4,tp=2"), "sequence_divides")
    assert wrong is not None and wrong.nearest == 8192
    assert not found(8192, "cp=4,tp=2")
    eight_bit = found(8200, "cp=4,tp=2", "fp8")
    assert broken(eight_bit, "tokens_suit_the_precision") is not None
    assert broken(eight_bit, "tokens_suit_the_precision").nearest == 8192


@pytest.mark.parametrize(
    ("vocab", "tp", "multiple", "rows"),
    [(32000, 2, 128, 32000), (32000, 4, 128, 32256), (32000, 8, 128, 32768), (151669, 4, 128, 152064), (128256, 8, 128, 129024),
     (128256, 8, 64, 128512), (129280, 24, 128, 132096), (50257, 2, 0, 50257)],
)  # fmt: skip
def test_b09_padded_vocabulary(vocab: int, tp: int, multiple: int, rows: int) -> None:
    assert padded_vocab(vocab, tp, multiple) == rows


def test_b10_an_unpadded_odd_vocabulary_does_not_go_with_tp() -> None:
    titan = job(decoder(vocab=50257), "h100-sxm:1x2", 64, 8, "torchtitan")
    assert broken(violations(titan, read_layout(titan, "tp=2")), "vocabulary_divides_tp") is not None
    megatron = job(decoder(vocab=50257), "h100-sxm:1x2", 64, 8, "megatron")
    assert limits_of(megatron).pads_vocab == 128
    assert not violations(megatron, read_layout(megatron, "tp=2"))


def test_b11_all_broken_rules_come_at_once() -> None:
    model = decoder(heads=64, hidden=1024, experts=256, expert_width=96, width=96)
    j = job(model, "h100-sxm:1x3", 96, 6)
    rules = {v.rule for v in violations(j, read_layout(j, "tp=3,ep=3"))}
    assert {"heads_divide_tp", "experts_divide_ep"} <= rules
    heads = job(decoder(heads=52, hidden=832, width=832), "h100-sxm:1x8", 64, 8)
    wrong = broken(violations(heads, read_layout(heads, "tp=8")), "heads_divide_tp")
    assert wrong is not None and "1, 2, 4, 13, 26, 52" in wrong.message and wrong.nearest == 4


def test_b12_accelerate_has_no_ddp_beside_tp() -> None:
    j = job("llama-3-8b", "h100-sxm:1x8", 4096, 64, "accelerate")
    assert broken(violations(j, read_layout(j, "tp=2,dp_replicate=4,zero=0")), "replication_needs_sharding") is not None
    assert not violations(j, read_layout(j, "tp=2,dp_replicate=2,dp_shard=2,zero=3"))


def test_b15_capabilities_are_refused_with_the_target_named() -> None:
    fsdp = job("llama-3-8b", "h100-sxm:1x8", 4096, 64, "megatron")
    for text, rule in (("pp=2,zero=3", "zero_and_pipeline"), ("tp=2,zero=3", "zero_and_tensor")):
        wrong = broken(violations(fsdp, read_layout(fsdp, text)), rule)
        assert wrong is not None and "megatron" in wrong.message
    mla = job("deepseek-v3", "h100-sxm:2x8", 4096, 64, "megatron")
    assert broken(violations(mla, read_layout(mla, "cp=2,cp_kind=ulysses,etp=1")), "latent_attention_and_ulysses") is not None
    space = Space(fsdp)
    sharded = [(p, s) for p in space.prefixes for s in space.shards(p) if s.zero == 3]
    assert sharded and all(p.tp == p.pp == 1 for p, _ in sharded), "pruned before anything is costed"
    assert all(p.ulysses == 1 for p in Space(mla).prefixes)


def test_b17_a_batch_that_does_not_divide_proposes_the_nearest() -> None:
    j = job(decoder(layers=8, heads=8), "h100-sxm:184x8", 64, 32, "megatron")
    wrong = broken(violations(j, read_layout(j, "tp=8,pp=8")), "batch_divides")
    assert wrong is not None and (wrong.field, wrong.value, wrong.nearest) == ("global_batch", 32, 23)


def test_b18_deepspeed_trains_tp_with_zero_0_to_2() -> None:
    j = job("llama-3-8b", "h100-sxm:1x8", 4096, 64, "deepspeed")
    assert broken(violations(j, read_layout(j, "tp=2,zero=3")), "zero_and_tensor") is not None
    assert not violations(j, read_layout(j, "tp=2,zero=2"))


def test_e07_a_p2p_ring_does_not_split_sliding_windows() -> None:
    j = job("gpt-oss-20b", "h100-sxm:1x8", 4096, 64, "megatron")
    assert broken(violations(j, read_layout(j, "cp=2,etp=1")), "windows_and_ring") is not None


def test_f05_tied_embeddings_are_not_split_by_torchtitan() -> None:
    tied: ModelSpec = decoder(layers=8, tied=True)
    titan = job(tied, "h100-sxm:1x8", 64, 64, "torchtitan")
    wrong = broken(violations(titan, read_layout(titan, "pp=2")), "tied_embeddings_and_pipeline")
    assert wrong is not None and wrong.nearest == 1
    assert not violations(job(tied, "h100-sxm:1x8", 64, 64, "megatron"), read_layout(titan, "pp=2,zero=1"))


def test_g12_check_leaves_a_layout_that_fits_alone() -> None:
    j = job("llama-3-8b", "h100-sxm:1x8", 4096, 64)
    document = check(j, "tp=2,zero=3")
    assert document["legal"] and document["fits"] and document["binding"]["over_bytes"] == 0


def test_document_deepseek_v3_layout_is_legal() -> None:
    j = job("deepseek-v3", "h800-sxm:256x8", 4096, 15360)
    layout = read_layout(j, "pp=16,ep=64,zero=1,schedule=dualpipe")
    assert violations(j, layout) == []
    assert j.model.moe is not None and j.model.moe.experts // layout.ep == 4
    assert check(j, "pp=16,ep=64,zero=1,recompute=full")["fits"]


@pytest.mark.parametrize(("tp", "micro_batch"), [(1, 4), (2, 8), (4, 8)])
def test_b16_the_micro_batch_divides_the_batch_of_a_data_parallel_rank_not_of_a_gpu(tp: int, micro_batch: int) -> None:
    """16 GPUs, 64 sequences: 4, 8 and 16 a rank at tp 1, 2 and 4; of the micro batches 4 and 8 the larger that divides."""
    j = job(decoder(layers=8, heads=8), "h100-sxm:2x8", 64, 64)
    found = Space(j, read_wishes(f"tp={tp},pp=1,cp=1")).batches(tp, 1, 1, 16 // tp)
    assert max(b.micro_batch for b in found if b.micro_batch in (4, 8)) == micro_batch
    wrong = broken(violations(j, read_layout(j, f"tp={tp},micro_batch={64 * tp // 16 * 2}")), "batch_divides")
    assert wrong is not None
