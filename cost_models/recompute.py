"""What a recompute mode keeps of a layer, and what it runs again in backward: rules over the operations of its forward.

``full`` runs the whole forward again, collectives included. ``selective`` runs the operations of the named modules again, as the
frameworks define them: Megatron's ``--recompute-modules`` (core_attn, layernorm, moe_act, mlp, moe, mla_up_proj, shared_experts),
``mlp_act`` (the dense activation) and TorchTitan's ``op`` policy (every second matrix product, and all pointwise work).
"""

from __future__ import annotations

from functools import cache

from cost_models.arrays import minimum, where
from cost_models.layer_cost import LayerCost
from cost_models.layout import RecomputeRule
from profiles.operations import Attend, Collective, GroupedMatmul, Matmul, Number, Operation, Pointwise

NORM_OUTPUTS = tuple(f"{block}_norm_{what}" for block in ("attention", "mlp", "moe", "ssm") for what in ("output", "normalised"))
DROPPED: dict[str, tuple[str, ...]] = {
    "core_attn": ("probabilities", "attention_mask", "dropped_probabilities", "log_sum_exp", "attention_output_exchanged"),
    "layernorm": NORM_OUTPUTS,
    "mlp_act": ("mlp_product", "mlp_gate_output"),
    "moe_act": ("experts_product", "experts_gate_output"),
    "mlp": ("mlp_hidden", "mlp_product", "mlp_gate_output"),
    "moe": ("router_", "experts_", "shared_"),
    "shared_experts": ("shared_",),
    "mla_up_proj": ("query", "key_value", "q_latent_norm_output", "kv_latent_norm_output"),
}
"""Kept tensors that each module's recompute drops, by name; a name that ends in ``_`` stands for all that begin so. A module whose
output is recomputed keeps its own input."""
CORE_ATTENTION = (
    "core_attention", "scores", "softmax", "context", "repeat_kv", "ring_kv", "gather_kv", "ulysses_qkv", "ulysses_output",
)  # fmt: skip
"""Core attention, context parallelism's exchanges included."""
ENTRIES = ("attention_in", "mlp_in")
"""Collectives that gather a norm's output before the layers that read it."""
UP_PROJECTIONS = ("q_up", "kv_up", "rope", "q_latent_norm", "kv_latent_norm")


def recomputed(
    forward: tuple[Operation, ...], rule: RecomputeRule, stops_early: bool = False, regathers: bool = False
) -> tuple[Operation, ...]:
    """The operations of ``forward`` that run again under ``rule``; ``stops_early``: not what follows the last tensor that backward
    needs (``Execution.recompute_stops_early``); ``regathers``: a recomputed norm's output is kept gathered over TP otherwise, so it
    is gathered again (``Execution.keeps_gathered_input`` with ``discards_outputs``)."""
    if rule.mode == "none":
        return ()
    if rule.mode == "full":
        return _needed(forward) if stops_early else forward
    chosen = tuple(op for op in forward if any(_belongs(op.name, module) for module in rule.modules))
    if stops_early and {"mlp", "moe", "shared_experts"} & set(rule.modules):
        chosen = _needed(chosen)
    if stops_early:  # the output's exchange keeps nothing
        chosen = tuple(op for op in chosen if op.name != "ulysses_output")
    if regathers and "layernorm" in rule.modules:
        chosen += tuple(op for op in forward if isinstance(op, Collective) and op.name in ENTRIES and op.kind == "all_gather")
    return chosen + (_every_second(forward) if "op" in rule.modules else ())


