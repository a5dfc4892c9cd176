"""``axisplan regress`` and ``axisplan calibrate`` as a CI job meets them: exit codes, files, annotations, refusals."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from cost_models.accuracy import PREDICTION_COLUMNS
from profiles.hardware import load_cluster


def written(folder: Path, data: Path, start: str, count: int, slower: float = 1.0) -> Path:
    """A runs file of ``count`` published rows whose id begins with ``start``, measured ``slower`` times as slow."""
    with (data / "runs.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["id"].startswith(start) and row["info_grade"] == "A"][:count]
    for row in rows:
        row["derived_step_s"] = f"{slower * float(row['derived_step_s']):.6g}"
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path = folder / "runs.csv"
    path.write_text(out.getvalue(), encoding="utf-8")
    return path


def with_error(document: dict[str, Any], error: float) -> dict[str, Any]:
    return {**document, "step_time": {**document["step_time"], "mape": error}}


def test_the_verdict_against_a_baseline_is_the_exit_code_and_a_readable_difference(tmp_path: Path, data: Path, invoke: Any) -> None:
    runs = str(written(tmp_path, data, "narayanan21", 6))
    code, out, _ = invoke("regress", runs, "--json", "--out", str(tmp_path / "p.csv"))
    assert code == 0
    document = json.loads(out)
    assert document["rows"] == 6
    predictions = list(csv.DictReader((tmp_path / "p.csv").open(encoding="utf-8")))
    assert tuple(predictions[0]) == PREDICTION_COLUMNS
    assert len(predictions) == 6
    assert all(float(p["predicted_low_s"]) < float(p["predicted_step_s"]) < float(p["predicted_high_s"]) for p in predictions)
    same, better = tmp_path / "same.json", tmp_path / "better.json"
    same.write_text(out, encoding="utf-8")
    better.write_text(json.dumps(with_error(document, document["step_time"]["mape"] - 0.005)), encoding="utf-8")
    code, out, _ = invoke("regress", runs, "--baseline", str(same))
    assert (code, out.splitlines()[-1]) == (0, "as the baseline")
    code, out, _ = invoke("regress", runs, "--baseline", str(better))
    assert code == 1
    assert any(line.startswith("WORSE") and "step_time.mape" in line and "->" in line for line in out.splitlines())
    code, out, _ = invoke("regress", runs, "--baseline", str(better), "--github")
    assert code == 1
    assert any(
        line.startswith("::error file=") and "title=axisplan regress::" in line and "%25" in line for line in out.splitlines()
    )


def test_the_picture_is_written_in_the_form_of_its_name(tmp_path: Path, data: Path, invoke: Any) -> None:
    pytest.importorskip("matplotlib")
    runs = str(written(tmp_path, data, "narayanan21", 3))
    assert invoke("regress", runs, "--picture", str(tmp_path / "p.svg"))[0] == 0
    assert "<svg" in (tmp_path / "p.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["[]", "{}", '{"rows": 3}', "not json"])
def test_a_baseline_that_regress_did_not_print_is_refused(tmp_path: Path, data: Path, invoke: Any, text: str) -> None:
    (tmp_path / "b.json").write_text(text, encoding="utf-8")
    code, _, err = invoke("regress", str(written(tmp_path, data, "narayanan21", 2)), "--baseline", str(tmp_path / "b.json"))
    assert code == 2
    assert "--baseline" in err
    assert len(err.strip().splitlines()) == 1


def test_calibration_of_a_slow_cluster_states_its_held_out_error_and_writes_a_cluster(
    tmp_path: Path, data: Path, invoke: Any
) -> None:
    runs = str(written(tmp_path, data, "dgxc-25.02", 16, slower=1.25))
    code, out, err = invoke("calibrate", runs, "--cluster", "h100-sxm:8x8", "--out", str(tmp_path / "mine.yaml"), "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["held_out"] < found["before"]
    assert 0.7 < found["factors"]["compute"] < 0.95
    mine = load_cluster(str(tmp_path / "mine.yaml"))
    assert mine.gpu.facts.sustained_matmul_speed.origin == "fitted"
    code, out, _ = invoke("calibrate", runs, "--cluster", "h100-sxm:8x8", "--out", str(tmp_path / "mine.yaml"))
    assert "on runs left out" in out


@pytest.mark.parametrize(("count", "cluster"), [(3, "h100-sxm:8x8"), (16, "b200:8x8")])
def test_calibration_from_too_few_runs_is_refused_and_writes_nothing(
    tmp_path: Path, data: Path, invoke: Any, count: int, cluster: str
) -> None:
    runs = str(written(tmp_path, data, "dgxc-25.02", count))
    code, _, err = invoke("calibrate", runs, "--cluster", cluster, "--out", str(tmp_path / "mine.yaml"))
    assert code == 2
    assert "calibrating needs" in err
    assert not (tmp_path / "mine.yaml").exists()
