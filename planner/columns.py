"""A column's costs as the program needs them: seconds and bytes by layer kind and recompute mode, from the cost models.

Nothing is priced here: the numbers are ``cost_models.passes.unit_seconds``, ``step.rank_update`` and ``memory``'s, and a chunk is a sum
of units. ``Core`` holds what all columns of one core share; ``Column`` adds what ZeRO, the split of dp, and offload decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.chunks import blocks_transfers
from cost_models.communication import Network, reach, stragglers
from cost_models.job import Job
from cost_models.layout import DEDUPLICATED, Layout, Recompute, RecomputeRule
from cost_models.passes import NO_RECOMPUTE, layer_key, unit_seconds, unit_weights
from cost_models.pipeline import Timeline, simulate
from cost_models.states import Holding
from cost_models.step import ChunkSeconds, boundary_seconds, rank_update, ranks_chunks
from cost_models.units import EMBEDDING, HEAD, MTP, Unit
from cost_models.update import optimizer_seconds
from planner.paths import Paths, PathStore
from planner.rules.core import Limits, limits_of
from planner.wishes import Wish
from profiles.errors import InputError
from profiles.hardware import ClusterSpec
from profiles.operations import Number

Floats = npt.NDArray[np.float64]

Mix = tuple[tuple[int, ...], ...]
"""Layers of a chunk by kind (rows) and recompute mode (columns)."""


def modes_of(job: Job, limits: Limits) -> tuple[RecomputeRule, ...]:
    """The recompute choices of a layer that the planner tries, cheapest first: none, a selective one or two that the target has, full."""
    names = ["none"] if "none" in limits.recompute_modes else []
    if "selective" in limits.recompute_modes:
        has = set(limits.modules)
        if "op" in has and limits.recompute == "model":
            names.append("selective(op)")
        if job.execution.unfused and "core_attn" in has:
            names.append("selective(core_attn)")
        moe = job.model.moe is not None
        light = [m for m in (("layernorm", "moe_act", "mla_up_proj") if moe else ("layernorm", "mlp_act")) if m in has]
        if job.model.attention is None or job.model.attention.kind != "latent_attention":
            light = [m for m in light if m != "mla_up_proj"]
        if light:
            names.append(f"selective({','.join(light)})")
        heavy = "moe" if moe else "mlp"
        if heavy in has:
            names.append(f"selective({heavy})")
    if "full" in limits.recompute_modes:
        names.append("full")
    return tuple(rule_of(n) for n in names)


def modes_within(
    modes: tuple[RecomputeRule, ...], limits: Limits, pins: Sequence[Wish], excluded: Sequence[Sequence[Wish]]
) -> tuple[RecomputeRule, ...]:
    """The choices that pins and one-field exclusions leave; a pinned one that the planner does not try by itself is tried.

    Raises InputError for choices by layers (the program makes those), for one that the target has not, and where none is left.
    """
    left = modes
    refused = [replace(e[0], op="!=" if e[0].op == "=" else "=") for e in excluded if len(e) == 1]
    for wish in (w for w in (*pins, *refused) if w.field == "recompute"):
        if any(len(Recompute.parse(value).rules) > 1 or ":" in value for value in wish.values):
            rule = "one choice for every layer; which layers recompute is the program's to find, axisplan estimate --layout prices a given one"
            raise InputError("--pin", str(wish), rule, "recompute=full")
        named = [rule_of(value) for value in wish.values]
        unknown = [r for r in named if r.mode not in limits.recompute_modes or not {*r.modules} <= {*limits.modules}]
        if unknown and wish.op == "=":
            rule = f"the target recomputes {', '.join(limits.recompute_modes)}, of {', '.join(limits.modules) or 'no module alone'}"
            raise InputError("--pin", str(wish), rule, f"recompute={limits.recompute_modes[-1]}")
        if wish.op == "=":
            left = tuple(sorted({*named} if wish in pins else {*named} & {*left}, key=lambda r: (ORDER.index(r.mode), r.modules)))
        else:
            left = tuple(r for r in left if r not in named)
    if not left:
        raise InputError("--pin", ", ".join(map(str, pins)), "leaves no recompute choice", "recompute=full")
    return left


ORDER = ("none", "selective", "full")


def takes_turns(pattern: Sequence[int]) -> bool:
    """Whether layers of one kind stand apart, others between them: how many a chunk holds of each then does not say in which order."""
    return sum(a != b for a, b in pairwise(pattern)) >= len({*pattern})


@lru_cache(maxsize=256)
def rule_of(text: str) -> RecomputeRule:
    rule = Recompute.parse(text).rules[0]
    return RecomputeRule(0, None, rule.mode, rule.modules)


def mode_text(rule: RecomputeRule) -> str:
    return f"{rule.mode}({','.join(rule.modules)})" if rule.modules else rule.mode


# -- seconds of units -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Units:
    """Seconds of one microbatch by unit: layer kinds (K), their modes (M), embedding, head with its MTP modules (by the mode of the last
    layer). ``f`` forward, ``b`` recompute and input gradient, ``w`` weight gradient, ``sf``, ``sb`` what a DualPipe pair hides."""

    f: Floats
    b: Floats
    w: Floats
    sf: Floats
    sb: Floats
    embedding: tuple[float, float, float]
    head: tuple[tuple[float, float, float, float, float], ...]
    """By mode of the last layer: f, b, w, sf, sb."""

    def only(self, mode: int) -> Units:
        """These units where every layer has one mode."""
        return Units(self.f, self.b[:, [mode]], self.w, self.sf, self.sb[:, [mode]], self.embedding, (self.head[mode],))

    @cached_property
    def least(self) -> Floats:
        """K x 3: f, the least b of any mode, w, pairs' savings taken off."""
        return np.stack([self.f - self.sf, (self.b - self.sb).min(axis=1), self.w], axis=1)

    @cached_property
    def least_head(self) -> tuple[float, float, float]:
        return (min(h[0] - h[3] for h in self.head), min(h[1] - h[4] for h in self.head), min(h[2] for h in self.head))


