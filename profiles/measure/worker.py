"""One worker of the profiler under torchrun: ``python -P -m profiles.measure.worker JOB RECORDS``.

The job names what to measure, ``{"gpu": {...}, "links": {...}, "layer": {...}}``; rank 0 appends a record a line to RECORDS.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiles.errors import one_line

TIMEOUT_SECONDS = 120.0
"""After which a collective that some worker never joined fails on the others."""


def watch_parent(owner: int) -> None:
    """Ends this process when torchrun or ``owner`` (the axisplan that started it) is gone, so that none is left behind."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and _alive(owner):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def device_of_worker(choice: str | None) -> Any:
    """The ``torch.device`` of this worker: its own CUDA device where there is one (or is asked for), else the CPU."""
    import torch

    if choice in (None, "auto"):
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    if choice == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device(str(choice))


def join(device: Any, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Enters the process group that torchrun's environment describes: NCCL on CUDA (gloo beside it), gloo on CPU."""
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_seconds))


def main(argv: Sequence[str] | None = None) -> int:
    """Does the job; exit code 0, or 1 with an error record."""
    job_file, records_file = argv if argv is not None else sys.argv[1:]
    job = json.loads(Path(job_file).read_text())
    watch_parent(int(job["owner"]))
    rank = int(os.environ["RANK"])
    with Path(records_file).open("a", buffering=1) as out:

        def report(record: dict[str, Any]) -> None:
            if rank == 0:
                out.write(json.dumps(record) + "\n")

        try:
            _work(job, report)
        except KeyboardInterrupt:
            return 130
        except Exception as error:
            out.write(json.dumps({"type": "error", "rank": rank, "message": one_line(error)[:300]}) + "\n")
            raise
    return 0


def _work(job: dict[str, Any], report: Any) -> None:
    import torch
    import torch.distributed as dist

    from profiles.measure import gpu_worker, link_worker
    from profiles.measure.together import Workers

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = device_of_worker(job.get("device"))
    join(device)
    together = Workers()
    report({"type": "start", "device": str(device)})
    if "gpu" in job:
        gpu_worker.measure_here(device, together, report=report, **job["gpu"])
    if "links" in job:
        link_worker.measure_here(device, together, report=report, **job["links"])
    if "layer" in job:
        from profiles.measure import layer_worker
        from profiles.measure.layer import resolve

        given = dict(job["layer"])
        make = resolve(given.pop("layer"), given.pop("folder"))
        layer_worker.measure_here(device, together, report=report, make=make, **given)
    together.gather("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
