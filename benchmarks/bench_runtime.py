"""Tokens/s of the runtime against the plainest PyTorch that does the same, on 4 CPU processes, interleaved pair by pair.

    torchrun --standalone --nproc-per-node 4 benchmarks/bench_runtime.py [--pairs 10] [--only dp4,tp4,pp4,cp4,...] [--save]

dp4: DistributedDataParallel and AdamW. tp4: DTensor styles (parallelize_module). pp4: PipelineStage with Schedule1F1B, gradients clipped
by the norm over all stages. cp4: SDPA on gathered keys and values, against the runtime's own gathering kind; cp4-ring, cp4-ulysses and
cp4-both: the runtime's other kinds against that same program (a ring keeps a quarter of the keys and values, and passes them on again in
backward). Prints a ratio (above 1: the runtime is faster) with its 95 % interval; a defect when all of it is below 0.95. ``--save``: each
case's row of benchmarks/results/runtime.csv is written anew.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_single
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cost_models.layout import Layout
from planner.runtime.data import Batch
from planner.runtime.settings import TrainSettings
from planner.runtime.train import Trainer
from profiles.files import write_text
from profiles.model import Attention, Layer, Mlp, uniform

HIDDEN, LAYERS, HEADS, KV, FFN, VOCAB, SEQ, BATCH = 256, 4, 8, 4, 704, 512, 256, 8
WIDTH = HIDDEN // HEADS
RESULTS = Path(__file__).resolve().parent / "results" / "runtime.csv"
COLUMNS = [
    "case",
    "layout",
    "pairs",
    "tokens_per_second",
    "ratio",
    "low",
    "high",
    "ratio_by_processor",
    "low_by_processor",
    "high_by_processor",
]
T_95 = {9: 2.262, 11: 2.201, 14: 2.145, 19: 2.093, 29: 2.045}


class PlainLayer(nn.Module):
    """A Llama layer as one writes it without thinking of speed or axes; ``gather``: keys and values of other ranks."""

    def __init__(self, gather: bool = False) -> None:
        super().__init__()
        self.gather = gather
        self.n1, self.n2 = nn.RMSNorm(HIDDEN, eps=1e-6), nn.RMSNorm(HIDDEN, eps=1e-6)
        self.q, self.o = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k, self.v = nn.Linear(HIDDEN, KV * WIDTH, bias=False), nn.Linear(HIDDEN, KV * WIDTH, bias=False)
        self.gate, self.up = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        y = self.n1(x)
        q, k, v = (f(y).view(b, s, -1, WIDTH).transpose(1, 2) for f in (self.q, self.k, self.v))
        first = dist.get_rank() * s if self.gather else 0
        q, k = (turn(t, first) for t in (q, k))
        if self.gather:
            k, v = (all_gather_single(t.contiguous(), 2, dist.group.WORLD) for t in (k, v))
            rows = torch.arange(first, first + s)[:, None]
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(k.shape[2])[None] <= rows, enable_gqa=True)
        else:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(o.transpose(1, 2).reshape(b, s, -1))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def turn(x: Tensor, first: int) -> Tensor:
    angles = torch.arange(first, first + x.shape[2])[:, None] * 10000.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Plain(nn.Module):
    """The model, or a pipeline stage of it."""

    def __init__(self, layers: int = LAYERS, embedding: bool = True, head: bool = True, gather: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN) if embedding else None
        self.layers = nn.ModuleList(PlainLayer(gather) for _ in range(layers))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6) if head else None
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False) if head else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if self.embedding is not None else x
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def ordinary(model: nn.Module, ids: Tensor, labels: Tensor, micro: int) -> Callable[[], None]:
    """A training step: accumulate, clip, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        for x, y in zip(ids.split(micro), labels.split(micro), strict=True):
            loss_of(model(x), y).backward()
        for kind in (DTensor, Tensor):  # torch clips one kind at a time
            of_kind = [p for p in model.parameters() if isinstance(p, DTensor) == (kind is DTensor)]
            if of_kind:
                nn.utils.clip_grad_norm_(of_kind, 1.0)
        optimizer.step()

    return step


