"""``axisplan profile`` as a command: refused before measuring, rough when short, JSON, and a known GPU set beside a measurement."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import cli
from planner.commands.measuring import keep_as_this
from profiles.errors import AxisplanError, InputError
from profiles.fit import Errors
from profiles.hardware import GpuProfile, load_cluster, load_gpu
from profiles.measure import machine
from profiles.measure.gpu import FEWEST_JUDGES, GpuMeasurement
from profiles.measure.judging import differences
from profiles.measure.machine import MachineMeasurement
from profiles.measure.plots import check_picture
from profiles.measure.samples import Sample, load_samples
from profiles.measure.timing import LEAST_OVERTIME_SECONDS, OVERTIME, overtime
from profiles.operations import Attend, Matmul, Pointwise


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.cli, list(arguments))
    return result.exit_code, result.stdout


H200 = load_gpu("h200-sxm")


def as_known(factor: float) -> list[Sample[Any]]:
    """Samples that take ``factor`` times what the H200's shipped curves say of a short burst."""
    causal = 4096 * 4097 // 2
    operations = [
        *(Matmul(m, 4096, 4096, dtype) for m in (1024, 4096) for dtype in ("bf16", "fp8")),
        *(Attend(1, 32, 8, 4096, 4096, 128, 128, causal, "bf16", backward) for backward in (False, True)),
        Pointwise(1 << 30, 1),
        Matmul(128, 4096, 4096, "bf16"),
        Matmul(4096, 4096, 4096, "mxfp8"),
    ]
    return [
        Sample(op, seconds=factor * float(H200.seconds(op, sustained=False)), form="add")
        for op in operations
        if not isinstance(op, Matmul) or op.dtype in H200.peaks
    ]


def test_a_known_gpu_set_beside_a_measurement_shows_how_far_it_is_by_kind() -> None:
    facts = {"launch_seconds": 2 * H200.launch_seconds, "memory_usable_bytes": H200.usable_bytes}
    found = differences(H200, as_known(1.25), facts)
    assert set(found) == {
        "matmul bf16",
        "matmul fp8",
        "attention forward bf16",
        "attention backward bf16",
        "memory add",
        "launch",
        "usable memory",
    }
    assert found["matmul bf16"].count == 2  # sides below 256 are not what training is made of
    for kind in ("matmul bf16", "matmul fp8", "attention forward bf16", "attention backward bf16", "memory add"):
        assert found[kind].median == pytest.approx(0.2)
        assert found[kind].ratio == pytest.approx(0.8)
    assert found["launch"].median == pytest.approx(0.5)
    assert found["usable memory"].median == 0.0


def test_failed_candidates_and_unknown_precisions_are_left_out() -> None:
    samples = [
        Sample(Matmul(4096, 4096, 4096, "bf16"), failed="out of memory"),
        Sample(Matmul(4096, 4096, 4096, "nvfp4"), seconds=1e-3),
    ]
    assert differences(H200, samples, {}) == {}


def test_a_short_budget_may_be_exceeded_until_a_fit_is_possible() -> None:
    assert overtime(1.0) == LEAST_OVERTIME_SECONDS
    assert overtime(60.0) == 60.0 * OVERTIME


def test_a_profile_that_few_shapes_judge_is_said_to_be_rough() -> None:
    def judged(count: int) -> GpuMeasurement:
        errors = {f"matmul {dtype}": Errors(0.1, 0.1, 0.2, 1.0, count) for dtype in H200.matmul}
        return GpuMeasurement([], {}, profile=H200, held_out=errors)

    assert judged(FEWEST_JUDGES).rough == ""
    assert judged(FEWEST_JUDGES - 1).rough.startswith("ROUGH profile: fewer than 5 shapes judge the fit of bf16 (4), fp8 (4)")
    assert replace(judged(0), profile=None).rough == ""


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from profiles.measure import gpu, links

    def measured(*_: object, **__: object) -> None:
        raise AssertionError("measured all the same")

    monkeypatch.setattr(machine, "profile_machine", measured)
    monkeypatch.setattr(links, "measure_links", measured)
    monkeypatch.setattr(gpu, "measure_gpu", measured)
    for command in ("gpu", "links"):
        result = CliRunner().invoke(cli.cli, ["profile", command, "--plot", str(tmp_path / "p.gif")])
        assert isinstance(result.exception, InputError)
        assert "ends in .png, .svg, .pdf" in str(result.exception)
    with pytest.raises(InputError, match="is not there"):
        check_picture(tmp_path / "absent" / "p.png")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AxisplanError, match=r"pip install 'axisplan\[plot\]'"):
        check_picture(tmp_path / "p.png")


