"""What the worker processes of the runtime's tests run. Arguments and results are JSON; tensors go through .npz files."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from cost_models.layout import Layout
from planner.runtime import norms, weights
from planner.runtime.attention import Tokens
from planner.runtime.checkpoint import Checkpoints
from planner.runtime.collectives import all_gather
from planner.runtime.data import Batch, TokenFile, indices_of
from planner.runtime.evaluate import HeldOut
from planner.runtime.loop import checkpoint_facts, resume
from planner.runtime.settings import TrainSettings
from planner.runtime.timeline import measured_spans
from planner.runtime.train import Trainer
from profiles.huggingface import load_model
from profiles.model import Attention, LatentAttention, Layer, Mlp, ModelSpec, Moe, uniform

CPU = torch.device("cpu")


def model_of(name: str, layers: int = 4, **changes: Any) -> ModelSpec:
    """Small models, each with something of its own."""
    fields: dict[str, Any] = {"hidden": 32, "vocab": 67}
    attention = Attention(heads=8, kv_heads=4, head_dim=8)
    layer = Layer(mixer=attention, ffn=Mlp(width=64))
    if name in ("llama", "llama8"):
        fields["norm_eps"] = 1e-5
        layers = 8 if name == "llama8" else layers
    elif name == "mqa":
        layer = Layer(mixer=Attention(heads=8, kv_heads=1, head_dim=8, qkv_bias=True, qk_norm="head"), ffn=Mlp(width=64))
    elif name == "gpt":
        layer = Layer(
            mixer=Attention(heads=4, kv_heads=4, head_dim=8, qkv_bias=True, output_bias=True),
            ffn=Mlp(width=128, gated=False, bias=True, activation="gelu_new"),
        )
        fields |= {"tied": True, "norm": "layer", "norm_bias": True, "learned_positions": 64}
    elif name == "moe":
        layer = Layer(mixer=attention, ffn=Moe(experts=8, top_k=2, width=24))
    elif name == "moe-v3":
        dense, routed = layer, Moe(
            experts=8, top_k=3, width=16, router="sigmoid", selection_bias=True, scaling=2.5, groups=4, top_groups=2, shared_width=32
        )  # fmt: skip
        return ModelSpec.model_validate(
            {
                "name": name,
                **fields,
                "kinds": (dense, Layer(mixer=attention, ffn=routed)),
                "pattern": (0, *(1,) * (layers - 1)),
                **changes,
            }
        )
    elif name == "moe-qwen2":
        layer = Layer(
            mixer=attention, ffn=Moe(experts=4, top_k=2, width=24, normalise_top_k=False, shared_width=16, shared_gate=True)
        )
    elif name == "mla":
        mixer = LatentAttention(heads=4, q_rank=12, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6)
        layer = Layer(mixer=mixer, ffn=Moe(experts=4, top_k=2, width=24, router="sigmoid", selection_bias=True, shared_width=16))
    elif name == "mla-lite":
        layer = Layer(mixer=LatentAttention(heads=4, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=8), ffn=Mlp(width=64))
    elif name in ("mtp", "mtp-tied", "mtp-plain"):
        routed = Moe(experts=4, top_k=2, width=24, router="sigmoid", selection_bias=True, shared_width=16)
        mixer = LatentAttention(heads=4, q_rank=12, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6)
        layer = Layer(mixer=mixer if name == "mtp" else attention, ffn=routed if name == "mtp" else Mlp(width=64))
        fields |= {"mtp": 1 if name == "mtp-tied" else 2, "tied": name == "mtp-tied", "family": "deepseek_v3"}
    elif name == "sinks":  # gpt-oss
        mixer = Attention(heads=8, kv_heads=2, head_dim=8, qkv_bias=True, output_bias=True, sinks=True, window=6)
        layer = Layer(mixer=mixer, ffn=Moe(experts=4, top_k=2, width=24, bias=True, router_bias=True))
    elif name == "gated":  # Qwen3-Next's attention
        layer = Layer(mixer=Attention(heads=8, kv_heads=2, head_dim=8, output_gate=True, qk_norm="head"), ffn=Mlp(width=64))
    elif name == "olmo2":
        layer = Layer(mixer=Attention(heads=8, kv_heads=2, head_dim=8, qk_norm="full"), ffn=Mlp(width=64), post_norm=True)
    elif name == "cohere":
        layer = Layer(
            mixer=Attention(heads=8, kv_heads=2, head_dim=8, qk_norm="per_head"), ffn=Mlp(width=64), parallel=True, norms=1
        )
        fields |= {"norm": "layer", "tied": True}
    elif name == "window":
        layer = Layer(mixer=Attention(heads=8, kv_heads=4, head_dim=8, window=5), ffn=Mlp(width=64))
    else:
        raise ValueError(name)
    return uniform(name, layer, layers, **{**fields, **changes})


class Synthetic:
    """Sequences made from their numbers; ``mask`` leaves out labels: ``random`` half of them, ``one`` all but one of each batch."""

    def __init__(self, vocab: int, seq_len: int, mask: str = "none", documents: bool = False) -> None:
        self.vocab, self.seq_len, self.mask, self.documents = vocab, seq_len, mask, documents

    def batch(self, indices: Sequence[int]) -> Batch:
        rows, masks, ends = [], [], []
        for i in indices:
            generator = torch.Generator().manual_seed(1000 + i)
            rows.append(torch.randint(0, self.vocab, (self.seq_len + 1,), generator=generator))
            masks.append(torch.rand(self.seq_len, generator=generator) < 0.5)
            ends.append((torch.rand(self.seq_len, generator=generator) < 0.2).long().cumsum(0))
        both = torch.stack(rows)
        labels = both[:, 1:].clone()
        if self.mask == "random":
            labels[torch.stack(masks)] = -100
        elif self.mask == "one":
            keep = labels[:, 3].clone()
            labels[:] = -100
            for row, i in enumerate(indices):
                if i % 8 == 2:
                    labels[row, 3] = keep[row]
        return Batch(both[:, :-1].contiguous(), labels, torch.stack(ends) if self.documents else None)


def trainer_of(model: str, layout: str, settings: dict[str, Any], changes: dict[str, Any]) -> Trainer:
    made = Layout.parse(layout, dist.get_world_size())
    facts = {"seq_len": 16, "global_batch": 8, "precision": "fp64", "learning_rate": 1e-2, "seed": 3, **settings}
    return Trainer(model_of(model, **changes), made, TrainSettings.model_validate(facts), CPU)


def whole(trainer: Trainer, what: str) -> dict[str, np.ndarray]:
    """Whole tensors from the boxes that all ranks hold (each element divided by how many hold it)."""
    names: dict[str, tuple[int, ...]] = {}
    everyone: list[Any] = [None] * dist.get_world_size()
    mine = list(trainer.optimizer.pieces(what))
    dist.all_gather_object(everyone, {p.name: p.shape for p in mine})
    for part in everyone:
        names |= part
    out = {}
    for name in sorted(names):
        both = torch.zeros(2, *names[name], dtype=torch.float64)
        for piece in mine:
            if piece.name == name:
                box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
                both[(0, *box)] += piece.tensor.double()
                both[(1, *box)] += 1
        dist.all_reduce(both)
        out[name] = (both[0] / both[1]).numpy()
    return out


def imbalance(layout: str) -> float:
    """What a step says of its experts where every token chooses experts 0, 1 and 2 of 8."""
    trainer = trainer_of("moe-v3", layout, {}, {})
    for decoder in trainer.decoders.values():
        for buffer in decoder.buffers():
            buffer[:3] = 100.0
    data = Synthetic(trainer.model.vocab, trainer.settings.seq_len)
    return trainer.step(0, trainer.batch(data, 0))["expert_imbalance"]


def gradients(
    path: str, layout: str, model: str = "llama", source: dict[str, Any] | None = None, settings: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None, force: bool = False, after: int = 0,
) -> float:  # fmt: skip
    """One step's loss; rank 0 writes every whole gradient to ``path``. ``force``: every router chooses the first experts alone;
    ``after`` that many steps of training."""
    trainer = trainer_of(model, layout, settings or {}, changes or {})
    for decoder in trainer.decoders.values() if force else ():
        for buffer in decoder.buffers():
            buffer[:4] = 100.0
    data = Synthetic(trainer.model.vocab, trainer.settings.seq_len, **(source or {}))
    for number in range(after):
        trainer.step(number, trainer.batch(data, number))
    share = indices_of(0, trainer.settings.global_batch, trainer.layout.dp, trainer.mesh.dp)
    loss = trainer.gradients(data.batch(share))
    dist.all_reduce(loss)
    square = trainer.optimizer.squared_norm()
    dist.all_reduce(square)
    found = whole(trainer, "gradient")
    exact = sum(float((g**2).sum()) for g in found.values())
    assert abs(float(square) - exact) <= 1e-9 * exact, (float(square), exact)
    if dist.get_rank() == 0:
        np.savez(path, **found)
    return float(loss)


def losses(
    layout: str, steps: int, model: str = "llama", source: dict[str, Any] | None = None, settings: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
) -> list[list[float]]:  # fmt: skip
    """(loss, gradient norm) of each step of a short training."""
    trainer = trainer_of(model, layout, {"steps": steps, **(settings or {})}, changes or {})
    data = Synthetic(trainer.model.vocab, trainer.settings.seq_len, **(source or {}))
    out = []
    for number in range(steps):
        done = trainer.step(number, trainer.batch(data, number))
        out.append([done["loss"], done["grad_norm"]])
    return out


def dtypes(layout: str, precision: str) -> dict[str, list[str]]:
    """After a step: the number types of what the model computes with, of gradients, masters and moments."""
    trainer, data = _trainer_and_data(layout, 1, settings={"precision": precision})
    trainer.gradients(trainer.batch(data, 0))
    found = {"gradient": {str(p.tensor.dtype) for p in trainer.optimizer.pieces("gradient")}}
    trainer.step(0, trainer.batch(data, 0))
    for what in ("parameter", "exp_avg", "exp_avg_sq"):
        found[what] = {str(p.tensor.dtype) for p in trainer.optimizer.pieces(what)}
    found["computed"] = {str(trainer.dtype)} | {str(p.dtype) for d in trainer.decoders.values() for p in d.parameters()}
    return {what: sorted(kinds) for what, kinds in found.items()}


def resharding(layout: str) -> list[bool]:
    """Whether FSDP2 lets each layer's parameters go after its forward, layer by layer."""
    trainer = trainer_of("llama", layout, {}, {})
    layers = [layer for decoder in trainer.decoders.values() for layer in decoder.layers.values()]
    states = [fully_shard.state(layer) for layer in layers]  # type: ignore[attr-defined]
    return [group._reshard_after_forward for state in states for group in state._fsdp_param_groups]


