"""The entry of a worker process (``axisplan worker train PLAN --settings FILE``), started by torchrun once a rank.

What goes wrong is one line on stderr: ``axisplan: ...`` from the rank where it began; ranks that only lost contact say so without
that prefix. Exit codes are the command's: 1 failed, 2 the input is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import sys
import time
from typing import Any, NoReturn

from planner.runtime.settings import parser, read_settings
from planner.runtime.stop import die_with_parent
from profiles.errors import AxisplanError, InputError, one_line

REFUSED = "axisplan-exit-code: 2"
"""Printed after a fault of the input: torchrun hides the code of a worker."""
LOST = "lost contact with another process"
PATIENCE = 20.0
"""Seconds that the other ranks leave rank 0 to report a fault of the input."""


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the worker and end the process with its exit code."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    try:
        code = _train(parser().parse_args(argv))
    except BaseException as error:
        _explain(error)
        code = error.exit_code if isinstance(error, AxisplanError) else 130 if isinstance(error, KeyboardInterrupt) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Destructors at interpreter exit are not safe here: after an error a peer may wait in a collective for ever, and they would wait
    # with it; after success a thread of the process group that still runs ends the process with SIGABRT now and then.
    os._exit(code)


def _train(arguments: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from cost_models.step import ideal_seconds
    from planner.emit.logs import append_row
    from planner.plan import Plan, digest
    from planner.runtime import feedback, loop
    from planner.runtime.devices import as_planned, backend_of, check, device_of_rank, kind_of
    from planner.runtime.journal import Journal
    from planner.traces import write_trace

    plan = Plan.load(arguments.plan)
    job = plan.job()
    settings = read_settings(arguments, job)
    ran = dataclasses.replace(job, seq_len=settings.seq_len, global_batch=settings.global_batch)
    check(job.cluster, settings.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), alone=False)
    device = device_of_rank(kind_of(job.cluster, settings.device), int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend_of(device), timeout=datetime.timedelta(seconds=settings.timeout_seconds))
    journal = Journal(settings.out, settings.tensorboard)

    def trace(spans: list[dict[str, Any]]) -> None:
        write_trace(plan, arguments.trace, journal.records, spans)

    layout, planned = plan.layout_object, as_planned(job.cluster, settings.device)
    ideal = ideal_seconds(ran, layout) if planned else None
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
    if journal.records and settings.out is not None and planned:
        row = feedback.row(plan, journal.records, f"{job.model.name}-{digest([plan.inputs, plan.layout_text])[:12]}")
        for path in filter(None, (settings.out / "runs.csv", arguments.runs)):
            append_row(path, row)
    dist.destroy_process_group()
    return 0


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
        print(f"rank {rank}: {LOST}: {text[:200]}", file=sys.stderr)
    else:
        import traceback

        traceback.print_exception(error)
        print(f"axisplan: rank {rank}: {type(error).__name__}: {text[:300]}", file=sys.stderr)


if __name__ == "__main__":
    main()
