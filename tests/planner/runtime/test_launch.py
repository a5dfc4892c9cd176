"""Starting real training through torchrun, and what a user sees when it breaks."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.runs import load_runs, read_rows
from cost_models.step import estimate
from planner import plan as plans
from planner.runtime.checkpoint import latest
from planner.runtime.launch import launch, start, stopped, why
from planner.runtime.stop import workers_of
from profiles.errors import AxisplanError, InputError
from profiles.hardware import load_cluster
from profiles.model import Attention, Layer, Mlp, Moe, uniform

AXISPLAN = [sys.executable, "-P", "-c", "from cli import main; main()"]
TEXT = "It was the best of times, it was the worst of times. " * 400


def folder(path: Path, layout: str = "dp=2", world: int = 2, experts: int = 0, cluster: str = "", **settings: Any) -> Path:
    """A folder with plan.json, train.json and text, as an emitter leaves it."""
    ffn: Mlp | Moe = Moe(experts=experts, top_k=2, width=32) if experts else Mlp(width=64)
    layer = Layer(mixer=Attention(heads=4, kv_heads=2, head_dim=8), ffn=ffn)
    model = uniform("tiny", layer, 2, hidden=32, vocab=260)
    job = Job(model, load_cluster(cluster or f"cpu:1x{world}"), load_execution("axisplan"), 32, 4, "fp32")
    made = Layout.parse(layout, world)
    certificate = plans.Certificate(
        columns_legal=1, cut_by_memory=0, cut_by_bound=0, cut_by_dominance=0, solved=1, best_bound_seconds=1, fastest_seconds=1, gap=0,
        proved=True, proposed_seconds=1, tie=0,
    )  # fmt: skip
    plans.Plan(
        model=plans.model_dump(model), cluster=plans.cluster_dump(job.cluster), execution=plans.execution_dump(job.execution),
        inputs=plans.hashes(job), job_settings=plans.job_record(job), layout=plans.layout_dump(made), layout_text=made.text(),
        stages=plans.stages_of(job, made), estimate=estimate(job, made).to_json(), certificate=certificate,
    ).save(path / "plan.json")  # fmt: skip
    (path / "text.txt").write_text(TEXT)
    facts = {"data": ["text.txt"], "steps": 4, "learning_rate": 3e-3, **settings}
    (path / "train.json").write_text(json.dumps(facts))
    return path


def arguments(path: Path, *more: str) -> list[str]:
    return ["train", str(path / "plan.json"), "--settings", str(path / "train.json"), *more]


def alive(text: str) -> list[str]:
    """Command lines of processes that mention ``text``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if text in line and int(entry.name) != os.getpid():
                found.append(line)
    return found


