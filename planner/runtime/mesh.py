"""Mesh: the process groups of a layout, by axis.

One ``DeviceMesh`` holds the dense axes in the layout's own rank order, with context parallelism as its two parts (ring outside,
ulysses inside); a second holds the expert axes over the same ranks. What other modules are given is an ``Axis``: its size, this
rank's place on it, and the group. An axis of size 1 has no group and costs no collective.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from cost_models.layout import Layout
from profiles.errors import InputError
from profiles.model import Attention, ModelSpec


@dataclass(frozen=True)
class Axis:
    """One mesh axis as this rank sees it. ``ranks`` are the global ranks on it, in order; ``group`` is None when size is 1."""

    name: str
    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = field(default=None, compare=False)


class Mesh:
    """Every axis of ``layout`` for this rank.

    Attributes: tp, cp, ring, ulysses, pp, dp_shard, dp_replicate; the products dp_cp (one gradient sum), dp_shard_cp (ZeRO);
    etp, ep, edp_shard, edp_replicate, edp for experts; ``ends`` joins first and last pipeline rank (an embedding that both hold); ``kv(f)``
    joins the f neighbours on tp that hold the same key/value head.
    """

    def __init__(self, layout: Layout, model: ModelSpec, device: torch.device, timeout_seconds: float | None = None) -> None:
        world = dist.get_world_size()
        if world != layout.world:
            raise InputError("layout", layout.text(), f"needs {layout.world} processes, there are {world}", layout.world)
        self.layout, self.device, self.rank = layout, device, dist.get_rank()
        self.coordinates = layout.coordinates(self.rank)
        sizes = dict(layout.axes)
        names: list[str] = []
        for axis, _ in reversed(layout.axes):
            names += ["ring", "ulysses"] if axis == "cp" else [axis]
        sizes |= {"ring": layout.ring, "ulysses": layout.ulysses}
        ranks = torch.arange(world).reshape([sizes[n] for n in names])
        self.dense = DeviceMesh(device.type, ranks, mesh_dim_names=tuple(names))
        self._names = names
        self._axes: dict[str, Axis] = {}
        self._sharding: dict[bool, DeviceMesh] = {}
        for name in names:
            self._add(name, self.dense[name])
        for name, parts in {
            "cp": ("ring", "ulysses"),
            "dp_cp": ("dp_replicate", "dp_shard", "ring", "ulysses"),
            "dp_shard_cp": ("dp_shard", "ring", "ulysses"),
        }.items():
            self._product(name, parts, sizes)
        by_stage = ranks.movedim(names.index("pp"), 0).reshape(layout.pp, -1)
        self._experts(by_stage, model)
        self._kv: dict[int, Axis] = {1: Axis("kv1")}
        for factor in sorted({f for k in model.kinds if (f := kv_copies(k.mixer, layout.tp)) > 1}):
            tp_last = ranks.movedim(names.index("tp"), -1).reshape(-1, layout.tp // factor, factor)
            self._kv[factor] = self._add(f"kv{factor}", DeviceMesh(device.type, tp_last, mesh_dim_names=("a", "b", "c"))["c"])
        first, last = layout.rank_of_chunk(0), layout.rank_of_chunk(layout.chunks - 1)
        self.ends = Axis("ends")
        if (model.tied or model.mtp) and first != last:
            pairs = by_stage[[first, last]].T.contiguous()
            both = DeviceMesh(device.type, pairs, mesh_dim_names=("a", "ends"))
            if both.get_coordinate() is not None:
                self.ends = self._add("ends", both["ends"])
        if timeout_seconds is not None:
            for one in self._axes.values():
                if one.group is not None:
                    _set_pg_timeout(datetime.timedelta(seconds=timeout_seconds), one.group)

    def _add(self, name: str, mesh: DeviceMesh) -> Axis:
        size = mesh.size()
        if size == 1:
            self._axes[name] = Axis(name, ranks=(self.rank,))
        else:
            group = mesh.get_group()
            self._axes[name] = Axis(name, size, mesh.get_local_rank(), tuple(dist.get_process_group_ranks(group)), group)
        return self._axes[name]

    def _product(self, name: str, parts: tuple[str, ...], sizes: dict[str, int]) -> None:
        real = [p for p in self._names if p in parts and sizes[p] > 1]
        if len(real) > 1:
            self._add(name, self.dense[tuple(real)]._flatten(name))
        else:
            only = self._axes[real[0]] if real else Axis(name, ranks=(self.rank,))
            self._axes[name] = Axis(name, only.size, only.rank, only.ranks, only.group)

    def _experts(self, by_stage: torch.Tensor, model: ModelSpec) -> None:
        layout = self.layout
        names = ("edp_replicate", "edp_shard", "ep", "etp")
        if model.moe is None:
            for name in (*names, "edp"):
                self._axes[name] = Axis(name, ranks=(self.rank,))
            return
        shape = (layout.pp, layout.edp_replicate, layout.edp_shard, layout.ep, layout.etp)
        self.expert = DeviceMesh(self.device.type, by_stage.reshape(shape), mesh_dim_names=("stage", *names))
        for name in names:
            self._add(name, self.expert[name])
        real = tuple(n for n in names[:2] if self._axes[n].size > 1)
        self._add("edp", self.expert[real]._flatten("edp") if len(real) > 1 else self.expert[real[0] if real else "edp_shard"])

    def sharding(self, expert: bool) -> DeviceMesh:
        """The mesh FSDP2 shards over: [shard], or [replicate, shard] where there are replicas (HSDP)."""
        if expert:
            names = ("edp_replicate", "edp_shard") if self._axes["edp_replicate"].size > 1 else ("edp_shard",)
            return self.expert[names]
        if expert not in self._sharding:
            inner = [n for n in self._names if n in ("dp_shard", "ring", "ulysses")]
            outer = [n for n in self._names if n not in inner and n != "dp_replicate"]
            order = [self._names.index(n) for n in (*outer, "dp_replicate", *inner)]
            ranks = self.dense.mesh.permute(order).reshape(-1, self.layout.dp_replicate, self.layout.dp_shard * self.layout.cp)
            self._sharding[expert] = DeviceMesh(self.device.type, ranks, mesh_dim_names=("rest", "replicate", "shard"))
        mesh = self._sharding[expert]
        return mesh["replicate", "shard"] if self.layout.dp_replicate > 1 else mesh["shard"]

    def axis(self, name: str) -> Axis:
        """The axis called ``name``."""
        return self._axes[name]

    def kv(self, copies: int) -> Axis:
        """The tensor-parallel neighbours that hold the same key/value heads."""
        return self._kv[copies]

    @property
    def axes(self) -> dict[str, Axis]:
        """Every axis by name; products of one real axis share its group."""
        return dict(self._axes)

    def axis_of(self, ranks: Iterable[int]) -> str:
        """The first axis whose ranks are these: names a group met in a trace."""
        wanted = tuple(ranks)
        return next((n for n, a in self._axes.items() if a.size > 1 and a.ranks == wanted), "world")

    @property
    def tp(self) -> Axis:
        return self._axes["tp"]

    @property
    def cp(self) -> Axis:
        return self._axes["cp"]

    @property
    def ring(self) -> Axis:
        return self._axes["ring"]

    @property
    def ulysses(self) -> Axis:
        return self._axes["ulysses"]

    @property
    def pp(self) -> Axis:
        return self._axes["pp"]

    @property
    def dp_cp(self) -> Axis:
        return self._axes["dp_cp"]

    @property
    def dp(self) -> int:
        """This rank's place among the ``layout.dp`` data shards."""
        return self.coordinates["dp_replicate"] * self.layout.dp_shard + self.coordinates["dp_shard"]


def kv_copies(mixer: object, tp: int) -> int:
    """How many tensor-parallel ranks hold the same key/value heads (1 while there are heads enough)."""
    if isinstance(mixer, Attention) and tp > mixer.kv_heads:
        return tp // mixer.kv_heads
    return 1
