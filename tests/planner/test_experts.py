"""Expert placement: document C's example, brute force on small instances, histograms."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import numpy as np
import pytest

from cost_models.layout import Layout
from cost_models.memory import stage_memory
from cost_models.moe_ops import imbalance as busiest
from cost_models.step import estimate
from planner.experts import imbalance, place, read_histogram, zipf
from planner.routing import imbalances, place_layers
from profiles.errors import InputError
from tests.planner.jobs import decoder, job


def brute_force(loads: tuple[int, ...], ep: int, redundant: int) -> float:
    """The least load of the most loaded rank over every choice of copies and every placement with distinct experts a rank."""
    experts, slots = len(loads), (len(loads) + redundant) // ep
    best = float("inf")
    for extra in itertools.combinations_with_replacement(range(experts), redundant):
        copies = [1 + extra.count(e) for e in range(experts)]
        if max(copies) > ep:
            continue
        best = min(best, _fill([loads[e] / copies[e] for e in range(experts)], copies, ep, slots, best))
    return best


def _fill(share: list[float], left: list[int], ranks: int, slots: int, best: float) -> float:
    """Fill one rank in every way, then the others."""
    if ranks == 0:
        return 0.0
    found = float("inf")
    for held in itertools.combinations([e for e in range(len(left)) if left[e]], slots):
        weight = sum(share[e] for e in held)
        rest = [n - (e in held) for e, n in enumerate(left)]
        if weight < min(best, found) and max(rest) <= ranks - 1:
            found = min(found, max(weight, _fill(share, rest, ranks - 1, slots, best)))
    return found


@pytest.mark.parametrize("seed", range(24))
def test_placements_of_random_small_instances_are_those_of_brute_force(seed):
    draw = random.Random(seed)
    ep = draw.choice((2, 3))
    experts = ep * draw.choice((1, 2)) if ep == 3 else 2 * draw.choice((1, 2, 3))
    redundant = draw.choice((0, 0, ep)) if experts * (ep - 1) >= ep else 0
    loads = tuple(draw.randint(0, 20) for _ in range(experts))
    found = place(loads, ep, redundant)
    best = brute_force(loads, ep, redundant)
    assert found.most_loaded == pytest.approx(best)
    assert found.bound <= best + 1e-9
    assert found.proved
    assert sum(found.loads) == pytest.approx(sum(loads))


def test_every_expert_is_placed_every_rank_is_full_and_none_holds_an_expert_twice():
    loads = zipf(64, 1.0, 1e6)
    for redundant in (0, 8, 16):
        found = place(loads, 8, redundant)
        assert {e for rank in found.ranks for e in rank} == set(range(64))
        assert {len(rank) for rank in found.ranks} == {(64 + redundant) // 8}
        assert all(len(set(rank)) == len(rank) for rank in found.ranks)
        assert found.bound <= found.most_loaded <= found.plain_most_loaded + 1e-9
    assert place(loads, 8, 16).imbalance < place(loads, 8).imbalance < place(loads, 8).plain_imbalance


def test_imbalance_of_a_histogram_is_the_mean_over_layers_and_one_without_expert_parallelism():
    rows = [[1.0, 1.0, 6.0, 0.0], [2.0, 2.0, 2.0, 2.0]]
    assert imbalance(rows, 2, optimised=False) == pytest.approx((1.5 + 1) / 2)
    assert imbalance(rows, 2) == pytest.approx((1.5 + 1) / 2)
    assert imbalance(rows, 2, redundant=2) == pytest.approx(1)
    assert imbalance(rows, 1) == 1


def test_histograms_are_read_from_csv_and_json(tmp_path):
    (tmp_path / "h.csv").write_text("e0,e1,e2,e3\n1,1,6,0\n2,2,2,2\n")
    (tmp_path / "h.json").write_text(json.dumps({"layer 0": [1, 1, 6, 0], "layer 1": [2, 2, 2, 2]}))
    assert read_histogram(tmp_path / "h.csv") == read_histogram(tmp_path / "h.json") == [[1, 1, 6, 0], [2, 2, 2, 2]]
    assert [p["most_loaded"] for p in place_layers(tmp_path / "h.csv", None, None, 2, 2)] == [4, 4]


@pytest.mark.parametrize("text", ["", "a,b\nc,d\n", "1,2\n1\n", "1,-2\n", "1,nan\n", "1,inf\n"])
def test_what_is_no_histogram_is_refused(tmp_path, text):
    (tmp_path / "h.csv").write_text(text)
    with pytest.raises(InputError) as refused:
        read_histogram(tmp_path / "h.csv")
    assert refused.value.field == "routing"


def test_counts_that_do_not_divide_are_refused_with_the_nearest():
    for arguments, field, nearest in (
        ((range(6), 4), "ep", 3),
        ((range(4), 2, 1), "redundant", 0),
        ((range(4), 2, 6), "redundant", 4),
    ):
        with pytest.raises(InputError) as refused:
            place(list(arguments[0]), *arguments[1:])
        assert (refused.value.field, refused.value.nearest) == (field, nearest)
    for given in ((None, None, 64), (None, 0.5, None)):
        with pytest.raises(InputError):
            place_layers(*given, 8, 0)


def test_a_histogram_gives_the_imbalance_of_every_ep_with_experts_in_order(tmp_path):
    """Layers 6 1 1 0 and 2 2 2 2 of four experts: at ep 2 the busiest rank has 7 and 4 of a mean of 4, at ep 4 6 and 2 of 2."""
    file = tmp_path / "routing.csv"
    file.write_text("e0,e1,e2,e3\n6,1,1,0\n2,2,2,2\n", encoding="utf-8")
    model = decoder(experts=4)
    assert imbalances(file, model) == ((1, 1.0), (2, (7 / 4 + 1) / 2), (4, (3 + 1) / 2))
    with pytest.raises(InputError, match="4 experts"):
        imbalances(file, decoder(experts=8))
    with pytest.raises(InputError, match="no experts"):
        imbalances(file, decoder())


def test_a_histogram_costs_a_layout_what_its_own_ep_is_worth():
    routing = ((1, 1.0), (2, 1.3), (4, 1.7))
    plain = job(decoder(experts=4, hidden=256, width=512), "h100-sxm:1x4", 1024, 16)
    routed = replace(plain, routing=routing)
    for ep, factor in routing:
        layout = Layout(ep=ep, dp_shard=4, zero=1)
        as_said = estimate(plain.with_imbalance(factor), layout)
        assert estimate(routed, layout).step_seconds == as_said.step_seconds
        assert [s.needed for s in stage_memory(routed, layout)] == [s.needed for s in as_said.memory]
    degrees = np.array([1, 2, 4, 2])
    assert list(busiest(routed, degrees, plain.model.moe)) == [1.0, 1.3, 1.7, 1.3]
    assert "moe_imbalance: the default, no histogram given" not in estimate(routed, Layout(ep=4, dp_shard=4)).guessed


def test_a_plan_with_a_histogram_is_slower_where_the_histogram_is_skewed_and_says_by_how_much(tmp_path, invoke):
    """All tokens go to the first 32 of 128 experts: expert parallelism leaves ranks idle."""
    file = tmp_path / "routing.json"
    base = ["plan", "qwen3-30b-a3b", "--cluster", "h100-sxm:2x8", "--seq-len", "4k", "--global-batch", "64", "--top", "0", "--json"]

    def planned(*more: str) -> dict:
        code, out, err = invoke(*base, "--pin", "tp=1,pp=1,cp=1,ep>=2", *more)
        assert code == 0, err
        return json.loads(out)

    file.write_text(json.dumps([1] * 128), encoding="utf-8")
    even = planned("--routing", str(file))
    assert even["layout"]["ep"] > 1
    assert even["estimate"]["step_seconds"] == pytest.approx(planned("--moe-imbalance", "1")["estimate"]["step_seconds"])
    assert "1.00 times the mean" in even["certificate"]["notes"][-1]
    file.write_text(json.dumps([4] * 32 + [0] * 96), encoding="utf-8")
    skewed = planned("--routing", str(file))
    assert skewed["job_settings"]["routing"] == [[1, 1.0], [2, 2.0], *[[ep, 4.0] for ep in (4, 8, 16, 32, 64, 128)]]
    assert skewed["estimate"]["step_seconds"] > even["estimate"]["step_seconds"]
    code, _, err = invoke(*base, "--routing", str(file), "--moe-imbalance", "1.2")
    assert code == 2 and "--moe-imbalance" in err
