"""Plan: the versioned artefact that everything after planning reads.

Self-contained: it holds the model, the cluster and the execution it was made for, each with a hash, so that an emitter, the runtime
or a CI job needs nothing else, and a plan for something else is refused. The same input gives the same bytes. Schema:
``docs/plan.schema.json`` (``schema()``).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from cost_models.execution import Execution
from cost_models.job import Job, MeasuredLayer
from cost_models.layout import Layout
from profiles.errors import AxisplanError, InputError
from profiles.files import write_text
from profiles.hardware import ClusterSpec
from profiles.model import ModelSpec
from profiles.version import __version__

FORMAT = 1
"""Version of the artefact. A file of an older version is migrated (``MIGRATIONS``), one of a newer version refused."""


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Stage(Record):
    """What one pipeline rank holds: its chunks in model order, ``layers`` as [first, last] (inclusive; empty chunk: [])."""

    stage: int
    chunks: list[int]
    layers: list[list[int]]
    recompute: list[str]
    """One choice a chunk: none, full, selective(...), or ``n x mode + m x mode``."""
    embedding: bool = False
    head: bool = False
    pool: int = 0
    """The GPU pool of a mixed cluster that hosts it."""


class Certificate(Record):
    """What was proved. ``columns_legal = cut_by_memory + cut_by_bound + cut_by_dominance + solved + unexplored``; seconds of a step."""

    columns_legal: int
    cut_by_memory: int
    cut_by_bound: int
    cut_by_dominance: int
    solved: int
    unexplored: int = 0
    """Columns that effort or time did not reach: only the bound of their rows is known."""
    best_bound_seconds: float
    fastest_seconds: float
    gap: float
    proved: bool
    proposed_seconds: float
    """Of the plan proposed: within ``tie`` of the fastest."""
    tie: float
    objective: str = "step-time"
    solver: str = ""
    cuts: int = 0
    """Critical paths that were added to the program."""
    space: str = ""
    """The declared space in words: what was tried."""
    pins: dict[str, str] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)


class RunnerUp(Record):
    layout: dict[str, Any]
    layout_text: str
    estimate: dict[str, Any]
    slower: float
    """Share by which its step is longer than the proposed plan's."""
    loses: dict[str, float]
    """Seconds by cause that it takes more (negative: less) than the proposed plan."""
    chance_faster: float
    flips: str = ""
    """The constant whose error would make it the faster one soonest."""


class JobRecord(Record):
    seq_len: int
    global_batch: int
    precision: str
    optimizer: str
    moe_imbalance: float | None
    margin: float
    memory_limit_bytes: float | None
    lora_rank: int = 0
    lora_targets: list[str] = Field(default_factory=list)
    lora_alpha: float = 0.0
    frozen: list[str] = Field(default_factory=list)
    documents: list[list[int]] = Field(default_factory=list)
    """[length, count] of the documents that sequences are packed from."""
    routing: list[tuple[int, float]] = Field(default_factory=list)
    """[ep, max / mean tokens of a rank] of the routing histogram."""
    measured: list[list[float]] = Field(default_factory=list)
    """[kind, tp, micro batch, tokens, forward and backward seconds, kept bytes] of each layer of ``--profile``."""


