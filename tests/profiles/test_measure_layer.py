"""What a layer computes, keeps and holds at its peak, counted; layers of a user's own module; the file they are written to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from profiles.errors import AxisplanError, InputError
from profiles.measure.counting import Counter, LiveBytes
from profiles.measure.layer import measure_layer, resolve
from profiles.measure.layer_profile import LayerProfile, LayerRow
from profiles.measure.layer_worker import Layer, count

CPU = torch.device("cpu")
FP32 = 4
MODULE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, hidden, width):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, width, bias=False), nn.Linear(width, hidden, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def shard(micro_batch, seq_len, tp=1, width=64):
    return Block(32, width // tp), torch.randn(micro_batch, seq_len, 32)

def fixed():
    return Block(32, 64), {"x": torch.randn(2, 8, 32)}

def wrong():
    return "no module"

def huge(micro_batch, seq_len):
    if seq_len > 8:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory: you tried to allocate")
    return Block(32, 64), torch.randn(micro_batch, seq_len, 32)
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_layers.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_layers", raising=False)
    return "my_layers"


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def test_an_mlps_flops_and_kept_bytes_are_those_of_the_formula() -> None:
    tokens = 2 * 8
    found = count(Layer((Mlp(), torch.randn(2, 8, 32)), CPU, torch.float32))
    assert found["forward_flops"] == 2 * tokens * 32 * 64 * 2
    assert found["backward_flops"] == 2 * found["forward_flops"]
    assert found["saved_bytes"] == tokens * (32 + 64) * FP32  # its input, and relu's result; relu's input is not needed
    assert found["parameter_bytes"] == 2 * 32 * 64 * FP32


def test_attention_on_a_cpu_is_counted() -> None:
    q = torch.randn(2, 4, 16, 8, requires_grad=True)
    with Counter() as forward:
        out = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    with Counter() as backward:
        out.sum().backward()
    assert forward.flops == 4 * 2 * 4 * 16 * 16 * 8
    assert backward.flops == 2.5 * forward.flops


def test_views_launch_nothing_and_kernels_move_bytes() -> None:
    a = torch.ones(8, 4)
    with Counter() as counter:
        (a.view(4, 8).transpose(0, 1) + 1.0).detach()
    assert (counter.kernels, counter.bytes) == (1, 2 * 8 * 4 * FP32)


def test_peak_counts_what_is_alive_at_once() -> None:
    with LiveBytes() as live:
        for _ in range(3):
            a = torch.empty(1000)
            del a
        b, c = torch.empty(1000), torch.empty(500)
    assert live.peak == 1500 * FP32
    assert b.numel() + c.numel() == 1500


def test_a_view_keeps_the_whole_storage() -> None:
    class Slice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2.0)[:, :1] ** 2

    found = count(Layer((Slice(), torch.randn(4, 100)), CPU, torch.float32))
    assert found["saved_bytes"] == 400 * FP32


def test_a_users_module_is_measured_over_shapes_and_shards(own_module: str) -> None:
    profile = measure_layer(
        f"{own_module}:shard", micro_batches=[1, 2], seq_lens=[8], tp=[1, 2], arguments={"width": 128}, budget_seconds=0.4
    )
    assert {row.key for row in profile.rows} == {(f"{own_module}:shard", tp, b, 8) for tp in (1, 2) for b in (1, 2)}
    whole, half = profile.row(f"{own_module}:shard", 1, 2, 8), profile.row(f"{own_module}:shard", 2, 2, 8)
    assert whole is not None
    assert half is not None
    assert whole.forward_flops == 2 * half.forward_flops == 2 * 16 * 32 * 128 * 2
    assert whole.parameter_bytes == 2 * half.parameter_bytes
    assert whole.forward_seconds > 0
    assert whole.peak_bytes > whole.saved_bytes > half.saved_bytes


def test_a_function_without_parameters_and_keyword_inputs_will_do(own_module: str) -> None:
    (row,) = measure_layer(f"{own_module}:fixed", name="mine", seq_lens=[8], budget_seconds=0.2).rows
    assert (row.name, row.saved_bytes) == ("mine", 16 * (32 + 64) * FP32)


def test_a_shape_that_runs_out_of_memory_is_a_row_and_the_rest_goes_on(own_module: str) -> None:
    rows = measure_layer(f"{own_module}:huge", seq_lens=[16, 8], budget_seconds=0.2).rows
    assert [(row.seq_len, row.failed) for row in rows] == [(16, "out of memory"), (8, "")]


@pytest.mark.parametrize(
    ("target", "word"),
    [
        ("my_layers", "package.module:function"),
        ("my_layers:absent", "no function absent"),
        ("no_such_module:f", "cannot be imported"),
    ],
)
def test_a_function_that_is_not_there_is_named(own_module: str, target: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        resolve(target)


def test_a_function_that_returns_something_else_is_refused(own_module: str) -> None:
    with pytest.raises(AxisplanError, match=r"returns \(module, example_inputs\)"):
        measure_layer(f"{own_module}:wrong", budget_seconds=0.2)


def test_several_processes_need_the_layer_by_name() -> None:
    with pytest.raises(InputError, match="by name"):
        measure_layer(lambda: None, processes=2)


ROWS = (
    LayerRow(name="a", micro_batch=1, seq_len=8, forward_seconds=1.0, backward_seconds=2.0),
    LayerRow(name="a", micro_batch=2, seq_len=8, failed="out of memory"),
)


@pytest.mark.parametrize("name", ["p.yaml", "p.json"])
def test_a_layer_profile_is_read_back_as_written(tmp_path: Path, name: str) -> None:
    profile = LayerProfile(host="here", date="2026-01-01", device="cpu", processes=4, rows=ROWS)
    profile.save(tmp_path / name)
    again = LayerProfile.load(tmp_path / name)
    assert again == profile
    assert again.row("a", 1, 1, 8) == ROWS[0]
    assert again.row("a", 1, 2, 8) is None
    assert again.row("a", 2, 1, 8) is None


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("rows: [", "not valid YAML"),
        ("rows: 3", "profile.rows"),
        ("rows: [{name: a, micro_batch: 1, seq_len: 8, forward_seconds: -1}]", "forward_seconds"),
        ("rows: [{name: a, micro_batch: 1, seq_len: 8, forward_secs: 1}]", "forward_secs"),
        ("version: 2\nrows: []", "version"),
    ],
)
def test_a_broken_layer_profile_names_the_field(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(InputError, match=word):
        LayerProfile.load(tmp_path / "p.yaml")


def test_a_missing_layer_profile_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        LayerProfile.load(tmp_path / "absent.yaml")