def units(job: Job, layout: Layout, modes: Sequence[RecomputeRule]) -> Units:
    """The unit seconds of a column (any layout of it); cached by what they depend on."""
    return _units(job, layer_key(job, layout), tuple(modes))


@lru_cache(maxsize=8192)
def _units(job: Job, key: Layout, modes: tuple[RecomputeRule, ...]) -> Units:
    kinds = range(len(job.model.kinds))
    table = [[unit_seconds(job, key, k, r) for r in modes] for k in kinds]
    one, head = unit_seconds(job, key, EMBEDDING), unit_seconds(job, key, HEAD)
    heads = []
    for rule in modes:
        total = np.array([head.f, head.b, head.w, *head.paired_saving])
        if job.model.mtp:
            extra = unit_seconds(job, key, MTP, rule)
            total = total + job.model.mtp * np.array([extra.f, extra.b, extra.w, *extra.paired_saving])
        heads.append(tuple(float(x) for x in total))
    return Units(
        np.array([row[0].f for row in table]), np.array([[u.b for u in row] for row in table]), np.array([row[0].w for row in table]),
        np.array([row[0].paired_saving[0] for row in table]), np.array([[u.paired_saving[1] for u in row] for row in table]),
        (one.f, one.b, one.w), tuple(heads),  # type: ignore[arg-type]
    )  # fmt: skip


@lru_cache(maxsize=64)
def prefix_counts(job: Job) -> npt.NDArray[np.int64]:
    """(L + 1) x K: layers of each kind among the first i."""
    kinds = len(job.model.kinds)
    out = np.zeros((job.model.num_layers + 1, kinds), np.int64)
    for i, kind in enumerate(job.model.pattern):
        out[i + 1] = out[i]
        out[i + 1, kind] += 1
    return out