def test_two_processes_train_on_text_and_the_loss_falls(tmp_path: Path, invoke: Any) -> None:
    records: list[dict[str, Any]] = []
    path = folder(tmp_path, eval_data=["text.txt"], eval_every=3, checkpoint_every=4)
    launch(arguments(path, "--trace", str(path / "trace.json"), "--runs", str(path / "all.csv")), 2, records.append, timeout=120)
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert [r["step"] for r in records if "eval_loss" in r] == [3, 4]
    assert [json.loads(line) for line in (path / "run" / "metrics.jsonl").read_text().splitlines()] == records
    plan = plans.Plan.load(path / "plan.json")
    for record in records:
        assert record["mfu"] * record["seconds"] == pytest.approx(plan.estimate["mfu"] * plan.step_seconds)
    events = json.loads((path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X" and e.get("tid") == 2] == ["forward 0", "backward 0", "forward 1", "backward 1",
                                                                                    "reduce", "optimizer"]  # fmt: skip
    assert (path / "all.csv").read_text() == (path / "run" / "runs.csv").read_text()
    assert set(records[0]) >= {"step", "loss", "grad_norm", "seconds", "tokens_per_second", "peak_bytes"}
    assert records[-1]["loss"] < records[0]["loss"]
    runs, skipped = load_runs(read_rows(tmp_path / "run" / "runs.csv"))
    assert not skipped
    assert runs[0].layout == Layout.parse("dp=2")
    timed = [r["seconds"] for r in records if not r.get("watched")]
    assert runs[0].seconds == pytest.approx(statistics.median(timed), rel=1e-4)
    assert not alive(str(tmp_path))
    code, _, said = invoke("export", str(path / "run"), "--out", str(path / "exported"), "--dtype", "fp32")
    assert (code, "at most 4.00 GiB of host memory" in said) == (0, True)
    safetensors = pytest.importorskip("safetensors.torch")
    weights = safetensors.load_file(path / "exported" / "model-00001.safetensors")
    assert sum(t.numel() for t in weights.values()) == plan.job().model.parameters.total
    assert invoke("export", str(path / "exported"), "--out", str(path / "again"))[0] == 2
    assert "no config.json" in said
    assert not (path / "exported" / "config.json").exists()
    missing = invoke("export", str(path / "run"), "--out", str(path / "again"), "--config", "no-such.json")
    assert missing[0] == 2
    assert missing[2].startswith("axisplan: --config: 'no-such.json'") and missing[2].count("\n") == 1
    (path / "config.json").write_text("{}")
    assert (
        "no config.json"
        not in invoke("export", str(path / "run"), "--out", str(path / "again"), "--config", str(path / "config.json"))[2]
    )
    assert (path / "again" / "config.json").read_text() == "{}"


def test_a_killed_rank_is_one_clear_line_and_nothing_stays(tmp_path: Path) -> None:
    path = folder(tmp_path, steps=5000)
    seen: list[dict[str, Any]] = []

    def kill_rank_1(record: dict[str, Any]) -> None:
        seen.append(record)
        if len(seen) == 2:
            victims = [p for p in Path("/proc").iterdir() if p.name.isdigit() and _is_worker(p, str(path), "1")]
            assert victims
            os.kill(int(victims[0].name), signal.SIGKILL)

    with pytest.raises(AxisplanError) as caught:
        launch(arguments(path), 2, kill_rank_1, log=tmp_path / "log.txt", timeout=120)
    assert "rank 1 was killed by SIGKILL" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not alive(str(tmp_path))


@pytest.mark.slow
def test_a_rank_that_raises_alone_ends_the_others_at_once(tmp_path: Path) -> None:
    """Wall 8: they wait for it in a collective, whose timeout is ten minutes."""
    path = folder(tmp_path, steps=5000, timeout_seconds=600)
    seen: list[dict[str, Any]] = []

    def raise_in_rank_1(record: dict[str, Any]) -> None:
        seen.append(record)
        if len(seen) == 2:
            kill(path, 1, signal.SIGINT)  # Python raises KeyboardInterrupt

    with pytest.raises(AxisplanError) as caught:
        launch(arguments(path), 2, raise_in_rank_1, log=tmp_path / "log.txt", timeout=120)
    assert "not finished" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not alive(str(tmp_path))


def _is_worker(entry: Path, text: str, rank: str) -> bool:
    try:
        line = (entry / "cmdline").read_bytes().decode()
        environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return text in line and f"RANK={rank}" in environment


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "precision", "layouts"),
    [
        (0, "fp32", ["dp=1,micro_batch=4", "cp=2,zero=3", "tp=2,pp=2"]),
        (4, "fp64", ["dp=1,micro_batch=4", "tp=2,dp=2,ep=2,zero=2"]),
    ],
)
def test_run_json_prints_the_same_losses_whatever_the_layout_and_the_number_of_processes(
    tmp_path: Path, experts: int, precision: str, layouts: list[str]
) -> None:
    """The promise of docs/runtime.md: dense models to fp32 rounding, a mixture of experts in fp64."""
    losses, held_out, imbalance = [], [], set()
    for number, layout in enumerate(layouts):
        world = Layout.parse(layout, None).world
        (tmp_path / str(number)).mkdir()
        path = folder(tmp_path / str(number), layout, world, experts, eval_data=["text.txt"], precision=precision)
        command = ["run", str(path / "plan.json"), "--settings", str(path / "train.json"), "--json"]
        ran = subprocess.run([*AXISPLAN, *command], capture_output=True, text=True, timeout=200, check=True)
        lines = [json.loads(line) for line in ran.stdout.splitlines()]
        losses.append([line["loss"] for line in lines])
        held_out.append(lines[-1]["eval_loss"])
        imbalance |= {tuple(line.get("expert_imbalance", 0.0) for line in lines)}
    assert len(losses[0]) == 4
    rel = 1e-5 if precision == "fp32" else 1e-9
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=rel)
    assert held_out == pytest.approx([held_out[0]] * len(layouts), rel=rel)
    assert len(imbalance) == 1, "of the worst layer of all stages"
    (measured,) = read_rows(path / "run" / "runs.csv")
    stages = Layout.parse(layout, None).pp
    assert (
        len((measured["stage_seconds"] or "1").split(";")) == len((measured["predicted_stage_seconds"] or "1").split(";")) == stages
    )


