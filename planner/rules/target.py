"""Rules of the target: axes, sharding, recompute, dispatch and offload it can express. The data is ``planner/data/limits.yaml``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from cost_models.layout import even_split
from planner.rules.core import Break, Case, listed, rule

PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
"""Widest first: the nearest one a target has is the closest here, the narrower on ties."""


AXES = ("tp", "cp", "pp", "ep", "etp", "dp_replicate", "dp_shard")


@rule(
    "target", " ".join(AXES), "the target has every axis whose degree exceeds 1",
    lambda _, limits: not {*AXES} <= {*limits.axes},
)  # fmt: skip
def axes_are_expressible(case: Case) -> Iterator[Break]:
    for axis in AXES:
        degree = getattr(case.layout, axis)
        if degree > 1 and axis not in case.limits.axes:
            yield Break(axis, degree, f"{case.limits.target} has no axis {axis}", (1,))


@rule("target", "cp cp_kind", "the target has this kind of context parallelism")
def context_kind_is_expressible(case: Case) -> Iterator[Break]:
    layout = case.layout
    kind = "hybrid" if layout.ring > 1 and layout.ulysses > 1 else layout.cp_kind
    kinds = case.limits.cp_kinds
    if layout.cp > 1 and kind not in kinds and "cp" in case.limits.axes:
        yield Break(
            "cp_kind", layout.cp_kind, f"{case.limits.target} has {listed(kinds)}", tuple(k for k in kinds if k != "hybrid")
        )


@rule("target", "zero dp_shard cp", "the target has this ZeRO stage")
def zero_is_expressible(case: Case) -> Iterator[Break]:
    layout, limits = case.layout, case.limits
    zero = layout.zero
    if zero not in limits.zero and not (zero == 1 and layout.dp_shard * layout.cp == 1):
        yield Break("zero", zero, f"{limits.target} shards as ZeRO {listed(limits.zero)}", tuple(limits.zero))
    elif limits.zero_always and zero == 0 and (layout.dp_shard > 1 or layout.cp > 1):
        what = "dp_shard" if layout.dp_shard > 1 else "cp"
        yield Break(
            "zero", zero, f"{limits.target}: {what} > 1 always shards parameters (ZeRO 2 or 3)", tuple(z for z in limits.zero if z)
        )


@rule("target", "zero pp", "the target pipelines with this ZeRO stage")
def zero_and_pipeline(case: Case) -> Iterator[Break]:
    layout, limits = case.layout, case.limits
    most = limits.max_zero_with_pp if limits.zero3_with_pp else min(limits.max_zero_with_pp, 2)
    if layout.pp > 1 and layout.zero > most:
        yield Break("zero", layout.zero, f"{limits.target}: a pipeline goes with ZeRO 0 to {most}", tuple(range(most + 1)))


@rule("target", "zero tp", "the target shards parameters beside tensor parallelism")
def zero_and_tensor(case: Case) -> Iterator[Break]:
    layout, limits = case.layout, case.limits
    if layout.tp > 1 and layout.zero == 3 and not limits.tp_zero3:
        yield Break("zero", 3, f"{limits.target}: tensor-parallel training supports ZeRO 0, 1 and 2", (2, 1, 0))
    most = {2: limits.zero2_max_tp, 3: limits.zero3_max_tp}.get(layout.zero, 0)
    if most and layout.tp > most:
        yield Break("tp", layout.tp, f"{limits.target}: ZeRO {layout.zero} goes with tp up to {most}", tuple(range(1, most + 1)))


@rule("target", "tp cp dp_replicate dp_shard", "replication beside tp or cp needs sharding where the target says so")
def replication_needs_sharding(case: Case) -> Iterator[Break]:
    layout = case.layout
    if case.limits.replicate_needs_shard and layout.dp_replicate > 1 and layout.dp_shard == 1 and layout.tp * layout.cp > 1:
        yield Break("dp_shard", 1, f"{case.limits.target}: dp_replicate {layout.dp_replicate} beside tp or cp needs dp_shard > 1")


@rule("target", "tp cp cp_kind", "tensor and Ulysses parallelism go together in the target")
def tensor_and_ulysses(case: Case) -> Iterator[Break]:
    if case.layout.tp > 1 and case.layout.ulysses > 1 and not case.limits.tp_with_ulysses:
        yield Break("cp", case.layout.cp, f"{case.limits.target}: no Ulysses beside tensor parallelism", (1,))


@rule("target", "pp ep", "pipeline and expert parallelism go together in the target")
def pipeline_and_experts(case: Case) -> Iterator[Break]:
    if case.layout.pp > 1 and case.layout.ep > 1 and not case.limits.pp_with_ep:
        yield Break("ep", case.layout.ep, f"{case.limits.target}: no expert parallelism inside a pipeline", (1,))


@rule("target", "tp sp", "sequence parallelism splits over a tensor-parallel group")
def sequence_needs_tensor(case: Case) -> Iterator[Break]:
    if case.layout.sp and case.layout.tp == 1:
        yield Break("sp", True, "sequence parallelism needs tp > 1", (False,))


@rule("target", "tp sp", "a mixture of experts under tensor parallelism needs sequence parallelism where the target says so")
def experts_need_sequence(case: Case) -> Iterator[Break]:
    if case.job.model.moe is not None and case.layout.tp > 1 and not case.layout.sp and case.limits.moe_tp_needs_sp:
        yield Break("sp", False, f"{case.limits.target}: MoE with tp > 1 needs sequence parallelism", (True,))


@rule("target", "dispatcher", "the target has this dispatcher")
def dispatcher_is_expressible(case: Case) -> Iterator[Break]:
    known = case.limits.dispatchers
    if case.job.model.moe is not None and case.layout.dispatcher not in known:
        yield Break("dispatcher", case.layout.dispatcher, f"{case.limits.target} has {listed(known)}", tuple(known))


@rule("target", "offload", "the target can offload this: no target of emission offloads activations")
def offload_is_expressible(case: Case) -> Iterator[Break]:
    known = listed(case.limits.offload) or "nothing"
    for what in case.layout.offload:
        if what not in case.limits.offload:
            where = (
                "; activations are estimated under an execution that no target limits (simumax)" if what == "activations" else ""
            )
            yield Break("offload", "+".join(case.layout.offload), f"{case.limits.target} offloads {known}{where}", ("none",))


@rule("target", "pp vpp stages recompute", "the target can express this choice of what is recomputed")
def recompute_is_expressible(case: Case) -> Iterator[Break]:
    layout, limits = case.layout, case.limits
    rules = layout.recompute_rules.rules
    for part in rules:
        if part.mode not in limits.recompute_modes:
            yield Break(
                "recompute",
                layout.recompute,
                f"{limits.target} recomputes {listed(limits.recompute_modes)}",
                tuple(limits.recompute_modes),
            )
            return
        unknown = [m for m in part.modules if m not in limits.modules]
        if unknown:
            near = tuple(limits.recompute_modes[:1]) if not limits.modules else (f"selective({limits.modules[0]})", "none")
            yield Break("recompute", layout.recompute, f"{limits.target} cannot recompute {listed(unknown)} alone", near)
            return
    layers = case.job.model.num_layers
    last = max((r.last for r in rules if r.last is not None), default=0)
    if last >= layers:
        yield Break("recompute", layout.recompute, f"names layer {last}; the model's are 0 to {layers - 1}", ())
        return
    if limits.recompute == "layer":
        return
    choices = [str(layout.recompute_rules.of(i).mode) + ",".join(layout.recompute_rules.of(i).modules) for i in range(layers)]
    if len(set(choices)) == 1:
        return
    if limits.recompute == "block" and set(choices) <= {"none", "full"} and _same_block(layout, choices):
        return
    how = (
        "one choice for the whole model"
        if limits.recompute == "model"
        else "one choice, or the first n layers of every chunk in full"
    )
    yield Break("recompute", layout.recompute, f"{limits.target} expresses {how}", ("full", "none"))


def _same_block(layout: Any, choices: list[str]) -> bool:
    """Whether every chunk recomputes its first n layers in full, with one n (or all it has, when fewer)."""
    counts = layout.stages or even_split(len(choices), layout.pp * layout.vpp)
    start, blocks = 0, []
    for count in counts:
        chunk = choices[start : start + count]
        full = sum(c == "full" for c in chunk)
        if chunk[:full] != ["full"] * full:
            return False
        blocks.append((full, count))
        start += count
    n = max(full for full, _ in blocks)
    return all(full == min(n, count) for full, count in blocks)


@rule("target", "", "the target trains in this precision")
def precision_is_expressible(case: Case) -> Iterator[Break]:
    known, wanted = getattr(case.job.execution, "precisions", ()), case.job.precision
    if known and wanted not in known:
        place = {p: i for i, p in enumerate(PRECISIONS)}
        near = sorted(known, key=lambda p: (abs(place.get(p, 0) - place.get(wanted, 0)), -place.get(p, 0)))
        yield Break("precision", wanted, f"{case.job.execution.name} trains in {listed(known)}", tuple(near))


@rule("target", "", "the target trains with this optimizer")
def optimizer_is_expressible(case: Case) -> Iterator[Break]:
    known, wanted = case.job.execution.optimizers, case.job.optimizer
    if wanted not in known:
        yield Break("optimizer", wanted, f"{case.job.execution.name} trains with {listed(known)}", tuple(known))


@rule("target", "zero", "the target keeps this optimizer's state with this ZeRO stage")
def optimizer_goes_with_zero(case: Case) -> Iterator[Break]:
    zero, wanted = case.layout.zero, case.job.optimizer
    most = case.limits.muon_max_zero
    if wanted == "muon" and zero > most:
        yield Break("zero", zero, f"{case.limits.target}: muon goes with ZeRO 0 to {most}", tuple(range(most, -1, -1)))
    if case.job.execution.moment_bytes == 2 and zero == 0 and not case.limits.narrow_moments_unsharded:
        yield Break("zero", zero, f"{case.limits.target}: 16-bit moments need a sharded optimizer (ZeRO 1 or more)", (1,))


GRAPHED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "pp": ("a pipeline", lambda layout: layout.pp > 1),
    "ep": ("expert parallelism", lambda layout: layout.ep > 1),
    "full": ("full recompute", lambda layout: any(r.mode == "full" for r in layout.recompute_rules.rules)),
}
"""What CUDA graphs may not go with (``graphs_without``): in words, and whether a layout has it."""


@rule("target", "pp ep recompute", "what CUDA graphs capture goes with the layout in the target")
def graphs_suit_the_layout(case: Case) -> Iterator[Break]:
    graphs = case.job.execution.graphs
    for name in case.limits.graphs_without if graphs != "none" else ():
        what, has = GRAPHED[name]
        if has(case.layout) and not (name == "full" and graphs == "full"):
            field = "recompute" if name == "full" else name
            repair = ("none",) if name == "full" else (1,)
            yield Break(field, getattr(case.layout, field), f"{case.limits.target}: no CUDA graphs with {what}", repair)


@rule("target", "", "8- and 4-bit products are compiled where the target needs that")
def low_precision_is_compiled(case: Case) -> Iterator[Break]:
    low = case.job.precision in ("fp8", "mxfp8", "nvfp4")
    if low and case.limits.low_precision_compiled and case.job.execution.elementwise != "compiled":
        message = f"{case.limits.target} needs compiled blocks for it (execution.elementwise = compiled)"
        yield Break("precision", case.job.precision, message, ("bf16",))


@rule("target", "pp", "multi-token prediction goes with a pipeline in the target")
def prediction_modules_and_pipeline(case: Case) -> Iterator[Break]:
    model = case.job.model
    if case.layout.pp > 1 and model.mtp and not case.limits.mtp_with_pp:
        message = (
            f"{case.limits.target} runs no multi-token prediction inside a pipeline, and {model.name} has {model.mtp} module(s)"
        )
        yield Break("pp", case.layout.pp, message, (1,))


@rule("target", "pp vpp", "expert exchange beside compute needs virtual stages in a pipeline where the target says so")
def expert_overlap_and_pipeline(case: Case) -> Iterator[Break]:
    layout, job = case.layout, case.job
    if (
        job.model.moe is not None
        and job.execution.ep_overlap
        and case.limits.ep_overlap_needs_vpp
        and layout.pp > 1
        and layout.vpp == 1
    ):
        yield Break(
            "vpp", 1, f"{case.limits.target}: overlapped expert all-to-all (execution.ep_overlap) needs vpp > 1 in a pipeline"
        )