@lru_cache(maxsize=64)
def alike_spans(job: Job) -> npt.NDArray[np.int64]:
    """(L + 1) x (L + 1): the same number where the layers [start, stop) are as many of every kind."""
    layers = job.model.num_layers
    code = np.zeros((layers + 1) ** 2, np.int64)
    for placed in prefix_counts(job).T:
        counts = placed[None] - placed[:, None] + layers
        code = np.unique(code * (2 * layers + 1) + counts.reshape(-1), return_inverse=True)[1].reshape(-1)
    return code.reshape(layers + 1, layers + 1)


GROUPS = (
    "tp",
    "ring",
    "ulysses",
    "cp",
    "etp",
    "ep",
    "etp_ep",
    "zero",
    "dp_replicate",
    "dp",
    "edp_shard",
    "edp_replicate",
    "edp",
    "pp",
)
"""Axes over which a layout's collectives run (``communication.Network.group``)."""


def placement(cluster: ClusterSpec, layout: Layout) -> tuple[tuple[Number, ...], ...]:
    """How many ranks of each group share a domain, and how far messages between its neighbours and its ends go: all that prices see of a rank
    order, so that layouts that differ in their order alone, and agree in this, cost the same."""
    network, out = Network(cluster, layout), []
    for axis in GROUPS:
        group = network.group(axis)
        ends = max(1, group.ranks - 1) * group.stride
        pairs = [(group.ranks, group.stride), (2, reach(cluster, group.ranks, group.stride)), (2, round(ends))]
        out.append(tuple(inside for ranks, stride in pairs for inside in cluster.spread(ranks, stride)))
    return tuple(out)


def priced_as(dispatcher: str) -> str:
    """The dispatcher that stands for those that cost the same."""
    return DEDUPLICATED[0] if dispatcher in DEDUPLICATED else dispatcher


# -- a column -------------------------------------------------------------------------------------------------------------


