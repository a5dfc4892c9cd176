"""The accuracy page's figures, their parts on hand-made runs, and the goals that the cost models must keep on published runs."""

from __future__ import annotations

import ast
import csv
import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from cost_models.accuracy import (
    Prediction,
    Regression,
    compare,
    constant_value,
    fitted_constants,
    github_annotations,
    median_group,
    memory_scores,
    predict,
    ranking,
    regress,
    score,
)
from cost_models.accuracy_report import diff, page, picture, summary, table
from cost_models.calibrate import calibrate, scaled
from cost_models.execution import Execution
from cost_models.layout import Layout
from cost_models.memory import fits
from cost_models.runs import Run, Skipped, apply_rules, load_runs, read_rows, seconds_of, to_run
from profiles.errors import AxisplanError, InputError
from profiles.hardware import load_cluster
from tests.scripts import script

PROJECT = Path(__file__).parents[2]
DATA = PROJECT / "tests" / "data"


@cache
def rows() -> tuple[dict[str, str], ...]:
    return tuple(read_rows(DATA / "runs.csv"))


@cache
def runs() -> dict[str, Run]:
    return {run.id: run for run in load_runs(rows())[0]}


@cache
def regression() -> Regression:
    """All published runs, once for the tests of this file (seconds)."""
    return regress(*load_runs(rows()))


@cache
def result() -> dict[str, Any]:
    return regression().to_json()


def row(name: str) -> dict[str, str]:
    return next(r for r in rows() if r["id"] == name)


# -- goals ----------------------------------------------------------------------------------------------------------------


def test_all_434_judging_rows_are_predicted() -> None:
    judged = [
        r["id"]
        for r in rows()
        if r["info_grade"] == "A" and r["time_ok"] == "yes" and r["step_quality"] in ("printed", "from_tokens", "from_flops")
    ]
    assert len(judged) == 434
    assert sorted(p.run.id for p in regression().judged) == sorted(judged)


def test_step_time_is_within_the_goals_on_published_runs() -> None:
    time = result()["step_time"]
    assert time["mape"] <= 0.06
    assert time["median_group_mape"] <= 0.045
    assert time["by_kind"]["moe"]["mape"] <= 0.08
    assert len(fitted_constants()) <= 12


def test_memory_is_within_the_goals_on_published_runs() -> None:
    memory = {key.split(" | ")[1]: value for key, value in result()["memory"].items() if "SimuMax" in key}
    assert memory["allocated"]["n"] == 22
    assert memory["allocated"]["mape"] <= 0.015
    reserved = [p for p in regression().predictions if p.run.source.startswith("PyTorch torchtitan") and p.memory_error is not None]
    assert len(reserved) >= 12
    assert memory_scores(reserved)[f"{reserved[0].run.source} | reserved"]["mape"] <= 0.03


def test_torchtitan_s_memory_is_within_the_goal_whatever_its_tables_say_of_the_allocator() -> None:
    """One ratio of reserved over allocated, the default of every preset, for compiled and eager runs."""
    ratio = Execution().reserved_ratio
    rows_of = [p.run for p in regression().predictions if "torchtitan" in p.run.source and p.run.memory_gib and p.run.grade == "A"]
    assert len(rows_of) == 12
    same = {"reserved_ratio": ratio, "eager_reserved_ratio": ratio}
    plain = [replace(run, job=replace(run.job, execution=run.job.execution.with_(**same))) for run in rows_of]
    assert memory_scores([predict(run) for run in plain])[f"{plain[0].source} | reserved"]["mape"] <= 0.03


def test_every_run_that_ran_is_said_to_fit() -> None:
    """Without a margin: a run took what it took."""
    graded = [run for run in runs().values() if run.grade == "A"]
    assert len(graded) > 434
    assert [run.id for run in graded if not fits(replace(run.job, margin=0.0), run.layout)[0]] == []


@pytest.mark.slow
def test_single_node_layouts_of_vtrain_are_ordered() -> None:
    scores = regress(*load_runs(read_rows(DATA / "vtrain_single.csv"))).to_json()
    assert scores["step_time"]["n"] == 426
    assert scores["step_time"]["mape"] <= 0.10
    assert scores["ranking"]["pair_order"] >= 0.92
    assert scores["ranking"]["regret"] <= 0.02


