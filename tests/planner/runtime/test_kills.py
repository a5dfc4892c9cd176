"""Twenty random kills of a 200-step run, in the middle of saves too: it finishes with the losses of a run that nobody touched."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from planner.runtime.checkpoint import latest
from planner.runtime.launch import launch
from tests.planner.runtime.test_launch import _is_worker, alive, arguments, folder

STEPS, EVERY, KILLS = 200, 5, 20


class Killer:
    """Kills a random rank soon after each of the chosen steps is first reported; counts the kills that hit a save half written."""

    def __init__(self, path: Path, seed: int) -> None:
        pick = random.Random(seed)
        saves = pick.sample(range(EVERY, STEPS, EVERY), KILLS // 2)
        others = pick.sample([s for s in range(1, STEPS) if s % EVERY], KILLS - KILLS // 2)
        delays = {s: pick.uniform(0, 0.02) for s in saves} | {s: pick.uniform(0, 0.2) for s in others}
        self.path, self.waiting, self.pick, self.done, self.in_saves = path, delays, pick, 0, 0

    def __call__(self, step: int) -> None:
        delay = self.waiting.pop(step, None)
        if delay is not None:
            threading.Timer(delay, self._kill, (self.pick.choice("01"),)).start()

    def _kill(self, rank: str) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:  # none is there while torchrun starts them again
            for entry in Path("/proc").glob("[0-9]*"):
                if _is_worker(entry, str(self.path), rank):
                    self.in_saves += self._half_written()
                    os.kill(int(entry.name), signal.SIGKILL)
                    self.done += 1
                    return
            time.sleep(0.05)

    def _half_written(self) -> bool:
        folder = self.path / "run" / "checkpoints"
        whole = latest(folder)
        return any(p.name > (whole.name if whole else "") for p in folder.glob("step-*"))


@pytest.mark.verify
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", ["dp=2,zero=1", "pp=2"])
def test_twenty_random_kills_change_no_loss(tmp_path: Path, layout: str, record_property: Any) -> None:
    facts = {"steps": STEPS, "checkpoint_every": EVERY, "out": "run"}
    for name in "ab":
        (tmp_path / name).mkdir()
    calm: list[dict[str, Any]] = []
    launch(arguments(folder(tmp_path / "a", layout, **facts)), 2, calm.append, timeout=400)
    killer = Killer(tmp_path / "b", seed=7)
    broken: dict[int, float] = {}
    repeated = 0

    def record(line: dict[str, Any]) -> None:
        nonlocal repeated
        step, loss = line["step"], line["loss"]
        assert broken.get(step, loss) == loss, f"step {step} was {broken[step]}, then {loss}"
        repeated += step in broken
        broken[step] = loss
        killer(step)

    began = time.monotonic()
    launch(arguments(folder(tmp_path / "b", layout, **facts)), 2, record, restarts=KILLS + 2, timeout=1300)
    print(f"{layout}: {killer.done} kills ({killer.in_saves} in a save), {repeated} steps again, {time.monotonic() - began:.0f} s")
    assert killer.done == KILLS
    assert killer.in_saves >= 2
    assert broken == {r["step"]: r["loss"] for r in calm}, "bitwise, every step"
    assert latest(tmp_path / "b" / "run" / "checkpoints") == tmp_path / "b" / "run" / "checkpoints" / f"step-{STEPS:08d}"
    assert not alive(str(tmp_path))