def _needed(forward: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """Without the last products and the exchange behind them, whose results nothing keeps; all where a norm follows them."""
    names = {op.name for op in forward}
    if any(name.endswith("_post_norm") for name in names):
        return forward
    gone: tuple[str, ...] = ("projection", "attention_out")
    if "mlp_down" in names:
        gone = ("mlp_down", "mlp_out")
    elif "experts_down" in names or "shared_down" in names:
        gone = ("moe_all", *(() if "shared_gate" in names else ("shared_down", "shared_out")))
    return tuple(op for op in forward if op.name not in gone)


OUTPUT_MODULES = ("layernorm", "mlp_act", "moe_act", "mla_up_proj")
"""Modules whose recompute is meant to drop their *output*, which the next operation keeps otherwise."""


def kept_bytes(cost: LayerCost, rule: RecomputeRule, tp: Number = 1, *, discards_outputs: bool = True) -> Number:
    """Bytes of a layer kept from its forward to its backward under ``rule``, on one rank for one microbatch.

    ``full`` keeps the layer's input (2 s b h, Korthikanti et al. 2022, section 5). TorchTitan's ``op`` keeps the input and the
    outputs of attention, of the reduce-scatters (``tp`` ranks), and of every matrix product that it does not run again.
    ``discards_outputs``: False where a module's output stays kept by the operation behind it (``OUTPUT_MODULES`` drop nothing).
    """
    if rule.mode == "none":
        return cost.saved_bytes
    if rule.mode == "full":
        return cost.input_bytes
    if "op" in rule.modules:
        return cost.input_bytes + _operation_outputs(cost, tp)
    modules = [m for m in rule.modules if discards_outputs or m not in OUTPUT_MODULES]
    gone = tuple(name for module in modules for name in DROPPED[module])
    left = [s for s in cost.saved if not _named(s.name, gone)]
    own = [i for i, s in enumerate(left) if s.name in _inputs(modules)]
    total: Number = sum(minimum(s.bytes, cost.input_bytes) if i in own else s.bytes for i, s in enumerate(left))
    missing = not own and ("moe" in modules or ("shared_experts" in modules and any(s.name == "shared_input" for s in cost.saved)))
    return total + (cost.input_bytes if missing else 0)


def kept_twice(cost: LayerCost, rule: RecomputeRule) -> Number:
    """Of what a layer keeps under ``rule``, bytes that recomputation makes once more: attention's output, which the projection behind it
    keeps too; a module's own input, where the layer keeps it as it is and the module's first products keep it gathered over TP."""
    again = [s.bytes for s in cost.saved if s.name == "attention_output" and "core_attn" in rule.modules]
    gathered = [f"{block}_{what}" for block in ("mlp",) * ("mlp" in rule.modules) for what in ("norm_output", "input")]
    again += [where(s.bytes > cost.input_bytes, cost.input_bytes, 0) for s in cost.saved if s.name in gathered]
    return sum(again)


def _inputs(modules: list[str]) -> tuple[str, ...]:
    """The kept tensors that are the input of a recomputed module, as the layer has it: not gathered over TP, and kept in any case."""
    blocks = ("mlp",) * ("mlp" in modules) + ("moe",) * ("moe" in modules or "shared_experts" in modules)
    return tuple(f"{block}_{what}" for block in blocks for what in ("norm_output", "input"))


def _named(name: str, patterns: tuple[str, ...]) -> bool:
    return any(name.startswith(p) if p.endswith("_") else name == p for p in patterns)


def _operation_outputs(cost: LayerCost, tp: Number) -> Number:
    again = {id(op) for op in _every_second(cost.forward)}
    total: Number = sum(s.bytes for s in cost.saved if s.name in ("attention_output", "log_sum_exp"))
    for op in cost.forward:
        if id(op) in again:
            continue
        if isinstance(op, Matmul):
            total = total + op.m * op.n * op.batch * activation_bytes(op.dtype)
        elif isinstance(op, GroupedMatmul):
            total = total + op.tokens * op.n * activation_bytes(op.dtype)
        elif isinstance(op, Collective) and op.kind == "reduce_scatter" and op.axis == "tp":
            total = total + op.bytes / tp
    return total


def activation_bytes(dtype: str) -> int:
    """Bytes an element of a product's output: products of fewer than 16 bits give 16."""
    return 4 if dtype in ("fp32", "tf32") else 2


@cache
def _belongs(name: str, module: str) -> bool:
    stem = name.split(".")[0]
    match module:
        case "core_attn":
            return stem in CORE_ATTENTION
        case "layernorm":
            return stem in ("attention_norm", "mlp_norm", "moe_norm", "ssm_norm")
        case "moe_act":
            return stem in ("experts_activation", "moe_activation", "routed_activation")
        case "mlp_act":
            return stem == "mlp_activation"
        case "mlp":
            return stem.startswith("mlp_")
        case "moe":
            return stem.startswith(("moe_", "expert", "route", "shared", "permute", "dispatch", "combine"))
        case "shared_experts":
            return stem.startswith("shared")
        case "mla_up_proj":
            return stem in UP_PROJECTIONS
    return False


def _every_second(forward: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """TorchTitan's selective-op policy: every second matrix product is not saved, nor is pointwise work; attention and
    collectives are (torchtitan/distributed/activation_checkpoint.py)."""
    out: list[Operation] = []
    products = 0
    for op in forward:
        if isinstance(op, (Matmul, GroupedMatmul)):
            products += 1
            if products % 2 == 0:
                out.append(op)
        elif isinstance(op, Pointwise):
            out.append(op)
        elif not isinstance(op, (Attend, Collective)):
            raise AssertionError(op)
    return tuple(out)
