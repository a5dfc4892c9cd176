"""What only a GPU can say, in a few minutes of one: ``python benchmarks/gpu_checks.py PLANS OUT`` (PLANS made by ``gpu_jobs.py``).

Each part is a process of its own with a limit in seconds; one that fails is recorded and the others go on. OUT gets ``summary.json``
and what each part wrote:

* ``profile``   ``axisplan profile gpu``: a cluster file and its samples.
* ``train``     ``axisplan run`` of the plan ``dense``: its records of each step.
* ``jobs``      the plans' programs in one process: peak bytes of the second step, who held them, seconds of each kind of kernel.
* ``numbers``   losses of ``llama-tiny`` in fp32 beside the CPU's; the runtime's operations against fp64.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMITS = {"profile": 130, "train": 80, "jobs": 170, "numbers": 45}
"""Seconds a part may take on a GPU."""
RUN = "import cli; cli.main({!r})"
TEXT = "a planner is as good as what it knows; what it does not know must be measured first. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default="jobs,train,profile,numbers")
    parser.add_argument("--seconds", type=int, default=110, help="of `profile gpu`")
    parser.add_argument("--inside", choices=("jobs", "numbers"), help="be that part's process")
    parser.add_argument("--only", default="", help="names of jobs, commas between")
    arguments = parser.parse_args()
    plans, out = arguments.plans.resolve(), arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.inside:
        {"jobs": jobs, "numbers": numbers}[arguments.inside](plans, out, arguments.only)
        return
    work = out / "work"
    work.mkdir(exist_ok=True)
    data = work / "text.txt"
    data.write_text(TEXT * 20_000)
    again = [sys.executable, "-W", "ignore", __file__, str(plans), str(out), "--only", arguments.only, "--inside"]
    profile = ["profile", "gpu", "--seconds", str(arguments.seconds), "--processes", "1", "--out", str(out / "gpu.yaml")]
    train = ["run", str(plans / "dense.plan.json"), "--steps", "12", "--data", str(data), "--out", str(work / "train"), "--json"]
    commands = {
        "profile": [sys.executable, "-W", "ignore", "-c", RUN.format(profile)],
        "train": [sys.executable, "-W", "ignore", "-c", RUN.format(train)],
        "jobs": [*again, "jobs"],
        "numbers": [*again, "numbers"],
    }
    summary: dict[str, Any] = {}
    for name in arguments.parts.split(","):
        summary[name] = part(commands[name], LIMITS[name], out / f"{name}.log")
        (out / "summary.json").write_text(json.dumps(summary, indent=1))
        print(name, summary[name], flush=True)


def part(command: list[str], limit: float, log: Path) -> dict[str, Any]:
    """Run one part; how it ended and how long it took."""
    start = time.monotonic()
    with log.open("w") as written:
        try:
            code: Any = subprocess.run(command, stdout=written, stderr=subprocess.STDOUT, timeout=limit, env=os.environ).returncode
        except subprocess.TimeoutExpired:
            code = "out of time"
    return {"code": code, "seconds": round(time.monotonic() - start, 1), "end": log.read_text()[-300:] if code else ""}


# -- jobs -----------------------------------------------------------------------------------------------------------------


def jobs(plans: Path, out: Path, only: str) -> None:
    """Every plan for some steps in this process."""
    import torch

    from planner.plan import Plan

    device = join()
    found: dict[str, Any] = {"host": facts(device)}
    for path in sorted(plans.glob("*.plan.json")):
        name = path.name.removesuffix(".plan.json")
        if only and name not in only.split(","):
            continue
        try:
            found[name] = one_job(Plan.load(path), device)
        except Exception as error:  # the next job may run
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:500], "where": traceback.format_exc()[-1500:]}
        (out / "jobs.json").write_text(json.dumps(found, indent=1))
        print(name, json.dumps({k: v for k, v in found[name].items() if k not in ("held", "kernels")}), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def join() -> Any:
    """This process as a job of one; its device."""
    import torch
    import torch.distributed as dist

    from planner.runtime.devices import backend_of, device_of_rank

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "RANK": "0", "WORLD_SIZE": "1"}
    device = device_of_rank("cuda" if torch.cuda.is_available() else "cpu", 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend_of(device))
    return device


def facts(device: Any) -> dict[str, Any]:
    """Date, kind of host, versions."""
    import datetime

    import torch

    cuda = device.type == "cuda"
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "torch": torch.__version__,
        "driver": subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout.strip()
        if cuda
        else "",
    }


def one_job(plan: Any, device: Any) -> dict[str, Any]:
    """Steps of one plan: building, peak of the second step, what held it, seconds of the others, kernels of the last."""
    import torch

    from planner.runtime.data import Batch
    from planner.runtime.settings import TrainSettings
    from planner.runtime.train import Trainer

    job, cuda = plan.job(), device.type == "cuda"
    settings = TrainSettings(seq_len=job.seq_len, global_batch=job.global_batch, precision=job.precision)
    out: dict[str, Any] = {}
    start = time.perf_counter()
    trainer = Trainer(job.model, plan.layout_object, settings, device)
    out["build_seconds"] = time.perf_counter() - start
    generator = torch.Generator().manual_seed(0)

    def step(number: int) -> float:
        ids = torch.randint(job.model.vocab, (job.global_batch, job.seq_len + 1), generator=generator)
        batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        begin = time.perf_counter()
        out["loss"] = trainer.step(number, batch)["loss"]
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    out["first_seconds"] = step(0)
    before = 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.memory._record_memory_history(max_entries=400_000, context="alloc", stacks="python")
    step(1)
    if cuda:
        out["max_memory_allocated"] = torch.cuda.max_memory_allocated()
        out["max_memory_reserved"] = torch.cuda.max_memory_reserved()
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        out["held"] = holders(snapshot["device_traces"][0], before)
        out["workspace_bytes"] = workspaces()
    out["step_seconds"] = [step(n) for n in range(2, 7 if cuda else 3)]
    if cuda:
        free, total = torch.cuda.mem_get_info()
        out["device_bytes"] = total - free
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            out["profiled_seconds"] = step(7)
        out["kernels"] = kernels(profile)
    return out


def workspaces() -> int:
    """Bytes that cuBLAS keeps for its products (32 MiB a handle and stream on Hopper): the allocator counts them, a trace does not
    see them. They are let go here, and come back with the next product."""
    import torch

    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return held - torch.cuda.memory_allocated()


def holders(trace: list[dict[str, Any]], before: int) -> dict[str, Any]:
    """The fullest moment of an allocator's history: bytes alive then by the line of this project that allocated them in this step;
    ``before`` were alive when it began."""

    def ours(event: dict[str, Any]) -> str:
        lines = [f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in event["frames"] if "/planner/" in f["filename"]]
        return " < ".join(lines[:3]) or " < ".join(f"{Path(f['filename']).name}:{f['line']}" for f in event["frames"][:3])

    def replay(until: int | None) -> tuple[int, int, dict[int, dict[str, Any]]]:
        alive: dict[int, dict[str, Any]] = {}
        size, most, at = before, before, -1
        for place, event in enumerate(trace):
            if event["action"] == "alloc":
                alive[event["addr"]] = event
                size += event["size"]
            elif event["action"] == "free_completed":
                alive.pop(event["addr"], None)
                size -= event["size"]
            if size > most:
                most, at = size, place
            if place == until:
                break
        return most, at, alive

    most, at, _ = replay(None)
    _, _, alive = replay(at)
    by_line: dict[str, list[int]] = {}
    for event in alive.values():
        entry = by_line.setdefault(ours(event), [0, 0])
        entry[0] += event["size"]
        entry[1] += 1
    largest = sorted(by_line.items(), key=lambda item: -item[1][0])[:40]
    moment = ours(trace[at]) if at >= 0 else "start"
    return {
        "before": before,
        "peak": most,
        "at": moment,
        "alive": [[line, *entry] for line, entry in largest],
        "events": len(trace),
    }


def kernels(profile: Any) -> list[list[Any]]:
    """[name, seconds, calls] of the kernels that took longest."""
    rows = [
        [event.key[:160], event.self_device_time_total * 1e-6, event.count]
        for event in profile.key_averages()
        if event.self_device_time_total
    ]
    return sorted(rows, key=lambda row: -row[1])[:60]


# -- numbers --------------------------------------------------------------------------------------------------------------


def numbers(plans: Path, out: Path, only: str) -> None:
    """Relative errors of the runtime's operations on the device, and losses of ten steps in fp32 on both."""
    import torch

    device = join()
    found: dict[str, Any] = {"host": facts(device)}

    def record(name: str, measure: Callable[[], Any]) -> None:
        try:
            found[name] = measure()
        except Exception as error:  # the next may run
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:500], "where": traceback.format_exc()[-800:]}
        (out / "numbers.json").write_text(json.dumps(found, indent=1))
        print(name, found[name], flush=True)

    for dtype in (torch.float32, torch.bfloat16):
        record(f"operations {dtype}", lambda dtype=dtype: operation_errors(device, dtype))  # type: ignore[misc]
    record("losses on the device", lambda: tiny_losses(device))
    record("losses on the CPU", lambda: tiny_losses(torch.device("cpu")))
    if device.type == "cuda":
        record("grouped-query attention", lambda: grouped_queries(device))