def train_and_save(folder: str, layout: str, steps: int, more: int, **facts: Any) -> list[float]:
    """Train ``steps`` steps, save, train ``more``: the losses of the latter."""
    trainer, data = _trainer_and_data(layout, steps + more, **facts)
    saved = Checkpoints(Path(folder))
    for number in range(steps):
        trainer.step(number, trainer.batch(data, number))
    saved.save(trainer, steps, checkpoint_facts(trainer))
    out = [trainer.step(n, trainer.batch(data, n))["loss"] for n in range(steps, steps + more)]
    saved.finish()
    return out


def save_each_step(folder: str, layout: str, steps: int, keep: int = 9, **facts: Any) -> list[float]:
    """Train ``steps`` steps, saving after each: their losses."""
    trainer, data = _trainer_and_data(layout, steps, **facts)
    saved, out = Checkpoints(Path(folder), keep), []
    for number in range(steps):
        out.append(trainer.step(number, trainer.batch(data, number))["loss"])
        saved.save(trainer, number + 1, checkpoint_facts(trainer), wait=True)
    return out


def load_and_train(folder: str, layout: str, steps: int, more: int, **facts: Any) -> list[float]:
    """Continue from the last checkpoint under ``folder``: the losses of ``more`` steps."""
    trainer, data = _trainer_and_data(layout, steps + more, **facts)
    done = resume(trainer, Checkpoints(Path(folder)))
    assert done == steps
    return [trainer.step(n, trainer.batch(data, n))["loss"] for n in range(steps, steps + more)]


