"""Megatron-Bridge: its generic GPT recipe with Hydra-style overrides. The same facts as Megatron-LM's flags, as configuration fields."""

from __future__ import annotations

import re

from cost_models.job import Job
from cost_models.layout import Layout
from planner.emit import connections
from planner.emit.core import EmitSettings, Need, Program, Variable, Word, admit, from_environment
from planner.emit.environment import shared
from planner.emit.megatron.model import model_flags
from planner.emit.megatron.program import OPTIONS, all_flags
from planner.plan import Plan

__all__ = ["OPTIONS", "program", "require_model"]
TARGET = "megatron-bridge"
CHECKOUT = Need("MEGATRON_BRIDGE_PATH", "your checkout of Megatron-Bridge", "/opt/Megatron-Bridge")
RECIPE = "vanilla_gpt_pretrain_config"
FIELDS: dict[str, tuple[str, ...]] = {
    "--seq-length": ("model.seq_length", "dataset.seq_length"),
    "--norm-epsilon": ("model.layernorm_epsilon",),
    "--num-experts": ("model.num_moe_experts",),
    "--vocab-size": ("model.vocab_size", "tokenizer.vocab_size"),
    "--micro-batch-size": ("train.micro_batch_size",),
    "--global-batch-size": ("train.global_batch_size",),
    "--train-iters": ("train.train_iters", "scheduler.lr_decay_iters"),
    "--num-virtual-stages-per-pipeline-rank": ("model.virtual_pipeline_model_parallel_size",),
    "--num-distributed-optimizer-instances": ("ddp.num_distributed_optimizer_instances",),
    "--data-parallel-sharding-strategy": ("ddp.data_parallel_sharding_strategy",),
    "--outer-dp-sharding-strategy": ("ddp.outer_dp_sharding_strategy",),
    "--ckpt-format": ("checkpoint.ckpt_format",),
    "--lr": ("optimizer.lr",),
    "--weight-decay": ("optimizer.weight_decay",),
    "--adam-beta2": ("optimizer.adam_beta2",),
    "--clip-grad": ("optimizer.clip_grad",),
    "--optimizer": ("optimizer.optimizer",),
    "--optimizer-offload-fraction": ("optimizer.optimizer_offload_fraction",),
    "--eval-iters": ("validation.eval_iters",),
    "--log-interval": ("logger.log_interval",),
    "--seed": ("rng.seed",),
    "--tokenizer-type": ("tokenizer.tokenizer_type",),
    "--tokenizer-model": ("tokenizer.tokenizer_model",),
    "--max-position-embeddings": (),
    "--lr-decay-style": (),
    "--data-path": ("dataset.blend",),
}
"""Flags whose field is not ``model.`` and the flag's own name with underscores. (): the field follows from others."""
SWITCHES: dict[str, tuple[str, ...]] = {
    "--swiglu": ("model.gated_linear_unit=true", "model.activation_func=silu"),
    "--disable-bias-linear": ("model.add_bias_linear=false",),
    "--untie-embeddings-and-output-weights": ("model.share_embeddings_and_output_weights=false",),
    "--group-query-attention": (),
    "--use-rope-scaling": ("model.rope_scaling=true",),
    "--use-tp-pp-dp-mapping": ("dist.use_tp_pp_dp_mapping=true",),
    "--use-distributed-optimizer": ("ddp.use_distributed_optimizer=true", "optimizer.use_distributed_optimizer=true"),
    "--overlap-grad-reduce": ("ddp.overlap_grad_reduce=true",),
    "--overlap-param-gather": ("ddp.overlap_param_gather=true", "optimizer.overlap_param_gather=true"),
    "--use-megatron-fsdp": ("ddp.use_megatron_fsdp=true", "dist.use_megatron_fsdp=true"),
    "--grad-reduce-in-bf16": ("ddp.grad_reduce_in_fp32=false",),
    "--optimizer-cpu-offload": ("optimizer.optimizer_cpu_offload=true",),
    "--overlap-cpu-optimizer-d2h-h2d": ("optimizer.overlap_cpu_optimizer_d2h_h2d=true",),
    "--use-precision-aware-optimizer": ("optimizer.use_precision_aware_optimizer=true",),
    "--fp8-param-gather": ("ddp.fp8_param_gather=true", "model.fp8_param=true"),
    "--reuse-grad-buf-for-mxfp8-param-ag": (
        "ddp.reuse_grad_buf_for_mxfp8_param_ag=true",
        "optimizer.reuse_grad_buf_for_mxfp8_param_ag=true",
    ),
    "--no-check-for-nan-in-loss-and-grad": ("ddp.check_for_nan_in_grad=false", "rerun_state_machine.check_for_nan_in_loss=false"),
    "--log-throughput": ("logger.log_throughput=true",),
    "--mock-data": (),
    "--bf16": (),
    "--fp16": (),
}
PRECISIONS = {
    "bf16": "bf16_mixed", "fp16": "fp16_mixed", "fp8": "bf16_with_fp8_current_scaling_mixed", "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}  # fmt: skip
PRECISION_FLAGS = ("--fp8-format", "--fp8-recipe", "--fp4-format", "--fp4-recipe")
LISTS = {"--cuda-graph-modules", "--recompute-modules", "--hierarchical-context-parallel-sizes", "--data-path"}
PATTERNS = {"--moe-layer-freq", "--window-attn-skip-freq", "--no-rope-freq"}


def program(plan: Plan, settings: EmitSettings) -> Program:
    """Raises InputError for a plan that the generic recipe cannot run, with the reason."""
    job, layout = admit(plan, TARGET)
    given = overrides(job, layout, settings)
    environment = (
        Variable("PYTHONPATH", from_environment(CHECKOUT.name, "/src"), "The recipe is imported from the checkout.", "prepend"),
        *connections.megatron(connections.Streams.of(job, layout)),
        *shared(plan, "megatron", settings.options),
    )
    words = ("--recipe", RECIPE, "--mode", "pretrain", *given)
    return Program(
        target=TARGET,
        words=(from_environment(CHECKOUT.name, "/scripts/training/run_recipe.py"), *(Word(w) for w in words)),
        environment=environment,
        needs=(CHECKOUT,),
        arguments=(f"train.train_iters={settings.steps}",),
        notes=("It trains on made-up tokens unless emitted with --data PREFIX.",) if not settings.data else (),
    )


def require_model(job: Job) -> None:
    """Raise InputError where Megatron's model, which the recipe is of, does not have the shape."""
    model_flags(job, TARGET)


def overrides(job: Job, layout: Layout, settings: EmitSettings) -> list[str]:
    """``section.field=value`` for every fact of the plan. Raises InputError for what Megatron's model cannot be."""
    flags = all_flags(job, layout, settings, TARGET)
    out = [f"mixed_precision={PRECISIONS[job.precision]}", "model.should_pad_vocab=true"]
    for flag, values in flags.items():
        out += override(flag, values)
    return out


def override(flag: str, values: tuple[str, ...]) -> list[str]:
    if flag in PRECISION_FLAGS:
        return []
    if not values:
        return list(SWITCHES.get(flag, (f"model.{field(flag)}=true",)))
    names = FIELDS.get(flag, (f"model.{field(flag)}",))
    return [f"{name}={shown(flag, values)}" for name in names]


def field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def shown(flag: str, values: tuple[str, ...]) -> str:
    """A value in Hydra's grammar; text that it could read otherwise is quoted."""
    if flag in PATTERNS:
        return "[" + ",".join(str(n) for n in expanded(values[0])) + "]"
    if flag == "--window-size":
        return f"[{values[0]}]"
    if flag == "--data-path":
        return "[[" + ",".join(quoted(v) for v in values) + "],null]"
    if flag in LISTS:
        return "[" + ",".join(values) + "]"
    return values[0] if re.fullmatch(r"[\w.+-]+", values[0]) else quoted(values[0])


def quoted(text: str) -> str:
    """A string of Hydra's grammar: double quotes; a quote inside is escaped, backslashes only where a quote follows them."""
    return '"' + re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + ('\\"' if found[2] else ""), text) + '"'


def unquoted(text: str) -> str:
    """What ``quoted`` made of a string; other text as it is."""
    if not text.startswith('"'):
        return text
    return re.sub(r'(\\+)("|$)', lambda found: len(found[1]) // 2 * "\\" + found[2], text[1:-1])


def expanded(text: str) -> list[int]:
    """The numbers of ``([0]*3+[1]*58)``."""
    return [int(value) for value, count in re.findall(r"\[(\d+)\]\*(\d+)", text) for _ in range(int(count))]
