"""A run, as a story: from a plan's model and layout to a trained model.

``run`` reads top to bottom: data is opened, each rank builds its part of the model (``train``), the last whole checkpoint is
continued, and every step trains, is measured, reported, evaluated and saved.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cost_models.layout import Layout
from planner.runtime import checkpoint, weights
from planner.runtime.checkpoint import Checkpoints
from planner.runtime.data import Source, TokenFile
from planner.runtime.evaluate import HeldOut
from planner.runtime.metrics import Memory, worst_of_all
from planner.runtime.settings import TrainSettings, files_of
from planner.runtime.stop import STOPPED, Stop
from planner.runtime.timeline import measured_spans
from planner.runtime.train import Trainer
from profiles.errors import InputError
from profiles.model import ModelSpec

Record = dict[str, Any]


def run(
    model: ModelSpec, layout: Layout, settings: TrainSettings, device: torch.device, source: Source | None = None,
    record: Callable[[Record], None] | None = None, *, ideal_seconds: float | None = None,
    spans: Callable[[list[Record]], None] | None = None,
) -> None:  # fmt: skip
    """Train. Rank 0 hands each step's record to ``record`` (default: one JSON line on stdout).

    ``ideal_seconds``: what the model FLOPs of a step take at the devices' peak, for the records' ``mfu``. ``spans`` is given what
    every stage did in the last step, and when, on rank 0.

    With ``out`` and ``checkpoint_every``, continues from the last whole checkpoint, whatever layout wrote it; on SIGTERM every rank
    finishes its step, saves and leaves. A save under way is finished whatever ends the run.
    """
    memory = Memory(device)
    source = source or open_data(model, settings, "data")
    trainer = Trainer(model, layout, settings, device)
    held_out = HeldOut(open_data(model, settings, "eval_data"), settings.eval_sequences) if settings.eval_data else None
    saved = open_checkpoints(settings)
    done = begin(trainer, saved)
    with Stop() as stop, finishing(saved):
        for number in range(done, settings.steps):
            if spans is not None:
                dist.barrier()  # spans of all ranks begin at one moment
            start, began = time.perf_counter(), trainer.pipeline.clock.now()
            with memory.step() as watched:
                line: Record = {"step": number + 1, **trainer.step(number, trainer.batch(source, number), stop.asked)}
            leave = line.pop("stop") > 0
            line["seconds"] = time.perf_counter() - start
            measured(line, trainer, memory, ideal_seconds)
            if watched:
                line["watched"] = True
            last = leave or number + 1 == settings.steps
            if last and spans is not None:
                measured_spans(trainer, began, spans)
            if held_out is not None and (last or (settings.eval_every and (number + 1) % settings.eval_every == 0)):
                line |= held_out.loss(trainer)
            if dist.get_rank() == 0:
                (record or print_record)(line)
            if saved is not None and (last or (number + 1) % settings.checkpoint_every == 0):
                saved.save(trainer, number + 1, checkpoint_facts(trainer), wait=last)
            if leave:
                say_stopped(number + 1, saved)
                break


def measured(line: Record, trainer: Trainer, memory: Memory, ideal_seconds: float | None) -> None:
    """Add a step's rates, the worst rank's peak, and the busy seconds of each stage."""
    settings = trainer.settings
    line["tokens_per_second"] = settings.seq_len * settings.global_batch / line["seconds"]
    if ideal_seconds is not None:
        line["mfu"] = ideal_seconds / line["seconds"]
    worst = worst_of_all((memory.peak(), memory.reserved(), line.get("expert_imbalance", 0.0)), trainer.device)
    line["peak_bytes"] = int(worst[0])
    if worst[1]:
        line["reserved_bytes"] = int(worst[1])
    if "expert_imbalance" in line:
        line["expert_imbalance"] = worst[2]
    if trainer.layout.pp > 1:
        line["stage_seconds"] = trainer.stage_seconds()


@contextmanager
def finishing(saved: Checkpoints | None) -> Iterator[None]:
    """Whatever ends the run, a checkpoint whose writing has begun is written first; the run's own fault is the one raised."""
    try:
        yield
    except BaseException:
        if saved is not None:
            saved.settle()
        raise
    if saved is not None:
        saved.finish()


