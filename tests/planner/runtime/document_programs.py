"""The worked examples of documents B and C (shared/documents.md), run in real processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from cost_models.layout import Layout
from planner.runtime import context
from planner.runtime.attention import Tokens
from planner.runtime.attention_blocks import attend_forward
from planner.runtime.context import ContextAttention, spans
from planner.runtime.expert import Dispatcher
from planner.runtime.mesh import Mesh
from profiles.model import Attention, Layer, Mlp, ModelSpec, Moe, uniform


def _mesh(layout: str, ffn: Mlp | Moe) -> Mesh:
    model: ModelSpec = uniform("document", Layer(mixer=Attention(heads=2, kv_heads=2, head_dim=8), ffn=ffn), 1, hidden=16, vocab=8)
    return Mesh(Layout.parse(layout, dist.get_world_size()), model, torch.device("cpu"))


class Recorder:
    """Counts what is sent while it is entered, (kind, bytes) of each call, and whose blocks a ring computes with."""

    def __enter__(self) -> Recorder:
        self.calls: list[tuple[str, int]] = []
        self.seen: list[int] = []
        self._saved = (dist.batch_isend_irecv, dist.all_to_all_single, context._Blocks.arguments)

        def passes(ops: list[Any]) -> list[Any]:
            self.calls.append(("pass", sum(o.tensor.nbytes for o in ops if o.op is dist.isend)))
            return self._saved[0](ops)

        def exchange(out: torch.Tensor, x: torch.Tensor, *rest: Any, **more: Any) -> Any:
            self.calls.append(("all_to_all", x.nbytes))
            return self._saved[1](out, x, *rest, **more)

        def arguments(blocks: Any, source: int, *rest: Any) -> Any:
            self.seen.append(source)
            return self._saved[2](blocks, source, *rest)

        dist.batch_isend_irecv, dist.all_to_all_single, context._Blocks.arguments = passes, exchange, arguments
        return self

    def __exit__(self, *_: object) -> None:
        dist.batch_isend_irecv, dist.all_to_all_single, context._Blocks.arguments = self._saved


def attention(layout: str, tokens: int, heads: int = 2) -> dict[str, Any]:
    """Causal attention of ``tokens`` tokens under ``layout``: error against one process, what was sent, whose blocks were seen."""
    mesh = _mesh(layout, Mlp(width=8))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, 1, heads, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    whole, _ = attend_forward(q, k, v, None, None, (0, tokens), (0, tokens), 0, 0, 8**-0.5)
    held = spans(mesh.layout, tokens, mesh.cp.rank)
    mine = Tokens(held).positions(torch.device("cpu"))
    with Recorder() as sent:
        out = ContextAttention(mesh)(q[mine], k[mine], v[mine], Tokens(held), 0, 0, 8**-0.5)
    return {"error": float((out - whole[mine]).abs().max()), "sent": sent.calls, "seen": sent.seen, "tokens": mine.tolist()}


def dispatch(experts: list[list[list[int]]], rows: list[list[float]]) -> dict[str, Any]:
    """Rows of width 1 to the four experts of two processes; expert e adds 10 (e + 1). ``experts[rank][row]`` are the chosen ones."""
    mesh = _mesh("dp=2,ep=2", Moe(experts=4, top_k=1, width=8))
    moves = Dispatcher(mesh, 4)
    chosen = torch.tensor(experts[mesh.rank], dtype=torch.int64)
    mine = torch.tensor(rows[mesh.rank]).unsqueeze(1)
    width = chosen.shape[1] if chosen.numel() else 1
    route = moves.plan(chosen.flatten())
    arrived = moves.dispatch(mine[route.order // width], route)
    own = torch.repeat_interleave(torch.arange(2) + 2 * mesh.axis("ep").rank, torch.tensor(route.per_expert))
    results = moves.combine(arrived + 10.0 * (own + 1).unsqueeze(1), route)
    placed = torch.zeros(chosen.numel(), 1).index_copy(0, route.order, results).view(-1, width)
    return {
        "arrived": [[int(e), float(r)] for e, r in zip(own, arrived, strict=True)], "results": placed.tolist(),
        "sent": route.sent, "received": route.received,
    }  # fmt: skip