def test_intervals_cover_about_80_percent_of_the_runs() -> None:
    assert 0.72 <= result()["interval_coverage"] <= 0.9


def test_our_parameter_counts_agree_with_the_column_of_the_data() -> None:
    """The column counts embedding and head once for some models (Nemotron) whose files keep two matrices."""
    off = []
    for r in rows():
        run = runs().get(r["id"])
        if run is not None and run.judged and not run.job.model.learned_positions:
            parts = run.job.model.parameters
            ratios = [count / 1e9 / float(r["params_B"]) for count in (parts.total, parts.total - parts.head)]
            if min(abs(ratio - 1) for ratio in ratios) > 0.01:
                off.append((r["id"], ratios))
    assert not off


# -- rows to runs -----------------------------------------------------------------------------------------------------------


def test_a_row_becomes_the_run_its_cells_say() -> None:
    run = runs()["dgxc-25.02.01-llama3-70b-nemo-bf16-H100x64"]
    assert run.layout == Layout.parse("tp=4,pp=4,vpp=5,cp=2,dp_shard=2,zero=1,sp=true,micro_batch=1,schedule=interleaved", 64)
    assert run.job.cluster.gpus == 64
    assert run.job.precision == "bf16"
    assert run.job.execution.tp_overlap == "userbuffers"
    assert (run.job.model.num_layers, run.job.model.hidden) == (80, 8192)
    assert run.seconds == 14.61
    assert run.judged
    assert not run.guessed


@pytest.mark.parametrize(
    ("name", "execution"),
    [
        ("narayanan21-t1-1.7B-A100x32", "megatron-2021"),
        ("korthikanti22-t5-22B-full", "megatron-2022"),
        ("zb-table4-1.5B-ZB-2p-p8-b6-m24", "megatron-2023-zero-bubble"),
        ("bloom-027-177B-h12288-L96-dp8tp8pp6mb4", "megatron-2022-deepspeed"),
        ("dgxc-24.11.1-nemotron4-15b-nemo-fp8-H100x16", "megatron-2024-nemo"),
        ("dgxc-25.04-llama3-8b-nemo-bf16-H100x8", "megatron-2025-nemo"),
        ("mbridge-26.04-llama3-70b-H100x64-FP8-gbs256", "megatron-2025-bridge"),
        ("foundry-mpt3b-A100x8-s2048-mb10-bf16", "fsdp-2023-composer"),
        ("titan-table1-FSDP", "torchtitan-2024"),
        ("simumax-b200-llama3_70b_l12_tp4_pp1_dp2_mbc4_cef", "simumax"),
        ("vtrain-multi-0026", "megatron-2022-vtrain"),
    ],
)  # fmt: skip
def test_the_framework_and_date_of_a_row_choose_its_preset(name: str, execution: str) -> None:
    assert runs()[name].job.execution.name == execution


def test_rules_give_what_the_columns_cannot_say() -> None:
    zero_bubble = runs()["zb-table4-1.5B-ZB-2p-p8-b6-m24"]
    assert zero_bubble.layout.schedule == "zb-h2"
    assert zero_bubble.layout.stages == (2, 3, 3, 3, 3, 3, 3, 2)
    assert zero_bubble.job.execution.post_validation
    assert runs()["bloom-068-182B-h13824-L78-dp8tp4pp12mb2"].layout.stages == (7,) * 11 + (1,)
    deepseek = runs()["mbridge-26.08-deepseek-v3-GB200x256-MXFP8-gbs4096"]
    assert deepseek.layout.stages == (4,) * 15 + (1,)
    assert deepseek.job.model.mtp == 1
    assert deepseek.job.precision == "mxfp8"
    maverick = runs()["dgxc-25.05.04-llama4-maverick-nemo-fp8-GB200x128"]
    assert maverick.job.model.pattern[:4] == (1, 0, 1, 0)