def plain(name: str, ids: Tensor, labels: Tensor) -> Callable[[], None]:
    """The plain step of a case."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if name == "dp4":
        share = BATCH // world
        mine = slice(rank * share, (rank + 1) * share)
        return ordinary(nn.parallel.DistributedDataParallel(Plain()), ids[mine], labels[mine], share)
    if name == "tp4":
        mesh = init_device_mesh("cpu", (world,))
        model = Plain()
        styles = {n: ColwiseParallel() for n in ("q", "k", "v", "gate", "up")} | {n: RowwiseParallel() for n in ("o", "down")}
        for layer in model.layers:
            parallelize_module(layer, mesh, styles)
        parallelize_module(
            model,
            mesh,
            {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())},
        )
        return ordinary(model, ids, labels, BATCH)
    if name.startswith("cp4"):
        share = SEQ // world
        mine = slice(rank * share, (rank + 1) * share)
        return ordinary(nn.parallel.DistributedDataParallel(Plain(gather=True)), ids[:, mine], labels[:, mine], BATCH)
    model = Plain(LAYERS // world, rank == 0, rank == world - 1)
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, BATCH, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*((ids,) if rank == 0 else ()), target=labels if rank == world - 1 else None)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        square = nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(square)  # the norm of the whole model: clipping each stage by its own would train something else
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, square.sqrt())
        optimizer.step()

    return step


LAYOUTS = {
    "dp4": "dp=4,zero=0,micro_batch=2",
    "tp4": "tp=4,sp=false,micro_batch=8",
    "pp4": "pp=4,micro_batch=1",
    "cp4": "cp=4,cp_kind=allgather,zero=0,micro_batch=8",
    "cp4-ring": "cp=4,cp_kind=ring,zero=0,micro_batch=8",
    "cp4-ulysses": "cp=4,cp_kind=ulysses,zero=0,micro_batch=8",
    "cp4-both": "cp=4,cp_kind=ring2xulysses2,zero=0,micro_batch=8",
}


def ours(name: str, ids: Tensor, labels: Tensor) -> Callable[[], None]:
    """The runtime's step of a case."""
    layer = Layer(mixer=Attention(heads=HEADS, kv_heads=KV, head_dim=WIDTH), ffn=Mlp(width=FFN))
    model = uniform("bench", layer, LAYERS, hidden=HIDDEN, vocab=VOCAB)
    settings = TrainSettings(seq_len=SEQ, global_batch=BATCH, precision="fp32", learning_rate=1e-3, decay="constant")
    trainer = Trainer(model, Layout.parse(LAYOUTS[name], 4), settings, torch.device("cpu"))
    share = BATCH // trainer.layout.dp
    mine = slice(trainer.mesh.dp * share, (trainer.mesh.dp + 1) * share)
    batch = Batch(ids[mine], labels[mine])
    return lambda: void(trainer.step(0, batch))


def void(_: object) -> None:
    return None


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """A step, all ranks starting together: seconds of the slowest rank, and processor seconds of all ranks, which other programs on the
    machine hardly change."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    step()
    took = torch.tensor([time.perf_counter() - start, time.process_time() - used], dtype=torch.float64)
    slowest, everyone = took[:1].clone(), took[1:].clone()
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(everyone)
    return float(slowest), float(everyone)


def interval(logs: list[float]) -> tuple[float, float, float]:
    """Geometric mean of ratios given by their logarithms, with its 95 % interval."""
    mean = statistics.fmean(logs)
    half = T_95.get(len(logs) - 1, 2.0) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def save(row: list[str]) -> None:
    """Put a case's row into the table, in the place of its former one."""
    before = [line.split(",") for line in RESULTS.read_text(encoding="utf-8").splitlines()[1:]] if RESULTS.exists() else []
    rows = sorted([line for line in before if line[0] != row[0]] + [[cell.replace(",", ";") for cell in row]])
    write_text(RESULTS, "".join(",".join(line) + "\n" for line in (COLUMNS, *rows)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--only", default=",".join(LAYOUTS))
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator) for _ in range(2))
    for name in arguments.only.split(","):
        a, b = ours(name, ids, labels), plain(name, ids, labels)
        for step in (a, b, a, b):
            step()
        logs, used, mine = [], [], []
        for pair in range(arguments.pairs):
            first, second = (timed(a), timed(b)) if pair % 2 == 0 else reversed((timed(b), timed(a)))
            logs.append(math.log(second[0] / first[0]))
            used.append(math.log(second[1] / first[1]))
            mine.append(first[0])
        if dist.get_rank() == 0:
            ratio, low, high = interval(logs)
            by_work, least, most = interval(used)
            speed = BATCH * SEQ / statistics.median(mine)
            print(
                f"{name}: {speed:8.0f} tokens/s, {ratio:.2f} x plain (95 %: {low:.2f} to {high:.2f}) "
                f"{'DEFECT' if high < 0.95 else 'ok'}; by processor seconds of all ranks {by_work:.2f} ({least:.2f} to {most:.2f})",
                flush=True,
            )
            if arguments.save:
                figures = (ratio, low, high, by_work, least, most)
                save([name, LAYOUTS[name], str(arguments.pairs), f"{speed:.0f}", *(f"{x:.3f}" for x in figures)])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
