"""Small random jobs, and their best layout found the slow ways: every column, split and mix simulated; one program over all columns."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cost_models.job import Job
from cost_models.step import estimate
from planner.columns import Column, Mix, modes_of
from planner.fitting import Fitting, Policy, policies
from planner.paths import PathStore
from planner.program import Answer, Block, Pattern, Program
from planner.space import Space
from tests.planner.jobs import decoder, job

EXECUTIONS = ("axisplan", "megatron", "torchtitan")


def small_job(seed: int) -> Job:
    """A job small enough to enumerate: 1 to 4 GPUs, 2 to 5 layers, dense or MoE, memory sometimes tight."""
    rng = random.Random(seed)
    experts = rng.choice([0, 0, 4])
    layers = rng.choice([2, 3, 4, 5])
    dense_first = rng.choice([0, 1]) if experts else 0
    model = decoder(
        layers=layers, hidden=rng.choice([256, 512, 1024]), heads=rng.choice([2, 4]), width=rng.choice([512, 1024]), vocab=rng.choice([512, 4096]),
        experts=experts, dense_first=dense_first, head_dim=64,
    )  # fmt: skip
    gpus = rng.choice([1, 2, 2, 4])
    batch = gpus * rng.choice([2, 4])
    j = job(model, f"h100-sxm:1x{gpus}", rng.choice([512, 2048]), batch, rng.choice(EXECUTIONS), margin=0.0)
    if rng.random() < 0.5:
        roomy = estimate(j, Space(j).layout(*first_column(j)))
        peak = max(s.needed for s in roomy.memory)
        j = replace(j, memory_limit_bytes=peak * rng.uniform(0.9, 1.05))
    return j


def first_column(j: Job):
    space = Space(j)
    prefix = space.prefixes[-1]
    batch = space.batches(prefix.tp, prefix.cp, prefix.pp, prefix.dp)[0]
    return prefix, batch, space.columns_of(prefix, batch)[0]


def columns(j: Job) -> Iterator[tuple[Column, Fitting, list[Policy]]]:
    space, store = Space(j), PathStore()
    modes = modes_of(j, space.limits)
    for prefix in space.prefixes:
        for batch in space.batches(prefix.tp, prefix.cp, prefix.pp, prefix.dp):
            for shard in space.columns_of(prefix, batch):
                column = Column(j, space.layout(prefix, batch, shard), modes, store)
                longest = -(-j.model.num_layers // column.chunks) + 2
                yield column, Fitting(column), policies(space.limits.recompute, modes, longest)


def compositions(layers: int, chunks: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, layers), chunks - 1):
        edges = (0, *cuts, layers)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


@dataclass(frozen=True)
class Enumerated:
    """Least seconds over every column, split and mix that fits (inf: none fits), and how many columns; the same of pipelines alone."""

    best: float
    columns: int
    piped: float
    piped_columns: int


def exhaustive(j: Job, *, every: bool = False) -> Enumerated:
    """Every column, split and mix, simulated: without ``every`` only where the busiest rank's own work is less than the best one takes."""
    best, number = {False: float("inf"), True: float("inf")}, {False: 0, True: 0}
    for column, fitting, some in columns(j):
        pipe = column.layout.pp > 1
        number[pipe] += 1
        busy = Busy(column)
        for stages in compositions(column.layers, column.chunks):
            starts = [sum(stages[:c]) for c in range(len(stages))]
            for policy in some:
                choices = [
                    list(policy.mixes(fitting.counts(s, s + n), len(column.modes))) for s, n in zip(starts, stages, strict=True)
                ]
                for mixes in itertools.product(*choices):
                    if not every and column.step(busy.longest(mixes)) >= best[pipe]:
                        continue
                    seconds = column.step(column.simulate(mixes).seconds)
                    if seconds < best[pipe] and fitting.fits(stages, mixes):
                        best[pipe] = seconds
    return Enumerated(min(best.values()), sum(number.values()), best[True], number[True])


class Busy:
    """Seconds that the busiest rank works on all its microbatches."""

    def __init__(self, column: Column) -> None:
        self.column = column
        self.ranks = [column.layout.chunks_of_rank(rank) for rank in range(column.layout.pp)]
        self.known: dict[tuple[int, Mix], float] = {}

    def longest(self, mixes: Sequence[Mix]) -> float:
        if self.column.layout.schedule == "dualpipe":  # both directions share a rank
            return 0.0
        return self.column.microbatches * max(sum(self.chunk(c, mixes[c]) for c in held) for held in self.ranks)

    def chunk(self, chunk: int, mix: Mix) -> float:
        if (chunk, mix) not in self.known:
            last = chunk == self.column.chunks - 1
            f, b, w, sf, sb = self.column.chunk_seconds(
                mix, first=chunk == 0, last=last, tail=self.column.tail_of(mix) if last else 0
            )
            self.known[chunk, mix] = f + b + w - sf - sb
        return self.known[chunk, mix]


def monolithic(j: Job, nodes: int = 20_000, most: int = 100_000) -> tuple[Answer | None, bool]:
    """(the answer of one program over all columns, splits and mixes, None where nothing fits; whether it was solved to its end: neither where
    ``nodes`` ended it, whose bound is below its seconds then, nor where it would have more than ``most`` patterns)."""
    blocks, number = [], 0
    for column, fitting, some in columns(j):
        for policy in some:
            patterns = []
            for chunk in range(column.chunks):
                last = chunk == column.chunks - 1
                here = [
                    Pattern(start, stop, mix)
                    for start in ([0] if chunk == 0 else range(chunk, column.layers))
                    for stop in ([column.layers] if last else range(start + 1, column.layers))
                    for mix in policy.mixes(fitting.counts(start, stop), len(column.modes))
                ]
                patterns.append(here)
            number += sum(map(len, patterns))
            if number > most:
                return None, False
            if all(patterns):
                blocks.append(Block(column, fitting, policy, patterns))
    program = Program(blocks, float("inf"))
    answer = program.solve(rounds=200, nodes=nodes)
    return answer, not program.stopped and (answer is None or answer.bound >= answer.seconds * (1 - 1e-6))
