"""The decoder: one program for the model kinds of ModelSpec, or the part of it that a pipeline chunk holds.

Activations are [sequence, batch, hidden] between layers (sequence / cp, and / tp under SP); token ids come as [batch, sequence].
Parameters have names that do not depend on the layout: layers are numbered through the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.layout import SPLIT_BACKWARD, Layout, RecomputeRule
from planner.rules.core import limits_row
from planner.rules.planning import lacking
from planner.runtime.adapters import Trained, attach
from planner.runtime.attention import SelfAttention, Tokens, attend
from planner.runtime.context import ContextAttention
from planner.runtime.latent import LatentSelfAttention
from planner.runtime.loss import token_losses
from planner.runtime.mesh import Mesh
from planner.runtime.mlp import MlpBlock
from planner.runtime.moe import Balance, MoeBlock
from planner.runtime.norms import Norm
from planner.runtime.parameter import Block, blocks_of, fill, parameter
from planner.runtime.recompute import Recomputed, again
from planner.runtime.tensor import Embedding, Linear, TensorParallel
from profiles.errors import InputError
from profiles.model import Attention, LatentAttention, Layer, Mlp, ModelSpec, Moe


@dataclass(frozen=True)
class Part:
    """What a chunk holds: layers ``first .. last - 1`` of the model, the embedding, the head (with the prediction modules)."""

    layers: range
    embedding: bool
    head: bool


@dataclass(frozen=True)
class Build:
    """What every module is made with."""

    model: ModelSpec
    layout: Layout
    mesh: Mesh
    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device
    balance: Balance
    trained: Trained = field(default_factory=Trained)
    frozen_dtype: torch.dtype | None = None
    """Of what is not trained; None: ``dtype``."""

    def norm(self, width: int | None = None) -> Norm:
        block = self.tp.replicated(width or self.model.hidden, init="ones")
        return Norm(
            self.model.norm, block, self.model.norm_eps, self.model.norm_bias, self.model.norm_weight, self.dtype, self.device
        )


def parts(layout: Layout, model: ModelSpec, pp_rank: int) -> dict[int, Part]:
    """Chunk -> what it holds, for the chunks of one pipeline rank."""
    last = layout.chunks - 1
    return {c: Part(layout.layers_of_chunk(c, model.num_layers), c == 0, c == last) for c in layout.chunks_of_rank(pp_rank)}


class Decoder(nn.Module):
    """A chunk of the model. Forward: token ids or activations in; activations, or each token's loss, out."""

    def __init__(self, build: Build, part: Part) -> None:
        super().__init__()
        model, tp = build.model, build.tp
        _check(model, build.layout)
        self.part, self.tp, self.model, self.layout = part, tp, model, build.layout
        self.splits = build.layout.pp > 1 and build.layout.schedule in SPLIT_BACKWARD
        self._again: list[tuple[Tensor, Tensor]] = []
        ends = {"copies": 2, "partial": ("ends",)} if build.mesh.ends.size > 1 else {}
        if part.embedding or (part.head and shares_embedding(model)):
            self.embed_tokens = Embedding(model.vocab, model.hidden, tp, build.dtype, build.device, **ends)
        if part.embedding:
            if model.learned_positions:
                rows = tp.replicated(model.learned_positions, model.hidden)
                self.embed_positions = parameter(rows, build.dtype, build.device)
            if model.embedding_norm:
                self.embed_norm = build.norm()
        self.layers = nn.ModuleDict({str(i): DecoderLayer(build, model.layer(i), i) for i in part.layers})
        self.later = range(model.num_layers, model.num_layers + model.mtp) if part.head else range(0)
        self.layers.update({str(i): PredictionLayer(build, i) for i in self.later})
        if part.head:
            if model.final_norm:
                self.norm = build.norm()
            if not model.tied:
                self.lm_head = _head(build)
        attach(self, build.trained, tp.size, build.mesh.axis("etp").size, build.dtype, build.frozen_dtype or build.dtype)
        self.blocks: dict[str, Block] = blocks_of(self)

    def forward(
        self, x: Tensor, tokens: Tokens, labels: Tensor | None = None, later: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> Tensor:
        """``x``: ids [batch, sequence] in the first chunk, else activations. With a head and ``labels`` [batch, sequence]: the
        loss of each token, [sequence * batch]; with a head alone: this rank's part of the logits, [sequence, batch, vocabulary].
        With ``later``, the (ids, labels) that each multi-token-prediction module is given: losses [1 + modules, sequence * batch].
        """
        if self.part.embedding:
            x = self._embed(x, tokens)
        for index in self.part.layers:
            x = self.layers[str(index)](x, tokens)
        if not self.part.head:
            return x
        if self.model.final_norm:
            x = self.norm(x)
        logits = self._logits(x)
        if labels is None:
            return logits
        losses = [token_losses(logits, labels, self.tp.axis, self.vocab_start)]
        for index, (ids, targets) in zip(self.later, later, strict=False):
            x, normed = self.layers[str(index)](x, self.embed_tokens(ids, self._embedding_again()), tokens)
            losses.append(token_losses(self._logits(normed, again=True), targets, self.tp.axis, self.vocab_start))
        return torch.stack(losses) if later else losses[0]

    def _logits(self, x: Tensor, again: bool = False) -> Tensor:
        x = self.tp.enter(x)
        if not self.model.tied:
            return self.lm_head(x)
        return torch.nn.functional.linear(x, self._embedding_again() if again else self.embed_tokens.weight)

    def _embedding_again(self) -> Tensor:
        """The embedding's weight for one more use. Where the backward is split, a leaf of its own: uses that depend on each other
        cannot be told apart in the graph that is cut (``take_again``)."""
        weight = self.embed_tokens.weight
        if not self.splits or not torch.is_grad_enabled():
            return weight
        self._again.append((weight, weight.detach().requires_grad_(weight.requires_grad)))
        return self._again[-1][1]

    def take_again(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter, leaf that stands for it) of the last forward: the leaf's gradient belongs to the parameter."""
        taken, self._again = self._again, []
        return taken

    @property
    def vocab_start(self) -> int:
        """The first word of this rank's part of the vocabulary."""
        name = "embed_tokens.weight" if self.model.tied else "lm_head.weight"
        return self.blocks[name].offsets[0]

    def _embed(self, ids: Tensor, tokens: Tokens) -> Tensor:
        x = self.embed_tokens(ids)
        if self.model.learned_positions:
            places = tokens.positions(x.device)
            if self.tp.sequence:
                places = places.chunk(self.tp.size)[self.tp.rank]
            x = x + torch.nn.functional.embedding(places, self.embed_positions).unsqueeze(1)
        return self.embed_norm(x) if self.model.embedding_norm else x

    def initialise(self, seed: int) -> None:
        """Fill every parameter from (seed, name, rows)."""
        for name, value in self.named_parameters():
            fill(value.data, name, self.blocks[name], seed)


def _head(build: Build) -> Linear:
    from planner.runtime.tensor import split_outputs

    model = build.model
    return split_outputs(model.hidden, model.vocab, model.head_bias, build.tp, build.dtype, build.device)


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward around the residual stream."""

    def __init__(self, build: Build, spec: Layer, index: int, rule: RecomputeRule | None = None) -> None:
        super().__init__()
        self.spec, self.tp = spec, build.tp
        self.recompute = Recomputed(rule or build.layout.recompute_rules.of(index))
        common = (build.tp, self.recompute, build.dtype, build.device)
        self.self_attn: nn.Module | None = None
        if isinstance(spec.mixer, Attention):
            self.self_attn = SelfAttention(
                spec.mixer, build.model, build.tp, Core(build, self.recompute), build.dtype, build.device
            )
        elif isinstance(spec.mixer, LatentAttention):
            self.self_attn = LatentSelfAttention(spec.mixer, build.model, build.tp, Core(build, self.recompute), *common[1:])
        if self.self_attn is not None:
            self.input_layernorm = build.norm()
        self.mlp: nn.Module | None = None
        self.ffn_part = "moe" if isinstance(spec.ffn, Moe) else "mlp"
        model = build.model
        if isinstance(spec.ffn, Moe):
            self.mlp = MoeBlock(
                spec.ffn,
                model.hidden,
                model.num_layers,
                index,
                build.mesh,
                build.tp,
                build.layout.capacity,
                build.balance,
                *common[1:],
            )
        elif isinstance(spec.ffn, Mlp):
            self.mlp = MlpBlock(spec.ffn, model.hidden, model.num_layers, *common)
        if self.mlp is not None and not (spec.parallel and spec.norms == 1):
            self.post_attention_layernorm = build.norm()

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        return again(self._forward, x, tokens) if self.recompute.full and torch.is_grad_enabled() else self._forward(x, tokens)

    def _forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        spec, attention, mlp = self.spec, self.self_attn, self.mlp
        if spec.parallel and attention is not None and mlp is not None:
            if spec.norms == 2:
                return x + self._normed("input_layernorm", attention, x, tokens) + self._normed("post_attention_layernorm", mlp, x)
            both = self.recompute.through(
                "layernorm",
                self.input_layernorm,
                (x,),
                lambda h: attention(self._enter(attention, h), tokens) + mlp(self._enter(mlp, h)),
            )
            return x + both
        if attention is not None:
            if spec.post_norm:
                x = x + self.input_layernorm(attention(self._enter(attention, x), tokens))
            else:
                x = x + self._normed("input_layernorm", attention, x, tokens)
        if mlp is not None:
            if spec.post_norm:
                x = x + self.post_attention_layernorm(self.recompute(self.ffn_part, lambda h: mlp(self._enter(mlp, h)), x))
            elif self.ffn_part not in self.recompute.parts:
                x = x + self._normed("post_attention_layernorm", mlp, x)
            elif "layernorm" in self.recompute.parts:
                x = x + again(lambda h: mlp(self._enter(mlp, self.post_attention_layernorm(h))), x)
            else:
                x = x + again(lambda h: mlp(self._enter(mlp, h)), self.post_attention_layernorm(x))
        return x

    def _enter(self, block: nn.Module, x: Tensor) -> Tensor:
        """Blocks whose first layer is cut over tp are given every token."""
        return self.tp.enter(x) if block.entered else x

    def _normed(self, norm: str, block: nn.Module, x: Tensor, *rest: Tokens) -> Tensor:
        """``block`` of the normalised ``x``."""
        out: Tensor = self.recompute.through(
            "layernorm", lambda one: self._enter(block, getattr(self, norm)(one)), (x,), lambda made: block(made, *rest)
        )
        return out


class PredictionLayer(DecoderLayer):
    """A multi-token-prediction module (DeepSeek-V3, arXiv:2412.19437 section 2.2), named as the hub's checkpoints name it: layer
    ``num_layers + k``, of the last layer's kind. Module k sees at position i the token i + k + 1 and predicts the one after it.

    The first module is given the model's final normalised hidden state, the next ones their predecessor's before its norm.
    """

    def __init__(self, build: Build, index: int) -> None:
        model, last = build.model, build.model.num_layers - 1
        super().__init__(build, model.layer(last), index, build.layout.recompute_rules.of(last))
        self.enorm, self.hnorm = build.norm(), build.norm()
        self.eh_proj = Linear(build.tp.replicated(model.hidden, 2 * model.hidden), None, build.dtype, build.device)
        self.shared_head = nn.ModuleDict({"norm": build.norm()})

    def forward(self, x: Tensor, embedded: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Hidden states and the embeddings of later tokens, both [s (/tp under SP), b, hidden] -> hidden states, and what the
        head is given."""
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(x)), -1))
        x = super().forward(x, tokens)
        return x, self.shared_head["norm"](x)