def operation_errors(device: Any, dtype: Any) -> dict[str, list[float]]:
    """Norm of the error over the norm of the fp64 result on the CPU, of every output of each operation."""
    import torch

    from planner.runtime import kernels as k

    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(dtype)

    s, b, h, kv, d = 384, 2, 8, 2, 64
    x, gate, up, grad, weight = random(s, b, 512), random(s, 256), random(s, 256), random(s, b, 512), random(512)
    q, key, value, g = random(s, b, h, d), random(s, b, kv, d), random(s, b, kv, d), random(s, b, h, d)
    wide_q, wide_k, wide_g = random(s, b, h, 96), random(s, b, h, 96), random(s, b, h, 64)
    logits, targets, scale = random(300, 1000), torch.randint(1000, (300,), generator=generator), random(300)
    rule: tuple[Any, ...] = (None, None, [0, s], [0, s], 0, 0, d**-0.5)

    def attention(query: Any, keys: Any, values: Any, upstream: Any) -> list[Any]:
        result, lse = k.attend(query, keys, values, *rule)
        return [result, lse, *k.attend_grad(upstream, query, keys, values, result, lse, *rule)]

    def norm(x: Any, w: Any, g: Any) -> list[Any]:
        result, rstd = k.rms_norm(x, w, 1e-5)
        return [result, rstd, *k.rms_norm_backward(g, x, w, rstd)]

    def loss(logits: Any, targets: Any, scale: Any) -> list[Any]:
        lse, picked = k.cross_entropy(logits, targets, 0)
        return [lse, picked, k.cross_entropy_backward(logits, targets, lse, scale.to(lse.dtype), 0)]

    cases: dict[str, tuple[Callable[..., list[Any]], tuple[Any, ...]]] = {
        "attention": (attention, (q, key, value, g)),
        "latent attention": (attention, (wide_q, wide_k, random(s, b, h, 64), wide_g)),
        "norm": (norm, (x, weight, grad)),
        "swiglu": (lambda a, c, g: [k.swiglu(a, c, "silu"), *k.swiglu_backward(g, a, c, "silu")], (gate, up, random(s, 256))),
        "loss": (loss, (logits, targets, scale)),
    }
    errors: dict[str, list[float]] = {}
    for name, (call, inputs) in cases.items():
        exact = call(*(t.double() if t.is_floating_point() else t for t in inputs))
        got = call(*(t.to(device) for t in inputs))
        errors[name] = [float((a.cpu().double() - e).norm() / e.norm()) for a, e in zip(got, exact, strict=True)]
    return errors


