"""The entry of a worker process (``axisplan worker train PLAN --settings FILE``), started by torchrun once a rank.

What goes wrong is one line on stderr: ``axisplan: ...`` from the rank where it began; ranks that only lost contact say so without
that prefix. Exit codes are the command's: 1 failed, 2 the input is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
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
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--precision")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other training setting")
    parser.add_argument("--json", action="store_true", help="accepted for scripts: records are JSON lines always")
    return parser


def _train(arguments: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from planner.plan import Plan
    from planner.runtime import feedback, train
    from planner.runtime.mesh import backend_of, device_of_rank

    plan = Plan.load(arguments.plan)
    job = plan.job()
    settings = read_settings(arguments, {"seq_len": job.seq_len, "global_batch": job.global_batch, "precision": job.precision})
    device = device_of_rank(int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend_of(device), timeout=datetime.timedelta(seconds=settings.timeout_seconds))
    records: list[dict[str, Any]] = []

    def record(line: dict[str, Any]) -> None:
        records.append(line)
        train.print_record(line)

    train.run(job.model, plan.layout_object, settings, device, record=record)
    if records and settings.out is not None:
        feedback.write(settings.out / "runs.csv", [feedback.row(plan, records, job.model.name)])
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
        if "data" in given:
            files = [given["data"]] if isinstance(given["data"], str) else given["data"]
            given["data"] = [str(folder / name) for name in files]
        if given.get("out"):
            given["out"] = str(folder / given["out"])
        values |= given
    for name in ("steps", "data", "out", "seed", "precision"):
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