def shares_embedding(model: ModelSpec) -> bool:
    """Whether the last chunk needs the token embedding too: as its head, or for its prediction modules."""
    return model.tied or model.mtp > 0


class Core:
    """Attention of this rank's tokens under the layout's context parallelism: q, k, v, tokens, window, chunk, scale."""

    def __init__(self, build: Build, recompute: Recomputed) -> None:
        self.function = attend if build.layout.cp == 1 else ContextAttention(build.mesh)
        self.recompute = recompute

    def __call__(self, *arguments: Any) -> Tensor:
        out: Tensor = self.recompute("core_attn", self.function, *arguments)
        return out


def _check(model: ModelSpec, layout: Layout) -> None:
    """Raise InputError for what this runtime does not run."""
    if found := lacking(model, limits_row("axisplan")["lacks"]):
        raise InputError("model", model.name, f"the runtime does not run {', '.join(found)}")
    for kind in model.kinds:
        if kind.mixer is not None and kind.mixer.heads % layout.tp:
            raise InputError("tp", layout.tp, f"must divide the {kind.mixer.heads} heads")
        if isinstance(kind.ffn, Moe) and layout.dispatcher != "alltoall":
            raise InputError("dispatcher", layout.dispatcher, "the runtime exchanges tokens with all-to-all", "alltoall")