def _trainer_and_data(
    layout: str, steps: int, model: str = "llama", settings: dict[str, Any] | None = None, changes: dict[str, Any] | None = None
) -> tuple[Trainer, Synthetic]:
    trainer = trainer_of(model, layout, {"steps": steps, **(settings or {})}, changes or {})
    return trainer, Synthetic(trainer.model.vocab, trainer.settings.seq_len)


def _from_folder(folder: str, layout: str, batch: int, more: dict[str, Any] | None = None) -> Trainer:
    model = load_model(str(Path(folder) / "config.json"))
    settings = TrainSettings.model_validate({"seq_len": 16, "global_batch": batch, "precision": "fp32", **(more or {})})
    trainer = Trainer(model, Layout.parse(layout, dist.get_world_size()), settings, CPU)
    weights.load(trainer, Path(folder))
    return trainer


def logits(folder: str, layout: str, ids: list[list[int]], path: str) -> None:
    """Logits [batch, tokens, vocabulary] of a Hugging Face model folder; rank 0 writes them to ``path``."""
    trainer = _from_folder(folder, layout, len(ids))
    with torch.no_grad():
        part = trainer.decoders[0](torch.tensor(ids), Tokens((0, len(ids[0]))))
    full = all_gather(part.permute(2, 1, 0).contiguous(), trainer.mesh.tp).permute(1, 2, 0)
    if dist.get_rank() == 0:
        np.save(path, full.numpy())


