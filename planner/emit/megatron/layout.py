"""Layout -> the flags of parallelism, schedule, recompute and data parallelism."""

from __future__ import annotations

from itertools import groupby

from cost_models.job import Job
from cost_models.layout import Layout, even_split
from planner.emit.core import refuse
from planner.emit.megatron.flags import Flags, number, switch
from planner.rules.cluster import same_placement

CP_TYPES = {"ring": "p2p", "ulysses": "a2a", "allgather": "all_gather"}
DEFAULT_ORDER = "tp-cp-dp-pp"
PRECISIONS = {
    "fp32": {}, "fp16": switch("--fp16"), "bf16": switch("--bf16"),
    "fp8": switch("--bf16") | {"--fp8-format": ("hybrid",), "--fp8-recipe": ("tensorwise",)},
    "mxfp8": switch("--bf16") | {"--fp8-format": ("e4m3",), "--fp8-recipe": ("mxfp8",)},
    "nvfp4": switch("--bf16") | {"--fp4-format": ("e2m1",), "--fp4-recipe": ("nvfp4",)},
}  # fmt: skip


def layout_flags(job: Job, layout: Layout, target: str = "megatron") -> Flags:
    """All flags that follow from the layout, the batch and the precision. Raises InputError for what Megatron has no flag for."""
    flags = degrees(job, layout, target)
    flags |= stages(job, layout)
    flags |= context(layout)
    flags |= data_parallel(job, layout, target)
    flags |= recompute(job, layout, target)
    if job.model.moe is not None:
        flags |= dispatch(job, layout, target)
    return flags | states(job, layout, target)


def degrees(job: Job, layout: Layout, target: str) -> Flags:
    if layout.tp > 1 and job.execution.vocab_multiple == 1:
        raise refuse(target, "execution.vocab_multiple = 1 beside tp > 1 leaves ranks with odd parts of the vocabulary; take 128")
    flags: Flags = {
        "--micro-batch-size": (str(layout.micro_batch),),
        "--global-batch-size": (str(job.global_batch),),
        "--tensor-model-parallel-size": (str(layout.tp),),
        "--pipeline-model-parallel-size": (str(layout.pp),),
        "--context-parallel-size": (str(layout.cp),),
        "--expert-model-parallel-size": (str(layout.ep),),
    }
    etp = layout.etp
    if not same_placement(layout, layout.order, DEFAULT_ORDER):
        flags |= switch("--use-tp-pp-dp-mapping")
        if job.model.moe is None:
            # This order wants as many expert replicas as data-parallel ones, also where there are no experts.
            etp = layout.tp * layout.cp
        elif layout.tp * layout.cp != layout.ep * layout.etp:
            raise refuse(
                target,
                f"order {layout.order} needs expert data parallelism to equal dp: etp*ep = {layout.etp * layout.ep} must be"
                f" tp*cp = {layout.tp * layout.cp}",
            )
    flags["--expert-tensor-parallel-size"] = (str(etp),)
    if layout.sp:
        flags |= switch("--sequence-parallel")
    if job.execution.tp_overlap == "userbuffers" and layout.tp > 1:
        if not layout.sp:
            raise refuse(target, "overlapped tensor parallelism (execution.tp_overlap = userbuffers) needs sequence parallelism")
        flags |= switch("--tp-comm-overlap")
    return flags


def stages(job: Job, layout: Layout) -> Flags:
    """Even chunks by their number; anything else as a layout string, the most general form."""
    if layout.pp == 1:
        return {}
    counts = layout.stages or even_split(job.model.num_layers, layout.chunks)
    if len(set(counts)) > 1:
        return {"--pipeline-model-parallel-layout": (layout_string(counts, job.model.mtp),)}
    return {"--num-virtual-stages-per-pipeline-rank": (str(layout.vpp),)} if layout.vpp > 1 else {}


