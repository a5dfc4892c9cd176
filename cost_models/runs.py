"""Rows of measured runs -> (Job, Layout): what ran, by rules that are stated once, in ``data/runs.yaml``.

The schema is that of ``docs/runs.md``; an empty cell means "not stated": the framework's default is taken, and the row says so
(``Run.guessed``). A row's speed is never read while it is mapped.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.layout import Layout, even_split, nearest_divisor
from cost_models.packing import documents_of
from cost_models.run_cells import described, domain_of, gpu_cluster, precision_of, recompute_of, zero_of
from profiles.errors import InputError
from profiles.files import read_shipped
from profiles.hardware import load_cluster
from profiles.model import MAX_LAYERS, Attention, FeedForward, LatentAttention, Layer, Mlp, ModelSpec, Moe, Spec

Row = Mapping[str, str]
JUDGED_QUALITY = ("printed", "from_tokens", "from_flops")
SETTING = (
    "source", "framework", "model_name", "layers", "hidden", "heads", "gpu", "gpus", "seq_len", "global_batch",
    "precision", "overlap",
)  # fmt: skip
"""Columns that rows must share to be ranked against each other."""
NEEDED = ("id", "layers", "hidden", "heads", "vocab", "seq_len", "gpu", "gpus", "global_batch")
MEMORY_FIGURES = {"allocated": "allocated", "reserved": "reserved", "nvidia-smi": "device", "whole card": "device"}
"""Words of ``mem_counter`` -> the predicted figure it is compared with."""


@dataclass(frozen=True)
class Run:
    """A measured run: what ran, and what was measured. ``seconds`` and ``memory_gib`` are None where not measured."""

    id: str
    source: str
    group: tuple[str, str, str]
    """(source, model, gpu)."""
    setting: tuple[str, ...]
    """Everything but the layout: rows that agree in it can be ranked against each other."""
    job: Job
    layout: Layout
    seconds: float | None
    memory_gib: float | None
    memory_figure: str
    """allocated, reserved, device, or empty where the source does not say what it counted."""
    judged: bool
    grade: str
    guessed: tuple[str, ...]

    @property
    def moe(self) -> bool:
        return self.job.model.moe is not None


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be a run of this model, and why."""

    id: str
    why: str


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV file. Raises InputError where it cannot be read or lacks a column that every run needs."""
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = [{key: (value or "").strip() for key, value in row.items() if key} for row in reader]
            columns = reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError("RUNS.csv", str(path), f"cannot be read ({error})") from error
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise InputError("RUNS.csv", str(path), f"lacks the columns {', '.join(missing)} (docs/runs.md lists them)")
    return rows


def load_runs(rows: Iterable[Row]) -> tuple[list[Run], list[Skipped]]:
    """Every row that can be mapped, and those that cannot with the reason."""
    runs, skipped = [], []
    for row in rows:
        try:
            runs.append(to_run(row))
        except InputError as error:
            skipped.append(Skipped(row.get("id", ""), str(error)))
    return runs, skipped


def to_run(row: Row) -> Run:
    """One row. Raises InputError naming the cell that cannot be used."""
    facts = apply_rules(row)
    guessed = list(facts.guesses)
    model = _exact_model(row["model"]) if row.get("model") else _model(row, facts.model)
    layout = _exact_layout(row, model) if row.get("layout") else _layout(row, facts.layout, model, guessed)
    execution = load_execution(facts.execution, {key: _text(value) for key, value in facts.set.items()})
    name = row["gpu"]
    cluster_name = gpu_cluster(name, guessed)
    gpus = _count(row, "gpus")
    domain = domain_of(cluster_name, gpus, _number(row, "gpus_per_node", 8), guessed)
    cluster = load_cluster(f"{cluster_name}:{gpus // domain}x{domain}")
    if row.get("inter_node_GBps") or "inter_node_GBps" in facts.cluster:
        rate = _positive(row, "inter_node_GBps") if row.get("inter_node_GBps") else float(facts.cluster["inter_node_GBps"])
        cluster = cluster.with_network(1e9 * rate, "the row's inter_node_GBps, or the rule of data/runs.yaml that stands for it")
    precision = precision_of(facts.job.get("precision") or row.get("precision", ""), guessed, cluster.gpu.peaks)
    job = Job(
        model, cluster, execution, _count(row, "seq_len"), _count(row, "global_batch"), precision,
        moe_imbalance=facts.job.get("moe_imbalance"), documents=documents_of(facts.job["documents"]) if "documents" in facts.job else (),
        lora_rank=facts.job.get("lora_rank", 0),
    )  # fmt: skip
    if layout.microbatches(job.global_batch) * layout.micro_batch * layout.dp != job.global_batch:
        guessed.append("the global batch is not a whole number of microbatches; rounded down")
    if layout.microbatches(job.global_batch) < 1:
        raise InputError("global_batch", job.global_batch, f"is less than micro_batch x dp = {layout.micro_batch * layout.dp}")
    counter = row.get("mem_counter", "").lower()
    figure = next((figure for word, figure in MEMORY_FIGURES.items() if word in counter), "")
    step = seconds_of(row)
    grade = row.get("info_grade", "")
    judged = step is not None and grade in ("", "A") and row.get("time_ok", "yes") in ("", "yes")
    judged = judged and (row.get("step_quality", "") or JUDGED_QUALITY[0]) in JUDGED_QUALITY
    setting = tuple(row.get(column, "") for column in SETTING)
    memory = _positive(row, "measured_peak_mem_GiB") if row.get("measured_peak_mem_GiB") else None
    return Run(
        row["id"], row.get("source", ""), (row.get("source", ""), row.get("model_name", ""), name), setting, job, layout,
        step, memory, figure, judged, grade, tuple(guessed),
    )  # fmt: skip


def seconds_of(row: Row) -> float | None:
    """Measured seconds of a step: ``derived_step_s``, else ``measured_step_s``, else from tokens/s/GPU."""
    for key in ("derived_step_s", "measured_step_s"):
        if row.get(key):
            return _positive(row, key)
    if row.get("measured_tokens_per_s_per_gpu"):
        return (
            _count(row, "seq_len")
            * _count(row, "global_batch")
            / (_positive(row, "measured_tokens_per_s_per_gpu") * _count(row, "gpus"))
        )
    return None


# -- rules ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """What the rules say about a row."""

    execution: str
    set: Mapping[str, Any]
    model: Mapping[str, Any]
    layout: Mapping[str, Any]
    job: Mapping[str, Any]
    cluster: Mapping[str, Any]
    guesses: tuple[str, ...]


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = read_shipped(Path(__file__).parent / "data" / "runs.yaml")
    return table


def apply_rules(row: Row) -> Facts:
    """All rules that hold for ``row``, later ones over earlier ones; where none names an execution, the fallback does."""
    merged: dict[str, dict[str, Any]] = {"set": {}, "model": {}, "layout": {}, "job": {}, "cluster": {}}
    execution, guesses = "", []
    for rule in _table()["rules"]:
        if not _applies(rule, row):
            continue
        execution = rule.get("execution", execution)
        for key, values in merged.items():
            values.update(rule.get(key, {}))
        if "guess" in rule:
            guesses.append(rule["guess"])
    if not execution:
        unknown = next(rule for rule in _table()["fallback"] if _applies(rule, row))
        execution = unknown["execution"]
        guesses.append(unknown["guess"])
    return Facts(execution, guesses=tuple(guesses), **merged)


def _applies(rule: Mapping[str, Any], row: Row) -> bool:
    """Whether all of a rule's conditions hold; ``any`` looks at everything a row says of itself in words."""
    return all(
        _holds(described(row) if column == "any" else row.get(column, ""), wanted) for column, wanted in rule["when"].items()
    )


