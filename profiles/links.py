"""What one link can do: ``Link.seconds(kind, bytes, ranks)``.

``t = alpha + S/B + c sqrt(S)``, S the bytes a rank puts on the wire (``operations.wire_bytes``). The square root stands for the
slow growth of NCCL's chunking and protocols; one row (alpha, B, c) a collective and group size, as measured, since extrapolating
over group sizes costs 9-17 % (docs/hardware.md). Between measured sizes alpha and 1/B are interpolated; beyond the last, alpha
grows by what each further rank added between the measured ones (one more ring step) and B stays.

Two kinds of link: *fabric* (NVLink, PCIe, shared memory: the ranks of one domain) and *network* (each rank of a domain has its own
NIC, or its share of one). A network's ring costs ``hop_seconds`` a domain; a tree costs ``2 log2(domains)`` hops for an all-reduce
and a little bandwidth, and the faster of the two is taken, as NCCL does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from profiles.errors import InputError
from profiles.gpu import STRICT, Constant, Origin
from profiles.operations import Number, smaller, wire_bytes

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast")
LIKE = {
    "all_reduce": ("reduce_scatter", "all_gather"), "all_gather": ("reduce_scatter", "broadcast", "all_reduce"),
    "reduce_scatter": ("all_gather", "all_reduce"), "all_to_all": ("send_recv", "all_gather"),
    "send_recv": ("all_to_all", "all_gather"), "broadcast": ("all_gather", "send_recv"),
}  # fmt: skip
"""Where a link has no row of a kind: whose row prices it."""
STEPS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "send_recv": 0.0, "broadcast": 1.0}
"""Passes round a ring."""
IN_SWITCH = 1.2
"""An all-reduce that moves this many times the bytes a second of a reduce-scatter is no ring."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CollectiveCurve:
    """One row: ``alpha_seconds + S/bytes_per_second + sqrt_seconds sqrt(S)`` for a group of ``ranks``, S on one rank's wire."""

    ranks: int = Field(ge=2)
    alpha_seconds: float = Field(ge=0)
    bytes_per_second: float = Field(gt=0)
    origin: Origin
    source: str = Field(min_length=3)
    sqrt_seconds: float = Field(default=0.0, ge=0)
    heldout_error: float | None = None
    protocol_switch_bytes: float | None = Field(default=None, gt=0)
    """S from which NCCL's bandwidth protocol (Simple) is faster than its low-latency ones (LL, LL128), where that was seen."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Link:
    """A link as one GPU sees it, in one direction. ``curves`` by collective kind, by group size.

    ``network``: every rank of a domain brings its own share of bandwidth (``curves`` are for one rank a domain; group sizes count
    domains). ``shared``: groups that communicate at once divide it (PCIe, shared memory, a NIC for several GPUs). ``rails``: the
    most NICs of one domain that one ring or tree uses.
    """

    name: str
    peak_bytes_per_second: Constant
    curves: dict[str, tuple[CollectiveCurve, ...]]
    network: bool = False
    shared: bool = False
    hop_seconds: Constant | None = None
    tree_efficiency: Constant | None = None
    peer_seconds: Constant | None = None
    rails: Constant | None = None

    def __hash__(self) -> int:
        return hash((self.name, self.network, self.peak_bytes_per_second.value))

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.curves if kind not in KINDS]
        if unknown or not self.curves:
            raise ValueError(f"curves: {', '.join(unknown) or 'empty'}: kinds are {', '.join(KINDS)}")
        if self.peak_bytes_per_second.value <= 0:
            raise ValueError("peak_bytes_per_second must be positive")
        for kind, rows in self.curves.items():
            sizes = [row.ranks for row in rows]
            if not rows or sizes != sorted(set(sizes)):
                raise ValueError(f"curves.{kind}: one row a group size, smallest first")

    @property
    def bytes_per_second(self) -> float:
        """Achieved, one direction, per GPU: the best of the large-message rates that are not in-switch reductions."""
        kinds = [kind for kind in self.curves if kind != "all_reduce"] or list(self.curves)
        return max(row.bytes_per_second for kind in kinds for row in self.curves[kind])

    @cached_property
    def _tables(self) -> dict[str, tuple[Number, Number, Number, Number]]:
        tables = {}
        for kind in KINDS:
            like = kind if kind in self.curves else next((k for k in LIKE[kind] if k in self.curves), next(iter(self.curves)))
            rows = self.curves[like]
            values = [(row.ranks, row.alpha_seconds, 1 / row.bytes_per_second, row.sqrt_seconds) for row in rows]
            table = np.array(values, dtype=float)
            tables[kind] = (table[:, 0], table[:, 1], table[:, 2], table[:, 3])
        return tables

    def at_peak(self, peak_bytes_per_second: float, source: str) -> Link:
        """The same link at another line rate (a NIC of half the speed): rates scale, latencies stay; origin ``estimate``."""
        factor = peak_bytes_per_second / self.peak_bytes_per_second.value
        curves = {
            kind: tuple(
                replace(row, bytes_per_second=row.bytes_per_second * factor, origin="estimate", source=f"{source}; {row.source}")
                for row in rows
            )
            for kind, rows in self.curves.items()
        }
        peak = replace(self.peak_bytes_per_second, value=peak_bytes_per_second, origin="estimate", source=source)
        return replace(self, peak_bytes_per_second=peak, curves=curves)

    def curve(self, kind: str, ranks: Number) -> tuple[Number, Number, Number]:
        """(alpha seconds, seconds a wire byte, c) of a group of ``ranks``; a point-to-point message uses the smallest group's."""
        if kind not in KINDS:
            raise InputError("collective", kind, f"unknown kind (one of {', '.join(KINDS)})", None)
        sizes, alpha, inverse, root = self._tables[kind]
        if kind == "send_recv":
            return float(alpha[0]), float(inverse[0]), float(root[0])
        at = np.log2(np.maximum(ranks, 2))
        grown: Number = np.interp(ranks, sizes, alpha)
        if len(sizes) > 1:
            step = max(alpha[-1] - alpha[0], 0.0) / (sizes[-1] - sizes[0])
            grown = grown + np.maximum(np.asarray(ranks) - sizes[-1], 0) * step
        return grown, np.interp(at, np.log2(sizes), inverse), np.interp(at, np.log2(sizes), root)

    def protocol(self, kind: str, bytes: float, ranks: int) -> str:
        """NCCL's protocol for a message of full buffer ``bytes``, by the nearest group size measured: ``LL`` (or LL128, between), or
        ``Simple``; empty where no switch was seen. The price needs no choice: c sqrt(S) is what the protocols look like together."""
        rows = [row for row in self.curves.get(kind, ()) if row.protocol_switch_bytes is not None]
        row = min(rows, key=lambda row: abs(row.ranks - ranks), default=None)
        if row is None or row.protocol_switch_bytes is None:
            return ""
        return "Simple" if wire_bytes(kind, bytes, ranks) >= row.protocol_switch_bytes else "LL"

    def in_switch(self, ranks: int) -> bool:
        """Whether the all-reduce of such a group is reduced in the switch (NVLS): it then runs above what a ring's wire share allows,
        which is what the reduce-scatter reaches."""
        ring, own = self.curve("reduce_scatter", ranks)[1], self.curve("all_reduce", ranks)[1]
        return bool(own * IN_SWITCH < ring) and ranks > 2

    def seconds(self, kind: str, bytes: Number, ranks: Number, sharing: Number = 1) -> Number:
        """Seconds of a collective of full buffer ``bytes`` over ``ranks`` ranks, one in each domain where this is a network.

        ``sharing``: groups that use the link at once; it divides bandwidth where the link is ``shared`` or a network. Zero for one
        rank. Arrays welcome.
        """
        wire = wire_bytes(kind, bytes, ranks)
        alpha, inverse, root = self.curve(kind, ranks)
        share = sharing if self.network or self.shared else 1
        seconds = alpha + self.hops(kind, ranks) + wire * inverse * share
        if self.network and kind == "all_reduce":
            seconds = smaller(seconds, alpha + self.tree_hops(ranks) + wire * inverse * share * self.tree_slowing(ranks))
        return (seconds + root * np.sqrt(wire)) * (np.asarray(ranks) > 1)

    def hops(self, kind: str, domains: Number) -> Number:
        """Seconds a ring over ``domains`` adds to its base latency; an all-to-all pays per peer instead."""
        if not self.network or self.hop_seconds is None:
            return 0.0
        if kind == "all_to_all" and self.peer_seconds is not None:
            return self.hop_seconds.value + self.peer_seconds.value * (domains - 1)
        return STEPS[kind] * self.hop_seconds.value * (domains - 1)

    def tree_hops(self, domains: Number) -> Number:
        """Seconds a double binary tree over ``domains`` adds: up and down."""
        return 0.0 if self.hop_seconds is None else 2 * self.hop_seconds.value * np.log2(np.maximum(domains, 1))

    def tree_slowing(self, domains: Number) -> Number:
        """Seconds a byte of a tree over those of a ring. Between two domains a tree sends the buffer once each way, a ring
        twice its half (which is why two nodes seem to beat their NICs); from three on, both send it twice."""
        efficiency = self.tree_efficiency.value if self.tree_efficiency is not None else 1.0
        return np.where(np.asarray(domains) <= 2, 1.0, 1.0 / efficiency)

    def spreading(self, below: Number) -> Number:
        """NICs that one communicator drives at once where ``below`` of its ranks sit in each domain."""
        return below if self.rails is None else np.minimum(below, self.rails.value)
