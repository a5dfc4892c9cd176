"""Which devices a run takes, and what is said where they are not here. CUDA is pretended: no test needs a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner.runtime.devices import backend_of, check, device_of_rank, kind_of
from planner.runtime.launch import launch
from planner.runtime.metrics import Clock, Memory
from profiles.errors import InputError
from profiles.hardware import load_cluster
from tests.planner.runtime.test_launch import folder

GPUS, CPUS = load_cluster("h100-sxm:1x8"), load_cluster("cpu:1x2")


def pretend(monkeypatch: pytest.MonkeyPatch, devices: int, gib: float = 80.0) -> None:
    """A machine with ``devices`` GPUs of ``gib``."""
    facts = SimpleNamespace(total_memory=int(gib * 2**30))
    for name, value in {
        "is_available": lambda: devices > 0, "device_count": lambda: devices, "get_device_properties": lambda _: facts,
        "get_device_name": lambda _: "NVIDIA Pretended",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize(
    ("cluster", "wish", "kind"),
    [(GPUS, "plan", "cuda"), (GPUS, "cpu", "cpu"), (CPUS, "plan", "cpu"), (CPUS, "cuda", "cuda"), (GPUS, "cuda", "cuda")],
)
def test_a_plan_runs_on_what_it_was_made_for_unless_told_otherwise(cluster: Any, wish: str, kind: str) -> None:
    assert kind_of(cluster, wish) == kind
    device = device_of_rank(kind_of(cluster, wish), 3)
    assert (str(device), backend_of(device)) == (("cuda:3", "nccl") if kind == "cuda" else ("cpu", "gloo"))


@pytest.mark.parametrize(("here", "found"), [(0, "no CUDA device"), (1, "1 CUDA device"), (7, "7 CUDA devices")])
def test_a_plan_for_gpus_that_are_not_here_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, here: int, found: str) -> None:
    pretend(monkeypatch, here)
    with pytest.raises(InputError) as caught:
        check(GPUS, "plan", 8, alone=True)
    assert str(caught.value) == (
        "--device: 'plan': the plan is for 8 x h100-sxm-80gb on 1 machine, 8 processes start here, and this machine has "
        f"{found}; nearest: cpu"
    )
    told = ["the plan is for 8 x h100-sxm-80gb on 1 machine, not on cpu: no MFU, and no row of measurements"]
    assert check(GPUS, "cpu", 8, alone=True) == told


def test_gpus_that_are_here_are_taken_and_smaller_ones_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 8, 79.2)
    assert check(GPUS, "plan", 8, alone=True) == []
    pretend(monkeypatch, 8, 40)
    (said,) = check(GPUS, "plan", 8, alone=True)
    assert said.endswith("here are NVIDIA Pretended of 40 GiB: it may not fit")
    assert check(CPUS, "cuda", 2, alone=True) == [
        "the plan is for 2 x cpu on 1 machine, not on cuda: no MFU, and no row of measurements"
    ]


def test_a_plan_for_several_machines_is_not_run_on_one_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 8)
    many = load_cluster("h100-sxm:2x8")
    with pytest.raises(
        InputError, match=r"on 2 machines and axisplan run starts the processes of one; emit it and start launch\.sh on each"
    ):
        check(many, "plan", 16, alone=True)
    assert check(many, "plan", 8, alone=False) == []
    assert len(check(many, "cpu", 16, alone=True)) == 1


@pytest.mark.parametrize("command", ["run", "worker start torchrun"])
def test_run_and_launch_sh_refuse_alike_before_any_process_starts(
    tmp_path: Path, invoke: Any, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    pretend(monkeypatch, 0)
    path = folder(tmp_path, "dp=4,tp=2", 8, cluster="h100-sxm:1x8")
    words = (str(path / "plan.json"), "--data", str(path / "text.txt"))
    code, out, said = invoke("run", *words) if command == "run" else invoke(*command.split(), "worker", "train", *words)
    assert (code, out) == (2, "")
    assert said.startswith("axisplan: --device: 'plan': the plan is for 8 x h100-sxm-80gb")
    assert "\n" not in said.strip()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_plan_for_gpus_on_processors_trains_and_measures_nothing_of_its_cluster(tmp_path: Path) -> None:
    path = folder(tmp_path, "dp=2", 2, cluster="h100-sxm:1x2")
    records: list[dict[str, Any]] = []
    launch(
        ["train", str(path / "plan.json"), "--settings", str(path / "train.json"), "--device", "cpu"],
        2,
        records.append,
        timeout=200,
    )
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert not any("mfu" in r for r in records)
    assert not (path / "run" / "runs.csv").exists()


class Event:
    """A CUDA event that knows its time."""

    at, waited = 0.0, False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.at += 5.0
        self.at = Event.at

    def record(self) -> None: ...

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, later: Event) -> float:
        assert self.waited
        assert later.waited
        return later.at - self.at


def test_a_gpus_time_is_between_events_and_its_memory_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = torch.device("cuda", 0), []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name, value in {"reset_peak_memory_stats": None, "max_memory_allocated": 7, "max_memory_reserved": 9}.items():
        monkeypatch.setattr(torch.cuda, name, lambda where, name=name, value=value: asked.append((name, where)) or value)
    clock, memory = Clock(device), Memory(device)
    first, last = clock.now(), clock.now()
    assert clock.seconds(first, last) == pytest.approx(0.005)
    with memory.step() as watched:
        assert not watched, "a GPU's steps are never slowed by watching"
    assert (memory.peak(), memory.reserved()) == (7, 9)
    assert asked == [("reset_peak_memory_stats", device), ("max_memory_allocated", device), ("max_memory_reserved", device)]
