"""Cases of group G (cases.md): what users ask of planners and estimators."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from cost_models.execution import load_execution
from cost_models.flops import flops_per_token
from cost_models.job import Job
from cost_models.layers import layer_operations
from cost_models.layout import Layout
from cost_models.memory import fits
from cost_models.state_bytes import bytes_per_parameter
from cost_models.states import layer_weights
from planner import screen
from planner.legality import check, read_layout
from planner.solve import PlanRequest, solve
from profiles.errors import DoesNotFit
from profiles.hardware import describe, load_cluster
from profiles.huggingface import load_model
from profiles.model import Attention, Layer, Mlp, uniform
from tests.planner.jobs import decoder, job


def test_g01_deepseek_v3_on_eight_gpus_fits_in_no_layout_and_no_time_is_said():
    with pytest.raises(DoesNotFit) as refused:
        solve(PlanRequest(job("deepseek-v3", "h100-sxm:1x8", 4096, 64)))
    line = str(refused.value)
    assert refused.value.exit_code == 3
    assert line.startswith("no feasible layout: deepseek-v3 on 8 x h100")
    assert re.search(r"; (optimizer|parameters|gradients) binds", line)
    assert re.search(r"would fit: .*\b\d+ GPUs of this kind", line)
    assert not re.search(r"\d m?s\b|second", line)


@pytest.mark.parametrize("command", ["plan", "estimate", "check"])
def test_g02_every_path_keeps_the_default_margin_and_no_plan_goes_beyond_it(invoke, command):
    arguments = ["llama-3.2-1b", "--cluster", "h100-sxm:1x2", "--seq-len", "2k", "--global-batch", "64", "--json"]
    arguments += [] if command == "plan" else ["--layout", "micro_batch=8"]
    code, out, _ = invoke(command, *arguments)
    assert code == 0
    limit = load_cluster("h100-sxm:1x2").gpu.usable_bytes * (1 - 0.08)
    document = json.loads(out)
    found = document["estimate"] if command == "plan" else document
    if command == "check":
        worst = fits(job("llama-3.2-1b", "h100-sxm:1x2", 2048, 64), Layout(dp_shard=2, micro_batch=8))[1]
        assert document["binding"]["headroom_bytes"] == pytest.approx(limit - worst.device, abs=1)
    else:
        assert found["limit_bytes"] == pytest.approx(limit)
        assert max(s["device"] for s in found["memory"]) <= limit


def test_g03_a_models_own_config_file_gives_the_experts_of_the_built_in_name(tmp_path):
    """384 experts at EP 8 are 48 a rank, not 384."""
    source = Path(__file__).resolve().parents[2] / "profiles" / "data" / "models" / "kimi-k2.json"
    config = tmp_path / "config.json"
    config.write_text(source.read_text(encoding="utf-8"))
    known, read = load_model("kimi-k2"), load_model(config)
    assert read.parameters == known.parameters
    layout = Layout(ep=8, dp_shard=8)
    weights = [w for w in layer_weights(read, read.layer(read.num_layers - 1)) if w.part == "experts"]
    execution = load_execution("axisplan")
    assert sum(w.local(layout, execution) for w in weights) * 8 == sum(w.elements for w in weights)


def test_g05_a_plan_uses_exactly_the_gpus_it_was_given():
    for cluster in ("h100-sxm:1x1", "h100-sxm:1x2", "h100-sxm:1x3", "h100-sxm:3x2"):
        of = job("llama-3.2-1b", cluster, 1024, 12)
        plan = solve(PlanRequest(of, top=0))
        assert plan.layout_object.world == of.cluster.gpus
        assert plan.layout_object.microbatches(12) * plan.layout_object.micro_batch * plan.layout_object.dp == 12


def test_g07_where_nothing_fits_every_candidate_says_why_and_seconds_are_seconds():
    from planner.sweep import Sweep, run

    of = replace(job("llama-3.2-1b", "h100-sxm:1x2", 2048, 8), memory_limit_bytes=2 * 2**30)
    rows = run(Sweep(PlanRequest(of), ("h100-sxm:1x2",), candidates=True), jobs=1)
    assert len(rows) > 10
    assert not any(r["fits"] for r in rows)
    assert all("does not fit" in r["reason"] and r["peak_bytes"] > 2 * 2**30 for r in rows)
    roomy = replace(of, memory_limit_bytes=None)
    plan = solve(PlanRequest(roomy, top=0))
    tokens = roomy.tokens / plan.step_seconds / 2
    assert plan.estimate["tokens_per_second_per_gpu"] == pytest.approx(tokens)
    flops = flops_per_token(roomy.model, 2048).training * tokens
    assert plan.estimate["mfu"] == pytest.approx(flops / roomy.cluster.gpu.peak_flops("bf16"), rel=1e-6)


def test_g08_bytes_are_gib_and_agree_with_the_golden_figure():
    """6,805 M parameters, 18 bytes each, four ranks: 28.52 GiB, which is 30.62 GB."""
    each = bytes_per_parameter(load_execution("deepspeed"), "bf16", "adamw", 3, 4)
    assert each == pytest.approx(18 / 4)
    assert screen.gib(6805e6 * each) == "28.52 GiB"
    assert 6805e6 * each / 1e9 == pytest.approx(30.62, abs=0.005)


def test_g09_every_constant_has_an_origin_and_a_source():
    for name in ("h100-sxm:2x8", "a100-sxm:1x8", "mi300x:1x8", "cpu:1x4"):
        for field, _, _, origin, source in describe(load_cluster(name)):
            assert re.split(r"[ ,:]", origin)[0] in ("datasheet", "measured", "fitted", "estimate", ""), (field, origin)
            assert source or not origin, field


def test_g10_ten_thousand_layouts_are_searched_offline_pins_hold_and_runners_up_say_what_they_lose():
    of = job("llama-3.2-1b", "h100-sxm:4x8", 2048, 64)
    free = solve(PlanRequest(of, top=2))
    assert free.certificate.columns_legal >= 10_000
    pinned = solve(PlanRequest(of, pins="tp=4,pp=2", top=0))
    assert (pinned.layout_object.tp, pinned.layout_object.pp) == (4, 2)
    assert pinned.step_seconds >= free.certificate.best_bound_seconds
    assert free.runners_up
    for runner in free.runners_up:
        gained = sum(runner.loses.values())
        assert gained == pytest.approx(runner.estimate["step_seconds"] - free.step_seconds, rel=1e-6, abs=1e-9)


def test_g12_a_layout_that_fits_is_left_alone():
    of = job("llama-3.2-1b", "h100-sxm:1x2", 2048, 16)
    layout = read_layout(of, "zero=1,micro_batch=2,recompute=full")
    document = check(of, layout)
    assert (document["legal"], document["fits"]) == (True, True)
    assert read_layout(of, layout.text()) == layout


def korthikanti(tp: int, sp: bool) -> tuple[float, float]:
    """Kept bytes of one GPT layer over s b h without attention scores, and of its replicated part (arXiv:2205.05198, section 4)."""
    s, b, h, heads = 2048, 4, 1536, 16
    spec = uniform("gpt", Layer(mixer=Attention(heads=heads, kv_heads=heads, head_dim=h // heads), ffn=Mlp(width=4 * h, gated=False)),
                   4, hidden=h, vocab=1024)  # fmt: skip
    of = Job(spec, load_cluster("h100-sxm:1x8"), load_execution("megatron-2021"), s, 64, "fp16")
    cost = layer_operations(of, Layout(tp=tp, sp=sp, micro_batch=b), spec.layer(0))
    total = cost.saved_bytes / (s * b * h)
    norms = sum(x.bytes for x in cost.saved if x.module == "norm") / (s * b * h)
    return float(total), float(norms)


def test_g15_sequence_parallelism_divides_the_replicated_part_and_nothing_else():
    """34 sbh = 10 replicated + 24 divided by tp; two norms keep 2 x 2 sbh."""
    whole, norms = korthikanti(1, False)
    assert norms == pytest.approx(4, abs=0.05)
    for tp in (2, 4, 8):
        plain, sequence = korthikanti(tp, False)[0], korthikanti(tp, True)[0]
        assert sequence == pytest.approx(whole / tp, rel=0.02)
        assert plain - sequence == pytest.approx(10 * (1 - 1 / tp), rel=0.02)


def test_g15_norm_weights_are_not_divided_by_tp():
    spec = decoder(layers=2, hidden=256, heads=8)
    for weight in layer_weights(spec, spec.layer(0)):
        if weight.part == "norm":
            assert weight.local(Layout(tp=4, sp=True), load_execution("megatron")) == weight.elements


def test_g16_a_table_of_candidates_has_a_row_each_with_the_reason():
    from planner.sweep import Sweep, run

    of = replace(job("llama-3.2-1b", "h100-sxm:1x2", 2048, 8), memory_limit_bytes=14 * 2**30)
    rows = run(Sweep(PlanRequest(of), ("h100-sxm:1x2",), candidates=True), jobs=1)
    keys = {"layout", "fits", "peak_bytes", "binding", "seconds", "reason"}
    assert all(keys <= set(r) and r["reason"] and r["layout"] for r in rows)
    assert [r["reason"] for r in rows].count("the fastest") == 1
    assert any(not r["fits"] and "does not fit" in r["reason"] for r in rows)
