"""Where experts go: from a routing histogram to the placement whose most loaded rank is least loaded, with a bound.

Let ``l_e`` be the tokens of expert e, N ranks, S = (E + R) / N slots a rank. An expert may have c >= 1 copies, on c different
ranks, each with l_e / c of its tokens. The program:

    y[e, c] in {0, 1}      expert e has c copies                    one_count:    sum_c y[e, c] = 1
    x[e, c, n] in {0, 1}   one of its c copies is on rank n         copies:       sum_n x[e, c, n] = c y[e, c]
                                                                    slots:        sum_{e,c} x[e, c, n] = S
    z                      tokens of the most loaded rank           most_loaded:  sum_{e,c} l_e / c x[e, c, n] <= z
    minimise z

A greedy placement improved by swaps usually meets a combinatorial bound, and is then proved without the program; else the program
is solved (HiGHS, one thread, a node limit) where it is small enough, and the gap that is left is stated.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles.errors import InputError

LARGEST_PROGRAM = 4000
"""Binaries beyond which the integer program is not tried."""


@dataclass(frozen=True)
class Placement:
    """``ranks[n]``: the experts on rank n (an expert on several ranks shares its tokens evenly among them). Loads in tokens."""

    ranks: tuple[tuple[int, ...], ...]
    loads: tuple[float, ...]
    plain_most_loaded: float
    """The most loaded rank when expert e sits on rank e // (E / N)."""
    bound: float
    """No placement has a less loaded most loaded rank than this."""

    @property
    def most_loaded(self) -> float:
        return max(self.loads)

    @property
    def mean(self) -> float:
        return sum(self.loads) / len(self.loads)

    @property
    def imbalance(self) -> float:
        """Max / mean tokens of a rank."""
        return self.most_loaded / self.mean if self.mean else 1.0

    @property
    def plain_imbalance(self) -> float:
        return self.plain_most_loaded / self.mean if self.mean else 1.0

    @property
    def gap(self) -> float:
        """1 - bound / most loaded."""
        return max(0.0, 1 - self.bound / self.most_loaded) if self.most_loaded else 0.0

    @property
    def proved(self) -> bool:
        """The bound meets the placement, to the solver's tolerance."""
        return self.gap <= 1e-6

    def to_json(self) -> dict[str, Any]:
        return {
            "ranks": [list(r) for r in self.ranks], "loads": list(self.loads), "most_loaded": self.most_loaded, "mean": self.mean,
            "imbalance": self.imbalance, "plain_imbalance": self.plain_imbalance, "bound": self.bound, "gap": self.gap, "proved": self.proved,
        }  # fmt: skip


def place(loads: Sequence[float], ep: int, redundant: int = 0) -> Placement:
    """Place ``len(loads)`` experts, and ``redundant`` further copies, on ``ep`` ranks.

    Raises InputError where experts, or experts and redundant slots, do not divide by ``ep``, or a load is negative.
    """
    experts = len(loads)
    if ep < 1 or experts % ep:
        from cost_models.layout import nearest_divisor

        raise InputError("ep", ep, f"must divide the {experts} experts", nearest_divisor(max(experts, 1), max(ep, 1)))
    if redundant < 0 or (experts + redundant) % ep:
        raise InputError(
            "redundant",
            redundant,
            f"experts and redundant slots ({experts + redundant}) must divide by ep = {ep}",
            redundant // ep * ep,
        )
    if redundant > experts * (ep - 1):
        raise InputError(
            "redundant",
            redundant,
            f"{experts} experts have at most {experts * (ep - 1)} further places on {ep} ranks",
            experts * (ep - 1),
        )
    if any(not 0 <= x < float("inf") for x in loads):
        raise InputError("routing", min(loads), "token counts must be finite and not negative", 0)
    loads = [float(x) for x in loads]
    slots = (experts + redundant) // ep
    each = experts // ep
    plain = max(sum(loads[n * each : (n + 1) * each]) for n in range(ep))
    bound = _bound(loads, ep, slots, redundant)
    best = _greedy(loads, ep, slots, redundant)
    if not redundant:
        order = [list(range(n * each, (n + 1) * each)) for n in range(ep)]
        best = min(best, _improve(loads, [1] * experts, order), key=lambda r: _most(loads, r))
    if _most(loads, best) > bound * (1 + 1e-9):
        solved = _program(loads, ep, slots, redundant, best)
        if solved is not None:
            best, bound = solved[0], max(bound, solved[1])
    copies = _copies(best, experts)
    found = tuple(sum(loads[e] / copies[e] for e in rank) for rank in best)
    return Placement(tuple(tuple(sorted(r)) for r in best), found, plain, min(bound, max(found)))


