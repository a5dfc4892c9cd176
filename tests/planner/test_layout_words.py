"""Layouts in the width of a screen."""

from __future__ import annotations

import pytest

from cost_models.layout import Layout
from planner.layout_words import bare, short
from profiles.errors import InputError

STAGES = "7|" + "|".join(["8"] * 14) + "|7"


def test_long_stages_are_runs_and_read_back_as_the_same_layout() -> None:
    whole = Layout.parse(f"tp=1,pp=16,stages={STAGES}").text()
    longer = Layout.parse(f"tp=1,pp=48,stages=1|{'|'.join(['2'] * 46)}|1").text()
    assert "stages=7|8x14|7" in short(whole)
    assert "stages=1|2x46|1" in short(longer)
    assert Layout.parse(short(longer)) == Layout.parse(longer)


def test_a_recompute_choice_layer_by_layer_is_counted() -> None:
    text = "tp=1,pp=2,recompute=0-9:full/10-10:selective(layernorm,mlp_act)/11-20:full/21-31:selective(layernorm,mlp_act)"
    assert short(text) == "tp=1,pp=2,recompute=20 layers full + 12 layers selective(layernorm,mlp_act)"


def test_short_values_stay_as_they_are() -> None:
    text = "tp=8,pp=4,recompute=0-3:full/4-30:selective,stages=30|32|32|32"
    assert short(text) == text


def test_a_bare_layout_leaves_out_what_says_nothing() -> None:
    text = "tp=2,pp=1,cp=1,dp_replicate=1,dp_shard=4,zero=1,sp=true,micro_batch=1,schedule=1f1b,recompute=none"
    assert bare(text) == "tp=2,dp_shard=4,zero=1,micro_batch=1"


def test_a_run_is_four_digits_at_most() -> None:
    with pytest.raises(InputError, match="lists the layers of each chunk"):
        Layout.parse("tp=1,pp=2,stages=1x99999")
