"""A mixture of experts written down plainly, with the groups that its statistics and capacities are made over."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_spec = importlib.util.spec_from_file_location("plain_programs", Path(__file__).resolve().parent / "prediction_programs.py")
assert _spec is not None
assert _spec.loader is not None
plain_programs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plain_programs)
programs = plain_programs.programs
SEQ, BATCH = 16, 8


def group_of(micro_batch: int, cp: int, tp: int) -> dict[tuple[int, int], tuple[tuple[int, int, int], int]]:
    """(sequence, position) -> (group, place in it): a group is what one rank routes at once, position after position. A ring of
    ``cp`` cuts a sequence into 2 cp chunks of which rank r holds r and 2 cp - 1 - r; ``tp`` cuts what a rank holds in turn."""
    out = {}
    for first in range(0, BATCH, micro_batch):
        for rank in range(cp):
            size = SEQ // (2 * cp)
            held = list(range(SEQ)) if cp == 1 else [c * size + i for c in (rank, 2 * cp - 1 - rank) for i in range(size)]
            share = len(held) // tp
            for at, position in enumerate(held):
                for row in range(micro_batch):
                    place = (at % share) * micro_batch + row
                    out[first + row, position] = ((first, rank, at // share), place)
    return out


def mixture(
    p: dict[str, Tensor], at: str, x: Tensor, model: Any, facts: dict[str, Any], groups: dict[Any, Any]
) -> tuple[Tensor, Tensor]:
    """[b, s, hidden] -> the same, and the auxiliary loss of the layer."""
    moe = model.moe
    scores = F.linear(x, p[f"{at}.gate.weight"]).softmax(-1)
    values, experts = scores.topk(moe.top_k, -1)
    values = values / values.sum(-1, keepdim=True)
    kept = _kept(experts, groups, facts["capacity"], moe)
    out = torch.zeros_like(x)
    for e in range(moe.experts):
        gate, up, down = (p[f"{at}.experts.{n}_proj"][e] for n in ("gate", "up", "down"))
        done = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        out = out + done * (values * kept * (experts == e)).sum(-1, keepdim=True)
    loss = torch.zeros((), dtype=x.dtype)
    step = facts["micro_batch"] if facts["balance"] == "switch" else 1
    for first in range(0, BATCH, step):
        rows = slice(first, first + step)
        share = F.one_hot(experts[rows], moe.experts).double().sum((0, 1, 2)) * moe.experts / (moe.top_k * step * SEQ)
        loss = loss + facts["balance_coefficient"] * step / BATCH * (share * scores[rows].mean((0, 1))).sum()
    return out, loss


def _kept(experts: Tensor, groups: dict[Any, Any], capacity: float, moe: Any) -> Tensor:
    """1 where a choice is within its expert's capacity in its group, first come first served; 0 where it is dropped."""
    kept = torch.ones_like(experts, dtype=torch.float64)
    if not capacity:
        return kept
    members: dict[Any, list[tuple[int, int, int]]] = {}
    for (row, position), (group, place) in groups.items():
        members.setdefault(group, []).append((place, row, position))
    for tokens in members.values():
        limit = math.ceil(capacity * len(tokens) * moe.top_k / moe.experts)
        seen = [0] * moe.experts
        for _, row, position in sorted(tokens):
            for k in range(moe.top_k):
                expert = int(experts[row, position, k])
                seen[expert] += 1
                kept[row, position, k] = float(seen[expert] <= limit)
    return kept


def plain(path: str, micro_batch: int, cp: int, tp: int, **facts: Any) -> list[float]:
    """(loss, choices dropped) of the first batch; every gradient of loss + auxiliary losses, to ``path``."""
    trainer = programs.trainer_of("moe", "micro_batch=8", {}, {})
    model = trainer.model
    p = {n: v.detach().clone().requires_grad_() for n, v in trainer.decoders[0].named_parameters()}
    batch = programs.Synthetic(model.vocab, SEQ).batch(range(BATCH))
    groups = group_of(micro_batch, cp, tp)
    x, auxiliary = p["embed_tokens.weight"][batch.ids], torch.zeros((), dtype=torch.float64)
    for i in range(model.num_layers):
        x = plain_programs.attention(p, f"layers.{i}", x)
        normed = plain_programs.norm(p, f"layers.{i}.post_attention_layernorm", x)
        out, loss = mixture(p, f"layers.{i}.mlp", normed, model, {**facts, "micro_batch": micro_batch}, groups)
        x, auxiliary = x + out, auxiliary + loss
    logits = F.linear(plain_programs.norm(p, "norm", x), p["lm_head.weight"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    (loss + auxiliary).backward()
    np.savez(path, **{n: v.grad.numpy() for n, v in p.items() if v.grad is not None})
    return [float(loss), float(auxiliary)]