def _copies(ranks: Sequence[Sequence[int]], experts: int) -> list[int]:
    count = [0] * experts
    for rank in ranks:
        for e in rank:
            count[e] += 1
    return count


def _most(loads: Sequence[float], ranks: Sequence[Sequence[int]]) -> float:
    copies = _copies(ranks, len(loads))
    return max(sum(loads[e] / copies[e] for e in rank) for rank in ranks)


def _bound(loads: Sequence[float], ep: int, slots: int, redundant: int) -> float:
    """A load that the most loaded rank cannot be below: the mean; the best replication of single experts; and, without redundancy,
    the heaviest expert with the lightest company, and two of the ep + 1 heaviest sharing a rank."""
    mean = sum(loads) / ep
    ordered = sorted(loads, reverse=True)
    single = min(
        max((load / c for load, c in zip(ordered, counts, strict=False)), default=0.0)
        for counts in [_replicate(ordered, redundant, ep)]
    )
    if redundant:
        return max(mean, single)
    light = sorted(loads)
    alone = ordered[0] + sum(light[: slots - 1])
    pair = ordered[ep - 1] + ordered[ep] + sum(light[: max(0, slots - 2)]) if len(ordered) > ep else 0.0
    return max(mean, alone, pair)


def _replicate(loads: Sequence[float], redundant: int, most: int) -> list[int]:
    """Copies of each expert that make the largest share smallest: always give the next copy to the largest share."""
    import heapq

    copies = [1] * len(loads)
    heap = [(-load, e) for e, load in enumerate(loads)]
    heapq.heapify(heap)
    left = redundant
    while left and heap:
        _, e = heapq.heappop(heap)
        if copies[e] >= most:
            continue
        copies[e] += 1
        left -= 1
        heapq.heappush(heap, (-loads[e] / copies[e], e))
    return copies


def _greedy(loads: Sequence[float], ep: int, slots: int, redundant: int) -> list[list[int]]:
    """Heaviest share first onto the least loaded rank that has a slot and not this expert; then swaps."""
    copies = _replicate(loads, redundant, ep)
    shares = sorted(((loads[e] / copies[e], e) for e in range(len(loads)) for _ in range(copies[e])), key=lambda s: (-s[0], s[1]))
    ranks: list[list[int]] = [[] for _ in range(ep)]
    total = [0.0] * ep
    for share, e in shares:
        open_ranks = [n for n in range(ep) if len(ranks[n]) < slots and e not in ranks[n]]
        if not open_ranks:
            n, other = _make_room(ranks, e, slots)
            moved = ranks[n].pop(other)
            free = next(m for m in range(ep) if len(ranks[m]) < slots)
            ranks[free].append(moved)
            total[free] += loads[moved] / copies[moved]
            total[n] -= loads[moved] / copies[moved]
            open_ranks = [n]
        n = min(open_ranks, key=lambda k: (total[k], k))
        ranks[n].append(e)
        total[n] += share
    return _improve(loads, copies, ranks)


def _make_room(ranks: list[list[int]], expert: int, slots: int) -> tuple[int, int]:
    """A rank without ``expert`` and the place on it of an expert that the one rank with a free slot lacks."""
    free = next(rank for rank in ranks if len(rank) < slots)
    for n, rank in enumerate(ranks):
        if expert not in rank:
            for place_, other in enumerate(rank):
                if other not in free:
                    return n, place_
    raise InputError("redundant", len(ranks), "leaves no legal placement")


def _improve(loads: Sequence[float], copies: Sequence[int], ranks: list[list[int]]) -> list[list[int]]:
    """Swap an expert of the most loaded rank with a lighter one elsewhere while that helps."""
    ranks = [list(r) for r in ranks]
    share = [loads[e] / copies[e] for e in range(len(loads))]
    total = [sum(share[e] for e in r) for r in ranks]
    for _ in range(20 * len(loads)):
        worst = max(range(len(ranks)), key=lambda n: (total[n], -n))
        best: tuple[float, int, int, int] | None = None
        for n in range(len(ranks)):
            if n == worst:
                continue
            for i, a in enumerate(ranks[worst]):
                for j, b in enumerate(ranks[n]):
                    delta = share[a] - share[b]
                    if delta <= 0 or a in ranks[n] or b in ranks[worst]:
                        continue
                    height = max(total[worst] - delta, total[n] + delta)
                    if height < total[worst] * (1 - 1e-12) and (best is None or height < best[0]):
                        best = (height, n, i, j)
        if best is None:
            return ranks
        _, n, i, j = best
        delta = share[ranks[worst][i]] - share[ranks[n][j]]
        ranks[worst][i], ranks[n][j] = ranks[n][j], ranks[worst][i]
        total[worst] -= delta
        total[n] += delta
    return ranks