def test_a_rule_finds_nemotron_340b_as_its_tables_write_it() -> None:
    """sources.md 1a: FlashAttention-2 and a 16-bit optimizer in 24.11; in 25.04 neither."""
    old = runs()["dgxc-24.11.1-nemotron4-340b-nemo-bf16-H100x128"].job.execution
    assert (old.attention, old.moment_bytes, old.master_bytes) == ("fa2", 2, 0)
    new = next(r for r in runs().values() if r.id.startswith("dgxc-25.04") and "340b" in r.id).job.execution
    assert new.attention == "cudnn" and new.master_bytes == 4


def test_a_guess_is_named() -> None:
    run = runs()["mbridge-25.09-deepseek-v3-GB200x256-FP8-MX-gbs2048"]
    assert any("ep 32" in guess for guess in run.guessed)
    assert run.layout.ep == 32
    assert any("recompute" in guess for guess in runs()["vtrain-multi-0026"].guessed)


def test_no_rule_reads_a_measurement() -> None:
    from cost_models.runs import _table

    measured = {"derived_step_s", "measured_step_s", "measured_tokens_per_s_per_gpu", "measured_tflops_per_gpu", "measured_mfu"}
    for rule in _table()["rules"]:
        assert not measured & set(rule["when"])
        assert rule["why"]
    stripped = {**row("titan-table1-FSDP"), **dict.fromkeys(measured, "")}
    assert to_run(stripped).layout == runs()["titan-table1-FSDP"].layout


def test_a_users_row_needs_few_columns() -> None:
    mine = {
        "id": "mine", "framework": "megatron", "layers": "32", "hidden": "4096", "ffn_hidden": "14336", "heads": "32", "kv_heads": "8",
        "vocab": "128256", "seq_len": "8192", "gpu": "h100-sxm", "gpus": "16", "tp": "2", "pp": "2", "global_batch": "64",
        "micro_batch": "1", "measured_tokens_per_s_per_gpu": "8000",
    }  # fmt: skip
    run = to_run(mine)
    assert run.layout.dp == 4
    assert run.job.execution.name == "megatron"
    assert run.seconds == pytest.approx(64 * 8192 / (8000 * 16))
    assert run.judged
    assert set(run.guessed) >= {"precision bf16", "recompute none"}


@pytest.mark.parametrize(
    ("cell", "value", "field"),
    [
        ("layers", "", "layers"), ("gpus", "7.5", "gpus"), ("gpu", "h1000", "cluster"),
        ("tp", "3", "tp*pp*cp"), ("global_batch", "1", "global_batch"), ("hidden", "-5", "hidden"), ("precision", "fp7", "precision"),
    ],
)  # fmt: skip
def test_a_bad_cell_is_named(cell: str, value: str, field: str) -> None:
    broken = {**row("titan-table1-FSDP"), cell: value}
    runs_, skipped = load_runs([broken])
    scores = regress(runs_, skipped)
    assert not scores.predictions
    assert field in scores.skipped[0].why


def test_no_cell_whatever_it_holds_is_a_traceback() -> None:
    rng = random.Random(11)
    junk = [
        "",
        "0",
        "-1",
        "abc",
        "1e9",
        "3",
        "7",
        "0.5",
        "nan",
        "inf",
        "99999999999",
        "fp4",
        "none",
        "full",
        "selective:foo",
        "B300",
        "zb-v",
        "64",
    ]
    columns = [name for name in rows()[0] if name != "id"]
    broken = []
    for _ in range(120):
        one = dict(rng.choice(rows()))
        for _ in range(rng.randint(1, 3)):
            one[rng.choice(columns)] = rng.choice(junk)
        broken.append(one)
    found = regress(*load_runs(broken))
    assert len(found.predictions) + len(found.skipped) == len(broken)
    assert all(skip.why for skip in found.skipped)


def test_an_unknown_framework_is_guessed_and_said() -> None:
    unknown = {**row("titan-table1-FSDP"), "framework": "unheard of", "source": "somebody"}
    assert to_run(unknown).job.execution.name == "torchtitan"
    assert any("not known" in guess for guess in to_run(unknown).guessed)
    assert to_run({**unknown, "zero": "1"}).job.execution.name == "megatron"