class Plan(Record):
    """A plan. ``job()`` and ``layout_object`` give back what the cost models take."""

    version: int = FORMAT
    axisplan: str = __version__
    model: dict[str, Any]
    cluster: dict[str, Any]
    execution: dict[str, Any]
    inputs: dict[str, str]
    """SHA-256 of model, cluster, execution and job, and of any profile or routing file used."""
    job_settings: JobRecord
    layout: dict[str, Any]
    layout_text: str
    stages: list[Stage]
    estimate: dict[str, Any]
    certificate: Certificate
    runners_up: list[RunnerUp] = Field(default_factory=list)
    front: list[dict[str, Any]] = Field(default_factory=list)
    """The Pareto front, where it was asked for."""
    goodput: dict[str, Any] | None = None
    warnings: list[str] = Field(default_factory=list)
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables that a launch folder of it passes through (``axisplan emit --env``)."""

    # -- views ------------------------------------------------------------------------------------------------------

    def job(self) -> Job:
        """The job it was made for."""
        settings = {k: _tuples(v) for k, v in self.job_settings.model_dump().items()}
        settings["measured"] = tuple(MeasuredLayer(*map(int, row[:4]), *row[4:]) for row in self.job_settings.measured)
        return Job(
            load_model_dump(self.model), load_cluster_dump(self.cluster), load_execution_dump(self.execution), **settings,
        )  # fmt: skip

    @property
    def layout_object(self) -> Layout:
        return layout_from(self.layout)

    @property
    def step_seconds(self) -> float:
        return float(self.estimate["step_seconds"])

    def to_json(self) -> dict[str, Any]:
        """The document that ``axisplan plan --json`` prints."""
        return self.model_dump(mode="json")

    def text(self) -> str:
        return json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    # -- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the plan whole or not at all."""
        try:
            write_text(Path(path), self.text())
        except OSError as error:
            raise AxisplanError(f"cannot write {path}: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan; one of an older version is migrated. Raises InputError for a file that is not a plan or was altered."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise InputError("plan", str(path), f"cannot be read: {reason}") from None
        try:
            data = json.loads(text, parse_constant=_no_number)
        except ValueError as error:
            raise InputError("plan", str(path), f"is not JSON: {error}") from None
        return cls.read(data, str(path))

    @classmethod
    def read(cls, data: Any, where: str = "plan") -> Plan:
        """A plan from its JSON document. Raises InputError."""
        if not isinstance(data, dict) or "version" not in data or "layout" not in data:
            raise InputError("plan", where, "is not an axisplan plan (no version or layout)")
        version = data["version"]
        if type(version) is not int or not 0 <= version <= FORMAT:
            raise InputError("plan", where, f"has version {version}; this axisplan reads up to {FORMAT}: upgrade axisplan", FORMAT)
        for older in range(version, FORMAT):
            data = MIGRATIONS[older](data)
        try:
            plan = cls.model_validate(data)
            plan.layout_object  # noqa: B018 - reads it
            plan.job()
            hash(plan.layout_object)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(p) for p in first["loc"])
            raise InputError(f"plan.{field}", where, first["msg"]) from None
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise InputError("plan", where, f"does not describe a job: {error}") from None
        stored = {"model": data["model"], "cluster": data["cluster"], "execution": data["execution"], "job": data["job_settings"]}
        for name, record in stored.items():
            if plan.inputs.get(name) != digest(record):
                line = f"does not match the {name} in the plan: it was altered after planning; plan again"
                raise InputError(f"plan.inputs.{name}", where, line)
        plan._check_whole(where)
        return plan

    def _check_whole(self, where: str) -> None:
        """Raise InputError where layout, stages or figures contradict one another or are no numbers: the file was edited."""
        from planner.figures import check_figures

        layout = self.layout_object
        if layout != Layout.parse(self.layout_text):
            raise InputError("plan.layout", where, "and layout_text differ: it was altered after planning; plan again")
        if len(self.stages) != layout.pp or self.stages != stages_of(self.job(), layout, tuple(s.pool for s in self.stages)):
            raise InputError("plan.stages", where, "are not those of its layout: it was altered after planning; plan again")
        check_figures(self.estimate, "plan.estimate", where)
        if [s["stage"] for s in self.estimate["memory"]] != list(range(layout.pp)):
            raise InputError("plan.estimate.memory", where, f"does not list the {layout.pp} stages: it was altered; plan again")
        for index, runner in enumerate(self.runners_up):
            check_figures(runner.estimate, f"plan.runners_up.{index}.estimate", where)

    def require_same(self, model: ModelSpec | None = None, cluster: ClusterSpec | None = None) -> None:
        """Raise InputError when the plan was made for another model or cluster."""
        if model is not None and model != load_model_dump(self.model):
            raise InputError("model", model.name, f"is not the model this plan was made for ({self.model['name']}); plan again")
        if cluster is not None and cluster_dump(cluster) != cluster_dump(load_cluster_dump(self.cluster)):
            raise InputError(
                "cluster", cluster.name, f"is not the cluster this plan was made for ({self.cluster['name']}); plan again"
            )


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


MIGRATIONS: dict[int, Any] = {0: lambda data: {**data, "version": 1, "warnings": data.get("warnings", [])}}
"""From version n to n + 1. Version 0: the drafts before the first release, without warnings."""


# -- dumps ----------------------------------------------------------------------------------------------------------------