def _program(
    loads: Sequence[float], ep: int, slots: int, redundant: int, start: Sequence[Sequence[int]]
) -> tuple[list[list[int]], float] | None:
    """The integer program of the module's docstring; the placement and the solver's bound, None where it is too large."""
    experts = len(loads)
    most = min(ep, 1 + redundant)
    if experts * ep * most > LARGEST_PROGRAM:
        return None
    import pulp

    from planner.solver import bound_of, run

    program = pulp.LpProblem("experts", pulp.LpMinimize)
    z = pulp.LpVariable("z", lowBound=max(sum(loads) / ep, 0), upBound=_most(loads, start))
    counts = range(1, most + 1)
    x = {(e, c, n): pulp.LpVariable(f"x_{e}_{c}_{n}", cat="Binary") for e in range(experts) for c in counts for n in range(ep)}
    y = {(e, c): pulp.LpVariable(f"y_{e}_{c}", cat="Binary") for e in range(experts) for c in counts}
    program += z
    for e in range(experts):
        program += pulp.lpSum(y[e, c] for c in counts) == 1, f"one_count_{e}"
        for c in counts:
            program += pulp.lpSum(x[e, c, n] for n in range(ep)) == c * y[e, c], f"copies_{e}_{c}"
    for n in range(ep):
        program += pulp.lpSum(x[e, c, n] for e in range(experts) for c in counts) == slots, f"slots_{n}"
        program += pulp.lpSum(loads[e] / c * x[e, c, n] for e in range(experts) for c in counts) <= z, f"most_loaded_{n}"
    status = run(program, nodes=20000)
    if status not in ("optimal", "feasible"):
        return None
    bound = bound_of(program)
    ranks = [[e for e in range(experts) if any(x[e, c, n].value() and x[e, c, n].value() > 0.5 for c in counts)] for n in range(ep)]
    if any(len(r) != slots for r in ranks) or _most(loads, ranks) > _most(loads, start):
        ranks = [list(r) for r in start]
    return ranks, bound


# -- routing histograms ---------------------------------------------------------------------------------------------------


def read_histogram(path: str | Path) -> list[list[float]]:
    """Tokens by expert, one list a layer, from CSV (one row a layer; a header is skipped) or JSON (a list, a list of lists, or an object
    of such). Raises InputError."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("routing", str(path), f"cannot be read: {error.__class__.__name__}") from None
    try:
        rows = _json_rows(json.loads(text)) if path.suffix == ".json" else _csv_rows(text)
    except (ValueError, TypeError) as error:
        raise InputError("routing", str(path), f"is no table of token counts: {error}") from None
    if not rows or len({len(r) for r in rows}) != 1 or not rows[0]:
        raise InputError("routing", str(path), "needs one count an expert, and as many in every layer")
    if any(not 0 <= x < float("inf") for r in rows for x in r):
        raise InputError("routing", str(path), "token counts must be finite and not negative")
    return rows


def _json_rows(data: Any) -> list[list[float]]:
    if isinstance(data, dict):
        data = list(data.values())
    if not isinstance(data, list):
        raise ValueError("not a list")
    if data and isinstance(data[0], list):
        return [[float(x) for x in row] for row in data]
    return [[float(x) for x in data]]


def _csv_rows(text: str) -> list[list[float]]:
    rows: list[list[float]] = []
    for number, row in enumerate(csv.reader(text.splitlines())):
        cells = [c for c in row if c.strip()]
        try:
            values = [float(c) for c in cells]
        except ValueError:
            if number:
                raise
            continue
        if values:
            rows.append(values)
    return rows


def zipf(experts: int, exponent: float, tokens: float = 1.0) -> list[float]:
    """Loads that fall as rank^-exponent, summing to ``tokens``: a synthetic skew where there is no histogram."""
    raw = [(e + 1) ** -exponent for e in range(experts)]
    return [tokens * r / sum(raw) for r in raw]


def plain_imbalance(loads: Sequence[float], ep: int) -> float:
    """Max / mean tokens of a rank where expert e sits on rank e // (experts / ep); 1 where nothing is routed."""
    each = len(loads) // ep
    total = sum(loads)
    return max(sum(loads[n * each : (n + 1) * each]) for n in range(ep)) * ep / total if total else 1.0


def imbalance(rows: Sequence[Sequence[float]], ep: int, redundant: int = 0, *, optimised: bool = True) -> float:
    """Max / mean tokens of an expert-parallel rank, the mean over layers; in plain order, or in the best placement found."""
    if ep == 1:
        return 1.0
    if not optimised and not redundant:
        return sum(plain_imbalance(row, ep) for row in rows) / len(rows)
    placed = [place(row, ep, redundant) for row in rows]
    return sum(p.imbalance if optimised else p.plain_imbalance for p in placed) / len(placed)