def fine_tune(folder: str, layout: str, work: str, settings: dict[str, Any], ids: list[list[int]], path: str) -> None:
    """Two steps from a Hugging Face folder, saved; rank 0 writes the logits of ``ids`` after them to ``path``."""
    trainer = _from_folder(folder, layout, len(ids), settings)
    data = Synthetic(trainer.model.vocab, 16)
    for number in range(2):
        trainer.step(number, trainer.batch(data, number))
    Checkpoints(Path(work)).save(trainer, 2, checkpoint_facts(trainer), wait=True)
    with torch.no_grad():
        part = trainer.decoders[0](torch.tensor(ids), Tokens((0, len(ids[0]))))
    full = all_gather(part.permute(2, 1, 0).contiguous(), trainer.mesh.tp).permute(1, 2, 0)
    if dist.get_rank() == 0:
        np.save(path, full.numpy())


def export(folder: str, layout: str, work: str, out: str) -> None:
    """Read a Hugging Face folder under ``layout``, save a checkpoint, write it as a Hugging Face folder."""
    trainer = _from_folder(folder, layout, 4)
    saved = Checkpoints(Path(work))
    saved.save(trainer, 0, checkpoint_facts(trainer), wait=True)
    if dist.get_rank() == 0:
        weights.export(Path(work) / "step-00000000", Path(out), torch.float32, shard_bytes=20_000)
    dist.barrier()


def tied_copies(layout: str, steps: int) -> bool:
    """Whether both ends of a pipeline hold the same bits of a tied embedding after some steps."""
    trainer, data = _trainer_and_data(layout, steps, model="gpt")
    for number in range(steps):
        trainer.step(number, trainer.batch(data, number))
    ends = trainer.mesh.ends
    held = [d.embed_tokens.weight for d in trainer.decoders.values() if hasattr(d, "embed_tokens")]
    if not held or ends.size == 1:
        return True
    first, last = all_gather(held[0].detach().unsqueeze(0).contiguous(), ends)
    return torch.equal(first, last)


def train_spec(spec: dict[str, Any], layout: str, settings: dict[str, Any]) -> list[float]:
    """Train any model for the settings' steps; the losses."""
    model = ModelSpec.model_validate(spec)
    trainer = Trainer(model, Layout.parse(layout, dist.get_world_size()), TrainSettings.model_validate(settings), CPU)
    data = Synthetic(model.vocab, trainer.settings.seq_len)
    return [trainer.step(n, trainer.batch(data, n))["loss"] for n in range(trainer.settings.steps)]


