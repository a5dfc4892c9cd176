"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 section 2.1), keys and values expanded to all heads for training.

The down-projections are replicated over tp and run on a rank's own tokens; their normalised results enter tensor parallelism
together, in one collective, and the up-projections are cut by heads. One rotary key is shared by all heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from planner.runtime.attention import Rotary, Tokens
from planner.runtime.norms import Norm
from planner.runtime.recompute import again
from planner.runtime.tensor import Linear, TensorParallel, split_inputs, split_outputs
from profiles.model import LatentAttention, ModelSpec


class LatentSelfAttention(nn.Module):
    """[s (/tp under SP), b, hidden] -> the same."""

    entered = False

    def __init__(
        self, spec: LatentAttention, model: ModelSpec, tp: TensorParallel, core: Any, recompute: Any, dtype: torch.dtype, device: torch.device
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec, self.tp, self.core, self.recompute = spec, tp, core, recompute
        self.heads = spec.heads // tp.size
        hidden, heads = model.hidden, spec.heads

        def down(outputs: int) -> Linear:
            return Linear(
                tp.replicated(outputs, hidden), tp.replicated(outputs, init="zeros") if spec.bias else None, dtype, device
            )

        def norm(width: int) -> Norm:
            return Norm("rms", tp.replicated(width, init="ones"), model.norm_eps, False, True, dtype, device)

        if spec.q_rank:
            self.q_a_proj, self.q_a_layernorm = down(spec.q_rank), norm(spec.q_rank)
            self.q_b_proj = split_outputs(spec.q_rank, heads * spec.head_dim, False, tp, dtype, device)
        else:
            self.q_proj = split_outputs(hidden, heads * spec.head_dim, False, tp, dtype, device)
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = down(spec.kv_rank + spec.rope_dim), norm(spec.kv_rank)
        self.kv_b_proj = split_outputs(spec.kv_rank, heads * (spec.nope_dim + spec.value_dim), False, tp, dtype, device)
        std = 0.02 / (2 * model.num_layers) ** 0.5
        self.o_proj = split_inputs(heads * spec.value_dim, hidden, spec.bias, tp, dtype, device, std=std)
        self.rotary = Rotary(spec.rope_dim, model, pairs=True)
        scale = model.rope_scaling.latent_attention if model.rope_scaling is not None else 1.0
        self.rule = (spec.window or 0, 0, scale * spec.head_dim**-0.5)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        spec = self.spec
        latent, turned = self.kv_a_proj_with_mqa(x).split([spec.kv_rank, spec.rope_dim], -1)
        first = self.q_a_layernorm(self.q_a_proj(x)) if spec.q_rank else x
        entered = self.tp.enter(torch.cat([first, self.kv_a_layernorm(latent.contiguous()), turned], -1))
        if {"mla_up_proj", "core_attn"} <= self.recompute.parts:
            seen = again(lambda one: self.core.function(*self._expand(one, tokens), tokens, *self.rule), entered)
        else:
            seen = self.recompute.through(
                "mla_up_proj", self._expand, (entered, tokens), lambda made: self.core(*made, tokens, *self.rule)
            )
        return self.o_proj(seen.flatten(2))

    def _expand(self, entered: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """Latents of all tokens -> q, k [s, b, heads, nope + rope] and v [s, b, heads, value] of this rank's heads."""
        spec = self.spec
        width = entered.shape[-1] - spec.kv_rank - spec.rope_dim
        first, latent, turned = entered.split([width, spec.kv_rank, spec.rope_dim], -1)
        q = (self.q_b_proj if spec.q_rank else self.q_proj)(first).unflatten(-1, (self.heads, -1))
        plain, turning = q.split([spec.nope_dim, spec.rope_dim], -1)
        q = torch.cat([plain, self.rotary(turning, tokens)], -1)
        both = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1))
        key, value = both.split([spec.nope_dim, spec.value_dim], -1)
        shared = self.rotary(turned.unsqueeze(2), tokens).expand(-1, -1, self.heads, -1)
        return q, torch.cat([key, shared], -1), value.contiguous()