def test_a_file_that_is_no_table_of_runs_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="lacks the columns"):
        read_rows(tmp_path / "runs.csv")
    with pytest.raises(InputError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")


def test_seconds_come_from_the_best_column_there_is() -> None:
    base = {"seq_len": "1024", "global_batch": "8", "gpus": "4"}
    assert seconds_of({**base, "derived_step_s": "2", "measured_step_s": "3"}) == 2
    assert seconds_of({**base, "measured_step_s": "3"}) == 3
    assert seconds_of({**base, "measured_tokens_per_s_per_gpu": "512"}) == 4
    assert seconds_of(base) is None


def test_the_rules_hold_no_constant_of_a_row() -> None:
    facts = apply_rules(row("bloom-027-177B-h12288-L96-dp8tp8pp6mb4"))
    assert "blocking_launch_seconds" not in facts.set


# -- scores -----------------------------------------------------------------------------------------------------------------


def prediction(seconds: float, predicted: float, setting: str = "s", layout: str = "tp=1", group: str = "g") -> Prediction:
    run = replace(
        runs()["titan-table1-FSDP"], seconds=seconds, setting=(setting,), layout=Layout.parse(layout), group=(group, group, group)
    )
    return Prediction(run, predicted, 0.9 * predicted, 1.1 * predicted, 0.0, 0.0, 0.0, {})


def test_scores_are_what_their_names_say() -> None:
    scores = score([prediction(1.0, 1.1), prediction(1.0, 0.7), prediction(2.0, 2.0)])
    assert scores["n"] == 3
    assert scores["mape"] == pytest.approx((0.1 + 0.3 + 0.0) / 3)
    assert scores["bias"] == pytest.approx((0.1 - 0.3) / 3)
    assert scores["median"] == pytest.approx(0.1)
    assert score([]) == {"n": 0}


def test_the_median_over_groups_does_not_weigh_rows() -> None:
    many = [prediction(1.0, 2.0, group="a")] * 9
    assert median_group([*many, prediction(1.0, 1.1, group="b"), prediction(1.0, 1.2, group="c")]) == pytest.approx(0.2)


def test_layouts_are_ranked_inside_a_setting_only() -> None:
    scores = ranking([
        prediction(1.0, 1.2, "a", "tp=1"), prediction(2.0, 1.1, "a", "tp=2"), prediction(3.0, 3.3, "a", "tp=4"),
        prediction(9.0, 0.1, "b", "tp=1"), prediction(1.005, 5.0, "c", "tp=1"), prediction(1.0, 6.0, "c", "tp=2"),
    ])  # fmt: skip
    assert scores["settings"] == 2
    assert scores["pairs"] == 3
    assert scores["pair_order"] == pytest.approx(2 / 3)
    assert scores["tau"] == pytest.approx(1 / 3)
    assert scores["regret"] == pytest.approx((1.0 + 0.005) / 2)


def test_predictions_csv_has_a_line_a_row_and_the_reason_of_a_skip() -> None:
    few = Regression(tuple(regression().predictions[:2]), (Skipped("x", "no heads"),))
    lines = list(csv.DictReader(few.predictions_csv().splitlines()))
    assert [line["id"] for line in lines] == [few.predictions[0].run.id, few.predictions[1].run.id, "x"]
    assert float(lines[0]["predicted_step_s"]) == pytest.approx(few.predictions[0].seconds, rel=1e-5)
    assert lines[2]["note"] == "no heads"
    assert "predicted_peak_reserved_GiB" in lines[0]


def test_the_result_is_json_with_the_promised_keys() -> None:
    again = json.loads(json.dumps(result()))
    assert {"rows", "skipped", "step_time", "memory", "ranking", "interval_coverage", "fitted_constants"} <= set(again)
    assert {"mape", "median_group_mape", "bias", "by_source"} <= set(again["step_time"])
    assert {"tau", "pair_order", "regret"} <= set(again["ranking"])


# -- baseline ---------------------------------------------------------------------------------------------------------------


def test_nothing_is_worse_than_itself() -> None:
    assert compare(result(), result()) == []
    assert diff([]) == ["as the baseline"]


def test_a_worse_error_is_worse_and_a_better_one_is_a_change() -> None:
    now = json.loads(json.dumps(result()))
    now["step_time"]["mape"] += 0.02
    source = next(iter(now["step_time"]["by_source"]))
    now["step_time"]["by_source"][source]["mape"] -= 0.02
    now["ranking"]["pair_order"] -= 0.05
    changes = compare(now, result())
    assert [c.worse for c in changes] == [True, True, False]
    assert {c.figure for c in changes if c.worse} == {"step_time.mape", "ranking.pair_order"}
    assert diff(changes)[0].startswith("WORSE")
    notes = github_annotations(changes, "runs.csv")
    assert notes[0].startswith("::error file=runs.csv,title=axisplan regress::")
    assert notes[-1].startswith("::notice ")
    assert "\n" not in "".join(notes)


def test_a_source_that_vanished_and_another_constant_are_worse() -> None:
    now = json.loads(json.dumps(result()))
    gone = next(iter(now["step_time"]["by_source"]))
    del now["step_time"]["by_source"][gone]
    now["fitted_constants"] += 1
    worse = {c.figure for c in compare(now, result()) if c.worse}
    assert worse == {f"step_time.by_source.{gone}.mape", "fitted_constants"}


def test_the_models_are_not_worse_than_the_committed_baseline() -> None:
    baseline = json.loads((DATA / "accuracy_baseline.json").read_text())
    assert not [str(change) for change in compare(result(), baseline) if change.worse]


# -- reports ----------------------------------------------------------------------------------------------------------------


def test_the_page_and_the_summary_carry_the_figures() -> None:
    text = page(result(), {"vTrain's single-node runs": result()})
    figure = f"{100 * result()['step_time']['mape']:.1f}"
    assert f"**{figure} %**" in text
    assert "| torchtitan |" in table(result())
    assert all(entry["name"] in text for entry in fitted_constants())
    assert any("ranking:" in line for line in summary(result()))
    assert summary(Regression((), ()).to_json()) == ["no row has a time that can be judged"]


def test_readme_s_table_is_that_of_today() -> None:
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    assert readme == script("accuracy_page").with_table(readme, table(result()))
    assert readme.count(table(result())) == 1


@pytest.mark.slow
def test_the_page_of_the_docs_is_that_of_today() -> None:
    single = regress(*load_runs(read_rows(DATA / "vtrain_single.csv"))).to_json()
    assert (PROJECT / "docs" / "accuracy.md").read_text(encoding="utf-8") == script("accuracy_page").whole_page(result(), single)


def test_the_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture(regression(), tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").read_bytes()[:4] == b"\x89PNG"


# -- constants ----------------------------------------------------------------------------------------------------------------


def test_the_register_of_fitted_constants_names_places_that_exist_and_lie_in_their_ranges() -> None:
    for entry in fitted_constants():
        assert entry["low"] <= constant_value(entry["place"]) <= entry["high"], entry
        assert entry["low"] <= entry["prior"] <= entry["high"], entry


MOVED = re.compile(r"\bfitted\b|moved by runs|published runs|weak-scaling|single-node runs|\bresiduals\b")
"""Words of a source that say: this value was chosen by the error on published runs."""
BENCHMARKS = re.compile(r"aiconfigurator|nccl-tests|nccl issue|vTrain V100 all-reduce table|ml-engineering")
"""Tables of kernels and collectives, to which curves are fitted; no training run is among them."""


def numbers_of(file: Path) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every entry of a data file that has a source, with its path."""
    todo: list[tuple[tuple[str, ...], Any]] = [((), yaml.safe_load(file.read_text(encoding="utf-8")))]
    while todo:
        path, node = todo.pop()
        if isinstance(node, dict) and isinstance(node.get("source"), str):
            yield path, node
        if isinstance(node, dict):
            todo += [((*path, str(key)), value) for key, value in node.items()]
        elif isinstance(node, list):
            todo += [((*path, str(i)), value) for i, value in enumerate(node)]


def place_of(file: Path, path: tuple[str, ...]) -> str:
    kinds = {"attention_kernels.yaml": "kernel", "product_speed.yaml": "products"}
    if file.name in kinds:
        return f"{kinds[file.name]}:{'.'.join(path)}"
    return f"{'execution' if file.parent.name == 'executions' else 'gpu'}:{file.stem}.{path[-1] if path else ''}"


def test_a_number_that_runs_moved_is_in_the_register_or_a_curve_of_a_benchmark_table() -> None:
    places = {entry["place"] for entry in fitted_constants()}
    files = [
        *(PROJECT / "cost_models" / "data").glob("*.yaml"), *(PROJECT / "cost_models" / "data" / "executions").glob("*.yaml"),
        *(f for kind in ("gpus", "links", "clusters") for f in (PROJECT / "profiles" / "data" / kind).glob("*.yaml")),
    ]  # fmt: skip
    found, outside = set(), []
    for file in files:
        for path, entry in numbers_of(file):
            source = entry["source"]
            if place_of(file, path) in places:
                found.add(place_of(file, path))
                assert MOVED.search(source) or entry["origin"] == "fitted"
            elif (entry.get("origin") == "fitted" or MOVED.search(source)) and not BENCHMARKS.search(source):
                outside.append((file.name, path, source))
    assert outside == []
    assert len(found) == sum(not p.startswith(("code:", "execution:any.")) for p in places)


def numbers_with_reasons(file: Path) -> Iterator[tuple[str, str]]:
    """(name, text below it) of a module's numbers and of its classes' default numbers."""
    module = ast.parse(file.read_text(encoding="utf-8"))
    for body in (module.body, *(node.body for node in module.body if isinstance(node, ast.ClassDef))):
        for first, second in itertools.pairwise(body):
            target = first.targets[0] if isinstance(first, ast.Assign) else getattr(first, "target", None)
            number = getattr(getattr(first, "value", None), "value", None)
            text = getattr(getattr(second, "value", None), "value", None)
            if isinstance(target, ast.Name) and isinstance(number, float) and isinstance(text, str):
                yield target.id, text


def test_a_number_in_the_code_whose_reason_names_runs_is_in_the_register() -> None:
    names = {
        entry["place"].rpartition(".")[2] for entry in fitted_constants() if entry["place"].startswith(("code:", "execution:any."))
    }
    told = {
        name
        for file in (PROJECT / "cost_models").glob("*.py")
        for name, reason in numbers_with_reasons(file)
        if MOVED.search(reason)
    }
    assert told == names


# -- calibration --------------------------------------------------------------------------------------------------------------


def h100_runs() -> list[Run]:
    return [run for run in runs().values() if run.judged and run.id.startswith("dgxc-25.02") and not run.moe][:16]


def slower(run: Run, factor: float) -> Run:
    """The run as a cluster would have measured it whose chips are ``factor`` as fast as the profile's."""
    from cost_models.step import estimate

    job = replace(run.job, cluster=scaled(run.job.cluster, {"compute": factor}))
    return replace(run, seconds=estimate(job, run.layout, detail=False).step_seconds)


def test_calibration_finds_a_slow_chip_again() -> None:
    found = calibrate([slower(run, 0.8) for run in h100_runs()], load_cluster("h100-sxm:8x8"))
    assert found.factors["compute"] == pytest.approx(0.8, abs=0.03)
    assert found.before > 0.1
    assert found.held_out < 0.03
    assert found.cluster.gpu.facts.sustained_matmul_speed.origin == "fitted"


def test_calibration_refuses_too_few_runs_and_a_single_layout() -> None:
    with pytest.raises(InputError, match="calibrating needs"):
        calibrate(h100_runs()[:3], load_cluster("h100-sxm:8x8"))
    with pytest.raises(InputError, match="only layout"):
        calibrate([h100_runs()[0]] * 6, load_cluster("h100-sxm:8x8"))
    with pytest.raises(InputError, match="a100"):
        calibrate(h100_runs(), load_cluster("a100-sxm:8x8"))


def test_calibration_that_does_not_help_is_refused() -> None:
    exact = [slower(run, 1.0) for run in h100_runs()]
    with pytest.raises(AxisplanError, match="does not help"):
        calibrate(exact, load_cluster("h100-sxm:8x8"))