def held_out_losses(folder: str, layout: str, model: str = "llama", steps: int = 2, sequences: int = 0) -> dict[str, Any]:
    """Train, take the held-out loss, train on: it, and the losses of all steps. ``folder``: prepared data."""
    trainer = trainer_of(model, layout, {"steps": max(1, 2 * steps)}, {})
    source = TokenFile(Path(folder), trainer.settings.seq_len, reset=True)
    held_out = HeldOut(source, sequences)
    losses = [trainer.step(n, trainer.batch(source, n))["loss"] for n in range(steps)]
    found = held_out.loss(trainer)
    losses += [trainer.step(n, trainer.batch(source, n))["loss"] for n in range(steps, 2 * steps)]
    return {"loss": found["eval_loss"], "tokens": found["eval_tokens"], "losses": losses}


def plain_training(model: str, steps: int, settings: dict[str, Any]) -> list[list[float]]:
    """(loss, gradient norm) of each step in one process without the runtime's own loss, clipping, optimizer and schedule: PyTorch's."""
    trainer, data = _trainer_and_data("micro_batch=8", steps, model=model, settings=settings)
    decoder, facts = copy.deepcopy(trainer.decoders[0]), trainer.settings
    weights_of = {True: [], False: []}  # type: dict[bool, list[torch.nn.Parameter]]
    for parameter in decoder.parameters():
        weights_of[parameter.dim() > 1].append(parameter)
    groups = [{"params": weights_of[decays], "weight_decay": facts.weight_decay * decays} for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups, facts.learning_rate, facts.betas, facts.epsilon)
    rates = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, facts.final_rate, total_iters=steps)
    out = []
    for number in range(steps):
        batch = trainer.batch(data, number)
        optimizer.zero_grad()
        logits = decoder(batch.ids, Tokens((0, facts.seq_len))).transpose(0, 1)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), facts.clip)
        optimizer.step()
        rates.step()
        out.append([float(loss), float(norm)])
    return out


def plain_loss(folder: str, model: str, sequences: int) -> float:
    """In one process: PyTorch's cross entropy on the logits of ``sequences`` sequences, one after the other, before training."""
    trainer = trainer_of(model, "micro_batch=8", {}, {})
    source = TokenFile(Path(folder), trainer.settings.seq_len, reset=True)
    total = count = 0.0
    for number in range(sequences):
        batch = source.at([number])
        with torch.no_grad():
            logits = trainer.decoders[0](batch.ids, Tokens((0, trainer.settings.seq_len), batch.documents))[:, 0]
        total += float(torch.nn.functional.cross_entropy(logits, batch.labels[0], ignore_index=-100, reduction="sum"))
        count += float((batch.labels != -100).sum())
    return total / count


def spans_of_a_step(layout: str) -> dict[str, Any]:
    """What every stage did in a step, as rank 0 is told, with the step's seconds and the stages' busy seconds."""
    trainer, data = _trainer_and_data(layout, 1)
    told: list[Any] = []
    dist.barrier()
    began = trainer.pipeline.clock.now()
    trainer.step(0, trainer.batch(data, 0))
    seconds = trainer.pipeline.clock.seconds(began, trainer.pipeline.clock.now())
    busy = trainer.stage_seconds()
    measured_spans(trainer, began, told.extend)
    return {"spans": told, "seconds": seconds, "busy": busy}


def norm_gradients(layout: str, model: str) -> list[int]:
    """How often a step computes a norm's gradient of its input, and of its weight."""
    trainer, data = _trainer_and_data(layout, 1, model)
    counts = [0, 0]
    real = norms.kernels.rms_norm_backward

    class Counting:
        rms_norm = norms.kernels.rms_norm

        @staticmethod
        def rms_norm_backward(*arguments: Any) -> Any:
            counts[0] += arguments[4]
            counts[1] += arguments[5]
            return real(*arguments)

    kept, norms.kernels = norms.kernels, Counting  # type: ignore[assignment]
    try:
        trainer.gradients(trainer.batch(data, 0))
    finally:
        norms.kernels = kept
    return counts
