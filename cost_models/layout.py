"""Layout: how training is spread over ranks, and the meshes and rank groups that follow.

``world = tp * cp * pp * dp`` with ``dp = dp_replicate * dp_shard``. Experts live on another factoring of the same ranks of a stage:
``tp * cp * dp = etp * ep * edp``. Parameters are sharded (ZeRO) over ``dp_shard * cp``, expert parameters over
``edp_shard = tp * cp * dp_shard / (etp * ep)``. Whether a layout is *legal* for a model, cluster and target is
``planner.legality``'s business; here only the product identities and the grammar are checked.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from cost_models.hashing import HashedOnce
from cost_models.layout_text import integer, one_of, pairs, shown, value_of
from profiles.errors import InputError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v")
ZERO_BUBBLE = ("zb-h1", "zb-h2", "zb-v")
"""Schedules that run the input gradient (B) and the weight gradient (W) of every microbatch apart."""
SPLIT_BACKWARD = (*ZERO_BUBBLE, "dualpipe", "dualpipe-v")
"""Those, and the ones that do so for some microbatches."""
V_SHAPED = ("zb-v", "dualpipe-v")
"""Schedules that place chunk c and chunk 2*pp-1-c on one rank."""
EXPERT_AXES = ("etp", "ep", "edp")
DEDUPLICATED = ("deepep", "hybridep")
"""Dispatchers that send one copy of a token to each node that holds one of its experts; they cost the same."""
RECOMPUTE_MODULES = (
    "core_attn", "layernorm", "moe_act", "mlp", "moe", "mla_up_proj", "shared_experts", "mlp_act", "op",
)  # fmt: skip
"""Module names a selective recompute may list: Megatron's, and ``op`` for TorchTitan's every-second-matmul policy."""


class RecomputeRule(NamedTuple):
    """Layers ``first..last`` (inclusive; last None = to the end) run in ``mode``: none, full, or selective of ``modules``."""

    first: int
    last: int | None
    mode: str
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recompute:
    """Which layers are recomputed in backward, and what of them: ``none``, ``full``, ``selective(core_attn)``, or by layers,
    ``0-3:full/4-30:selective`` (layers not named are not recomputed)."""

    rules: tuple[RecomputeRule, ...]

    @classmethod
    def parse(cls, text: str) -> Recompute:
        rules = []
        for part in text.split("/"):
            head, _, body = part.rpartition(":")
            first, last = 0, None
            if head:
                match = re.fullmatch(r"(\d+)(?:-(\d+))?", head)
                if not match:
                    raise InputError("recompute", part, "layers are written FIRST-LAST:mode", "0-3:full")
                first = int(match[1])
                last = int(match[2] or match[1])
                if last < first:
                    raise InputError("recompute", part, "the last layer comes before the first", f"{last}-{first}:{body}")
            match = re.fullmatch(r"(none|full|selective)(?:\(([\w,]*)\))?", body)
            if not match or (match[2] is not None and match[1] != "selective"):
                near = difflib.get_close_matches(body, ["none", "full", "selective"], 1) or ["selective"]
                raise InputError("recompute", body, "a mode is none, full or selective(module,...)", near[0])
            modules = tuple(m for m in (match[2] or "").split(",") if m) or (("core_attn",) if match[1] == "selective" else ())
            for module in modules:
                if module not in RECOMPUTE_MODULES:
                    close = difflib.get_close_matches(module, RECOMPUTE_MODULES, 1)
                    raise InputError(
                        "recompute", module, "is not a module that can be recomputed", close[0] if close else "core_attn"
                    )
            rules.append(RecomputeRule(first, last, match[1], modules))
        ordered = sorted(rules, key=lambda r: r.first)
        for before, after in itertools.pairwise(ordered):
            if before.last is None or after.first <= before.last:
                raise InputError("recompute", text, f"layer {after.first} is named twice")
        return cls(tuple(ordered))

    def of(self, layer: int) -> RecomputeRule:
        """The rule of layer ``layer``; mode none where no rule names it."""
        for rule in self.rules:
            if rule.first <= layer and (rule.last is None or layer <= rule.last):
                return rule
        return RecomputeRule(layer, layer, "none")

    def __str__(self) -> str:
        parts = []
        for rule in self.rules:
            body = rule.mode
            if rule.mode == "selective" and rule.modules != ("core_attn",):
                body += f"({','.join(rule.modules)})"
            if not (rule.first == 0 and rule.last is None):
                body = f"{rule.first}-{rule.last}:{body}" if rule.last is not None else f"{rule.first}:{body}"
            parts.append(body)
        return "/".join(parts)


@dataclass(frozen=True)
class Layout(HashedOnce):
    """The degrees, order, schedule and recompute choice. All counts are positive integers.

    ``cp_kind`` is ``ring``, ``ulysses``, ``allgather``, or ``ring2xulysses4``; ``order`` lists the axes innermost first, e.g.
    ``tp-cp-dp-pp`` (Megatron's default), ``tp-cp-pp-dp``, ``tp-pp-dp``; dp_shard lies inside dp_replicate. ``stages`` holds the
    layers of each of the ``pp * vpp`` chunks in model order, empty = the default even split. ``offload`` lists what lives in host
    memory: ``optimizer``, ``activations``.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    cp_kind: str = "ring"
    ep: int = 1
    etp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    zero: int = 1
    order: str = "tp-cp-dp-pp"
    sp: bool = False
    micro_batch: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    stages: tuple[int, ...] = ()
    dispatcher: str = "alltoall"
    capacity: float = 0.0
    """Capacity factor of dropping MoE dispatch; 0 = dropless."""
    offload: tuple[str, ...] = ()

    __hash__ = HashedOnce.__hash__

    # -- identities -------------------------------------------------------------------------------------------------

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def edp(self) -> int:
        """Replicas of each expert shard: tp * cp * dp / (etp * ep)."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def edp_shard(self) -> int:
        """Ranks over which ZeRO shards an expert's parameters (at least 1)."""
        return max(1, self.tp * self.cp * self.dp_shard // (self.etp * self.ep))

    @property
    def edp_replicate(self) -> int:
        return max(1, self.edp // self.edp_shard)

    @property
    def chunks(self) -> int:
        return self.pp * self.vpp

    @property
    def ulysses(self) -> int:
        """Degree of the all-to-all part of context parallelism."""
        return self._cp_parts[1]

    @property
    def ring(self) -> int:
        """Degree of the ring (or gathered) part of context parallelism."""
        return self._cp_parts[0]

    @cached_property
    def _cp_parts(self) -> tuple[int, int]:
        if match := re.fullmatch(r"ring(\d+)xulysses(\d+)", self.cp_kind):
            return int(match[1]), int(match[2])
        return (1, self.cp) if self.cp_kind == "ulysses" else (self.cp, 1)

    @cached_property
    def recompute_rules(self) -> Recompute:
        return Recompute.parse(self.recompute)

    def microbatches(self, global_batch: int) -> int:
        """Microbatches a pipeline runs in a step (floor; legality demands that it divides)."""
        return global_batch // (self.micro_batch * self.dp)

    def rank_of_chunk(self, chunk: int) -> int:
        """The pipeline rank that holds ``chunk`` (model order)."""
        if self.schedule in V_SHAPED:
            return chunk if chunk < self.pp else 2 * self.pp - 1 - chunk
        return chunk % self.pp

    def chunks_of_rank(self, pp_rank: int) -> tuple[int, ...]:
        if self.schedule in V_SHAPED:
            return tuple(c for c in (pp_rank, 2 * self.pp - 1 - pp_rank) if c < self.chunks)
        return tuple(range(pp_rank, self.chunks, self.pp))

    def layers_of_chunk(self, chunk: int, num_layers: int) -> range:
        """Global indices of the layers of ``chunk``."""
        counts = self.stages or even_split(num_layers, self.chunks)
        start = sum(counts[:chunk])
        return range(start, start + counts[chunk])

    # -- ranks ------------------------------------------------------------------------------------------------------

    @cached_property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The dense mesh, innermost axis first, as (axis, size)."""
        sizes = {"tp": self.tp, "cp": self.cp, "pp": self.pp}
        out: list[tuple[str, int]] = []
        for axis in self.order.split("-"):
            if axis == "dp":
                out += [("dp_shard", self.dp_shard), ("dp_replicate", self.dp_replicate)]
            elif axis in sizes:
                out.append((axis, sizes[axis]))
        named = {a for a, _ in out}
        if "cp" not in named:
            out.insert(1, ("cp", self.cp))
        return tuple(out)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Mesh coordinates of ``rank``: the dense axes and etp, ep, edp."""
        out, rest = {}, rank
        for axis, size in self.axes:
            out[axis] = rest % size
            rest //= size
        place = self._place_in_stage(out)
        out["etp"] = place % self.etp
        out["ep"] = place // self.etp % self.ep
        out["edp"] = place // (self.etp * self.ep)
        return out

    def rank_at(self, coordinates: dict[str, int]) -> int:
        """The rank at dense coordinates (missing axes are 0)."""
        rank, stride = 0, 1
        for axis, size in self.axes:
            rank += coordinates.get(axis, 0) * stride
            stride *= size
        return rank

    def _place_in_stage(self, dense: dict[str, int]) -> int:
        place, stride = 0, 1
        for axis, size in self.axes:
            if axis != "pp":
                place += dense[axis] * stride
                stride *= size
        return place

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` only along ``axes`` (dense axes, or expert axes), ascending.

        ``dp`` stands for dp_shard and dp_replicate together.
        """
        wanted = [a for x in axes for a in (("dp_shard", "dp_replicate") if x == "dp" else (x,))]
        here = self.coordinates(rank)
        if any(a in EXPERT_AXES for a in wanted):
            sizes = {"etp": self.etp, "ep": self.ep, "edp": self.edp}
            strides = {"etp": 1, "ep": self.etp, "edp": self.etp * self.ep}
            base = sum(here[a] * strides[a] for a in EXPERT_AXES if a not in wanted)
            places = [base]
            for axis in EXPERT_AXES:
                if axis in wanted:
                    places = [p + i * strides[axis] for i in range(sizes[axis]) for p in places]
            return tuple(sorted(self._rank_in_stage(p, here["pp"]) for p in places))
        sizes = dict(self.axes)
        ranks = [dict(here)]
        for axis in wanted:
            ranks = [{**c, axis: i} for c in ranks for i in range(sizes[axis])]
        return tuple(sorted(self.rank_at(c) for c in ranks))

    def _rank_in_stage(self, place: int, pp_rank: int) -> int:
        dense = {"pp": pp_rank}
        for axis, size in self.axes:
            if axis != "pp":
                dense[axis] = place % size
                place //= size
        return self.rank_at(dense)

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """Every group along ``axes``, by its first rank."""
        for rank in range(self.world):
            group = self.group(rank, *axes)
            if group[0] == rank:
                yield group

    # -- text -------------------------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, text: str, world: int | None = None) -> Layout:
        """Read ``tp=8,pp=4,...``. With ``world``, data parallelism left out fills it.

        Raises InputError for an unknown key, a bad value, or degrees whose product is not the world.
        """
        return cls.derive(cls.read(text), world)

    @classmethod
    def read(cls, text: str) -> dict[str, Any]:
        """The keys of a LAYOUT string and their values, nothing derived; InputError for an unknown key or a bad value."""
        given = dict(pairs(text))
        values: dict[str, Any] = {}
        names = {f.name for f in fields(cls)}
        for key, raw in given.items():
            if key == "dp":
                values["dp"] = integer(key, raw)
                continue
            if key not in names:
                close = difflib.get_close_matches(key, sorted(names | {"dp"}), 1)
                raise InputError("layout", key, f"is not a key; keys are {', '.join(sorted(names))}", close[0] if close else None)
            values[key] = _value(key, raw)
        return values

    @classmethod
    def derive(cls, values: dict[str, Any], world: int | None = None) -> Layout:
        """Fill in what ``values`` leaves out (see the module's docstring); ``dp`` may stand for the product."""
        values = dict(values)
        fixed = values.get("tp", 1) * values.get("cp", 1) * values.get("pp", 1)
        dp = values.pop("dp", None)
        shard, replicate = values.get("dp_shard"), values.get("dp_replicate")
        if world is not None:
            if world % fixed:
                raise InputError("tp*cp*pp", fixed, f"must divide the {world} GPUs", nearest_divisor(world, fixed))
            if dp is not None and dp * fixed != world:
                raise InputError("dp", dp, f"tp*cp*pp*dp = {fixed * dp} must equal the {world} GPUs", world // fixed)
            if dp is None and (shard is None or replicate is None):
                dp = world // fixed
        if dp is not None:
            if shard is None and replicate is None:
                values["dp_shard"], values["dp_replicate"] = (dp, 1) if values.get("zero", 1) else (1, dp)
            elif shard is None or replicate is None:
                known = shard or replicate or 1
                name = "dp_shard" if shard is not None else "dp_replicate"
                if dp % known:
                    raise InputError(name, known, f"must divide dp = {dp}", nearest_divisor(dp, known))
                values["dp_replicate" if shard is not None else "dp_shard"] = dp // known
            elif shard * replicate != dp:
                raise InputError("dp", dp, f"must equal dp_replicate*dp_shard = {shard * replicate}", shard * replicate)
        layout = cls(**with_defaults(values))
        layout.check_products(world)
        return layout

    def check_products(self, world: int | None = None) -> None:
        """Raise InputError unless the product identities hold."""
        if world is not None and self.world != world:
            raise InputError("tp*cp*pp*dp", self.world, f"must equal the {world} GPUs", world)
        stage = self.tp * self.cp * self.dp
        if stage % (self.etp * self.ep):
            near = nearest_divisor(stage // self.etp, self.ep) if stage % self.etp == 0 else None
            raise InputError("ep", self.ep, f"etp*ep = {self.etp * self.ep} must divide tp*cp*dp = {stage}", near)
        ring, ulysses = self._cp_parts
        if ring * ulysses != self.cp:
            raise InputError("cp_kind", self.cp_kind, f"ring x ulysses = {ring * ulysses} must equal cp = {self.cp}", "ring")
        if self.stages and len(self.stages) != self.chunks:
            raise InputError(
                "stages", "|".join(map(str, self.stages)), f"needs pp*vpp = {self.chunks} counts, has {len(self.stages)}"
            )

    def text(self) -> str:
        """The canonical LAYOUT string: every key that differs from its default or is a degree."""
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            always = field.name in ("tp", "pp", "cp", "dp_replicate", "dp_shard", "zero", "micro_batch", "schedule", "recompute")
            if field.name == "etp" and self.ep > 1:
                always = True  # left out, it would be read as the target's default, which need not be 1
            if field.name == "sp" and self.tp > 1:
                always = True  # left out, tensor parallelism would be read as with it
            if value == field.default and not always:
                continue
            if field.name == "cp_kind" and self.cp == 1:
                continue
            parts.append(f"{field.name}={shown(value)}")
        return ",".join(parts)

    def __str__(self) -> str:
        return self.text()

    def with_(self, **changes: Any) -> Layout:
        return replace(self, **changes)


def with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """What a LAYOUT string implies where it is silent: virtual stages are interleaved, V-shaped schedules hold two chunks a rank, and
    tensor parallelism comes with sequence parallelism."""
    filled = dict(values)
    if filled.get("vpp", 1) > 1:
        filled.setdefault("schedule", "interleaved")
    if filled.get("schedule") in V_SHAPED:
        filled.setdefault("vpp", 2)
    filled.setdefault("sp", filled.get("tp", 1) > 1)
    return filled


def even_split(layers: int, chunks: int, first_extra: int = 0, last_extra: int = 0) -> tuple[int, ...]:
    """Layers of each chunk, as even as can be; ``first_extra`` and ``last_extra`` count the embedding and the head as layers.

    The remainder goes to the middle chunks, so that the ends, which also hold embedding and head, are never the longest.
    """
    total = layers + first_extra + last_extra
    base, rest = divmod(total, chunks)
    counts = [base] * chunks
    inside = sorted(range(chunks), key=lambda c: (c in (0, chunks - 1), abs(c - (chunks - 1) / 2), c))
    for chunk in inside[:rest]:
        counts[chunk] += 1
    counts[0] -= first_extra
    counts[-1] -= last_extra
    return tuple(counts)


def divisors(n: int) -> list[int]:
    """All positive divisors of ``n``, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def nearest_divisor(n: int, value: int) -> int:
    """The divisor of ``n`` closest to ``value`` in ratio, the smaller on ties."""
    return nearest(divisors(n), value)


def nearest(candidates: Sequence[int], value: int) -> int:
    """The candidate closest to ``value`` in ratio, the smaller on ties."""
    return min(candidates, key=lambda d: (abs(math.log(d / max(value, 1e-9))), d))


def _value(key: str, raw: str) -> Any:
    if key == "schedule":
        return one_of(key, raw, SCHEDULES, "1f1b")
    return str(Recompute.parse(raw)) if key == "recompute" else value_of(key, raw)