def say_stopped(step: int, saved: Checkpoints | None) -> None:
    """Rank 0's line after SIGTERM."""
    path = None if saved is None else checkpoint.latest(saved.folder)
    what = "nothing was saved: checkpoint_every is 0" if path is None else f"saved {path}"
    if dist.get_rank() == 0:
        print(f"{STOPPED}stopped by SIGTERM after step {step}; {what}", file=sys.stderr, flush=True)


def open_checkpoints(settings: TrainSettings) -> Checkpoints | None:
    if not settings.out or not settings.checkpoint_every:
        return None
    return Checkpoints(settings.out / "checkpoints", settings.keep, settings.timeout_seconds)


def begin(trainer: Trainer, saved: Checkpoints | None) -> int:
    """Steps done by the checkpoint that is continued, if any. Where some weights are not trained, no checkpoint holds them: they
    come from ``initial`` again."""
    settings = trainer.settings
    found = saved if saved is not None and settings.resume and checkpoint.latest(saved.folder) is not None else None
    if settings.initial is not None and (found is None or settings.lora_rank or settings.frozen):
        weights.load(trainer, settings.initial)
    return 0 if found is None else resume(trainer, found)


def checkpoint_facts(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint must agree with to be continued, and what wrote it."""
    settings = trainer.settings
    trained: dict[str, Any] = {}
    if settings.lora_rank or settings.frozen:
        names = ("lora_rank", "lora_targets", "lora_alpha", "frozen")
        trained = {n: v for n, v in settings.model_dump(mode="json").items() if n in names} | {"base": settings.initial is not None}
    return {
        "trained": trained, "model": trainer.model.model_dump(mode="json"), "layout": trainer.layout.text(), "seed": settings.seed,
        "seq_len": settings.seq_len, "global_batch": settings.global_batch,
    }  # fmt: skip


def resume(trainer: Trainer, saved: Checkpoints) -> int:
    """Steps done by the last whole checkpoint, which is read; 0 where there is none. One that is damaged is set aside, and the one
    before it read. Raises InputError if it is another run's, or none can be read."""
    path = checkpoint.latest(saved.folder)
    while path is not None:
        try:
            return _read(trainer, path)
        except InputError as error:
            last = checkpoint.before(path)
            if error.field != "checkpoint" or last is None:
                raise
            dist.barrier()  # every rank has looked for the one before
            if dist.get_rank() == 0:
                aside = checkpoint.set_aside(path, last)
                note(f"{error.value} {error.rule}; going on from {last.name}, the other is now {aside.name}")
            dist.barrier()
            path = last
    return 0


def _read(trainer: Trainer, path: Path) -> int:
    """Read the checkpoint at ``path``: its steps. Raises InputError on every rank alike."""
    facts, fault = {}, None
    try:
        facts = checkpoint.read_facts(path)
    except InputError as error:
        fault = error
    if worst_of_all([fault is not None], trainer.device)[0]:  # none goes on to read together while another does not
        raise fault or InputError("checkpoint", path, "is not a whole checkpoint on another rank")
    wanted = checkpoint_facts(trainer)
    for name in ("model", "trained", "seed", "seq_len", "global_batch"):
        if facts.get(name, {}) != wanted[name]:
            what = {"model": "another model", "trained": "other weights trained"}.get(name, f"{name} {facts.get(name)}")
            raise InputError("out", path.parent.parent, f"holds a run with {what}; choose another folder, or resume=false")
    return int(checkpoint.load(trainer, path)["step"])


def note(text: str) -> None:
    """Something worth saying beside the steps: the launcher shows it."""
    print(json.dumps({"note": text}), flush=True)


def open_data(model: ModelSpec, settings: TrainSettings, field: str) -> TokenFile:
    """The prepared data of a setting; text files are tokenised as bytes beside the run's output first (by rank 0 alone)."""
    from planner.runtime.data import prepare

    files = files_of(settings, field)
    folder = files[0]
    if not folder.is_dir():
        folder = (settings.out or Path(".")) / field
        if dist.get_rank() == 0:
            prepare(files, folder)
        dist.barrier()
    elif len(files) > 1:
        raise InputError(field, files[1], "only one prepared folder is read; prepare the texts together", folder)
    return TokenFile(folder, settings.seq_len, settings.seed, settings.reset_documents, model.vocab, field)


def print_record(line: Record) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
