"""The legal layouts, enumerated by prefixes.

A *prefix* fixes tp, context parallelism, pp, dp, ep and etp; its completions are *batch* choices (micro batch, schedule, vpp) times
*shard* choices (ZeRO, dp_replicate x dp_shard, order, dispatcher, offload), less the pairs that a rule forbids. A prefix together with
a batch choice is a *core*: all that the pipeline's time depends on but the gradient reduction at its ends. Every rule of
``planner.legality`` is asked as soon as the fields that it reads are chosen, and once per value.

Choices that are the same program twice are made once: without sharding ranks ZeRO is 0, ZeRO 0 replicates, orders that place every
rank alike are one, sequence parallelism goes with tp, and schedules need a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from cost_models.job import Job
from cost_models.layout import Layout, divisors
from planner.choices import BATCH_FIELDS, PREFIX_FIELDS, SHARD_FIELDS, SPLIT_FIELDS, WAY_FIELDS, Chosen
from planner.choices import Batch as Batch
from planner.choices import Prefix as Prefix
from planner.choices import Shard as Shard
from planner.legality import limits_of
from planner.rules.cluster import same_placement
from planner.rules.core import RULES, Case, Limits, Rule
from planner.rules.schedule import chunks_of
from planner.wishes import Wish as Wish
from planner.wishes import read_wishes as read_wishes
from planner.wishes import require_choices
from profiles.errors import InputError

UNEVEN_VPP = 8
"""Chunks a rank beyond which uneven ones are left out: of one or two layers each, some would take twice as long as others."""


_Asked = tuple[Rule, Callable[[Mapping[str, Any]], Any], dict[Any, bool]]
"""A rule, what reads its fields from chosen values, and what it said of those that it was asked about."""


class _ShardRules(NamedTuple):
    """Rules that read no split of dp, that read a split and no degree of the experts, a split and those, a split and another choice."""

    way: list[_Asked]
    dense: list[_Asked]
    split: list[_Asked]
    both: list[_Asked]


class Space:
    """The declared space of a job: what its target can express, less what the user pinned away.

    ``excluded``: each entry a conjunction of wishes; a layout that meets all of one is left out. ``offload``: whether host memory may
    be used.
    """

    def __init__(
        self,
        job: Job,
        pins: Sequence[Wish] = (),
        excluded: Sequence[Sequence[Wish]] = (),
        *,
        offload: bool = False,
        etp: bool = True,
    ) -> None:
        require_choices(pins, excluded)
        self.job, self.pins, self.excluded, self.offload = job, tuple(pins), tuple(tuple(e) for e in excluded), offload
        self.limits: Limits = limits_of(job)
        if offload and not self.limits.offload:
            rule = f"{self.limits.target} offloads nothing; plan it for another --execution"
            raise InputError("--allow-offload", True, rule, "--execution megatron")
        self._active = tuple(rule for rule in RULES.values() if rule.may_break(job, self.limits))
        self._asked: dict[str, _Asked] = {}
        self._rules: dict[tuple[frozenset[str], frozenset[str]], list[_Asked]] = {}
        self._shards: dict[Prefix, tuple[Shard, ...]] = {}
        self._split_memo: dict[tuple[Any, ...], dict[int, tuple[int, Shard]]] = {}
        self._pipeline_memo: dict[int, dict[str, list[int]]] = {}
        self._pipelined_memo: dict[tuple[int, ...], tuple[Batch, ...]] = {}
        self._dense_memo: dict[Any, list[tuple[int, int, int]]] = {}
        self._crossed: dict[tuple[str, bool, int], bool] = {}
        self._order_memo: dict[Prefix, list[str]] = {}
        self._placed: dict[tuple[bool, ...], list[str]] = {}
        self._batches: dict[tuple[int, int, int], tuple[Batch, ...]] = {}
        self._allowed: dict[tuple[str, Any], bool] = {}

    # -- asking the rules -------------------------------------------------------------------------------------------

    def _legal(self, chosen: Chosen, known: frozenset[str], new: frozenset[str]) -> bool:
        """Whether no rule that reads one of the ``new`` fields, and only ``known`` ones, is broken."""
        return self._keeps(chosen, self._rules_of(known, new))

    def _rules_of(self, known: frozenset[str], new: frozenset[str]) -> list[_Asked]:
        """The rules that read one of the ``new`` fields, and only ``known`` ones besides."""
        if (known, new) not in self._rules:
            self._rules[known, new] = [self._asked_of(r) for r in self._active if r.reads <= known | new and r.reads & new]
        return self._rules[known, new]

    def _asked_of(self, rule: Rule) -> _Asked:
        return self._asked.setdefault(rule.name, (rule, itemgetter(*sorted(rule.reads)), {}))

    def _keeps(self, chosen: Chosen, rules: Sequence[_Asked]) -> bool:
        """Whether no rule is broken; each is asked once for the values that it reads."""
        values = chosen.__dict__
        for rule, read, known in rules:
            at = read(values)
            good = known.get(at)
            if good is None:
                good = known[at] = next(rule.check(Case(self.job, chosen, self.limits)), None) is None
            if not good:
                return False
        return True

    def allowed(self, field: str, value: Any) -> bool:
        """Whether pins and one-field exclusions allow ``field = value``."""
        key = (field, value)
        if key not in self._allowed:
            one = [e[0] for e in self.excluded if len(e) == 1]
            self._allowed[key] = all(w.allows(value) for w in self.pins if w.field == field) and not any(
                w.allows(value) for w in one if w.field == field
            )
        return self._allowed[key]

    def _excluded(self, values: Mapping[str, Any]) -> bool:
        several = [e for e in self.excluded if len(e) > 1]
        return any(all(w.field in values and w.allows(values[w.field]) for w in e) for e in several)

    # -- prefixes ---------------------------------------------------------------------------------------------------

    @cached_property
    def prefixes(self) -> tuple[Prefix, ...]:
        """Every legal prefix that has at least one batch choice."""
        return tuple(self._prefixes())

    @property
    def has_layout(self) -> bool:
        """Whether there is a legal prefix at all, which is quicker to say than which."""
        return next(self._prefixes(), None) is not None

    def _prefixes(self) -> Iterator[Prefix]:
        world, model = self.job.cluster.gpus, self.job.model
        experts = model.moe.experts if model.moe else 1
        width = model.moe.width if model.moe else 1
        known0: frozenset[str] = frozenset()
        for tp in divisors(world):
            sp = tp > 1 and self.limits.sequence_parallel
            if not self.allowed("tp", tp) or not self.allowed("sp", sp):
                continue
            chosen = Chosen(tp=tp, sp=sp)
            step1 = frozenset(("tp", "sp"))
            if not self._legal(chosen, known0, step1):
                continue
            for cp in divisors(world // tp):
                if cp > self.job.seq_len or not self.allowed("cp", cp):
                    continue
                for kind in self._kinds(cp):
                    chosen = Chosen(tp=tp, sp=sp, cp=cp, cp_kind=kind)
                    step2 = frozenset(("cp", "cp_kind"))
                    if not self._legal(chosen, step1, step2):
                        continue
                    for pp in divisors(world // (tp * cp)):
                        if pp > model.num_layers or not self.allowed("pp", pp):
                            continue
                        dp = world // (tp * cp * pp)
                        if self.job.global_batch % dp or not self.allowed("dp", dp):
                            continue
                        chosen = Chosen(tp=tp, sp=sp, cp=cp, cp_kind=kind, pp=pp, dp=dp)
                        step3 = frozenset(("pp", "dp"))
                        if not self._legal(chosen, step1 | step2, step3) or not self.batches(tp, cp, pp, dp):
                            continue
                        yield from self._experts(chosen, step1 | step2 | step3, experts, width)

    def _experts(self, base: Chosen, known: frozenset[str], experts: int, width: int) -> Iterator[Prefix]:
        stage = base.tp * base.cp * base.dp
        chosen, rules = Chosen(**base.__dict__), self._rules_of(known, frozenset(("ep", "etp")))
        for ep in divisors(experts) if experts > 1 else [1]:
            if stage % ep or not self.allowed("ep", ep):
                continue
            for etp in self._expert_tensor(base.tp, stage // ep) if experts > 1 else [1]:
                if stage % (ep * etp) or width % etp or not self.allowed("etp", etp):
                    continue
                chosen.choose(("ep", "etp"), (ep, etp))
                if self._keeps(chosen, rules):
                    yield Prefix(base.tp, base.cp, base.cp_kind, base.pp, base.dp, ep, etp, base.sp)

    def _expert_tensor(self, tp: int, ranks: int) -> list[int]:
        """Degrees of expert tensor parallelism tried: whole experts, or split as the dense layers are; any where it is pinned."""
        return divisors(ranks) if any(w.field == "etp" for w in self.pins) else sorted({1, tp})

    def _kinds(self, cp: int) -> Iterator[str]:
        if cp == 1:
            yield "ring"
            return
        for kind in self.limits.cp_kinds:
            names = [f"ring{r}xulysses{cp // r}" for r in divisors(cp)[1:-1]] if kind == "hybrid" else [kind]
            for name in names:
                if self.allowed("cp_kind", name):
                    yield name

    # -- completions ------------------------------------------------------------------------------------------------

    def batches(self, tp: int, cp: int, pp: int, dp: int) -> tuple[Batch, ...]:
        """Micro batch, schedule and vpp that go with pp and dp (cp matters to 8-bit token counts only)."""
        key = (cp, pp, dp)
        if key not in self._batches:
            self._batches[key] = tuple(self._batch_choices(cp, pp, dp))
        return self._batches[key]

    def _batch_choices(self, cp: int, pp: int, dp: int) -> Iterator[Batch]:
        rules = self._rules_of(frozenset(("cp", "pp", "dp")), frozenset(("micro_batch",)))
        for micro in divisors(self.job.global_batch // dp):
            if self.allowed("micro_batch", micro) and self._keeps(Chosen(cp=cp, pp=pp, dp=dp, micro_batch=micro), rules):
                yield from self._pipelined(cp if self._pipeline_rules[2] else 1, pp, dp, micro)

    def _pipelined(self, cp: int, pp: int, dp: int, micro: int) -> tuple[Batch, ...]:
        """Schedules and chunks a rank that go with a micro batch."""
        key = (cp, pp, dp, micro)
        if key not in self._pipelined_memo:
            chosen, found = Chosen(cp=cp, pp=pp, dp=dp, micro_batch=micro), []
            schedule_rules, chunk_rules, _ = self._pipeline_rules
            for schedule, chunks in self._pipelines(pp).items():
                chosen.schedule = schedule
                if not self._keeps(chosen, schedule_rules):
                    continue
                for vpp in chunks:
                    chosen.vpp = vpp
                    if self._keeps(chosen, chunk_rules):
                        found.append(Batch(micro, schedule, vpp, self.job.global_batch // dp // micro))
            self._pipelined_memo[key] = tuple(found)
        return self._pipelined_memo[key]

    def _pipelines(self, pp: int) -> dict[str, list[int]]:
        """By schedule, the chunks a rank that may go with it at ``pp``, whatever the batch."""
        if pp not in self._pipeline_memo:
            layers = self.job.model.num_layers
            found = self._pipeline_memo[pp] = {}
            for schedule in self.schedules(pp):
                low, high = chunks_of(schedule)
                top = 1 if pp == 1 else min(high or layers, max(1, layers // pp))
                found[schedule] = [
                    vpp
                    for vpp in range(low if pp > 1 else 1, top + 1)
                    if self.allowed("vpp", vpp)
                    and self._worth_searching(pp, vpp)
                    and self._legal(Chosen(pp=pp, schedule=schedule, vpp=vpp), frozenset(("pp",)), frozenset(("schedule", "vpp")))
                ]
        return self._pipeline_memo[pp]

    @cached_property
    def _pipeline_rules(self) -> tuple[list[_Asked], list[_Asked], bool]:
        """The rules that read a schedule but no chunks; those that read chunks and more than the pipeline and its schedule; whether any of
        them reads the degree of context parallelism."""
        known = {"cp", "pp", "dp", *BATCH_FIELDS}
        of_schedule = self._rules_of(frozenset(("cp", "pp", "dp", "micro_batch")), frozenset(("schedule",)))
        of_chunks = [r for r in self._active if "vpp" in r.reads <= known and not r.reads <= {"pp", "schedule", "vpp"}]
        reads_cp = any("cp" in rule.reads for rule in (*of_chunks, *(rule for rule, _, _ in of_schedule)))
        return of_schedule, [self._asked_of(rule) for rule in of_chunks], reads_cp

    def _worth_searching(self, pp: int, vpp: int) -> bool:
        """Whether ``vpp`` chunks a rank are tried: many chunks only where they hold equally many layers, unless vpp is pinned."""
        return vpp <= UNEVEN_VPP or self.job.model.num_layers % (pp * vpp) == 0 or any(w.field == "vpp" for w in self.pins)

    def schedules(self, pp: int) -> list[str]:
        """Schedules tried at ``pp``; without a pipeline there is one, plain gradient accumulation, which a pinned schedule rules out."""
        pinned = {v for w in self.pins if w.field == "schedule" and w.op == "=" for v in w.values}
        if pp == 1:
            return ["1f1b"] if not pinned or "1f1b" in pinned else []
        return [s for s in self.limits.schedules if self.allowed("schedule", s) and (s not in self.limits.costed or s in pinned)]

    def shards(self, prefix: Prefix) -> tuple[Shard, ...]:
        """ZeRO, the split of dp, order, dispatcher and offload that go with a prefix."""
        if prefix not in self._shards:
            choices = self._legal_orders(prefix), self._dispatchers(prefix), self._offloads()
            self._shards[prefix] = tuple(self._shard_choices(prefix, *choices))
        return self._shards[prefix]

    def _shard_choices(
        self, prefix: Prefix, orders: Sequence[str], dispatchers: Sequence[str], offloads: Sequence[tuple[str, ...]]
    ) -> Iterator[Shard]:
        chosen = Chosen(**{f: getattr(prefix, f) for f in PREFIX_FIELDS})
        rules, ways = self._shard_rules, []
        for way in product(orders, dispatchers, offloads):
            chosen.choose(WAY_FIELDS, way)
            if self._keeps(chosen, rules.way):
                ways.append(way)
        for split in self._dense_splits(prefix, chosen):
            chosen.choose(SPLIT_FIELDS, split)
            if not self._keeps(chosen, rules.split):
                continue
            for way in ways:
                chosen.choose(WAY_FIELDS, way)
                if self._keeps(chosen, rules.both):
                    yield Shard(*split, *way)

    def _dense_splits(self, prefix: Prefix, chosen: Chosen) -> list[tuple[int, int, int]]:
        """Splits of dp with their ZeRO stage that no rule forbids that reads no degree of the experts: found once for those."""
        rules = self._shard_rules.dense
        reads = {"dp", "cp"}.union(*(rule.reads for rule, _, _ in rules))
        key = itemgetter(*(f for f in PREFIX_FIELDS if f in reads))(chosen.__dict__)
        if key not in self._dense_memo:
            found = self._dense_memo[key] = []
            for split in self._sharding(prefix):
                chosen.choose(SPLIT_FIELDS, split)
                if all(map(self.allowed, SPLIT_FIELDS, split)) and self._keeps(chosen, rules):
                    found.append(split)
        return self._dense_memo[key]

    @cached_property
    def _shard_rules(self) -> _ShardRules:
        """The rules of a prefix's completions."""
        split, way, experts = set(SPLIT_FIELDS), set(WAY_FIELDS), {"ep", "etp"}
        out = _ShardRules([], [], [], [])
        for rule in self._active:
            if rule.reads <= {*PREFIX_FIELDS, *SHARD_FIELDS} and rule.reads & {*SHARD_FIELDS}:
                one = (
                    out.way
                    if not rule.reads & split
                    else out.both
                    if rule.reads & way
                    else out.split
                    if rule.reads & experts
                    else out.dense
                )
                one.append(self._asked_of(rule))
        return out

    def _sharding(self, prefix: Prefix) -> Iterator[tuple[int, int, int]]:
        dp, cp = prefix.dp, prefix.cp
        zeros = self.limits.zero
        if 0 in zeros or dp * cp == 1:
            yield dp, 1, 0
        for shard in divisors(dp):
            if shard * cp == 1:
                continue
            for zero in zeros:
                if zero:
                    yield dp // shard, shard, zero

    def _orders(self, prefix: Prefix) -> list[str]:
        """Orders that place ranks differently, which only axes of more than one rank can."""
        key = (prefix.tp > 1, prefix.cp > 1, prefix.pp > 1, prefix.dp > 1)
        if key not in self._placed:
            seen = self._placed[key] = []
            for order in self.limits.orders:
                if self.allowed("order", order) and not any(same_placement(prefix, order, other) for other in seen):
                    seen.append(order)
        return self._placed[key]

    def _dispatchers(self, prefix: Prefix) -> Sequence[str]:
        if prefix.ep == 1:
            return ["alltoall"]
        return [d for d in self.limits.dispatchers if self.allowed("dispatcher", d)]

    def _offloads(self) -> Sequence[tuple[str, ...]]:
        options: list[tuple[str, ...]] = [()]
        pinned = [w for w in self.pins if w.field == "offload"]
        if self.offload or pinned:
            options += [(w,) for w in self.limits.offload]
            if len(self.limits.offload) > 1:
                options.append(tuple(sorted(self.limits.offload, reverse=True)))
        return [o for o in options if self.allowed("offload", o)]

    def compatible(self, prefix: Prefix, batch: Batch, shard: Shard) -> bool:
        """Whether no rule that reads both a batch and a shard field is broken, and no exclusion of several fields is met."""
        values = self._values(prefix, batch, shard)
        return self._keeps(Chosen(**values), self._crossing) and not self._excluded(values)

    @cached_property
    def _crossing(self) -> list[_Asked]:
        batch, shard = set(BATCH_FIELDS), set(SHARD_FIELDS)
        known = {*PREFIX_FIELDS, *batch, *shard}
        return [self._asked_of(r) for r in self._active if r.reads & batch and r.reads & shard and r.reads <= known]

    def _values(self, prefix: Prefix, batch: Batch, shard: Shard) -> dict[str, Any]:
        return {
            **{f: getattr(prefix, f) for f in PREFIX_FIELDS},
            **{f: getattr(batch, f) for f in BATCH_FIELDS},
            **{f: getattr(shard, f) for f in SHARD_FIELDS},
        }

    def columns_of(self, prefix: Prefix, batch: Batch) -> list[Shard]:
        """The shard choices that complete a core."""
        shards = self.shards(prefix)
        if self.excludes_pairs:
            return [s for s in shards if self.compatible(prefix, batch, s)]
        samples = {s.zero: s for s in shards}
        stages = {zero for zero, sample in samples.items() if self._goes(prefix, batch, zero, sample)}
        return list(shards) if len(stages) == len(samples) else [s for s in shards if s.zero in stages]

    @cached_property
    def excludes_pairs(self) -> bool:
        """Whether an exclusion names several fields, so that columns must be counted one by one."""
        return any(len(e) > 1 for e in self.excluded)

    @cached_property
    def may_offload(self) -> bool:
        return any(self._offloads())

    def offloads(self, what: str) -> bool:
        """Whether some layout has ``what`` (optimizer, activations) in host memory."""
        return any(what in some for some in self._offloads())

    @cached_property
    def counted_by(self) -> Callable[[Prefix], Any]:
        """What of a prefix says how many columns complete its cores: what the rules of a completion read, and what places ranks."""
        read = {"tp", "cp", "pp", "dp", "ep"}.union(*(rule.reads for rule in self._active if rule.reads & {*SHARD_FIELDS}))
        return attrgetter(*(f for f in PREFIX_FIELDS if f in read or self.excludes_pairs))

    def count(self, prefix: Prefix, batch: Batch) -> int:
        """How many columns complete a core."""
        return self.counts(prefix, [batch])[0]

    def counts(self, prefix: Prefix, batches: Sequence[Batch]) -> list[int]:
        """How many columns complete the cores of a prefix with each of these."""
        if self.excludes_pairs or self.may_offload:  # what is offloaded may not go with every split
            return [len(self.columns_of(prefix, batch)) for batch in batches]
        ways = len(self._legal_orders(prefix)) * len(self._dispatchers(prefix)) * len(self._offloads())
        if not ways:
            return [0] * len(batches)
        splits = self._splits(prefix).items()
        return [ways * sum(n for zero, (n, sample) in splits if self._goes(prefix, batch, zero, sample)) for batch in batches]

    def stages(self, prefix: Prefix, batch: Batch) -> frozenset[int]:
        """The ZeRO stages of the columns that complete a core."""
        if self.excludes_pairs or self.may_offload:
            return frozenset(s.zero for s in self.columns_of(prefix, batch))
        splits = self._splits(prefix).items()
        return frozenset(zero for zero, (_, sample) in splits if self._goes(prefix, batch, zero, sample))

    def zero_stages(self, piped: bool) -> list[int]:
        """The ZeRO stages that columns with a pipeline, or without one, may have."""
        return sorted(z for z in {0, *self.limits.zero} if not piped or z <= self.limits.max_zero_with_pp)

    def may_go(self, schedule: str, piped: bool, zero: int) -> bool:
        """Whether a ZeRO stage may go with a schedule, as far as was asked."""
        return self._crossed.get((schedule, piped, zero), True)

    def _splits(self, prefix: Prefix) -> dict[int, tuple[int, Shard]]:
        """Splits of dp by ZeRO stage: how many are legal, and one of them. They depend on the key alone."""
        key = (prefix.tp, prefix.cp, prefix.pp > 1, prefix.dp, prefix.ep, prefix.etp)
        if key not in self._split_memo:
            found: dict[int, tuple[int, Shard]] = {}
            order = self._legal_orders(prefix)
            if order:
                for shard in self._shard_choices(prefix, order[:1], self._dispatchers(prefix)[:1], self._offloads()[:1]):
                    number, sample = found.get(shard.zero, (0, shard))
                    found[shard.zero] = number + 1, sample
            self._split_memo[key] = found
        return self._split_memo[key]

    def _goes(self, prefix: Prefix, batch: Batch, zero: int, sample: Shard) -> bool:
        key = (batch.schedule, prefix.pp > 1, zero)
        if key not in self._crossed:
            self._crossed[key] = self.compatible(prefix, batch, sample)
        return self._crossed[key]

    def _legal_orders(self, prefix: Prefix) -> list[str]:
        """Orders that no rule forbids and that place ranks differently."""
        if prefix not in self._order_memo:
            self._order_memo[prefix] = self._find_orders(prefix)
        return self._order_memo[prefix]

    def _find_orders(self, prefix: Prefix) -> list[str]:
        known = frozenset(PREFIX_FIELDS)
        base = {f: getattr(prefix, f) for f in PREFIX_FIELDS}
        return [o for o in self._orders(prefix) if self._legal(Chosen(**base, order=o), known, frozenset(("order",)))]

    def layout(self, prefix: Prefix, batch: Batch, shard: Shard, stages: tuple[int, ...] = (), recompute: str = "none") -> Layout:
        """The column as a Layout, with a choice of stages and recompute."""
        return Layout(
            tp=prefix.tp, pp=prefix.pp, vpp=batch.vpp, cp=prefix.cp, cp_kind=prefix.cp_kind, ep=prefix.ep, etp=prefix.etp,
            dp_replicate=shard.dp_replicate, dp_shard=shard.dp_shard, zero=shard.zero, order=shard.order, sp=prefix.sp,
            micro_batch=batch.micro_batch, schedule=batch.schedule, recompute=recompute, stages=stages, dispatcher=shard.dispatcher,
            offload=shard.offload,
        )  # fmt: skip
