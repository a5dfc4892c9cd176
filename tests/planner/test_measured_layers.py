"""``--profile FILE``: measured layers go before the formulas, in estimates, plans and bounds, and a plan keeps them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import cli
from cost_models.job import Job, MeasuredLayer
from cost_models.layout import Layout, RecomputeRule
from cost_models.passes import unit_seconds
from cost_models.step import estimate
from cost_models.unit_memory import unit_memory
from cost_models.units import unit_cost
from planner.layer_profiles import compare, with_profile
from planner.plan import Plan
from planner.search import Search
from planner.solve import PlanRequest, solve
from planner.space import Space
from profiles.errors import DoesNotFit, InputError
from profiles.measure.layer_profile import LayerProfile, LayerRow
from profiles.model import Moe
from tests.planner.enumeration import exhaustive, small_job
from tests.planner.jobs import job
from tests.planner.test_solve import random_layouts

FULL, NONE, LIGHT = (
    RecomputeRule(0, None, "full"),
    RecomputeRule(0, None, "none"),
    RecomputeRule(0, None, "selective", ("mlp_act",)),
)


def row(seconds: float, **changes: object) -> LayerRow:
    facts = {
        "name": "llama-3.1-8b.0", "micro_batch": 1, "seq_len": 4096, "dtype": "bf16", "forward_seconds": seconds,
        "backward_seconds": 2 * seconds, "saved_bytes": 5e8,
    }  # fmt: skip
    return LayerRow.model_validate({**facts, **changes})


def saved(folder: Path, *rows: LayerRow) -> Path:
    path = folder / "layers.json"
    LayerProfile(rows=rows).save(path)
    return path


@pytest.fixture
def llama() -> Job:
    return job("llama-3.1-8b", "h100-sxm:1x8", 4096, 64)


def test_a_covered_layer_takes_the_measured_seconds(llama: Job, tmp_path: Path) -> None:
    measured = with_profile(llama, saved(tmp_path, row(0.004), row(0.003, tp=2), row(9.0, micro_batch=2, failed="out of memory")))
    plain, covered = Layout(dp_shard=8), unit_seconds(measured, Layout(dp_shard=8), 0)
    assert covered.f == pytest.approx(0.004)
    assert covered.b + covered.w == pytest.approx(0.008)
    formula = unit_seconds(llama, plain, 0)
    share = formula.backward_weight.compute.seconds / (
        formula.backward_weight.compute.seconds + formula.backward_input.compute.seconds
    )
    assert covered.w == pytest.approx(0.008 * share)
    halved = unit_seconds(measured, Layout(tp=2, dp_shard=4), 0)
    assert float(halved.forward.compute.seconds) == pytest.approx(0.003)
    assert halved.forward.exposed == unit_seconds(llama, Layout(tp=2, dp_shard=4), 0).forward.exposed


def test_what_was_not_measured_is_off_as_much_as_what_was(llama: Job, tmp_path: Path) -> None:
    measured = with_profile(llama, saved(tmp_path, row(0.004), row(0.003, tp=2)))
    known = [(0.004, Layout(dp_shard=8)), (0.003, Layout(tp=2, dp_shard=4, sp=False))]
    off = [seconds / float(unit_seconds(llama, at, 0).forward.compute.seconds) for seconds, at in known]
    for layout in (Layout(dp_shard=8, micro_batch=2), Layout(cp=2, dp_shard=4), Layout(tp=4, dp_shard=2)):
        corrected, formula = unit_seconds(measured, layout, 0), unit_seconds(llama, layout, 0)
        ratio = float(corrected.forward.compute.seconds / formula.forward.compute.seconds)
        assert ratio == pytest.approx((off[0] * off[1]) ** 0.5)


def test_a_step_of_measured_layers_is_their_sum_and_the_rest(llama: Job, tmp_path: Path) -> None:
    measured, layout = with_profile(llama, saved(tmp_path, row(0.004))), Layout(dp_shard=8, zero=0)
    before, after = estimate(llama, layout).step_seconds, estimate(measured, layout).step_seconds
    alone = unit_seconds(llama, layout, 0)
    assert after - before == pytest.approx(8 * 32 * (0.012 - alone.f - alone.b - alone.w), rel=0.02)


def test_recomputing_runs_at_the_measured_pace(llama: Job, tmp_path: Path) -> None:
    measured = with_profile(llama, saved(tmp_path, row(0.004)))
    assert float(unit_seconds(measured, Layout(dp_shard=8), 0, FULL).recompute.compute.seconds) <= 0.004
    assert float(unit_seconds(measured, Layout(dp_shard=8), 0, FULL).recompute.compute.seconds) > 0.003


def test_measured_bytes_are_kept_without_recompute_and_the_formula_with_all_of_it(llama: Job, tmp_path: Path) -> None:
    measured, layout = with_profile(llama, saved(tmp_path, row(0.004))), Layout(dp_shard=8)
    assert unit_memory(measured, layout, 0, NONE).kept == 5e8
    assert unit_memory(measured, layout, 0, FULL).kept == unit_memory(llama, layout, 0, FULL).kept
    freed = unit_memory(llama, layout, 0, NONE).kept - unit_memory(llama, layout, 0, LIGHT).kept
    assert unit_memory(measured, layout, 0, LIGHT).kept == 5e8 - freed


def with_random_rows(plain: Job, seed: int) -> Job:
    """``plain`` with layers "measured" at 0.3 to 3 times the formula, for some kinds, micro batches and degrees."""
    rng, rows = random.Random(seed), []
    for kind, layer in enumerate(plain.model.kinds):
        for tp in (1, 2) if not isinstance(layer.ffn, Moe) else (1,):
            for micro in (1, 2, 4):
                if rng.random() < 0.7:
                    at = Layout(tp=tp, micro_batch=micro, sp=False)
                    price, cost = unit_seconds(plain, at, kind), unit_cost(plain, at, kind)
                    ahead, back, kept = (rng.uniform(0.3, 3.0) for _ in range(3))
                    rows.append(
                        (
                            kind,
                            tp,
                            micro,
                            plain.seq_len,
                            ahead * price.f,
                            back * (price.b + price.w),
                            kept * float(cost.saved_bytes),
                        )
                    )
    return replace(plain, measured=tuple(MeasuredLayer(*row) for row in rows))


@pytest.mark.parametrize(
    ("model", "execution"), [("llama-3-8b", "axisplan"), ("qwen3-30b-a3b", "axisplan"), ("llama-3-8b", "megatron")]
)
def test_bounds_in_bulk_stay_below_every_estimate(model: str, execution: str) -> None:
    plain = job(model, "h100-sxm:1x8", 4096, 32, execution)
    measured = with_random_rows(plain, 3)
    search = Search(measured, Space(measured))
    at = {(r.prefix, r.micro_batch): i for i, r in enumerate(search.rows)}
    covered = 0
    for prefix, batch, layout in random_layouts(measured, 120, 4):
        i, cost = at[prefix, batch.micro_batch], estimate(measured, layout)
        covered += cost.step_seconds != estimate(plain, layout, detail=False).step_seconds
        if batch.schedule not in ("dualpipe", "dualpipe-v"):
            assert search.row_bounds[i] <= cost.step_seconds * (1 + 1e-9)
        assert search.row_bytes[i] <= max(s.needed for s in cost.memory) * (1 + 1e-9)
    assert covered >= 20


@pytest.mark.parametrize("seed", [0, 2, 5, 9])
def test_the_plan_with_measured_layers_is_the_best_of_all_enumerated(seed: int) -> None:
    j = with_random_rows(small_job(seed), seed)
    best = exhaustive(j).best
    request = PlanRequest(j, tie=0.0, prove=True, top=0)
    if best == float("inf"):
        with pytest.raises(DoesNotFit):
            solve(request)
        return
    plan = solve(request)
    assert best * (1 - 1e-9) <= plan.step_seconds <= best * (1 + 1e-4)
    assert plan.certificate.proved
    assert plan.certificate.best_bound_seconds <= best * (1 + 1e-9)


def test_a_plan_keeps_its_measured_layers_and_their_hash(tmp_path: Path) -> None:
    plain = job("llama-tiny", "cpu:1x2", 64, 8, precision="fp32")
    rows = [row(0.02, name="llama-tiny.0", micro_batch=b, seq_len=64, dtype="fp32", saved_bytes=1e6) for b in (1, 2, 4)]
    measured = with_profile(plain, saved(tmp_path, *rows))
    plan = solve(PlanRequest(measured, top=0))
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.job() == measured
    assert hash(again.job()) == hash(measured)
    assert estimate(again.job(), again.layout_object).step_seconds == pytest.approx(plan.step_seconds, rel=1e-12)
    assert plan.inputs["job"] != solve(PlanRequest(plain, top=0)).inputs["job"]
    altered = json.loads(plan.text())
    altered["job_settings"]["measured"][0][4] *= 2
    with pytest.raises(InputError, match="altered after planning"):
        Plan.read(altered)


def test_the_table_sets_measured_beside_formula(llama: Job, tmp_path: Path) -> None:
    measured = with_profile(llama, saved(tmp_path, row(0.004), row(0.003, tp=2)))
    one, two = compare(measured, Layout(dp_shard=8))
    assert (one.forward, one.backward, one.saved_bytes, one.used) == (0.004, 0.008, 5e8, True)
    assert (two.tp, two.used) == (2, False)
    plain = unit_seconds(llama, Layout(dp_shard=8), 0)
    assert one.analytic_forward == pytest.approx(plain.f)
    assert one.analytic_backward == pytest.approx(plain.b + plain.w)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.cli, list(arguments))
    return result.exit_code, result.output + (str(result.exception) if result.exception else "")


def test_estimate_check_and_plan_take_a_profile(tmp_path: Path) -> None:
    rows = [row(0.02, name="llama-tiny.0", micro_batch=2, seq_len=64, dtype="fp32", saved_bytes=1e6)]
    common = ("llama-tiny", "--cluster", "cpu:1x2", "--seq-len", "64", "--global-batch", "8", "--precision", "fp32")
    profile = ("--profile", str(saved(tmp_path, *rows)))
    code, text = run("estimate", *common, "--layout", "dp=2,micro_batch=2", *profile, "--json")
    assert code == 0
    document = json.loads(text)
    assert document["measured_layers"][0]["forward"] == 0.02
    assert document["measured_layers"][0]["used"]
    plain = json.loads(run("estimate", *common, "--layout", "dp=2,micro_batch=2", "--json")[1])
    assert document["step_seconds"] > plain["step_seconds"]
    assert "measured_layers" not in plain
    code, text = run("estimate", *common, "--layout", "dp=2,micro_batch=1", *profile)
    assert code == 0
    assert "llama-tiny.0 was not measured at tp 1, micro batch 1: the formula times what it is off elsewhere" in text
    assert run("check", *common, "--layout", "dp=2,micro_batch=2", *profile)[0] == 0
    code, text = run("plan", *common, *profile, "--pin", "micro_batch=2", "--json")
    assert code == 0
    assert json.loads(text)["job_settings"]["measured"] == [[0, 1, 2, 64, 0.02, 0.04, 1e6]]


@pytest.mark.parametrize(
    ("changes", "of", "word"),
    [
        ({"name": "gpt2.0"}, {}, "llama-3.1-8b.0"),
        ({"seq_len": 2048}, {}, "4096 tokens in bf16"),
        ({"dtype": "fp32"}, {}, "4096 tokens in bf16"),
        ({}, {"lora_rank": 8}, "adapters"),
        ({}, {"frozen": ("head",)}, "frozen"),
        ({}, {"documents": ((512, 10),)}, "packed"),
    ],
)
def test_a_profile_of_something_else_is_refused(
    llama: Job, tmp_path: Path, changes: dict[str, object], of: dict[str, object], word: str
) -> None:
    with pytest.raises(InputError, match=word):
        with_profile(replace(llama, **of), saved(tmp_path, row(0.004, **changes)))


def test_a_module_of_ones_own_stands_for_the_only_layer_kind(llama: Job, tmp_path: Path) -> None:
    assert with_profile(llama, saved(tmp_path, row(0.004, name="mine.layers:make"))).measured[0][0] == 0