def layout_string(counts: tuple[int, ...], mtp: int = 0) -> str:
    """``Et*3|(t*4|)*6t*5L``: E embedding, t layer, m MTP module, L loss, | between chunks; equal neighbours are folded."""

    def layers(n: int) -> str:
        return "" if n == 0 else "t" if n == 1 else f"t*{n}"

    tail = ("" if not mtp else "m" if mtp == 1 else f"m*{mtp}") + "L"
    if len(counts) == 1:
        return "E" + layers(counts[0]) + tail
    middle = ""
    for count, run in groupby(counts[1:-1]):
        times = len(list(run))
        middle += f"({layers(count)}|)*{times}" if times > 1 else f"{layers(count)}|"
    return f"E{layers(counts[0])}|{middle}{layers(counts[-1])}{tail}"


def context(layout: Layout) -> Flags:
    if layout.cp == 1:
        return {}
    if layout.ring > 1 and layout.ulysses > 1:
        sizes = (str(layout.ulysses), str(layout.ring))
        return {"--cp-comm-type": ("a2a+p2p",), "--hierarchical-context-parallel-sizes": sizes}
    return {
        "--cp-comm-type": (CP_TYPES["ulysses" if layout.ulysses > 1 else "allgather" if layout.cp_kind == "allgather" else "ring"],)
    }


def data_parallel(job: Job, layout: Layout, target: str) -> Flags:
    """ZeRO 0: plain replicas; 1: the distributed optimizer; 2 and 3: Megatron-FSDP."""
    execution = job.execution
    overlap = switch("--overlap-grad-reduce") if execution.dp_overlap else {}
    if layout.zero == 0:
        return overlap
    flags = switch("--use-distributed-optimizer") | overlap
    if execution.dp_overlap and execution.gather_overlap:
        flags |= switch("--overlap-param-gather")
    if layout.dp_replicate > 1:
        edp = layout.tp * layout.cp * layout.dp // (layout.ep * layout.etp)
        if job.model.moe is not None and edp % layout.dp_replicate:
            raise refuse(
                target, f"dp_replicate {layout.dp_replicate} must divide the expert data parallelism {edp} (optimizer instances)"
            )
        flags["--num-distributed-optimizer-instances"] = (str(layout.dp_replicate),)
    if layout.zero >= 2:
        flags |= switch("--use-megatron-fsdp") | {
            "--data-parallel-sharding-strategy": ("optim_grads" if layout.zero == 2 else "optim_grads_params",),
            "--ckpt-format": ("fsdp_dtensor",),
        }
        if layout.dp_replicate > 1:
            flags["--outer-dp-sharding-strategy"] = ("no_shard",)
    return flags


def recompute(job: Job, layout: Layout, target: str) -> Flags:
    """One choice for the model, or full for the first n layers of every chunk (``block``); anything else was refused by the rules."""
    rules = [layout.recompute_rules.of(i) for i in range(job.model.num_layers)]
    modes = {r.mode for r in rules}
    if modes == {"none"}:
        return {}
    if modes == {"full"}:
        unit = job.execution.recompute_unit
        return _full("uniform", unit)
    if modes == {"selective"}:
        modules = tuple(dict.fromkeys(m for r in rules for m in r.modules))
        _modules_exist(job, modules, target)
        return {"--recompute-granularity": ("selective",), "--recompute-modules": modules}
    counts = layout.stages or even_split(job.model.num_layers, layout.chunks)
    start, most = 0, 0
    for count in counts:
        most = max(most, sum(r.mode == "full" for r in rules[start : start + count]))
        start += count
    return _full("block", most)


def _full(method: str, layers: int) -> Flags:
    return {"--recompute-granularity": ("full",), "--recompute-method": (method,), "--recompute-num-layers": (str(layers),)}


def _modules_exist(job: Job, modules: tuple[str, ...], target: str) -> None:
    model, moe = job.model, job.model.moe
    there = {
        "moe": moe is not None, "moe_act": moe is not None, "shared_experts": moe is not None and moe.shared_width > 0,
        "mla_up_proj": getattr(model.attention, "kind", "") == "latent_attention",
    }  # fmt: skip
    for module in modules:
        if not there.get(module, True):
            raise refuse(target, f"recompute names {module}, which {model.name} does not have")


