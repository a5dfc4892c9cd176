"""TorchTitan's Python configuration -> Layout: the syntax tree is read (literals only), nothing is imported or run."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from cost_models.layout import Layout
from planner.emit.imported import Imported, fill_world
from planner.emit.torchtitan.program import BACKENDS, SCHEDULES, table
from profiles.errors import InputError

UNKNOWN = object()
SCHEDULE_OF = {name.lower(): ours for ours, name in SCHEDULES.items()} | {"loopedbfs": "interleaved"}
DISPATCHER_OF = {theirs: ours for ours, theirs in BACKENDS.items()}


def read(text: str, where: str, world: int | None = None) -> Imported:
    """Raises InputError for a file that is no Python, has no ParallelismConfig, or whose values are no literals."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError("FILE", where, f"is not Python: {getattr(error, 'msg', None) or type(error).__name__}") from None
    calls = Calls(tree)
    if "ParallelismConfig" not in calls.found and "TrainingConfig" not in calls.found:
        raise InputError("FILE", where, "has neither a ParallelismConfig nor a TrainingConfig of torchtitan")
    notes: list[str] = []
    parallel, training = calls.keywords("ParallelismConfig", notes), calls.keywords("TrainingConfig", notes)
    values, stages = degrees(parallel, notes)
    values["recompute"] = recompute(calls)
    registry = calls.found.get("model_registry")
    model = named_model(calls, registry)
    if (backend := _argument(registry, "moe_comm_backend")) in DISPATCHER_OF:
        values["dispatcher"] = DISPATCHER_OF[backend]
    if training.get("enable_cpu_offload") is True:
        values["offload"] = ("optimizer",)
    layout = fill_world(values, world, where)
    if layout.dp_shard * layout.cp == 1:
        layout = layout.with_(zero=0)
    whose = Tokens if TOKENS & (set(training) | set(parallel)) else Sequences
    batch = whose(parallel, training)
    layout = layout.with_(micro_batch=batch.micro_batch(layout.pp), **stages)
    job = {
        "seq_len": batch.seq_len,
        "global_batch": batch.global_batch(layout),
        "precision": precision(registry, training),
        "optimizer": "adamw",
    }
    return Imported("torchtitan", layout, job, model, tuple(notes))


class Calls:
    """Calls of a module by the called name (``A.Config`` counts as A), the last of each."""

    def __init__(self, tree: ast.AST) -> None:
        self.found: dict[str, ast.Call] = {}
        self.constant: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (name := called(node.func)):
                self.found[name] = node
            if isinstance(node, ast.keyword) and node.arg == "activation_checkpoint" and isinstance(node.value, ast.Constant):
                self.constant.add("no activation_checkpoint")

    def keywords(self, name: str, notes: list[str]) -> dict[str, Any]:
        """Literal keyword arguments; what is no literal is noted."""
        out: dict[str, Any] = {}
        call = self.found.get(name)
        for keyword in call.keywords if call is not None else ():
            value = _literal(keyword.value)
            if value is UNKNOWN:
                notes.append(f"{name}.{keyword.arg} is computed; torchtitan's default is taken")
            elif keyword.arg:
                out[keyword.arg] = value
        return out