def _holds(cell: str, wanted: Any) -> bool:
    text = str(wanted)
    match = re.fullmatch(r"(<=|>=|<|>)\s*([\d.]+)", text)
    if not match:
        return re.search(text, cell, re.IGNORECASE) is not None
    try:
        value, limit = float(cell), float(match[2])
    except ValueError:
        return False
    return {"<": value < limit, "<=": value <= limit, ">": value > limit, ">=": value >= limit}[match[1]]


# -- cells ----------------------------------------------------------------------------------------------------------------


def _positive(row: Row, key: str) -> float:
    try:
        value = float(row.get(key, ""))
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InputError(key, row.get(key, ""), "must be a positive number")
    return value


def _count(row: Row, key: str) -> int:
    value = _positive(row, key)
    if value != int(value):
        raise InputError(key, row[key], "must be a whole number", round(value))
    return int(value)


def _number(row: Row, key: str, default: int) -> int:
    return _count(row, key) if row.get(key) and row[key] not in ("0", "0.0") else default


def _text(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else str(value).lower() if isinstance(value, bool) else str(value)


# -- the model ------------------------------------------------------------------------------------------------------------


def _model(row: Row, facts: Mapping[str, Any]) -> ModelSpec:
    hidden, heads, layers = _count(row, "hidden"), _count(row, "heads"), _count(row, "layers")
    if layers > MAX_LAYERS:
        raise InputError("layers", layers, f"at most {MAX_LAYERS}", MAX_LAYERS)
    gated = facts.get("gated", row.get("gated_mlp", "1") != "0")
    bias = bool(facts.get("bias", False))
    activation = facts.get("activation", "silu" if gated else "gelu")
    mixer: Attention | LatentAttention
    if row.get("mla") == "1":
        mixer = LatentAttention(heads=heads, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    else:
        mixer = Attention(
            heads=heads, kv_heads=_number(row, "kv_heads", heads), head_dim=_number(row, "head_dim", hidden // heads),
            qkv_bias=bias, output_bias=bias, sinks=bool(facts.get("sinks", False)), rotary="learned_positions" not in facts,
        )  # fmt: skip
    width = _number(row, "ffn_hidden", 4 * hidden)
    dense = Mlp(width=width, gated=gated, bias=bias, activation=activation)
    ffn: FeedForward = dense
    experts = _number(row, "experts", 0)
    if experts:
        ffn = _valid(
            Moe, experts=experts, top_k=_number(row, "topk", 1), width=_number(row, "moe_ffn_hidden", width), gated=gated, bias=bias,
            activation=activation, shared_width=_number(row, "shared_expert_ffn", 0),
            groups=facts.get("groups", 1), top_groups=facts.get("top_groups", 1),
        )  # fmt: skip
    kinds = [Layer(mixer=mixer, ffn=ffn)]
    pattern = [0] * layers
    first_dense, every = _number(row, "first_dense_layers", 0), facts.get("moe_every", 1)
    if experts and (first_dense or every > 1):
        kinds.append(Layer(mixer=mixer, ffn=dense))
        pattern = [1 if i < first_dense or (i + 1) % every else 0 for i in range(layers)]
    if "window" in facts and isinstance(mixer, Attention):
        kinds.append(Layer(mixer=mixer.model_copy(update={"window": facts["window"]}), ffn=ffn))
        pattern = [len(kinds) - 1 if i % facts.get("window_every", 1) == 0 else k for i, k in enumerate(pattern)]
    positions = facts.get("learned_positions", 0)
    return _valid(
        ModelSpec,
        name=row.get("model_name", "") or row["id"], hidden=hidden, vocab=_count(row, "vocab"),
        kinds=tuple(kinds), pattern=tuple(pattern), tied=bool(facts.get("tied", False)),
        norm=facts.get("norm", "rms"), norm_bias=facts.get("norm") == "layer",
        learned_positions=_count(row, "seq_len") if positions == "seq_len" else positions,
        embedding_norm=bool(facts.get("embedding_norm", False)), mtp=facts.get("mtp", 0),
    )  # fmt: skip


def _exact_model(text: str) -> ModelSpec:
    """The ``model`` cell of a row that axisplan wrote: the whole ModelSpec."""
    try:
        return ModelSpec.model_validate_json(text)
    except ValidationError as error:
        raise InputError("model", text[:60], f"is no ModelSpec ({error.errors()[0]['msg']})") from None


def _exact_layout(row: Row, model: ModelSpec) -> Layout:
    """The ``layout`` cell of a row that axisplan wrote: every degree, the schedule and the recompute choice."""
    layout = Layout.parse(row["layout"], _count(row, "gpus"))
    _check_degrees(model, _count(row, "seq_len"), layout.tp, layout.chunks, layout.cp, layout.ep)
    return layout


S = TypeVar("S", bound=Spec)


def _valid(kind: type[S], **fields: Any) -> S:
    """The record, or an InputError that says what is wrong with it."""
    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or kind.__name__.lower()
        raise InputError(name, str(first.get("input", ""))[:60], first["msg"].removeprefix("Value error, ")) from None


# -- the layout -----------------------------------------------------------------------------------------------------------


def _layout(row: Row, facts: Mapping[str, Any], model: ModelSpec, guessed: list[str]) -> Layout:
    tp, pp, cp, ep = (_number(row, key, 1) for key in ("tp", "pp", "cp", "ep"))
    vpp = _number(row, "vp", 0) or facts.get("vpp", 1)
    if vpp == "most":
        vpp = model.num_layers // pp if pp > 1 and model.num_layers % pp == 0 else 1
    gpus = _count(row, "gpus")
    if gpus % (tp * pp * cp):
        raise InputError("tp*pp*cp", tp * pp * cp, f"must divide the {gpus} GPUs")
    dp = gpus // (tp * pp * cp)
    zero = facts["zero"] if "zero" in facts and not row.get("zero") else zero_of(row.get("zero", ""), guessed)
    for cell, default in (("micro_batch", "1"), ("recompute", "none")):
        if not row.get(cell) and cell not in facts:
            guessed.append(f"{cell} {default}")
    if pp > 1 and not row.get("vp") and "vpp" not in facts and "interleaved" in row.get("schedule", ""):
        guessed.append("vp 1")
    etp = tp if facts.get("etp") == "tp" and not row.get("etp") else _number(row, "etp", 1)
    _check_degrees(model, _count(row, "seq_len"), tp, pp * vpp, cp, ep)
    stage = tp * cp * dp
    if stage % etp:
        raise InputError("etp", etp, f"must divide tp*cp*dp = {stage}", nearest_divisor(stage, etp))
    if stage % (etp * ep):
        near = nearest_divisor(stage // etp, ep)
        guessed.append(f"ep {near}: the printed {ep} does not divide the {stage} ranks of a stage")
        ep = near
    schedule = facts.get("schedule") or ("interleaved" if vpp > 1 else "1f1b")
    replicated = zero == 0
    recompute = recompute_of(str(facts.get("recompute") or row.get("recompute", "")), model.num_layers, guessed, pp)
    sequence_parallel = (row.get("sp") or str(facts.get("sp", 0))).lower() in ("1", "true", "yes", "on")
    layout = Layout(
        tp=tp, pp=pp, vpp=2 if schedule == "zb-v" else vpp, cp=cp, cp_kind=facts.get("cp_kind", "ring"), ep=ep, etp=etp,
        dp_replicate=dp if replicated else 1, dp_shard=1 if replicated else dp, zero=zero,
        sp=sequence_parallel and tp > 1, micro_batch=_number(row, "micro_batch", facts.get("micro_batch", 1)),
        schedule=schedule, recompute=recompute, stages=_stages(facts, model.num_layers, pp * vpp),
        dispatcher=facts.get("dispatcher", "alltoall"), capacity=float(facts.get("capacity", 0.0)),
    )  # fmt: skip
    layout.check_products(gpus)
    return layout


def _check_degrees(model: ModelSpec, seq_len: int, tp: int, chunks: int, cp: int, ep: int) -> None:
    """What the operations need to be whole; everything else is legality's business."""
    mixer = model.attention
    if mixer is not None and mixer.heads % tp:
        raise InputError("tp", tp, f"must divide the {mixer.heads} heads", nearest_divisor(mixer.heads, tp))
    for kind in model.kinds:
        widths = [kind.ffn.width] if kind.ffn else []
        widths += [kind.ffn.shared_width] if isinstance(kind.ffn, Moe) and kind.ffn.shared_width else []
        if widths and min(widths) < tp:
            raise InputError("ffn_hidden", min(widths), f"leaves nothing for each of tp = {tp}", tp)
    if seq_len % cp or seq_len // cp < tp:
        raise InputError("cp", cp, f"must divide the {seq_len} tokens of a sequence, and leave one for each of tp = {tp}")
    if model.moe is not None and model.moe.experts % ep:
        raise InputError("ep", ep, f"must divide the {model.moe.experts} experts", nearest_divisor(model.moe.experts, ep))
    if chunks > 2 * MAX_LAYERS:
        raise InputError("pp*vpp", chunks, f"at most {2 * MAX_LAYERS} chunks")


def _stages(facts: Mapping[str, Any], layers: int, chunks: int) -> tuple[int, ...]:
    given = facts.get("stages", "")
    if isinstance(given, Mapping):
        given = given.get(chunks, "")
    if given:
        runs = [part.partition("*") for part in str(given).split()]
        counts = tuple(int(value) for value, _, times in runs for _ in range(int(times or 1)))
        if sum(counts) != layers or len(counts) != chunks:
            raise InputError("stages", str(given), f"must spread {layers} layers over {chunks} chunks")
        return counts
    ends = facts.get("ends", 0) if chunks > 1 else 0
    counts = even_split(layers, chunks, ends, ends)
    return counts if ends and min(counts) >= 0 else ()
