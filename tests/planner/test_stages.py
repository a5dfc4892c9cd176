"""The split of layers over ranks by dynamic programming is the best of all splits, each of whose paths is added up chunk by chunk."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest

from planner.columns import Units, alike_spans, prefix_counts
from planner.fitting import Policy
from planner.paths import Paths
from planner.solve_column import most_that_fits
from planner.stages import best_split
from tests.planner.jobs import decoder, job


def random_units(rng: np.random.Generator, kinds: int, modes: int) -> Units:
    b = rng.uniform(1.0, 3.0, (kinds, modes))
    return Units(
        f=rng.uniform(0.5, 2.0, kinds), b=b, w=rng.uniform(0.5, 2.0, kinds), sf=np.zeros(kinds), sb=np.zeros((kinds, modes)),
        embedding=tuple(rng.uniform(0.0, 1.0, 3)), head=tuple((*rng.uniform(0.0, 3.0, 3), 0.0, 0.0) for _ in range(modes)),
    )  # fmt: skip


def splits_of(layers: int, ranks: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, layers), ranks - 1):
        ends = (0, *cuts, layers)
        yield tuple(b - a for a, b in pairwise(ends))


class Stages:
    """What stages cost, at random by (rank, layers by kind): what is asked for, and what a path takes, added up chunk by chunk."""

    def __init__(self, seed: int, kinds: int, schedule: str, ranks: int, layers: int, microbatches: int) -> None:
        dense = {1: 0, 2: 2}[kinds]
        self.job = job(decoder(layers, experts=4, dense_first=dense), "h100-sxm:1x8", 512, 64)
        self.prefix, self.ranks, self.layers, self.transfer = prefix_counts(self.job), ranks, layers, 0.1
        self.units = random_units(np.random.default_rng(seed), kinds, 3)
        self.paths = Paths(schedule, ranks, 1, microbatches, False)
        self.seed = seed
        self.asked: set[tuple[int, tuple[int, ...]]] = set()

    def price(self, rank: int, start: int, stop: int) -> tuple[float, float, float]:
        counts = tuple((self.prefix[stop] - self.prefix[start]).tolist())
        assert (rank, counts) not in self.asked
        self.asked.add((rank, counts))
        return self.drawn(rank, counts)

    def drawn(self, rank: int, counts: tuple[int, ...]) -> tuple[float, float, float]:
        rng = random.Random(f"{self.seed} {rank} {counts}")
        fits = rng.random() < 0.9
        return (rng.choice([0.0, 0.5]) if fits else float("inf"), rng.random(), 0.7 if rank == 0 else rng.random())

    def longest(self, counts: tuple[int, ...]) -> float:
        """Seconds of the longest seed path on one rank; of those before and behind it, without recompute."""
        at, u = np.cumsum((0, *counts)), self.units
        each = [self.prefix[b] - self.prefix[a] for a, b in pairwise(at)]
        priced = [self.drawn(r, tuple(n.tolist())) for r, n in enumerate(each)]
        if not all(np.isfinite(extra) for extra, _, _ in priced):
            return float("inf")
        f, b, w = (np.array([float(n @ s) for n in each]) for s in (u.f, u.b.min(axis=1), u.w))
        for part, first, last in zip((f, b, w), u.embedding, u.least_head, strict=True):
            part[0] += first
            part[-1] += last
        longest = 0.0
        for path in self.paths.rows:
            seconds = path.forward + path.backward_input + path.backward_weight
            rank = int(np.argmax(seconds))
            alone = all(len(set(part[:rank])) <= 1 and len(set(part[rank + 1 :])) <= 1
                        for part in (path.forward, path.backward_input, path.backward_weight))  # fmt: skip
            if not alone:
                continue
            extra, begin, _ = priced[rank]
            total = float(path.forward @ f + path.backward_input @ b + path.backward_weight @ w) + path.backward_input[rank] * extra
            total += self.transfer * float(np.sum(path.p2p_forward) + np.sum(path.p2p_backward))
            total += begin if path.first == rank else 0.0
            total += priced[path.last][2] if path.last in (0, rank) else 0.0
            longest = max(longest, total)
        return longest


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_the_split_is_the_best_of_all_splits(seed: int, kinds: int, schedule: str) -> None:
    ranks, layers = (2, 3, 4)[seed % 3], (7, 8, 9)[seed // 2]
    s = Stages(seed, kinds, schedule, ranks, layers, microbatches=6)
    every = {counts: s.longest(counts) for counts in splits_of(layers, ranks)}
    best = min(every.values())
    nothing = np.zeros((layers + 1, layers + 1))
    for limit in (float("inf"), best * (1 + 1e-9), best * (1 - 1e-9)):
        s.asked.clear()
        found = best_split(s.paths, s.units, s.prefix, alike_spans(s.job), s.transfer, nothing, s.price, 1, limit)
        if limit < best or best == float("inf"):
            assert found is None
        else:
            assert found is not None
            assert found.bound == pytest.approx(best, rel=1e-12)
            assert every[found.counts] == pytest.approx(best, rel=1e-12)


def test_stages_with_a_fewest_number_of_layers_have_as_many() -> None:
    s = Stages(3, 1, "1f1b", 3, 9, microbatches=6)
    s.drawn = lambda rank, counts: (0.0, 0.0, 0.0)  # type: ignore[method-assign]
    nothing = np.zeros((10, 10))
    found = best_split(s.paths, s.units, s.prefix, alike_spans(s.job), s.transfer, nothing, s.price, 3, float("inf"))
    assert found is not None and found.counts == (3, 3, 3)


def test_only_stages_of_splits_within_the_limit_are_looked_at() -> None:
    s = Stages(5, 2, "1f1b", 4, 9, microbatches=6)
    s.drawn = lambda rank, counts: (0.0, 0.0, 0.0)  # type: ignore[method-assign]
    least, nothing = min(map(s.longest, splits_of(9, 4))), np.zeros((10, 10))

    def looked_at(limit: float, again: float) -> int:
        s.asked.clear()
        best_split(s.paths, s.units, s.prefix, alike_spans(s.job), s.transfer, nothing + again, s.price, 1, limit)
        return len(s.asked)

    assert looked_at(0.9 * least, 0.0) == 0
    assert looked_at(least * (1 + 1e-9), 0.5) == 0
    assert 4 <= looked_at(least * (1 + 1e-9), 0.0) < looked_at(float("inf"), 0.0)


@pytest.mark.parametrize(
    "policy", [Policy(), Policy(False, 1), Policy(False, 2), Policy(False, 0, 1), Policy(False, 0, 3), Policy(False, 0, 5)]
)
def test_the_recompute_of_a_policy_is_the_least_of_its_mixes(policy: Policy) -> None:
    rng = np.random.default_rng(0)
    b = np.sort(rng.uniform(1.0, 3.0, (2, 3)), axis=1)
    counts = np.array([(n, m) for n in range(4) for m in range(5)])
    least = [min(float((np.array(mix) * (b - b[:, :1])).sum()) for mix in policy.mixes(tuple(n.tolist()), 3)) for n in counts]
    assert policy.recompute(counts, b) == pytest.approx(least)


def test_the_most_that_fits_is_found_from_any_guess() -> None:
    for most in range(10):
        for guess in range(12):
            assert most_that_fits(range(1, most + 1).__contains__, guess, 9) == most