class Column:
    """One column: seconds and bytes of any choice of stages and recompute."""

    def __init__(self, job: Job, layout: Layout, modes: tuple[RecomputeRule, ...], store: PathStore) -> None:
        self.job, self.layout, self.modes, self.store = job, layout, modes, store
        self.microbatches = layout.microbatches(job.global_batch)
        self.chunks = layout.chunks
        self.layers = job.model.num_layers
        self._ends: dict[tuple[Any, ...], tuple[float, float]] = {}
        self._stage_ends: dict[tuple[Mix, bool, bool], tuple[float, float]] = {}
        self._chunks: dict[tuple[Mix, bool, bool, int], ChunkSeconds] = {}

    @cached_property
    def even(self) -> bool:
        """Whether the target holds as many layers in every chunk (``execution.uneven_stages`` is false)."""
        return not limits_of(self.job).uneven_stages

    @cached_property
    def units(self) -> Units:
        return units(self.job, self.layout, self.modes)

    @cached_property
    def transfer(self) -> float:
        return boundary_seconds(self.job, self.layout)

    @cached_property
    def blocking(self) -> bool:
        return blocks_transfers(self.job, self.layout.schedule)

    @cached_property
    def paths(self) -> Paths:
        layout = self.layout
        return self.store.of(layout.schedule, layout.pp, layout.vpp, self.microbatches, self.blocking)

    @cached_property
    def slowing(self) -> float:
        return stragglers(self.job.cluster.nodes if self.layout.world > 1 else 1)

    def step(self, pipeline_seconds: Any) -> Any:
        """Seconds of a step whose pipeline takes ``pipeline_seconds`` (``cost_models.step.estimate``)."""
        return (pipeline_seconds + self.job.execution.step_overhead_seconds) * self.slowing

    @cached_property
    def unit_weights(self) -> tuple[list[Holding], Holding, Holding]:
        kinds = [unit_weights(self.job, self.layout, k) for k in range(len(self.job.model.kinds))]
        return kinds, unit_weights(self.job, self.layout, EMBEDDING), unit_weights(self.job, self.layout, HEAD)

    def chunk_seconds(self, mix: Mix, *, first: bool, last: bool, tail: int = 0) -> tuple[float, float, float, float, float]:
        """(f, b, w, sf, sb) of a chunk; ``tail``: the mode of the model's last layer, for MTP."""
        u = self.units
        counts = np.asarray(mix, np.float64)
        n = counts.sum(axis=1)
        f, w, sf = float(n @ u.f), float(n @ u.w), float(n @ u.sf)
        b, sb = float((counts * u.b).sum()), float((counts * u.sb).sum())
        if first:
            f, b, w = f + u.embedding[0], b + u.embedding[1], w + u.embedding[2]
        if last:
            h = u.head[tail]
            f, b, w, sf, sb = f + h[0], b + h[1], w + h[2], sf + h[3], sb + h[4]
        return f, b, w, sf, sb

    def chunk(self, mix: Mix, *, first: bool, last: bool, tail: int = 0) -> ChunkSeconds:
        """The chunk as ``cost_models.step`` has it."""
        key = mix, first, last, tail if last else 0
        if key not in self._chunks:
            self._chunks[key] = self._chunk(mix, first=first, last=last, tail=tail)
        return self._chunks[key]

    def _chunk(self, mix: Mix, *, first: bool, last: bool, tail: int) -> ChunkSeconds:
        f, b, w, sf, sb = self.chunk_seconds(mix, first=first, last=last, tail=tail)
        kinds, embedding, head = self.unit_weights
        weights = Holding()
        parts: list[tuple[tuple[Unit, RecomputeRule], int]] = []
        if first:
            weights = weights + embedding
            parts.append(((EMBEDDING, NO_RECOMPUTE), 1))
        for k, row in enumerate(mix):
            for m, n in enumerate(row):
                if n:
                    weights = weights + kinds[k].times(n)
                    parts.append(((k, self.modes[m]), n))
        if last:
            weights = weights + head
            parts.append(((HEAD, NO_RECOMPUTE), 1))
            model = self.job.model
            if model.mtp:
                weights = weights + unit_weights(self.job, self.layout, MTP).times(model.mtp)
                parts.append(((MTP, self.modes[tail]), model.mtp))
        return ChunkSeconds(f, b, w, tuple(parts), weights, (sf, sb))

    def lightest(self, counts: tuple[int, ...], *, first: bool, last: bool) -> ChunkSeconds:
        """A chunk that holds these layers by kind, all of them in the mode that has the least input gradient."""
        mode = int(self.units.b.min(axis=0).argmin())
        mix = tuple(tuple(n if m == mode else 0 for m in range(len(self.modes))) for n in counts)
        return self.chunk(mix, first=first, last=last, tail=mode)

    @cached_property
    def layer_update(self) -> Floats:
        """Optimizer seconds of one layer's weights, by kind: what a rank's end grows by at least with each layer."""
        if self.job.optimizer == "muon":
            return np.zeros(len(self.job.model.kinds))
        return np.array([optimizer_seconds(self.job, self.layout, w) for w in self.unit_weights[0]])

    def ends(self, rank: int, chunks: Sequence[ChunkSeconds]) -> tuple[float, float]:
        """(start, end) seconds of a rank that holds ``chunks``: parameter gathering; gradient reduction and optimizer."""
        key = tuple((c.parts) for c in chunks)
        if key not in self._ends:
            held = ranks_chunks(self.layout, rank)
            padded: list[Any] = [None] * self.chunks
            for place, chunk in zip(held, chunks, strict=True):
                padded[place] = chunk
            update = rank_update(self.job, self.layout, padded, rank)
            self._ends[key] = (update.start, update.end)
        return self._ends[key]

    def stage_ends(self, rank: int, mix: Mix) -> tuple[float, float]:
        """``ends`` of a rank whose only chunk has this mix."""
        first, last = rank == 0, rank == self.layout.pp - 1
        key = (mix, first, last)
        if key not in self._stage_ends:
            self._stage_ends[key] = self.ends(rank, [self.chunk(mix, first=first, last=last, tail=self.tail_of(mix))])
        return self._stage_ends[key]

    def laid(self, mixes: Sequence[Mix]) -> tuple[list[ChunkSeconds], list[float], list[float]]:
        """(chunks, seconds at each rank's start, at its end) of one mix a chunk, in model order."""
        tail = self.tail_of(mixes[-1])
        chunks = [self.chunk(mix, first=c == 0, last=c == self.chunks - 1, tail=tail) for c, mix in enumerate(mixes)]
        ends = [self.ends(rank, [chunks[c] for c in ranks_chunks(self.layout, rank)]) for rank in range(self.layout.pp)]
        return chunks, [start for start, _ in ends], [end for _, end in ends]

    def simulate(self, mixes: Sequence[Mix]) -> Timeline:
        """The exact timeline of a choice: one mix a chunk, in model order."""
        chunks, starts, ends = self.laid(mixes)
        layout = self.layout
        return simulate(
            layout.schedule, layout.pp, layout.vpp, self.microbatches,
            [c.forward for c in chunks], [c.backward_input for c in chunks], [c.backward_weight for c in chunks], self.transfer,
            blocking=self.blocking, starts=starts, ends=ends,
            hidden_forward=[c.saving[0] for c in chunks], hidden_backward=[c.saving[1] for c in chunks],
        )  # fmt: skip

    def fractional(self, sizes: Sequence[float], mean: Floats) -> Timeline:
        """The timeline of chunks that hold fractions of mean layers (seconds f, b, w), without ends: for its critical path."""
        n = np.asarray(sizes, np.float64)
        chunks = [n * mean[0], n * mean[1], n * mean[2]]
        for array, first, last in zip(chunks, self.units.embedding, self.units.least_head, strict=True):
            array[0] += first
            array[-1] += last
        layout = self.layout
        f, b, w = chunks
        return simulate(layout.schedule, layout.pp, layout.vpp, self.microbatches, f, b, w, self.transfer, blocking=self.blocking)

    def tail_of(self, mix: Mix) -> int:
        """The mode of the last layer of a chunk: layers of a kind run the costlier modes first, so it is the cheapest mode present."""
        row = mix[self.job.model.pattern[-1]]
        return next((m for m, n in enumerate(row) if n), 0)

    def layout_of(self, stages: Sequence[int], mixes: Sequence[Mix]) -> Layout:
        """The layout that says this choice; within a chunk and kind, the costlier modes come first."""
        rules: list[str] = []
        start = 0
        for count, mix in zip(stages, mixes, strict=True):
            left = [[m for m in reversed(range(len(self.modes))) for _ in range(row[m])] for row in mix]
            taken = [0] * len(mix)
            for layer in range(start, start + count):
                kind = self.job.model.pattern[layer]
                rules.append(mode_text(self.modes[left[kind][taken[kind]]]))
                taken[kind] += 1
            start += count
        return self.layout.with_(stages=tuple(int(n) for n in stages) if self.chunks > 1 else (), recompute=recompute_text(rules))


def recompute_text(choices: Sequence[str]) -> str:
    """The shortest recompute string that gives each layer its choice."""
    if len(set(choices)) == 1:
        return choices[0]
    parts, start = [], 0
    for i in range(1, len(choices) + 1):
        if i == len(choices) or choices[i] != choices[start]:
            if choices[start] != "none":
                parts.append(f"{start}-{i - 1}:{choices[start]}")
            start = i
    return str(Recompute.parse("/".join(parts)))