def test_an_unknown_gpu_to_compare_with_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "profile_machine", lambda *_, **__: pytest.fail("measured all the same"))
    result = CliRunner().invoke(cli.cli, ["profile", "gpu", "--against", "h2000"])
    assert isinstance(result.exception, InputError)
    assert "h200" in str(result.exception)


def test_a_misspelt_collective_is_answered_with_the_nearest() -> None:
    result = CliRunner().invoke(
        cli.cli, ["profile", "links", "--processes", "2", "--device", "cpu", "--kinds", "all_reduce,brodcast"]
    )
    assert isinstance(result.exception, InputError)
    assert str(result.exception).endswith("nearest: broadcast")


def test_one_second_gives_a_rough_profile_as_json(tmp_path: Path) -> None:
    code, text = run(
        "profile", "gpu", "--device", "cpu", "--processes", "1", "--seconds", "1", "--dtype", "fp32", "--json", "--against", "cpu",
        "--out", str(tmp_path / "c.yaml"),
    )  # fmt: skip
    assert code == 0
    document = json.loads(text)
    assert document["rough"].startswith("ROUGH")
    assert document["cluster"]["gpu"]["peaks"]["fp32"]["value"] > 1e8
    assert document["links"] is None
    assert document["against"]["matmul fp32"]["count"] > 0
    assert set(document["noise"]) == {"spread", "others", "noisy"}
    assert (tmp_path / "c.yaml").exists()


def test_the_built_in_clusters_as_json() -> None:
    code, text = run("clusters", "--json")
    assert code == 0
    rows = {row["cluster"]: row for row in json.loads(text)}
    assert rows["h200-sxm"]["gpu"] == "h200-sxm-141gb"
    assert rows["h200-sxm"]["peak_flops"] == 989.5e12
    assert rows["cpu"]["peak_flops"] is None
    code, text = run("clusters", "show", "h100-sxm:2x8", "--json")
    assert code == 0
    assert {"field", "value", "unit", "origin", "source"} == set(json.loads(text)[0])


def test_this_machine_is_what_was_measured_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AXISPLAN_CACHE", str(tmp_path / "kept"))
    for call in (lambda: load_cluster("this"), lambda: load_gpu("this")):
        with pytest.raises(InputError, match=r"not measured yet: `axisplan profile gpu`"):
            call()
    assert "this machine: not measured yet" in run("clusters")[1]
    cluster = replace(load_cluster("cpu:1x4"), name="this", kind="")
    judged = {f"matmul {dtype}": Errors(0.1, 0.1, 0.2, 1.0, FEWEST_JUDGES) for dtype in cluster.gpu.matmul}
    whole = MachineMeasurement(GpuMeasurement([], {}, profile=cluster.gpu, held_out=judged), None, cluster)
    assert keep_as_this(replace(whole, interrupted=True)) == keep_as_this(replace(whole, cluster=None)) == ""
    assert keep_as_this(replace(whole, gpu=replace(whole.gpu, held_out={}))) == ""  # a rough one does not stand for the machine
    assert not (tmp_path / "kept").exists()
    assert keep_as_this(whole).startswith("kept as this machine")
    assert load_cluster("this") == load_cluster("This-Machine") == cluster
    assert load_cluster("this:2").gpus == 2
    assert load_gpu("this") == cluster.gpu
    assert json.loads(run("clusters", "--json")[1])[0]["cluster"] == "this"
    assert run("clusters", "show", "this")[0] == 0
    with pytest.raises(InputError, match="4 at once were measured; nearest: this:4"):
        load_cluster("this:8")