@pytest.mark.slow
def test_launch_sh_does_what_axisplan_run_does(tmp_path: Path, invoke: Any) -> None:
    """The same lines, records, checkpoints and row of measurements, seconds apart."""
    facts = {"steps": 4, "checkpoint_every": 2, "out": "run"}
    given, emitted = folder(tmp_path, "tp=2", **facts), tmp_path / "launch"
    assert invoke("emit", str(given / "plan.json"), "--target", "axisplan", "--out", str(emitted))[0] == 0
    for name in ("train.json", "text.txt"):
        (emitted / name).write_text((given / name).read_text())
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run = [*AXISPLAN, "run", str(given / "plan.json"), "--settings", str(given / "train.json")]
    told: list[list[dict[str, Any]]] = []
    for command in (run, ["bash", str(emitted / "launch.sh")]):
        ran = subprocess.run([*command, "--json"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True)
        told.append([json.loads(line) for line in ran.stdout.splitlines()])
    assert [[set(line), line["step"], line["loss"], line["grad_norm"]] for line in told[0]] == [
        [set(line), line["step"], line["loss"], line["grad_norm"]] for line in told[1]
    ]
    assert len(told[0]) == 4
    rows = [read_rows(where / "run" / "runs.csv")[0] for where in (given, emitted)]
    same = ("id", "framework", "gpu", "gpus", "tp", "pp", "zero", "seq_len", "global_batch", "predicted_step_s", "notes")
    assert [rows[0][name] for name in same] == [rows[1][name] for name in same]
    assert [latest(where / "run" / "checkpoints").name for where in (given, emitted)] == ["step-00000004"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    path = folder(tmp_path, steps=5000)
    program = f"from planner.runtime.launch import launch; launch({arguments(path)!r}, 2, lambda r: print(r, flush=True))"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(how)
    process.wait(30)
    until = time.monotonic() + 10
    while alive(str(tmp_path)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not alive(str(tmp_path))


def test_launch_sh_hands_restarts_to_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("planner.runtime.launch.supervise", lambda command, *_, log: seen.extend((command, log)))
    path = folder(tmp_path, out="run")
    words = ["torchrun", "--standalone", "--no-python", "axisplan", "worker", *arguments(path, "--restarts", "3")]
    start(words)
    assert seen == [["torchrun", "--max-restarts", "3", *words[1:]], tmp_path / "run" / "workers.log"]
    monkeypatch.setenv("NODE_RANK", "1")
    start(words[:-2])
    assert seen[2:] == [words[:-2], tmp_path / "run" / "workers-1.log"]
    with pytest.raises(InputError, match="--restarts: -1: must not be negative; nearest: 0"):
        start([*words[:-1], "-1"])


def test_a_port_in_use_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port: {port}: is in use"):
            launch(arguments(folder(tmp_path)), 2, print, port=port)


def test_bad_settings_are_one_line_naming_the_field(tmp_path: Path) -> None:
    path = folder(tmp_path, stepz=3)
    with pytest.raises(AxisplanError, match="stepz") as caught:
        launch(arguments(path), 1, print, timeout=60)
    assert "\n" not in str(caught.value)


def test_why_reads_the_failure_of_a_rank_from_torchruns_table() -> None:
    table = (
        "Root Cause (first observed failure):\n[0]:\n  host      : h\n  rank      : 3 (local_rank: 3)\n  exitcode  : -9 (pid: 17)"
    )
    assert why(table, 1) == "rank 3 was killed by SIGKILL"
    waited = "rank 0: lost contact with another process: Timed out waiting 6000ms for recv operation to complete"
    assert why(f"{waited}\n{table}", 1) == waited


def kill(path: Path, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
    victims = [p for p in Path("/proc").iterdir() if p.name.isdigit() and _is_worker(p, str(path), str(rank))]
    assert victims
    os.kill(int(victims[0].name), how)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_after_the_timeout(tmp_path: Path) -> None:
    """Wall 8: without a timeout of the groups the other ranks would wait for ever."""
    path = folder(tmp_path, "dp=2", steps=5000, timeout_seconds=6)
    seen: list[dict[str, Any]] = []

    def stop_rank_1(record: dict[str, Any]) -> None:
        seen.append(record)
        if len(seen) == 2:
            kill(path, 1, signal.SIGSTOP)

    with pytest.raises(AxisplanError, match=r"rank 0: lost contact with another process: .*[Tt]imed out") as caught:
        launch(arguments(path), 2, stop_rank_1, timeout=200)
    assert "\n" not in str(caught.value)
    assert not alive(str(tmp_path))


@pytest.mark.slow
def test_after_a_kill_torchrun_restarts_and_the_losses_are_the_same(tmp_path: Path) -> None:
    facts = {"steps": 40, "checkpoint_every": 4, "out": "run"}  # far more than are trained while the fifth line is on its way here
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    calm: list[dict[str, Any]] = []
    launch(arguments(folder(tmp_path / "a", "dp=2,zero=1", **facts)), 2, calm.append, timeout=200)
    broken: list[dict[str, Any]] = []

    def record(line: dict[str, Any]) -> None:
        broken.append(line)
        if len(broken) == 5:
            kill(tmp_path / "b", 1)

    launch(arguments(folder(tmp_path / "b", "dp=2,zero=1", **facts)), 2, record, restarts=2, timeout=200)
    assert [r["step"] for r in calm] == list(range(1, 41))
    assert broken[-1]["step"] == 40
    again = {r["step"]: r["loss"] for r in broken}
    assert again == {r["step"]: r["loss"] for r in calm}, "bitwise"
    assert latest(tmp_path / "b" / "run" / "checkpoints") is not None


@pytest.mark.slow
def test_sigterm_saves_and_leaves_and_the_next_run_continues(tmp_path: Path) -> None:
    path = folder(tmp_path, "dp=2", steps=3000, checkpoint_every=1000, out="run", decay="constant")
    seen: list[dict[str, Any]] = []

    def terminate(line: dict[str, Any]) -> None:
        seen.append(line)
        if len(seen) == 3:
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and _is_worker(entry, str(path), "0"):
                    os.kill(int(entry.name), signal.SIGTERM)

    launch(arguments(path), 2, terminate, timeout=200)
    stopped = seen[-1]["step"]
    assert stopped < 3000
    assert latest(path / "run" / "checkpoints") == path / "run" / "checkpoints" / f"step-{stopped:08d}"
    more: list[dict[str, Any]] = []
    launch(arguments(path, "--steps", str(stopped + 2)), 2, more.append, timeout=200)
    assert [r["step"] for r in more] == [stopped + 1, stopped + 2]


@pytest.mark.slow
@pytest.mark.parametrize("save", [1000, 0])
def test_sigterm_to_the_command_is_one_line_after_every_worker_has_saved_and_left(tmp_path: Path, save: int) -> None:
    path = folder(tmp_path, "dp=2", steps=5000, checkpoint_every=save, out="run", decay="constant")
    command = [*AXISPLAN, "run", str(path / "plan.json"), "--settings", str(path / "train.json"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        rest, said = process.communicate(timeout=100)
    steps = [json.loads(line)["step"] for line in rest.splitlines()]
    last = steps[-1] if steps else 3
    saved = path / "run" / "checkpoints" / f"step-{last:08d}"
    what = f"saved {saved}" if save else "nothing was saved: checkpoint_every is 0"
    assert said == f"axisplan: stopped by SIGTERM after step {last}; {what}\n"
    assert process.returncode == 143
    assert (latest(path / "run" / "checkpoints") == saved) == bool(save)
    assert not alive(str(tmp_path))


def test_workers_are_found_under_the_process_that_started_them_and_are_all_that_is() -> None:
    sleep = "import sys, time; time.sleep(60)"
    rank = {**os.environ, "RANK": "0"}
    script = f"exec 3<&0; {sys.executable} -c '{sleep}' planner.runtime.worker & RANK=1 {sys.executable} -c '{sleep}' planner.runtime.worker & wait"
    other = subprocess.Popen([sys.executable, "-c", sleep, "planner.runtime.worker"], env=rank)
    parent = subprocess.Popen(
        ["bash", "-c", script], env={k: v for k, v in os.environ.items() if k != "RANK"}, start_new_session=True
    )
    try:
        until = time.monotonic() + 20
        while not (found := workers_of(parent.pid)) and time.monotonic() < until:
            time.sleep(0.05)
        assert len(found) == 1
        assert b"RANK=1" in Path(f"/proc/{found[0]}/environ").read_bytes()
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        other.kill()
        parent.wait()
        other.wait()


def test_a_worker_that_left_when_asked_is_quoted() -> None:
    assert (
        stopped(io.StringIO("noise\naxisplan-stopped: stopped by SIGTERM after step 7; saved x\n"))
        == "stopped by SIGTERM after step 7; saved x"
    )
    assert stopped(io.StringIO("noise\n")) is None


@pytest.mark.slow
def test_a_loss_that_is_not_a_number_stops_with_the_step_named(tmp_path: Path) -> None:
    path = folder(tmp_path, "dp=2", learning_rate=1e30, clip=0, steps=40, checkpoint_every=1, out="run")
    with pytest.raises(AxisplanError, match=r"step \d+: loss .*not a number; nothing was updated or saved") as caught:
        launch(arguments(path), 2, lambda _: None, timeout=200)
    step = int(str(caught.value).split("step ")[1].split(":")[0])
    saved = latest(path / "run" / "checkpoints")
    assert saved is not None
    assert int(saved.name[5:]) == step - 1
