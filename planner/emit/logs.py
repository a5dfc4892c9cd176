"""A training log -> a row of ``runs.csv``, so that ``axisplan regress`` compares what was predicted with what ran.

Understood: axisplan's JSON lines, and the lines that Megatron-LM, TorchTitan and DeepSpeed print a step (ANSI colours and whatever
stands before a line are ignored). What the row says of the run comes from the plan; only speed and memory come from the log.
"""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models.runs import read_rows
from planner.plan import Plan, digest
from profiles.errors import InputError
from profiles.files import write_text
from profiles.model import LatentAttention, Mlp, Moe
from profiles.version import __version__

GIB = 2**30
BLOCKING = "CUDA_LAUNCH_BLOCKING=1"
"""In a log or among a plan's variables: the host waits for every launch, and the time is no measure of the model (cases.md I05)."""
COLUMNS = (
    "id", "source", "source_table", "license_note", "model_name", "arch", "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "head_dim",
    "vocab", "gated_mlp", "experts", "topk", "moe_ffn_hidden", "shared_expert_ffn", "first_dense_layers", "mla", "seq_len", "gpu",
    "gpus_per_node", "gpus", "intra_node_GBps", "inter_node_GBps", "precision", "framework", "tp", "pp", "vp", "cp", "ep", "etp", "dp", "sp",
    "zero", "micro_batch", "global_batch", "schedule", "recompute", "attention", "overlap", "measured_step_s",
    "measured_tokens_per_s_per_gpu", "measured_tflops_per_gpu", "flops_convention", "measured_mfu", "measured_peak_mem_GiB", "notes",
    "consistent", "consistency_detail", "layout_ok", "params_B", "active_params_B", "gflop_per_token_causal", "gflop_per_token_full",
    "derived_step_s", "derived_tokens_per_s_per_gpu", "derived_mfu_bf16_causal", "time_ok", "time_basis", "step_quality", "mem_counter",
    "info_grade",
)  # fmt: skip
"""The columns of ``runs.csv`` (docs/accuracy.md)."""


@dataclass(frozen=True)
class Step:
    """What a log says of one step (or of the mean of the steps since the last line). ``memory``: bytes, of what ``counter`` says."""

    number: int
    seconds: float | None
    memory: float | None = None
    counter: str = ""
    loss: float | None = None


@dataclass(frozen=True)
class Measured:
    """A log in figures: the median of ``counted`` steps after ``skipped`` ones of warm-up; the largest memory figure."""

    form: str
    seconds: float
    counted: int
    skipped: int
    memory: float | None
    counter: str
    first_loss: float | None
    last_loss: float | None


# -- the lines of each framework ---------------------------------------------------------------------------------------------

NUMBER = r"([-+]?[\d.,]+(?:[eE][-+]?\d+)?)"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def _number(text: str) -> float:
    return float(text.replace(",", "").rstrip("."))


def axisplan_step(line: str, plan: Plan) -> Step | None:
    """``{"step": 3, "loss": ..., "seconds": ..., "peak_bytes": ...}``, or the line for people that says the same."""
    start = line.find("{")
    if start < 0 or '"seconds"' not in line:
        return _axisplan_line(line)
    try:
        record = json.loads(line[start:])
        step, seconds = int(record["step"]), float(record["seconds"])
    except (ValueError, KeyError, TypeError):
        return None
    peak = record.get("peak_bytes")
    loss = record.get("loss")
    return Step(
        step,
        seconds,
        float(peak) if peak else None,
        "torch max allocated" if peak else "",
        float(loss) if loss is not None else None,
    )


AXISPLAN = re.compile(rf"step\s+(\d+)  loss {NUMBER}  .*?{NUMBER} (s|ms|us)  [\d,]+ tokens/s.*?  {NUMBER} ([GM]iB)")


