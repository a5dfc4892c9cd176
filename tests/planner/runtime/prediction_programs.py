"""Multi-token prediction written down plainly, and runs of it for the tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_spec = importlib.util.spec_from_file_location("runtime_programs", Path(__file__).resolve().parent / "programs.py")
assert _spec is not None
assert _spec.loader is not None
programs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(programs)
HEADS, KV, WIDTH = 8, 4, 8


def norm(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """RMSNorm."""
    return F.rms_norm(x, x.shape[-1:], p[f"{name}.weight"], 1e-6)


def _turn(x: Tensor) -> Tensor:
    """Rotary positions of [b, heads, s, width], halves together."""
    angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * 10000.0 ** -(torch.arange(0, WIDTH, 2, dtype=x.dtype) / WIDTH)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def attention(p: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    """The residual stream after the attention block."""
    h = norm(p, f"{at}.input_layernorm", x)
    q, k, v = (
        F.linear(h, p[f"{at}.self_attn.{n}_proj.weight"]).unflatten(-1, (heads, WIDTH)).transpose(1, 2)
        for n, heads in (("q", HEADS), ("k", KV), ("v", KV))
    )
    seen = F.scaled_dot_product_attention(_turn(q), _turn(k), v, is_causal=True, enable_gqa=True)
    return x + F.linear(seen.transpose(1, 2).flatten(2), p[f"{at}.self_attn.o_proj.weight"])


def _layer(p: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    x = attention(p, at, x)
    h = norm(p, f"{at}.post_attention_layernorm", x)
    gate, up = (F.linear(h, p[f"{at}.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
    return x + F.linear(F.silu(gate) * up, p[f"{at}.mlp.down_proj.weight"])


def plain(path: str, model: str, weight: float, documents: bool = False) -> list[float]:
    """(loss, mean loss of the modules) of the first batch; every gradient of loss + weight * that, to ``path``.

    DeepSeek-V3's equations 21 to 25 token by token: module k at position i takes the token at i + k and is judged by the one after.
    """
    trainer = programs.trainer_of(model, "micro_batch=8", {}, {})
    spec = trainer.model
    p = {n: v.detach().clone().requires_grad_() for n, v in trainer.decoders[0].named_parameters()}
    batch = programs.Synthetic(spec.vocab, 16, documents=documents).batch(range(8))
    x = p["embed_tokens.weight"][batch.ids]
    for i in range(spec.num_layers):
        x = _layer(p, f"layers.{i}", x)
    x = norm(p, "norm", x)
    head = p["embed_tokens.weight" if spec.tied else "lm_head.weight"]
    count = int((batch.labels != -100).sum())
    loss = F.cross_entropy(F.linear(x, head).flatten(0, 1), batch.labels.flatten(), reduction="sum") / count
    later: Any = 0.0
    for k in range(1, spec.mtp + 1):
        at = f"layers.{spec.num_layers + k - 1}"
        ids = torch.stack([torch.tensor([int(row[i + k]) if i + k < 16 else 0 for i in range(16)]) for row in batch.ids])
        ahead = F.rms_norm(p["embed_tokens.weight"][ids], x.shape[-1:], p[f"{at}.enorm.weight"], 1e-6)
        x = _layer(p, at, F.linear(torch.cat((ahead, norm(p, f"{at}.hnorm", x)), -1), p[f"{at}.eh_proj.weight"]))
        logits = F.linear(norm(p, f"{at}.shared_head.norm", x), head).log_softmax(-1)
        for b in range(8):
            for i in range(16 - k):
                if int(batch.labels[b, i + k]) != -100:
                    later = later - logits[b, i, batch.labels[b, i + k]] / (count * spec.mtp)
    (loss + weight * later).backward()
    np.savez(path, **{n: v.grad.numpy() for n, v in p.items() if v.grad is not None})
    return [float(loss), float(later)]


def step_losses(layout: str, model: str) -> list[float]:
    """(loss, loss of the modules) as a step of the runtime reports them."""
    trainer = programs.trainer_of(model, layout, {}, {})
    done = trainer.step(0, trainer.batch(programs.Synthetic(trainer.model.vocab, 16), 0))
    return [done["loss"], done["mtp_loss"]]
