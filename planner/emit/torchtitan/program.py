"""TorchTitan: a Python module whose function returns ``Trainer.Config``, run with ``--module`` and ``--config``."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path
from typing import Any

from cost_models.job import Job
from cost_models.layout import Layout, even_split
from planner.emit import connections
from planner.emit.core import EmitSettings, Need, Program, Variable, Word, admit, refuse
from planner.emit.environment import shared
from planner.emit.files import fill
from planner.emit.options import read_options
from planner.emit.readme import comment
from planner.emit.torchtitan.releases import OPTIONS, RELEASES, Release
from planner.plan import Plan
from profiles.files import read_shipped
from profiles.huggingface import load_model
from profiles.model import ModelSpec

MODULE = "axisplan_config"
SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV",
}  # fmt: skip
BACKENDS = {"alltoall": "standard", "deepep": "deepep", "hybridep": "hybridep"}
ASSETS = Need(
    "HF_ASSETS_PATH",
    "the folder of the model's tokenizer, as torchtitan's download script makes it",
    "./assets/hf/NAME",
)
__all__ = ["OPTIONS", "program", "require_model"]


def program(plan: Plan, settings: EmitSettings) -> Program:
    """Raises InputError for a plan that TorchTitan cannot run, with the reason. Option ``release``: whose field names to write."""
    job, layout = admit(plan, "torchtitan")
    release = RELEASES[read_options(settings.options, OPTIONS)["release"]]
    text = config(plan, job, layout, settings, release)
    environment = (
        Variable("PYTHONPATH", Word(base="here"), "torchtitan imports the configuration from this folder.", "prepend"),
        *connections.torchtitan(connections.Streams.of(job, layout)),
        *shared(plan, "torchtitan", settings.options),
    )
    words = ("-m", "torchtitan.train", "--module", MODULE, "--config", "train")
    notes = [f"Written for torchtitan {release.title} (--set release=0.3 or main)."]
    if layout.offload:
        notes.append("Its offload moves parameters and gradients too; the prediction is for the optimizer's state alone.")
    return Program(
        target="torchtitan",
        words=tuple(Word(w) for w in words),
        files={f"{MODULE}.py": text},
        environment=environment,
        needs=(ASSETS,),
        arguments=("--training.steps", str(settings.steps)),
        notes=tuple(notes),
    )


def require_model(job: Job) -> None:
    """Raise InputError where no flavour has the model's shape, or its module lacks the prediction modules."""
    module, _ = flavour_of(job.model)
    registry_arguments(module, job, Layout())


def config(plan: Plan, job: Job, layout: Layout, settings: EmitSettings, release: Release) -> str:
    """The Python module. Every value is a literal of Python, written with ``repr``."""
    module, flavour = flavour_of(job.model)
    _expressible(job, layout)
    arguments = registry_arguments(module, job, layout)
    return fill(
        "torchtitan-config.py",
        title=comment(f"{job.model.name} on {job.cluster.gpus} x {job.cluster.gpu.name}: {plan.layout_text}").replace("\\", "/"),
        version=release.title,
        module=module,
        imports=imports(job),
        loader_imports=release.imports,
        registry=", ".join([repr(flavour), *(f"{k}={v}" for k, v in arguments.items())]),
        learning_rate=repr(settings.learning_rate),
        dataloader=release.dataloader.format(dataset=repr(settings.data[0] if settings.data else "c4")),
        training=fields(release.training(job, layout) | training(job, layout, settings)),
        parallelism=fields(parallelism(job, layout, release)),
        activation_checkpoint=activation_checkpoint(layout),
        compiled=fields(compile_fields(job)),
    )


def fields(values: dict[str, Any]) -> str:
    return "\n".join(f"            {name}={literal(value)}," for name, value in values.items())


def literal(value: Any) -> str:
    """A value as Python source; a list of lists with one line an item."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"                {item!r},\n" for item in value) + "            ]"
    return repr(value)


# -- the model ---------------------------------------------------------------------------------------------------------------


@cache
def table() -> dict[str, Any]:
    data: dict[str, Any] = read_shipped(Path(__file__).parents[2] / "data" / "torchtitan.yaml")
    return data


def flavour_of(model: ModelSpec) -> tuple[str, str]:
    """TorchTitan's module and flavour of the model's shape. Raises InputError where it has none."""
    flavours: dict[str, list[str]] = table()["flavours"]
    if model.name in flavours and shape(load_model(model.name)) == shape(model):
        return flavours[model.name][0], flavours[model.name][1]
    for name, (module, flavour) in flavours.items():
        if shape(load_model(name)) == shape(model):
            return module, flavour
    near = "; nearest: ".join(("", *difflib.get_close_matches(model.name, flavours, 1)))
    raise refuse("torchtitan", f"it has no model of the shape of {model.name}; it has {', '.join(flavours)}{near}")


def shape(model: ModelSpec) -> dict[str, Any]:
    """All that a flavour fixes: everything but names, notes, and what is said apart."""
    dump = model.model_dump(exclude={"name", "family", "notes", "max_seq_len", "mtp"})
    return dump | {"layers": [model.pattern.count(k) for k in range(len(model.kinds))]}


def registry_arguments(module: str, job: Job, layout: Layout) -> dict[str, str]:
    """Arguments of the module's ``model_registry`` as source."""
    known = table()["modules"][module]["arguments"]
    out = {"attn_backend": repr("flex")}
    if "moe_comm_backend" in known and job.model.moe is not None:
        out["moe_comm_backend"] = repr(BACKENDS.get(layout.dispatcher, "standard"))
    if job.model.mtp:
        if "num_mtp_layers" not in known:
            raise refuse("torchtitan", f"its {module} has no multi-token-prediction modules; {job.model.name} has {job.model.mtp}")
        out["num_mtp_layers"] = repr(job.model.mtp)
    if converters := CONVERTERS.get(job.precision):
        out["converters"] = "[" + ", ".join(f"{name}.Config({given})" for name, given in converters) + "]"
    return out