def _axisplan_line(line: str) -> Step | None:
    """``step      3  loss 4.7199  grad norm 7.456  1.09 s  471 tokens/s  8.57 % MFU  0.10 GiB`` (``screen.step_line``)."""
    if not (found := AXISPLAN.search(line)):
        return None
    seconds = _number(found[3]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[found[4]]
    peak = _number(found[5]) * {"GiB": GIB, "MiB": 2.0**20}[found[6]]
    return Step(int(found[1]), seconds, peak, "torch max allocated", _number(found[2]))


MEGATRON = re.compile(rf"iteration\s+(\d+)\s*/\s*\d+ \|.*elapsed time per iteration \(ms\): {NUMBER}")
MEGATRON_LOSS = re.compile(rf"lm loss: {NUMBER}")
MEGATRON_MEMORY = re.compile(rf"memory \(MB\) \|.*max allocated: {NUMBER}")


def megatron_step(line: str, plan: Plan) -> Step | None:
    """``iteration 10/ 100 | ... elapsed time per iteration (ms): 1234.5 | ...``, and ``... memory (MB) | ... max allocated: ...``."""
    if found := MEGATRON.search(line):
        loss = MEGATRON_LOSS.search(line)
        return Step(int(found[1]), _number(found[2]) / 1e3, loss=_number(loss[1]) if loss else None)
    if memory := MEGATRON_MEMORY.search(line):
        return Step(-1, None, _number(memory[1]) * 2**20, "torch max allocated")
    return None


TORCHTITAN = re.compile(rf"step:\s*(\d+)\s+loss:\s*{NUMBER}.*?tps: ([\d,]+)")
TORCHTITAN_MEMORY = re.compile(rf"memory:\s*{NUMBER}GiB")


def torchtitan_step(line: str, plan: Plan) -> Step | None:
    """``step: 10  loss: 8.13  grad_norm: 2.3  memory: 0.86GiB(1.08%)  tps: 1,234  ...``; tps is tokens/s of one device, the memory what
    the allocator reserved at most."""
    found = TORCHTITAN.search(line)
    if not found or _number(found[3]) <= 0:
        return None
    job = plan.job()
    memory = TORCHTITAN_MEMORY.search(line)
    seconds = job.tokens / (_number(found[3]) * plan.layout_object.world)
    reserved = _number(memory[1]) * GIB if memory else 0.0
    return Step(int(found[1]), seconds, reserved or None, "torch max reserved" if reserved else "", _number(found[2]))


DEEPSPEED = re.compile(rf"global_step=(\d+), RunningAvgSamplesPerSec={NUMBER}, CurrSamplesPerSec={NUMBER}")
DEEPSPEED_MEMORY = re.compile(rf"MaxMemAllocated={NUMBER}\s*GB")
DEEPSPEED_PIPE = re.compile(rf"steps: (\d+) loss: {NUMBER} .*iter time \(s\): {NUMBER}")


def deepspeed_step(line: str, plan: Plan) -> Step | None:
    """``... global_step=10, RunningAvgSamplesPerSec=..., CurrSamplesPerSec=..., ... MaxMemAllocated=...GB``, or the pipeline engine's
    ``steps: 10 loss: 8.1 iter time (s): 1.234 ...``."""
    if found := DEEPSPEED_PIPE.search(line):
        return Step(int(found[1]), _number(found[3]), loss=_number(found[2]))
    found = DEEPSPEED.search(line)
    if not found or _number(found[3]) <= 0:
        return None
    layout = plan.layout_object
    # Samples as DeepSpeed counts them: beside AutoTP every GPU is a replica to it (ds_config.json has no train_batch_size there).
    samples = plan.job().global_batch * layout.tp
    memory = DEEPSPEED_MEMORY.search(line)
    peak = _number(memory[1]) * GIB if memory else 0.0
    return Step(int(found[1]), samples / _number(found[3]), peak or None, "torch max allocated" if peak else "")


FORMS: dict[str, Callable[[str, Plan], Step | None]] = {
    "axisplan": axisplan_step, "megatron": megatron_step, "torchtitan": torchtitan_step, "deepspeed": deepspeed_step,
}  # fmt: skip


def read_log(text: str, plan: Plan, *, warmup: int | None = None, where: str = "LOG") -> Measured:
    """The log's median step, after ``warmup`` lines (default: a third of them, at most 10).

    Where lines of several frameworks stand in one log (DeepSpeed's beside axisplan's), the form with the most steps counts.
    Raises InputError where no line is a step, or all are warm-up.
    """
    lines = ANSI.sub("", text).splitlines()
    found = {form: [s for line in lines if (s := parse(line, plan)) is not None] for form, parse in FORMS.items()}
    timed = {form: [s for s in steps if s.seconds is not None and s.seconds > 0] for form, steps in found.items()}
    form = max(timed, key=lambda f: len(timed[f]))
    steps = timed[form]
    if not steps:
        raise InputError("LOG", where, f"has no line of a step of {', '.join(FORMS)}")
    skip = min(10, len(steps) // 3) if warmup is None else warmup
    kept = steps[skip:]
    if not kept:
        raise InputError("--warmup", warmup, f"leaves none of the {len(steps)} steps in {where}", max(0, len(steps) - 1))
    memory = max((s for s in found[form] if s.memory), key=lambda s: s.memory or 0.0, default=None)
    losses = [s.loss for s in steps if s.loss is not None]
    seconds = statistics.median(s.seconds for s in kept if s.seconds is not None)
    return Measured(
        form, seconds, len(kept), skip, memory.memory if memory else None, memory.counter if memory else "",
        losses[0] if losses else None, losses[-1] if losses else None,
    )  # fmt: skip


# -- the row ------------------------------------------------------------------------------------------------------------------


def row_of(plan: Plan, measured: Measured, *, identity: str, source: str, note: str = "") -> dict[str, str]:
    """The run as a row of ``runs.csv``; cells that the schema cannot hold of a plan are said in ``notes``."""
    job, layout = plan.job(), plan.layout_object
    tokens = job.tokens / measured.seconds / layout.world
    framework = str(plan.execution.get("name", "axisplan"))
    notes = [note] if note else []
    trusted = "no" if "blocking" in measured.form else "yes"
    notes.append(f"median of {measured.counted} steps of the {measured.form} log after {measured.skipped}; axisplan {__version__}")
    if layout.stages or layout.dispatcher != "alltoall" or layout.offload or layout.dp_replicate > 1 < layout.dp_shard:
        notes.append(f"layout {layout.text()}")
    values: dict[str, Any] = {
        "id": identity, "source": source, "model_name": job.model.name, "arch": "moe" if job.model.moe else "dense", **_shapes(plan),
        "seq_len": job.seq_len, "gpu": job.cluster.kind or job.cluster.gpu.name, "gpus_per_node": job.cluster.gpus_per_node,
        "gpus": job.cluster.gpus, "precision": job.precision, "framework": framework, "tp": layout.tp, "pp": layout.pp, "vp": layout.vpp,
        "cp": layout.cp, "ep": layout.ep, "etp": layout.etp, "dp": layout.dp, "sp": int(layout.sp), "zero": layout.zero,
        "micro_batch": layout.micro_batch, "global_batch": job.global_batch, "schedule": layout.schedule,
        "recompute": _recompute(layout.recompute), "measured_step_s": f"{measured.seconds:.6g}",
        "measured_tokens_per_s_per_gpu": f"{tokens:.6g}", "measured_peak_mem_GiB": f"{measured.memory / GIB:.4g}" if measured.memory else "",
        "notes": "; ".join(notes), "params_B": f"{job.model.parameters.total / 1e9:.4g}",
        "active_params_B": f"{job.model.parameters.active / 1e9:.4g}", "derived_step_s": f"{measured.seconds:.6g}",
        "derived_tokens_per_s_per_gpu": f"{tokens:.6g}", "time_ok": trusted, "time_basis": "log", "step_quality": "printed",
        "mem_counter": measured.counter, "info_grade": "A",
    }  # fmt: skip
    exact = {"layout": layout.text(), "model": json.dumps(plan.model, separators=(",", ":"))}
    return {**{column: str(values.get(column, "")) for column in COLUMNS}, **exact}


def _shapes(plan: Plan) -> dict[str, Any]:
    """The model's columns, of its first layer of each kind."""
    model = plan.job().model
    mixers = [k.mixer for k in model.kinds if k.mixer is not None]
    mixer: Any = next((m for m in mixers if hasattr(m, "kv_heads")), mixers[0] if mixers else None)
    dense = next((k.ffn for k in model.kinds if isinstance(k.ffn, Mlp)), None)
    moe = next((k.ffn for k in model.kinds if isinstance(k.ffn, Moe)), None)
    any_ffn = dense or moe
    first_dense = 0
    for kind in model.pattern:
        if moe is None or isinstance(model.kinds[kind].ffn, Moe):
            break
        first_dense += 1
    return {
        "layers": model.num_layers, "hidden": model.hidden, "ffn_hidden": dense.width if dense else moe.width if moe else "",
        "heads": getattr(mixer, "heads", ""), "kv_heads": getattr(mixer, "kv_heads", ""), "head_dim": getattr(mixer, "head_dim", ""),
        "vocab": model.vocab, "gated_mlp": int(any_ffn.gated) if any_ffn else "", "experts": moe.experts if moe else "",
        "topk": moe.top_k if moe else "", "moe_ffn_hidden": moe.width if moe else "", "shared_expert_ffn": moe.shared_width if moe else "",
        "first_dense_layers": first_dense if moe else "", "mla": int(isinstance(mixer, LatentAttention)),
    }  # fmt: skip


def _recompute(text: str) -> str:
    """As the schema writes it: none, full, or ``selective:a+b``."""
    if found := re.fullmatch(r"selective(?:\(([\w,]+)\))?", text):
        return "selective:" + (found[1] or "core_attn").replace(",", "+")
    return text


def append_row(path: Path, row: dict[str, str]) -> int:
    """Add the row to a CSV file (made when absent); returns its number of rows. A row of the same id is replaced.

    Raises InputError for a file that is not such a table.
    """
    rows = read_rows(path) if path.exists() else []
    columns = list(rows[0]) if rows else list(COLUMNS)
    columns += [c for c in row if c not in columns]
    kept = [r for r in rows if r.get("id") != row["id"]]
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows([*kept, row])
    write_text(path, out.getvalue())
    return len(kept) + 1


def measure(
    log: Path, plan: Plan, *, identity: str = "", warmup: int | None = None, note: str = ""
) -> tuple[dict[str, str], Measured]:
    """Read ``log`` of a run of ``plan``: the row, and what was measured. Raises InputError for a log that has no steps."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError("LOG", str(log), f"cannot be read: {error.strerror}") from None
    found = read_log(text, plan, warmup=warmup, where=str(log))
    if BLOCKING in text or BLOCKING in [f"{name}={value}" for name, value in plan.environment.items()]:
        note = "; ".join(filter(None, (note, f"{BLOCKING}: launches block")))
        found = replace(found, form=f"{found.form} (blocking launches)")
    name = identity or f"run-{digest([plan.inputs, plan.layout_text])[:12]}"
    return row_of(plan, found, identity=name, source="axisplan measure", note=note), found
