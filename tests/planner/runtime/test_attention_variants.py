"""Sinks and output gates against their definitions, written out."""

from __future__ import annotations

import pytest
import torch

from planner.runtime.attention import Tokens, attend
from planner.runtime.attention_blocks import attend_backward, attend_forward
from planner.runtime.context import ring_spans


def explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int, scale: float) -> torch.Tensor:
    """Softmax over the keys a query sees and one sink; the sink's probability gives nothing (gpt-oss)."""
    s, _, heads, _ = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * scale
    i, j = torch.arange(s)[:, None], torch.arange(s)[None]
    scores = scores.masked_fill((j > i) | (i - j >= window if window else False), float("-inf"))
    both = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1).softmax(-1)
    return torch.einsum("bhqk,kbhd->qbhd", both[..., :-1], v)


def test_a_sink_takes_its_share_of_every_row_and_gradients_follow() -> None:
    torch.manual_seed(0)
    for window in (0, 3):
        q, k, v = (torch.randn(7, 2, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
        sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(7, 2, 4, 4, dtype=torch.float64)
        results = [explicit(q, k, v, sinks, window, 0.5), attend(q, k, v, Tokens((0, 7)), window, 0, 0.5, sinks)]
        assert torch.allclose(results[0], results[1], rtol=0, atol=1e-14)
        expected, got = (torch.autograd.grad((r * weight).sum(), (q, k, v, sinks)) for r in results)
        for one, other in zip(expected, got, strict=True):
            assert (one - other).abs().max() <= 1e-12


def test_an_output_gate_is_the_second_half_of_each_heads_query_projection() -> None:
    """Qwen3-Next: q_proj gives query and gate head by head; what the head saw is multiplied by the gate's sigmoid."""
    from planner.runtime.attention import SelfAttention
    from planner.runtime.mesh import Axis
    from planner.runtime.tensor import TensorParallel
    from profiles.model import Attention, Layer, Mlp, uniform

    torch.manual_seed(0)
    tp, cpu = TensorParallel(Axis("tp"), False), torch.device("cpu")
    made = {}
    for gated in (False, True):
        spec = Attention(heads=2, kv_heads=1, head_dim=4, output_gate=gated, rotary=False)
        model = uniform("gated", Layer(mixer=spec, ffn=Mlp(width=8)), 1, hidden=8, vocab=16)
        made[gated] = SelfAttention(spec, model, tp, attend, torch.float64, cpu)
        for value in made[gated].parameters():
            torch.nn.init.normal_(value)
    plain, gate = made[False], made[True]
    halves = gate.q_proj.weight.detach().unflatten(0, (2, 2, 4))
    with torch.no_grad():
        plain.q_proj.weight.copy_(halves[:, 0].flatten(0, 1))
        for name in ("k_proj", "v_proj"):
            getattr(plain, name).weight.copy_(getattr(gate, name).weight)
        plain.o_proj.weight.copy_(torch.eye(8, dtype=torch.float64))
        x = torch.randn(5, 3, 8, dtype=torch.float64)
        seen = plain(x, Tokens((0, 5))).unflatten(-1, (2, 4))
        gates = torch.einsum("sbi,hdi->sbhd", x, halves[:, 1]).sigmoid()
        expected = (seen * gates).flatten(2) @ gate.o_proj.weight.T
        assert torch.allclose(gate(x, Tokens((0, 5))), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ring", [2, 4])
def test_queries_in_spans_see_gathered_keys_as_under_a_mask(ring: int) -> None:
    """The gathering kind of context parallelism: each span of queries by itself, against the keys before it and its own."""
    torch.manual_seed(0)
    length, heads = 32, (4, 2, 2)
    held = [ring_spans(ring, length, place) for place in range(ring)]
    everyone = tuple(number for part in held for number in part)
    order = torch.cat([torch.arange(a, a + n) for part in held for a, n in zip(part[::2], part[1::2], strict=True)])
    for mine in held:
        places = torch.cat([torch.arange(a, a + n) for a, n in zip(mine[::2], mine[1::2], strict=True)])
        sizes = zip((length // ring, length, length), heads, (8, 8, 6), strict=True)
        q, k, v = (torch.randn(s, 2, h, w, dtype=torch.float64, requires_grad=True) for s, h, w in sizes)
        keys, values = (t.permute(1, 2, 0, 3).repeat_interleave(2, 1) for t in (k, v))
        scores = (q.permute(1, 2, 0, 3) @ keys.transpose(-1, -2) * 0.3).masked_fill(order[None] > places[:, None], float("-inf"))
        expected = (scores.softmax(-1) @ values).permute(2, 0, 1, 3)
        grad = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, (q, k, v), grad)
        with torch.no_grad():
            out, lse = attend_forward(q, k, v, None, None, mine, everyone, 0, 0, 0.3)
            got = attend_backward(grad, q, k, v, out, lse, None, None, mine, everyone, 0, 0, 0.3)
        for one, other in zip((expected, scores.logsumexp(-1), *wanted), (out, lse, *got), strict=True):
            assert (one - other).abs().max() <= 1e-13