def test_a_measurement_that_cannot_be_kept_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AXISPLAN_CACHE", str(tmp_path / "file"))
    cluster = load_cluster("cpu:1x4")
    judged = {f"matmul {dtype}": Errors(0.1, 0.1, 0.2, 1.0, FEWEST_JUDGES) for dtype in cluster.gpu.matmul}
    whole = MachineMeasurement(GpuMeasurement([], {}, profile=cluster.gpu, held_out=judged), None, cluster)
    assert keep_as_this(whole).startswith("not kept as this machine")


def test_collectives_of_a_cluster_with_their_algorithm_and_protocol() -> None:
    code, text = run("clusters", "collectives", "h100-sxm:1x8", "--json")
    assert code == 0
    rows = {(r["collective"], r["bytes"]): r for r in json.loads(text)}
    assert len(rows) == 36
    cluster = load_cluster("h100-sxm:1x8")
    largest = rows["all_reduce", 1 << 30]
    assert largest["seconds"] == cluster.collective_seconds("all_reduce", 1 << 30, 8)
    assert (largest["algorithm"], largest["protocol"]) == ("NVLS", "Simple")
    assert "NVLS tree" in run("clusters", "collectives", "h100-sxm:4x8")[1]
    result = CliRunner().invoke(cli.cli, ["clusters", "collectives", "h100-sxm:1x8", "--ranks", "4", "--stride", "4"])
    assert isinstance(result.exception, InputError)


def test_the_kept_profile_of_a_machine_predicts_products_it_has_not_seen_within_15_percent() -> None:
    kept = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "profile_here.json").read_text())
    assert kept["command"] == "axisplan profile gpu --processes 1 --seconds 100 --json"
    for dtype in ("fp32", "bf16"):
        assert kept["held_out"][f"matmul {dtype}"]["median"] < 0.15
        assert kept["held_out"][f"matmul {dtype}"]["count"] >= FEWEST_JUDGES
    assert set(kept["held_out"]) >= {"attention forward fp32", "attention backward fp32", "memory traffic", "launch"}
    assert kept["held_out"]["memory traffic"]["median"] < 0.15
    assert kept["held_out"]["memory traffic"]["count"] == 3
    assert kept["noise"]["noisy"] == (kept["noise"]["spread"] > 0.1 or kept["noise"]["others"] > 0.1)


def test_what_was_measured_before_an_interruption_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's curves alone where the links were not reached yet; the samples where nothing could be fitted."""
    gpu = load_gpu("cpu")
    samples: list[Sample[Any]] = [Sample(Matmul(512, 512, 512, "fp32"), seconds=1e-3)]

    def interrupted(profile: GpuProfile | None) -> str:
        measured = MachineMeasurement(GpuMeasurement(samples, {"host": "here"}, profile=profile), None, None, interrupted=True)
        monkeypatch.setattr(machine, "profile_machine", lambda *_, **__: measured)
        result = CliRunner().invoke(cli.cli, ["profile", "gpu", "--device", "cpu", "--out", str(tmp_path / "c.yaml")])
        assert result.exit_code != 0
        return " ".join(result.stdout.split())

    assert "only samples are written" in interrupted(None)
    assert not (tmp_path / "c.yaml").exists()
    assert load_samples(tmp_path / "c.samples.json") == (samples, {"host": "here"})
    assert "holds the device alone" in interrupted(gpu)
    assert load_gpu(str(tmp_path / "c.yaml")) == gpu


def test_a_precision_that_is_none_is_refused_before_anything_is_measured(invoke) -> None:
    code, out, err = invoke("profile", "gpu", "--device", "cpu", "--dtype", "", "--json")
    assert (code, out) == (2, "")
    assert err.startswith("axisplan: dtypes: ''") and err.count("\n") == 1
