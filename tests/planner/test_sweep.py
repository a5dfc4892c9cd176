"""Sweeps: tables, resuming, candidates."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest

from planner import sweep as sweeps
from planner.screen_whatif import MOST_CANDIDATES
from planner.solve import PlanRequest, solve
from planner.sweep import Point, Sweep, candidate_rows, points, run, to_csv, varying
from profiles.cluster import Pool
from profiles.errors import InputError
from profiles.hardware import load_gpu
from tests.planner.jobs import job


def request(**more) -> PlanRequest:
    return PlanRequest(job("llama-tiny", "h100-sxm:1x4", 256, 8, **more))


def test_every_combination_is_a_point_in_the_order_of_the_axes_and_impossible_ones_say_why():
    sweep = Sweep(request(), ("h100-sxm:1x4", "h200-sxm:2x4"), (2, 6), (256, 512), (8, 16))
    found = points(sweep)
    assert [tuple(p.values.values()) for p in found[:3]] == [
        ("h100-sxm:1x4", 2, 256, 8), ("h100-sxm:1x4", 2, 256, 16), ("h100-sxm:1x4", 2, 512, 8)
    ]  # fmt: skip
    assert len(found) == 16
    refused = [p for p in found if p.request is None]
    assert {p.values["gpus"] for p in refused} == {6}
    assert "whole nodes of 4" in refused[0].refused


def test_longer_sequences_can_keep_the_tokens_of_a_step():
    found = points(Sweep(request(), ("h100-sxm:1x4",), (), (256, 512, 1024), (16,), tokens_kept=True))
    assert [p.values["global_batch"] for p in found] == [16, 8, 4]


def test_a_row_is_the_plan_of_its_point_and_one_without_a_plan_has_the_reason():
    sweep = Sweep(request(), ("h100-sxm:1x4",), (1, 2, 6), (), (8,))
    rows = run(sweep, jobs=1)
    for row in rows[:2]:
        plan = solve(PlanRequest(job("llama-tiny", f"h100-sxm:1x{row['gpus']}", 256, 8), top=0))
        assert (row["layout"], row["step_seconds"]) == (plan.layout_text, plan.step_seconds)
        assert row["tokens_per_second_per_gpu"] == pytest.approx(row["tokens_per_second"] / row["gpus"])
    assert (rows[2]["fits"], rows[2]["layout"]) == (False, None)
    assert rows[2]["reason"]
    tight = Sweep(request(memory_limit_bytes=2**28), ("h100-sxm:1x4",), (1,))
    assert "no feasible layout" in run(tight, jobs=1)[0]["reason"]


def test_candidates_of_a_mixed_cluster_are_refused_with_the_reason():
    one = job("llama-tiny", "h100-sxm:1x4", 256, 8)
    pools = tuple(Pool(gpu=load_gpu(name), gpus=2) for name in ("h100-sxm-80gb", "a100-sxm-80gb"))
    mixed = replace(one, cluster=replace(one.cluster, kind="", pools=pools))
    (row,) = candidate_rows(Point({"cluster": "mixed"}, PlanRequest(mixed)))
    assert row["fits"] is False and "one GPU type" in row["reason"]


def test_finished_points_are_taken_up_again_and_the_others_planned(tmp_path, monkeypatch):
    state = tmp_path / "state.json"
    one = run(Sweep(request(), ("h100-sxm:1x4",), (1,)), jobs=1, state=state)
    planned = []
    real = sweeps.solve
    monkeypatch.setattr(sweeps, "solve", lambda r: planned.append(r.job.cluster.gpus) or real(r))
    both = run(Sweep(request(), ("h100-sxm:1x4",), (1, 2)), jobs=1, state=state)
    assert planned == [2]
    assert both[0] == json.loads(json.dumps(one[0]))
    run(Sweep(request(optimizer="sgd"), ("h100-sxm:1x4",), (1,)), jobs=1, state=state)
    assert planned == [2, 1]
    state.write_text("[]")
    with pytest.raises(InputError, match="--state"):
        run(Sweep(request(), ("h100-sxm:1x4",), (1,)), jobs=1, state=state)


def test_processes_give_the_rows_that_one_gives():
    sweep = Sweep(request(), ("h100-sxm:1x4",), (1, 2))
    seen: list[float] = []
    assert run(sweep, jobs=2, report=lambda share, what: seen.append(share)) == run(sweep, jobs=1)
    assert seen == [0.5, 1.0]


def test_candidates_come_fastest_first_and_the_fastest_is_the_plans(tmp_path):
    sweep = Sweep(PlanRequest(job("llama-3.2-1b", "h100-sxm:1x2", 2048, 8), tie=0.0), ("h100-sxm:1x2",), candidates=True)
    rows = run(sweep, jobs=1)
    plan = solve(PlanRequest(sweep.request.job, tie=0.0, top=0))
    fastest = next(r for r in rows if r["reason"] == "the fastest")
    assert (fastest["layout"], fastest["seconds"]) == (plan.layout_text, pytest.approx(plan.step_seconds))
    assert fastest["peak_bytes"] == pytest.approx(max(s["device"] for s in plan.estimate["memory"]))
    exact = [r["seconds"] for r in rows if r["seconds_are"] == "exact"]
    assert exact == sorted(exact)
    assert len({r["layout"] for r in rows}) == len(rows)


def test_tables_are_csv_json_and_pictures(tmp_path):
    rows = run(Sweep(request(), ("h100-sxm:1x4", "h200-sxm:1x4"), (1, 2), (256, 512, 128)), jobs=1)
    assert varying(rows) == ["seq_len", "cluster", "gpus"]
    read = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert [r["layout"] for r in read] == [r["layout"] for r in rows]
    sweeps.write(rows, tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == json.loads(json.dumps(rows))
    sweeps.plot(rows, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").stat().st_size > 1000


def test_the_command_prints_a_table_or_json_and_writes_files(invoke, tmp_path):
    arguments = [
        "sweep",
        "llama-tiny",
        "--cluster",
        "h100-sxm:1x4",
        "--gpus",
        "1,2",
        "--seq-len",
        "256",
        "--global-batch",
        "8",
        "--jobs",
        "1",
    ]
    code, out, _ = invoke(*arguments, "--json", "--out", str(tmp_path / "s.csv"))
    assert code == 0
    assert [r["gpus"] for r in json.loads(out)] == [1, 2]
    assert (tmp_path / "s.csv").read_text().startswith("cluster,gpus,seq_len,global_batch,fits,layout,")
    code, out, _ = invoke(*arguments)
    assert code == 0
    assert "tokens/s a GPU" in out
    assert invoke(*arguments, "--candidates", "--plot", "x.png")[0] == 2
    assert invoke(*arguments[:3], "h100-smx:1x4", *arguments[4:])[0] == 2


def test_candidates_that_the_screen_leaves_out_are_said_to_be_in_the_file(invoke, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    arguments = [
        "sweep",
        "llama-tiny",
        "--cluster",
        "cpu:1x4",
        "--seq-len",
        "128",
        "--global-batch",
        "8",
        "--candidates",
        "--jobs",
        "1",
    ]
    left_out = len(json.loads(invoke(*arguments, "--json")[1])) - MOST_CANDIDATES
    assert left_out > 0
    assert invoke(*arguments)[1].endswith(f"{left_out} more; --out candidates.csv writes all of them\n")
    written = tmp_path / "all.csv"
    assert invoke(*arguments, "--out", str(written))[1].endswith(f"{left_out} more; all are in {written}\n")
    assert len(written.read_text().splitlines()) == 1 + left_out + MOST_CANDIDATES


def test_a_narrow_window_leaves_a_sweeps_layouts_room(invoke, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    job = ("llama-3-8b", "--cluster", "h100-sxm:1x8", "--seq-len", "8k", "--global-batch", "128", "--jobs", "1")
    code, out, _ = invoke("sweep", *job, "--pin", "tp=2,pp=1,recompute=full")
    lines = out.splitlines()
    assert code == 0
    assert max(map(len, lines)) <= 100
    assert len(lines) < 12