def tiny_losses(device: Any) -> list[float]:
    """Losses of ten fp32 steps of a small Llama on the same random tokens."""
    import torch

    from cost_models.layout import Layout
    from planner.runtime.data import Batch
    from planner.runtime.settings import TrainSettings
    from planner.runtime.train import Trainer
    from profiles.huggingface import load_model

    model = load_model("llama-tiny")
    torch.backends.cuda.matmul.allow_tf32 = False
    trainer = Trainer(model, Layout(micro_batch=4), TrainSettings(seq_len=64, global_batch=8, steps=10), device)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for number in range(10):
        ids = torch.randint(model.vocab, (8, 65), generator=generator)
        losses.append(trainer.step(number, Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))["loss"])
    return losses


def grouped_queries(device: Any) -> dict[str, Any]:
    """Whether torch's flash kernel takes fewer key and value heads than query heads as they are."""
    import torch

    q, g = (torch.randn(2, 8, 512, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(2, 2, 512, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    flash, back = (
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_flash_attention_backward,
    )
    seed = torch.empty(2, dtype=torch.uint64, device=device)

    def run(k: Any, v: Any) -> list[Any]:
        out = flash(q, k, v, 0.0, True, False, scale=0.125)
        grads = back(g, q, k, v, out[0], out[1], None, None, 512, 512, 0.0, True, seed, seed[:0], scale=0.125)
        return [out[0], *grads]

    wide = run(k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))
    wide[2:] = [t.unflatten(1, (2, 4)).sum(2) for t in wide[2:]]
    return {"errors": [float((a - e).float().norm() / e.float().norm()) for a, e in zip(run(k, v), wide, strict=True)]}


if __name__ == "__main__":
    main()