CONVERTERS: dict[str, tuple[tuple[str, str], ...]] = {
    "fp8": (("Float8LinearConverter", "recipe_name='rowwise', model_compile_enabled=True"),),
    "mxfp8": (("MXFP8LinearConverter", "model_compile_enabled=True"),),
    "nvfp4": (("NVFP4LinearConverter", "model_compile_enabled=True"),),
}
"""Linear layers; experts stay in 16 bits (their converters are separate and newer)."""


def imports(job: Job) -> str:
    converters = CONVERTERS.get(job.precision, ())
    return "".join(f"from torchtitan.components.quantization import {name}\n" for name, _ in converters)


# -- the layout --------------------------------------------------------------------------------------------------------------


def _expressible(job: Job, layout: Layout) -> None:
    """Raise for what no field expresses."""
    if layout.cp > 1 and layout.cp_kind != "allgather":
        raise refuse(
            "torchtitan",
            f"its context parallelism gathers keys and values; cp_kind={layout.cp_kind} is not there: plan with cp_kind=allgather",
        )
    if job.model.mtp and layout.pp > 1:
        raise refuse(
            "torchtitan",
            f"it runs no multi-token prediction inside a pipeline, and {job.model.name} has {job.model.mtp} such module(s)",
        )
    replica = layout.dp_shard * layout.cp * layout.tp
    if replica % layout.ep:
        raise refuse("torchtitan", f"ep = {layout.ep} must divide dp_shard*cp*tp = {replica}: experts stay inside a replica")
    if layout.ep > 1 and layout.dispatcher not in BACKENDS:
        raise refuse("torchtitan", f"it has no {layout.dispatcher} dispatcher; it has {', '.join(BACKENDS)}")
    if layout.capacity:
        raise refuse("torchtitan", "a capacity factor is not emitted (only its non-blocking HybridEP has one)")
    if job.optimizer != "adamw":
        raise refuse("torchtitan", f"optimizer {job.optimizer} is not emitted; it trains with AdamW")
    if job.precision == "fp16":
        raise refuse("torchtitan", "it has no fp16 training (no loss scaling)")
    if job.precision in CONVERTERS and job.execution.elementwise != "compiled":
        raise refuse("torchtitan", f"{job.precision} needs compiled blocks (execution.elementwise = compiled)")
    if "optimizer" in layout.offload and layout.dp_shard * layout.cp == 1:
        raise refuse("torchtitan", "it offloads what FSDP shards; without dp_shard or cp there is nothing")


def training(job: Job, layout: Layout, settings: EmitSettings) -> dict[str, Any]:
    out: dict[str, Any] = {
        "steps": settings.steps,
        "disable_cuda_graphs": job.execution.graphs == "none",
    }
    if job.precision == "fp32":
        out["mixed_precision_param"] = "float32"
    if "optimizer" in layout.offload:
        out["enable_cpu_offload"] = True
    return out


def parallelism(job: Job, layout: Layout, release: Release) -> dict[str, Any]:
    out: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp_replicate,
        "data_parallel_shard_degree": layout.dp_shard,
        "fsdp_reshard_after_forward": _reshard(job, layout),
        "tensor_parallel_degree": layout.tp,
        "enable_sequence_parallel": layout.sp or layout.tp == 1,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": layout.ep,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.pp > 1:
        out |= {
            "pipeline_parallel_schedule": SCHEDULES[layout.schedule],
            **release.parallelism(job, layout),
            "module_fqns_per_model_part": parts(job.model, layout),
        }
    return out


def _reshard(job: Job, layout: Layout) -> str:
    """ZeRO 2 keeps parameters gathered (never); 3 is the default, which under a pipeline gathers once a step where the execution says so."""
    if layout.zero == 2:
        return "never"
    return "always" if layout.zero == 3 and layout.pp > 1 and job.execution.reshard_with_pipeline else "default"


def parts(model: ModelSpec, layout: Layout) -> list[list[str]]:
    """Modules of every chunk in model order: embedding first, norm and head last, every layer once."""
    counts = layout.stages or even_split(model.num_layers, layout.chunks)
    out, start = [], 0
    for count in counts:
        out.append([f"layers.{i}" for i in range(start, start + count)])
        start += count
    out[0] = ["tok_embeddings", *out[0]]
    out[-1] += ["norm", "lm_head"]
    return out


def activation_checkpoint(layout: Layout) -> str:
    rule = layout.recompute_rules.of(0)
    return {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}[rule.mode]


def compile_fields(job: Job) -> dict[str, Any]:
    compiled = job.execution.elementwise == "compiled"
    out: dict[str, Any] = {"enable": compiled}
    if compiled:
        out["components"] = ["model", "loss"]
    if job.execution.tp_overlap == "async":
        out["enable_async_tensor_parallel"] = True
    return out
