"""What a recompute mode runs again in backward: a rule over the operations of a layer's forward.

``full`` runs the whole forward again, collectives included. ``selective`` runs the operations of the named modules again, as the
frameworks define them: Megatron's ``--recompute-modules`` (core_attn, layernorm, moe_act, mlp, moe, mla_up_proj, shared_experts),
``mlp_act`` (the dense activation) and TorchTitan's ``op`` policy (every second matrix product, and all pointwise work).
"""

from __future__ import annotations

from functools import cache

from cost_models.layout import RecomputeRule
from profiles.operations import Attend, Collective, GroupedMatmul, Matmul, Operation, Pointwise

CORE_ATTENTION = ("core_attention", "scores", "softmax", "context", "repeat_kv")
UP_PROJECTIONS = ("q_up", "kv_up", "rope", "q_latent_norm", "kv_latent_norm")


def recomputed(forward: tuple[Operation, ...], rule: RecomputeRule) -> tuple[Operation, ...]:
    """The operations of ``forward`` that run again under ``rule``."""
    if rule.mode == "none":
        return ()
    if rule.mode == "full":
        return forward
    chosen = tuple(op for op in forward if any(_belongs(op.name, module) for module in rule.modules))
    return chosen + (_every_second(forward) if "op" in rule.modules else ())


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
            return stem.startswith(("moe_", "expert", "router", "routed", "shared", "permute", "dispatch", "combine"))
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
