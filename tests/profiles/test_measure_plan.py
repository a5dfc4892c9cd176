"""Which operations are timed, and in which order."""

from __future__ import annotations

from itertools import islice

import pytest

from profiles.errors import InputError
from profiles.measure import plan
from profiles.measure.fitting import FEWEST
from profiles.measure.gpu_worker import FEWEST_ATTENTIONS
from profiles.measure.link_worker import candidates
from profiles.measure.links import check_axes, default_axes
from profiles.operations import Matmul

BOUNDS = plan.Bounds(64, 4096, 5e9, 1e9)


def test_every_product_is_within_bounds_and_those_held_out_have_no_short_side() -> None:
    samples = list(plan.matmuls("fp32", BOUNDS, (256, 1024)))
    assert len(samples) > 300
    for s in samples:
        op = s.operation
        assert op.flops <= BOUNDS.flops
        assert min(op.m, op.n, op.k) >= (256 if s.held_out else 64)
        assert max(op.m, op.n, op.k) <= BOUNDS.largest * 1.1
        assert op.weight_gradient is (s.form == "weight_gradient")


def test_a_short_prefix_already_spans_sizes_forms_and_has_judges() -> None:
    first = list(islice(plan.matmuls("bf16", BOUNDS, (256, 1024, 2048)), 25))
    assert {s.form for s in first} == {"forward", "input_gradient", "weight_gradient"}
    assert 3 <= sum(s.held_out for s in first) <= 8
    for side in ("m", "n", "k"):
        sizes = [getattr(s.operation, side) for s in first if not s.held_out]
        assert max(sizes) / min(sizes) >= 16


def test_no_product_is_both_fitted_and_held_out() -> None:
    first = list(islice(plan.matmuls("fp32", BOUNDS, (256, 1024)), 200))
    shapes = {flag: {(s.operation.m, s.operation.n, s.operation.k) for s in first if s.held_out is flag} for flag in (True, False)}
    assert not shapes[True] & shapes[False]


def test_the_three_products_of_a_linear_layer_have_its_sides() -> None:
    sides = {frozenset((s.operation.m, s.operation.n, s.operation.k)) for s in plan.training_products("fp32", BOUNDS, (256,))}
    assert frozenset((256, 512, 1408)) in sides


def test_attention_covers_enough_lengths_to_fit_before_other_head_sizes() -> None:
    fitted = (s for s in plan.attentions("fp32", BOUNDS, head_dims=(64, 128), longest=2048) if not s.held_out)
    first = list(islice(fitted, FEWEST_ATTENTIONS))
    forward = [s.operation for s in first if not s.operation.backward and s.operation.qk_dim == 64]
    assert len(forward) >= FEWEST
    assert len({op.q_len for op in forward}) >= 4
    assert all(op.pairs == op.q_len * (op.q_len + 1) // 2 for op in forward)


def test_message_sizes_start_with_the_ends() -> None:
    axes = default_axes(4)
    plan_ = list(candidates(axes, ["all_reduce", "send_recv"], [1 << 10, 1 << 14, 1 << 20, 1 << 24], alone=False))
    sizes = list(dict.fromkeys(s.operation.bytes for s in plan_))
    assert sizes == [1 << 10, 1 << 24, 1 << 20, 1 << 14]
    assert {(s.operation.kind, s.ranks, s.groups) for s in plan_} == {
        ("all_reduce", 2, 2),
        ("all_reduce", 4, 1),
        ("send_recv", 2, 2),
    }


def test_one_group_alone_is_timed_beside_all_at_once() -> None:
    plan_ = list(candidates({"dp": [[0, 2], [1, 3]]}, ["all_gather"], [1 << 10]))
    assert [(s.groups, s.stride) for s in plan_] == [(2, 2), (1, 2)]


def test_messages_are_whole_elements_for_every_rank() -> None:
    (sample,) = candidates({"all": [[0, 1, 2]]}, ["all_gather"], [1000])
    assert sample.operation.bytes == 1008


def test_default_axes_are_every_divisor() -> None:
    assert default_axes(4) == {"2 ranks": [[0, 1], [2, 3]], "4 ranks": [[0, 1, 2, 3]]}
    assert default_axes(8, strided=True)["4 ranks, 2 apart"] == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize(
    ("groups", "word"),
    [([[0, 1], [2]], "one size"), ([[0]], "at least two"), ([[0, 1], [1, 2]], "one group"), ([[0, 4]], "0 to 3")],
)
def test_impossible_groups_are_refused(groups: list[list[int]], word: str) -> None:
    with pytest.raises(InputError, match=word):
        check_axes({"tp": groups}, 4)


def test_a_sample_is_a_matrix_product() -> None:
    assert isinstance(plan.product("fp32", 2, 3, 4).operation, Matmul)
