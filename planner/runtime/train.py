"""One rank's part of training: the model under its layout, and a step.

The mesh is made, each rank builds its part of the model, and every step runs the pipeline, reduces gradients, clips and updates.
What happens from a plan to a trained model, step after step, is told in ``loop``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cost_models.layout import SPLIT_BACKWARD, Layout
from planner.runtime import fully_sharded
from planner.runtime.adapters import Trained
from planner.runtime.attention import Tokens
from planner.runtime.collectives import all_gather, all_reduce, all_reduce_world
from planner.runtime.context import spans, take
from planner.runtime.data import Batch, Source, indices_of, shifted
from planner.runtime.data_parallel import Piece, Shards, frozen_pieces, make_buckets
from planner.runtime.loss import IGNORED
from planner.runtime.mesh import Mesh
from planner.runtime.model import Build, Decoder, parts, shares_embedding
from planner.runtime.moe import Balance
from planner.runtime.optimizer import Schedule, ShardedAdamW
from planner.runtime.pipeline import Chunk, MicroBatch, Pipeline
from planner.runtime.settings import TrainSettings
from planner.runtime.tensor import TensorParallel
from profiles.errors import AxisplanError, InputError
from profiles.model import ModelSpec

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def microbatches(layout: Layout, global_batch: int) -> int:
    """Microbatches of a step. Raises InputError unless the batch divides evenly (uneven microbatches hang a pipeline)."""
    unit = layout.micro_batch * layout.dp
    if global_batch % unit:
        raise InputError(
            "global_batch",
            global_batch,
            f"must be a multiple of micro_batch*dp = {unit}",
            max(1, round(global_batch / unit)) * unit,
        )
    return global_batch // unit


class Trainer:
    """One rank's part of the model with everything a step needs. The process group must exist."""

    def __init__(self, model: ModelSpec, layout: Layout, settings: TrainSettings, device: torch.device) -> None:
        if layout.schedule == "dualpipe":
            raise InputError("schedule", "dualpipe", "the runtime holds one copy of the model", "dualpipe-v")
        self.model, self.layout, self.settings, self.device = model, layout, settings, device
        self.dtype = DTYPES[settings.precision]
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.microbatches = microbatches(layout, settings.global_batch)
        self.mesh = Mesh(layout, model, device, settings.timeout_seconds)
        self.held = spans(layout, settings.seq_len, self.mesh.cp.rank)
        tp = TensorParallel(self.mesh.tp, layout.sp)
        tokens = settings.seq_len // layout.cp
        if tp.sequence and tokens % tp.size:
            raise InputError("seq_len", settings.seq_len, f"seq_len/cp = {tokens} must be a multiple of tp = {tp.size} under sp")
        self.sharded = fully_sharded.applies(self.mesh)
        where, stored = (torch.device("meta"), self.wide) if self.sharded else (device, self.dtype)
        self.balance = Balance(settings.balance, settings.balance_coefficient, 1.0 / settings.global_batch)
        trained = Trained(settings.lora_rank, settings.lora_targets, settings.lora_alpha, settings.frozen)
        build = Build(model, layout, self.mesh, tp, stored, where, self.balance, trained, self.dtype)
        self.decoders = {c: Decoder(build, part) for c, part in parts(layout, model, self.mesh.pp.rank).items()}
        self._tie()
        self.shards = self._shard()
        self.optimizer = ShardedAdamW(self.shards, self.wide, settings.betas, settings.epsilon, settings.weight_decay, device)
        self.rate = Schedule(settings.learning_rate, settings.warmup_steps, settings.steps, settings.decay, settings.final_rate)
        last = layout.chunks - 1
        chunks = [Chunk(c, d, c == 0, c == last) for c, d in self.decoders.items()]
        shape = (tokens // tp.size if tp.sequence else tokens, layout.micro_batch, model.hidden)
        self.pipeline = Pipeline(
            chunks, self.mesh.pp, layout.schedule, layout.vpp, shape, self.dtype, device, self._after_backward, self._before
        )

    def _tie(self) -> None:
        """First and last chunk on one rank share an embedding that both use."""
        last = self.layout.chunks - 1
        if shares_embedding(self.model) and last > 0 and 0 in self.decoders and last in self.decoders:
            if self.sharded:
                raise InputError(
                    "zero", 3, "an embedding whose two ends share a rank (V-shaped schedules) is not sharded by FSDP2", 2
                )
            self.decoders[last].embed_tokens = self.decoders[0].embed_tokens

    def _shard(self) -> Sequence[Shards]:
        """Initial values, and the parameters laid out as the ZeRO stage says."""
        if not self.sharded:
            for decoder in self.decoders.values():
                decoder.initialise(self.settings.seed)
            return make_buckets(self.decoders.values(), self.mesh, self.wide)
        for decoder in self.decoders.values():
            fully_sharded.shard(decoder, self.mesh, self.dtype, self.wide)
            decoder.to_empty(device=self.device)
            fully_sharded.initialise(decoder, self.settings.seed)
        return fully_sharded.make_groups(self.decoders.values(), self.mesh)

    def frozen_pieces(self) -> list[Piece]:
        """The boxes that this rank holds of what is not trained."""
        decoders = self.decoders.values()
        return list(fully_sharded.frozen_pieces(decoders) if self.sharded else frozen_pieces(decoders))

    def _before(self, chunk: Chunk, kind: str, microbatch: int) -> None:
        self.balance.recording = kind == "F"

    def _after_backward(self, chunk: Chunk) -> None:
        for shards in self.shards:
            shards.collect()

    def cut(self, batch: Batch) -> list[MicroBatch]:
        """This rank's microbatches of its data-parallel share of a step."""
        ids, labels = take(batch.ids, self.held).to(self.device), take(batch.labels, self.held).to(self.device)
        documents = None if batch.documents is None else take(batch.documents, self.held).to(self.device)
        later = [tuple(take(x, self.held).to(self.device) for x in shifted(batch, n + 1)) for n in range(self.model.mtp)]
        rows = [slice(i, i + self.layout.micro_batch) for i in range(0, len(ids), self.layout.micro_batch)]
        return [
            MicroBatch(
                ids[r],
                labels[r],
                Tokens(self.held, None if documents is None else documents[r]),
                tuple((a[r], b[r]) for a, b in later),
            )
            for r in rows
        ]

    def gradients(self, batch: Batch) -> Tensor:
        """Forward, backward and reduction of one step; the loss of the whole batch (mean over its valid tokens), as this rank's
        share: summed over all ranks of the job it is the loss."""
        batches = self.cut(batch)
        valid = torch.tensor(float(sum(int((b.labels != IGNORED).sum()) for b in batches)), dtype=torch.float64, device=self.device)
        count = float(all_reduce(valid, self.mesh.dp_cp).clamp_min(1.0))
        self.balance.begin()
        self.later_loss = torch.zeros((), dtype=torch.float64, device=self.device)

        def differentiated(losses: Tensor) -> Tensor:
            if losses.dim() == 1:
                return losses.sum() / count
            later = losses[1:].sum() / (count * len(losses[1:]))
            self.later_loss += later.detach()
            return losses[0].sum() / count + self.settings.mtp_weight * later

        for shards in self.shards:
            shards.clear()
        split = self.sharded and self.layout.schedule in SPLIT_BACKWARD
        for decoder in self.decoders.values() if split else ():
            fully_sharded.begin_split_step(decoder)
        local = self.pipeline.run(batches, differentiated) - self.settings.mtp_weight * self.later_loss
        for decoder in self.decoders.values() if split else ():
            fully_sharded.end_split_step(decoder)
        with self.pipeline.timed("reduce"):
            for shards in self.shards:
                shards.reduce()
        return local / self.mesh.tp.size

    def step(self, number: int, batch: Batch, stop: bool = False) -> dict[str, float]:
        """One step of training; loss, gradient norm before clipping, and how many ranks were asked to ``stop``.

        Raises AxisplanError on every rank, before anything is updated, when the loss is not a number.
        """
        local = self.gradients(batch)
        facts = torch.tensor([float(stop), float(self.balance.loss)], dtype=torch.float64, device=self.device)
        if self.model.mtp:
            facts = torch.cat((facts, self.later_loss[None] / self.mesh.tp.size))
        sums = all_reduce_world(torch.cat((torch.stack((local, self.optimizer.squared_norm())), facts)))
        loss, square, stops, balance, *later = sums.tolist()
        norm = square**0.5
        if not norm < float("inf"):
            raise AxisplanError(f"step {number + 1}: loss {loss}, gradient norm {norm}: not a number; nothing was updated or saved")
        clip = self.settings.clip
        with self.pipeline.timed("optimizer"):
            self.optimizer.step(self.rate.at(number), min(1.0, clip / (norm + 1e-6)) if clip else 1.0)
        out = {"loss": loss, "grad_norm": norm, "stop": stops, **({"mtp_loss": later[0]} if later else {})}
        return out if self.model.moe is None else {**out, "balance_loss": balance, "expert_imbalance": self._rebalance()}

    def _rebalance(self) -> float:
        """Move the selection biases; max / mean tokens of an expert, of this stage's worst layer."""
        worst = 1.0
        for index, loads in self.balance.everyone(self.mesh).items():
            worst = max(worst, float(loads.max() / loads.mean()))
            for decoder in self.decoders.values():
                if str(index) in decoder.layers:
                    router = decoder.layers[str(index)].mlp.gate  # type: ignore[union-attr]
                    if router.spec.selection_bias and router.weight.requires_grad:  # type: ignore[union-attr]
                        router.move_bias(loads, self.settings.bias_rate)  # type: ignore[union-attr,operator]
        return worst

    def stage_seconds(self) -> list[float]:
        """Seconds that each pipeline rank was busy in the last step, its transfers and waits apart."""
        mine = torch.tensor([self.pipeline.busy_seconds], dtype=torch.float64, device=self.device)
        everyone: list[float] = all_gather(mine, self.mesh.pp).tolist()
        return everyone

    def batch(self, source: Source, number: int) -> Batch:
        """This rank's sequences of step ``number``."""
        return source.batch(indices_of(number, self.settings.global_batch, self.layout.dp, self.mesh.dp))