def called(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return called(function.value) if function.attr == "Config" else function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN


def _argument(call: ast.Call | None, name: str) -> Any:
    for keyword in call.keywords if call is not None else ():
        if keyword.arg == name:
            return _literal(keyword.value)
    return None


def _whole(name: str, value: Any, low: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InputError(name, value, f"must be a whole number of at least {low}", low)
    return value


def degrees(parallel: dict[str, Any], notes: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Degrees of the layout, and what its pipeline says (kept apart: it needs pp)."""

    def degree(name: str, default: int = 1) -> int:
        return _whole(f"parallelism.{name}", parallel.get(name, default))

    tp, pp, cp = degree("tensor_parallel_degree"), degree("pipeline_parallel_degree"), degree("context_parallel_degree")
    values: dict[str, Any] = {
        "tp": tp, "pp": pp, "cp": cp, "ep": degree("expert_parallel_degree"), "dp_replicate": degree("data_parallel_replicate_degree"),
        "sp": tp > 1 and parallel.get("enable_sequence_parallel", True) is True,
        "zero": 2 if parallel.get("fsdp_reshard_after_forward") == "never" else 3,
    }  # fmt: skip
    if cp > 1:
        values["cp_kind"] = "allgather"
    shard = parallel.get("data_parallel_shard_degree", -1)
    if shard != -1:
        values["dp_shard"] = _whole("parallelism.data_parallel_shard_degree", shard)
    return values, pipeline(parallel, pp, notes) if pp > 1 else {}


def pipeline(parallel: dict[str, Any], pp: int, notes: list[str]) -> dict[str, Any]:
    name = str(parallel.get("pipeline_parallel_schedule", "1F1B"))
    schedule = SCHEDULE_OF.get(name.lower())
    if schedule is None:
        raise InputError("parallelism.pipeline_parallel_schedule", name, f"is not one of {', '.join(SCHEDULES.values())}", "1F1B")
    parts = parallel.get("module_fqns_per_model_part")
    if parts is None:
        notes.append("no module_fqns_per_model_part: torchtitan splits the layers itself, counting embedding and head as layers")
        return {"schedule": schedule, "vpp": 1 if schedule in ("1f1b", "gpipe") else 2}
    if not isinstance(parts, list) or not all(isinstance(p, list) for p in parts) or not parts or len(parts) % pp:
        raise InputError(
            "parallelism.module_fqns_per_model_part",
            len(parts),
            f"must be lists of names, their number a multiple of pp = {pp}",
            pp,
        )
    counts = tuple(sum(isinstance(m, str) and m.startswith("layers.") for m in part) for part in parts)
    numbers = [m for part in parts for m in part if isinstance(m, str) and m.startswith("layers.")]
    if numbers != [f"layers.{i}" for i in range(len(numbers))]:
        raise InputError(
            "parallelism.module_fqns_per_model_part",
            len(numbers),
            "must name every layer once and in order (torchtitan drops what is not named)",
        )
    return {"schedule": schedule, "vpp": len(parts) // pp, "stages": counts if len(set(counts)) > 1 else ()}


TOKENS = {"num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step", "max_context_length", "num_pp_microbatches"}
"""Fields of the releases that count a batch in tokens; where one of them is written, these releases' defaults hold."""


@dataclass(frozen=True)
class Batch:
    """The batch's fields of one kind of release."""

    parallel: dict[str, Any]
    training: dict[str, Any]

    def _training(self, name: str, default: int) -> int:
        return _whole(f"training.{name}", self.training.get(name, default))

    def _parallel(self, name: str) -> int:
        return _whole(f"parallelism.{name}", self.parallel.get(name, 1))


class Sequences(Batch):
    """0.3: in sequences."""

    @property
    def seq_len(self) -> int:
        return self._training("seq_len", 2048)

    def micro_batch(self, pp: int) -> int:
        return self._parallel("pipeline_parallel_microbatch_size") if pp > 1 else self._training("local_batch_size", 8)

    def global_batch(self, layout: Layout) -> int:
        if self.training.get("global_batch_size", -1) == -1:
            return self._training("local_batch_size", 8) * layout.dp
        return self._training("global_batch_size", 1)


class Tokens(Batch):
    """Later: in tokens."""

    @property
    def seq_len(self) -> int:
        return self._training("max_context_length", 2048)

    def _sequences(self, name: str, count: int) -> int:
        if count % self.seq_len:
            below = max(count // self.seq_len, 1) * self.seq_len
            raise InputError(f"training.{name}", count, f"must be whole sequences of max_context_length = {self.seq_len}", below)
        return count // self.seq_len

    def micro_batch(self, pp: int) -> int:
        name = "num_tokens_per_microbatch_per_dp_rank"
        return self._sequences(name, self._training(name, 16384))

    def global_batch(self, layout: Layout) -> int:
        name = "num_tokens_per_train_step"
        if self.training.get(name, -1) == -1:
            microbatches = self._parallel("num_pp_microbatches") if layout.pp > 1 else 1
            return self.micro_batch(layout.pp) * microbatches * layout.dp
        return self._sequences(name, self._training(name, 1))


def recompute(calls: Calls) -> str:
    if "FullAC" in calls.found:
        return "full"
    return "none" if "no activation_checkpoint" in calls.constant else "selective(op)"


def named_model(calls: Calls, registry: ast.Call | None) -> dict[str, Any]:
    """The built-in model of the flavour that ``model_registry`` is given."""
    flavour = _literal(registry.args[0]) if registry is not None and registry.args else None
    names = [name for name, (_, theirs) in table()["flavours"].items() if theirs == flavour]
    return {"flavour": flavour, "name": names[0]} if len(names) == 1 else {"flavour": flavour} if isinstance(flavour, str) else {}


def precision(registry: ast.Call | None, training: dict[str, Any]) -> str:
    text = ast.dump(registry) if registry is not None else ""
    for name, kind in (("Float8LinearConverter", "fp8"), ("MXFP8LinearConverter", "mxfp8"), ("NVFP4LinearConverter", "nvfp4")):
        if name in text:
            return kind
    return "fp32" if training.get("mixed_precision_param") == "float32" else "bf16"
