"""The entry of a worker process (``axisplan worker train PLAN --settings FILE``), started by torchrun once a rank.

What goes wrong is one line on stderr: ``axisplan: ...`` from the rank where it began; ranks that only lost contact say so without
that prefix. Exit codes are the command's: 1 failed, 2 the input is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from profiles.errors import AxisplanError, InputError, one_line

PR_SET_PDEATHSIG = 1
REFUSED = "axisplan-exit-code: 2"
"""Printed after a fault of the input: torchrun hides the code of a worker."""
PATIENCE = 20.0
"""Seconds that the other ranks leave rank 0 to report a fault of the input."""


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the worker and end the process with its exit code."""
    _die_with_parent()
    arguments = _parser().parse_args(argv)
    try:
        code = _train(arguments)
    except BaseException as error:
        _explain(error)
        code = error.exit_code if isinstance(error, AxisplanError) else 130 if isinstance(error, KeyboardInterrupt) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Destructors at interpreter exit are not safe here: after an error a peer may wait in a collective for ever, and they would wait
    # with it; after success a thread of the process group that still runs ends the process with SIGABRT now and then.
    os._exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("axisplan worker")
    parser.add_argument("action", choices=["train"])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--settings", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--data", type=Path, nargs="+")
    parser.add_argument("--eval-data", type=Path, nargs="+")
    parser.add_argument("--eval-every", type=int)
    parser.add_argument("--tensorboard", action="store_true", default=None)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--precision")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other training setting")
    parser.add_argument("--json", action="store_true", help="accepted for scripts: records are JSON lines always")
    return parser


def _train(arguments: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from cost_models.step import ideal_seconds
    from planner.emit.logs import append_row
    from planner.plan import Plan, digest
    from planner.runtime import feedback, loop
    from planner.runtime.journal import Journal, check_tensorboard
    from planner.runtime.mesh import backend_of, device_of_rank
    from planner.traces import write_trace

    plan = Plan.load(arguments.plan)
    job = plan.job()
    names = ("seq_len", "global_batch", "precision", "lora_rank", "lora_targets", "lora_alpha", "frozen")
    settings = read_settings(arguments, {name: getattr(job, name) for name in names})
    check_tensorboard(settings.tensorboard)
    ran = dataclasses.replace(job, seq_len=settings.seq_len, global_batch=settings.global_batch)
    device = device_of_rank(int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend_of(device), timeout=datetime.timedelta(seconds=settings.timeout_seconds))
    journal = Journal(settings.out, settings.tensorboard)

    def trace(spans: list[dict[str, Any]]) -> None:
        write_trace(plan, arguments.trace, journal.records, spans)

    ideal, layout = ideal_seconds(ran, plan.layout_object), plan.layout_object
    loop.run(
        job.model,
        layout,
        settings,
        device,
        record=journal,
        ideal_seconds=ideal,
        spans=trace if arguments.trace is not None else None,
    )
    journal.close()
    if journal.records and settings.out is not None:
        row = feedback.row(plan, journal.records, f"{job.model.name}-{digest([plan.inputs, plan.layout_text])[:12]}")
        for path in filter(None, (settings.out / "runs.csv", arguments.runs)):
            append_row(path, row)
    dist.destroy_process_group()
    return 0


def read_settings(arguments: argparse.Namespace, job: dict[str, Any]) -> Any:
    """TrainSettings from the plan's job, the settings file and the command line, later ones first.

    Paths in the file are relative to it. Raises InputError for an unknown key or a bad value.
    """
    from pydantic import ValidationError

    from planner.runtime.train import TrainSettings

    values: dict[str, Any] = dict(job)
    folder = Path()
    if arguments.settings is not None:
        try:
            given = json.loads(arguments.settings.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError("settings", arguments.settings, f"cannot be read: {error}") from None
        if not isinstance(given, dict):
            raise InputError("settings", arguments.settings, "is not a JSON object")
        folder = arguments.settings.resolve().parent
        for name in ("data", "eval_data"):
            if name in given:
                files = [given[name]] if isinstance(given[name], str) else given[name]
                given[name] = [str(folder / file) for file in files]
        if given.get("out"):
            given["out"] = str(folder / given["out"])
        values |= given
    for name in ("steps", "data", "eval_data", "eval_every", "tensorboard", "out", "seed", "precision"):
        if getattr(arguments, name) is not None:
            values[name] = getattr(arguments, name)
    for pair in arguments.set:
        key, _, text = pair.partition("=")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    if values.get("out") is None:
        values["out"] = folder / "run"
    try:
        return TrainSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "extra_forbidden":
            from difflib import get_close_matches

            name = str(first["loc"][0])
            near = get_close_matches(name, TrainSettings.model_fields, 3)
            raise InputError("--set", name, "is no training setting", ", ".join(near) or None) from None
        raise InputError(".".join(str(p) for p in first["loc"]), first.get("input"), first["msg"]) from None


def _explain(error: BaseException) -> None:
    rank = int(os.environ.get("RANK", "0"))
    text = one_line(error)
    if isinstance(error, InputError):
        if rank:  # every rank reads the same input and finds the same fault: rank 0 says so, and torchrun then ends the others
            time.sleep(PATIENCE)
        print(f"axisplan: {text}\n{REFUSED}", file=sys.stderr)
    elif isinstance(error, AxisplanError):
        print(f"axisplan: {text}", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt | SystemExit):
        pass
    elif any(word in text for word in ("onnection", "Read error", "timed out", "Timed out", "Broken pipe", "NCCL")):
        print(f"rank {rank}: lost contact with another process: {text[:200]}", file=sys.stderr)
    else:
        import traceback

        traceback.print_exception(error)
        print(f"axisplan: rank {rank}: {type(error).__name__}: {text[:300]}", file=sys.stderr)


def _die_with_parent() -> None:
    """Ask Linux to kill this process when torchrun dies, so that a killed launcher leaves nothing behind."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