def dispatch(job: Job, layout: Layout, target: str) -> Flags:
    """How tokens reach their experts."""
    flags: Flags = switch("--moe-grouped-gemm") if job.execution.grouped_gemm else {}
    if layout.dispatcher in ("deepep", "hybridep"):
        flags |= {"--moe-token-dispatcher-type": ("flex",), "--moe-flex-dispatcher-backend": (layout.dispatcher,)}
    else:
        flags["--moe-token-dispatcher-type"] = (layout.dispatcher,)
    if job.execution.permute_fusion:
        flags |= switch("--moe-permute-fusion")
    if layout.capacity:
        if layout.dispatcher == "allgather":
            raise refuse(target, "a capacity factor needs another dispatcher than allgather")
        flags["--moe-expert-capacity-factor"] = (number(layout.capacity),)
    if job.execution.ep_overlap and layout.ep > 1:
        flags |= _expert_overlap(job, layout, target)
    return flags


def _expert_overlap(job: Job, layout: Layout, target: str) -> Flags:
    """The rules of Megatron's overlapped expert all-to-all (targets.md 1.3)."""
    modules = {m for r in layout.recompute_rules.rules for m in r.modules}
    broken = {
        "a pipeline without virtual stages (vpp > 1)": layout.pp > 1 and layout.vpp == 1,
        "full recompute": any(r.mode == "full" for r in layout.recompute_rules.rules),
        "recompute of moe": "moe" in modules,
        f"dispatcher {layout.dispatcher}": layout.dispatcher == "allgather",
        "fp32": job.precision == "fp32",
        "several MTP modules": job.model.mtp > 1,
    }
    for what, is_so in broken.items():
        if is_so:
            raise refuse(target, f"overlapped expert all-to-all (execution.ep_overlap) does not go with {what}")
    return switch("--overlap-moe-expert-parallel-comm")


def states(job: Job, layout: Layout, target: str) -> Flags:
    """Precision and what the optimizer keeps."""
    execution = job.execution
    flags: Flags = dict(PRECISIONS[job.precision])
    low = job.precision in ("fp8", "mxfp8", "nvfp4")
    if low and job.precision != "nvfp4" and execution.fp8_parameters and layout.zero >= 1:
        flags |= switch("--fp8-param-gather")
        if job.precision == "mxfp8" and "--overlap-param-gather" in data_parallel(job, layout, target):
            flags |= switch("--reuse-grad-buf-for-mxfp8-param-ag")
    optimizers = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}
    if job.optimizer not in optimizers:
        raise refuse(target, f"optimizer {job.optimizer} has no counterpart; there are {', '.join(optimizers)}")
    if job.optimizer == "muon" and layout.zero >= 2:
        raise refuse(target, "muon does not go with Megatron-FSDP (ZeRO 2 and 3)")
    flags["--optimizer"] = (optimizers[job.optimizer],)
    if job.precision in ("bf16", "fp8", "mxfp8", "nvfp4") and execution.reduce_bytes == 2:
        flags |= switch("--grad-reduce-in-bf16")
    if execution.moment_bytes == 2:
        if layout.zero == 0:
            raise refuse(target, "16-bit moments need the distributed optimizer (ZeRO 1 or more)")
        flags |= switch("--use-precision-aware-optimizer") | {"--exp-avg-dtype": ("bf16",), "--exp-avg-sq-dtype": ("bf16",)}
    if "optimizer" in layout.offload:
        if layout.zero == 0:
            raise refuse(target, "an offloaded optimizer needs the distributed optimizer (ZeRO 1 or more)")
        flags |= switch("--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", "--use-precision-aware-optimizer")
        flags["--optimizer-offload-fraction"] = ("1.0",)
    return flags
