"""Saves and reads of checkpoints that the runtime's tests look into while they happen."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as read_state

from planner.runtime import checkpoint
from planner.runtime.checkpoint import Boxes, Checkpoints, _copied, state_of
from planner.runtime.loop import checkpoint_facts, finishing, resume
from planner.runtime.metrics import most_allocated
from profiles.errors import AxisplanError

_spec = importlib.util.spec_from_file_location("runtime_programs", Path(__file__).resolve().parent / "programs.py")
assert _spec is not None
assert _spec.loader is not None
programs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(programs)


def step_while_saving(folder: str) -> dict[str, Any]:
    """A step of training while a save is held up before its first byte, then the save read back."""
    trainer, data = programs._trainer_and_data("dp=2,zero=1", 2)
    saved, may_write, write = Checkpoints(Path(folder)), threading.Event(), checkpoint.write_state

    def held_up(*arguments: Any, **more: Any) -> None:
        may_write.wait(60)
        write(*arguments, **more)

    trainer.step(0, trainer.batch(data, 0))
    before = [p.tensor.clone() for p in trainer.optimizer.pieces("parameter")]
    checkpoint.write_state = held_up
    try:
        saved.save(trainer, 1, checkpoint_facts(trainer))
        trainer.step(1, trainer.batch(data, 1))
        during = checkpoint.latest(Path(folder))
        may_write.set()
        saved.finish()
    finally:
        checkpoint.write_state = write
    moved = any(not torch.equal(p.tensor, was) for p, was in zip(trainer.optimizer.pieces("parameter"), before, strict=True))
    assert resume(trainer, saved) == 1
    same = all(torch.equal(p.tensor, was) for p, was in zip(trainer.optimizer.pieces("parameter"), before, strict=True))
    after = checkpoint.latest(Path(folder))
    return {
        "named_while_writing": during and during.name, "named_after": after and after.name, "moved": moved, "as_it_was": same,
    }  # fmt: skip


def checkpoint_peaks(folder: str, layout: str, model: str, precision: str, vocab: int) -> dict[str, int]:
    """Bytes that this rank's copy of a save holds, that its save and its load allocate at most at once, and of the files."""
    settings = {"precision": precision, "steps": 1}
    trainer, data = programs._trainer_and_data(layout, 1, model=model, settings=settings, changes={"vocab": vocab})
    trainer.step(0, trainer.batch(data, 0))
    saved = Checkpoints(Path(folder))
    with torch.autograd.profiler.profile(profile_memory=True) as saving:
        copy = {name: _copied(value) for name, value in state_of(trainer, once=True).items()}
    held = sum(p.tensor.nbytes for value in copy.values() if isinstance(value, Boxes) for p in value.pieces)
    saved.save(trainer, 1, checkpoint_facts(trainer), wait=True)
    trainer.optimizer.prepare(1)
    state = state_of(trainer)
    with torch.autograd.profiler.profile(profile_memory=True) as loading:
        read_state(state, checkpoint_id=Path(folder) / "step-00000001")
    files = sum(p.stat().st_size for p in (Path(folder) / "step-00000001").glob("*.distcp"))
    return {"held": held, "saving": most_allocated(saving), "loading": most_allocated(loading), "files": files}


def fault_after_a_save_began(folder: str) -> str:
    """A run that ends with a fault while a save is being written: what is raised."""
    trainer, data = programs._trainer_and_data("dp=2,zero=1", 1)
    trainer.step(0, trainer.batch(data, 0))
    saved = Checkpoints(Path(folder))
    try:
        with finishing(saved):
            saved.save(trainer, 1, checkpoint_facts(trainer))
            raise AxisplanError("step 2: not a number")
    except AxisplanError as error:
        return str(error)


def save_where_nothing_can_be_named(folder: str) -> str:
    """A save whose pointer cannot be renamed into place (a folder stands there): what this rank says."""
    trainer, data = programs._trainer_and_data("dp=2,zero=1", 2)
    trainer.step(0, trainer.batch(data, 0))
    path = Path(folder)
    if dist.get_rank() == 0:
        (path / "latest").rename(path / "before")
        (path / "latest").mkdir()
        (path / "latest" / "in-the-way").touch()
    dist.barrier()
    try:
        Checkpoints(path).save(trainer, 2, checkpoint_facts(trainer), wait=True)
    except AxisplanError as error:
        return str(error)
    return ""