def digest(data: Any) -> str:
    """SHA-256 of a JSON document with sorted keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def model_dump(model: ModelSpec) -> dict[str, Any]:
    return model.model_dump(mode="json")


@cache
def _cluster_adapter() -> TypeAdapter[ClusterSpec]:
    return TypeAdapter(ClusterSpec)


def cluster_dump(cluster: ClusterSpec) -> dict[str, Any]:
    data: dict[str, Any] = _cluster_adapter().dump_python(cluster, mode="json")
    return data


def execution_dump(execution: Execution) -> dict[str, Any]:
    """The facts that differ from the fields' defaults, and the name."""
    default = Execution()
    facts = {f.name: getattr(execution, f.name) for f in fields(execution) if f.name != "sources"}
    changed = {k: v for k, v in facts.items() if k == "name" or v != getattr(default, k)}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in changed.items()}


def load_model_dump(data: dict[str, Any]) -> ModelSpec:
    return ModelSpec.model_validate(data)


def load_cluster_dump(data: dict[str, Any]) -> ClusterSpec:
    return _cluster_adapter().validate_python(data)


def load_execution_dump(data: dict[str, Any]) -> Execution:
    known = {f.name for f in fields(Execution)}
    unknown = set(data) - known
    if unknown:
        raise KeyError(f"unknown execution facts {sorted(unknown)}")
    return Execution(**{k: _tuples(v) for k, v in data.items()})


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples they were, at every depth."""
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def job_record(job: Job) -> JobRecord:
    return JobRecord(
        seq_len=job.seq_len, global_batch=job.global_batch, precision=job.precision, optimizer=job.optimizer,
        moe_imbalance=job.moe_imbalance, margin=job.margin, memory_limit_bytes=job.memory_limit_bytes,
        lora_rank=job.lora_rank, lora_targets=list(job.lora_targets), lora_alpha=job.lora_alpha, frozen=list(job.frozen),
        documents=[list(d) for d in job.documents], routing=list(job.routing), measured=[list(row) for row in job.measured],
    )  # fmt: skip


def hashes(job: Job) -> dict[str, str]:
    return {
        "model": digest(model_dump(job.model)), "cluster": digest(cluster_dump(job.cluster)),
        "execution": digest(execution_dump(job.execution)), "job": digest(job_record(job).model_dump(mode="json")),
    }  # fmt: skip


def layout_dump(layout: Layout) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(layout).items()}


def layout_from(data: dict[str, Any]) -> Layout:
    """A Layout from its dump. Raises InputError for an unknown key."""
    known = {f.name for f in fields(Layout)}
    for key in data:
        if key not in known:
            raise InputError("layout", key, "is not a key of a layout")
    return Layout(**{k: _tuples(v) for k, v in data.items()})


def stages_of(job: Job, layout: Layout, pools: tuple[int, ...] = ()) -> list[Stage]:
    """The stages of a layout in words and layer numbers, and which pool of a mixed cluster hosts each."""
    layers = job.model.num_layers
    if job.cluster.pools and not pools:
        pools = tuple(pool_of_stage(job, layout, rank) for rank in range(layout.pp))
    out = []
    for rank in range(layout.pp):
        chunks = list(layout.chunks_of_rank(rank))
        ranges = [layout.layers_of_chunk(c, layers) for c in chunks]
        out.append(
            Stage(
                stage=rank, chunks=chunks, layers=[[r.start, r.stop - 1] if len(r) else [] for r in ranges],
                recompute=[_recompute_words(layout, r) for r in ranges], embedding=0 in chunks, head=layout.chunks - 1 in chunks,
                pool=pools[rank] if pools else 0,
            )
        )  # fmt: skip
    return out


def pool_of_stage(job: Job, layout: Layout, rank: int) -> int:
    """The pool of a mixed cluster that pipeline rank ``rank`` lies in: pools are consecutive ranks."""
    first = layout.rank_at({"pp": rank})
    for number, pool in enumerate(job.cluster.pools):
        if first < pool.gpus:
            return number
        first -= pool.gpus
    return 0


def _recompute_words(layout: Layout, layers: range) -> str:
    counts: dict[str, int] = {}
    for layer in layers:
        rule = layout.recompute_rules.of(layer)
        mode = f"{rule.mode}({','.join(rule.modules)})" if rule.modules else rule.mode
        counts[mode] = counts.get(mode, 0) + 1
    if len(counts) <= 1:
        return next(iter(counts), "none")
    return " + ".join(f"{n} x {mode}" for mode, n in counts.items())


def schema() -> dict[str, Any]:
    """The JSON schema of a plan file (``docs/plan.schema.json``)."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Plan.model_json_schema()}
