"""The operations of ``cost_models.layers`` against the runtime's own modules, run for one rank under a fake process group: kept
bytes to the byte, collectives by axis, FLOPs of every product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from cost_models.execution import load_execution  # noqa: E402
from cost_models.job import Job  # noqa: E402
from cost_models.layers import embedding_operations, head_operations, layer_operations  # noqa: E402
from cost_models.layout import Layout  # noqa: E402
from cost_models.recompute import recomputed  # noqa: E402
from planner.runtime.attention import Tokens  # noqa: E402
from planner.runtime.context import spans  # noqa: E402
from planner.runtime.mesh import Mesh  # noqa: E402
from planner.runtime.model import Build, Decoder, parts  # noqa: E402
from planner.runtime.moe import Balance, Router  # noqa: E402
from planner.runtime.tensor import TensorParallel  # noqa: E402
from profiles.hardware import load_cluster  # noqa: E402
from profiles.model import Attention, LatentAttention, Layer, Mlp, ModelSpec, Moe, uniform  # noqa: E402
from profiles.operations import Collective, GroupedMatmul, Matmul  # noqa: E402

HIDDEN, VOCAB, SEQ, LAYERS = 256, 512, 256, 2
MIXERS = {
    "gqa": Attention(heads=16, kv_heads=4, head_dim=32),
    "qk_norm": Attention(heads=16, kv_heads=4, head_dim=32, qk_norm="head"),
    "mla": LatentAttention(heads=16, q_rank=96, kv_rank=64, nope_dim=32, rope_dim=16, value_dim=32),
    "mla_no_q": LatentAttention(heads=16, q_rank=None, kv_rank=64, nope_dim=32, rope_dim=16, value_dim=32),
}
FEEDS = {
    "gated": Mlp(width=512),
    "plain": Mlp(width=512, gated=False),
    "moe": Moe(experts=16, top_k=2, width=128),
    "shared": Moe(experts=16, top_k=2, width=128, shared_width=128),
}
CASES = [
    ("gqa", "gated", "tp=1", 1), ("gqa", "plain", "tp=1,micro_batch=2", 1), ("qk_norm", "gated", "tp=1", 1),
    ("mla", "gated", "tp=1", 1),
    ("mla_no_q", "gated", "tp=2", 2), ("gqa", "moe", "tp=1", 1), ("gqa", "shared", "tp=1", 1),
    ("gqa", "parallel", "tp=1", 1),
    ("gqa", "gated", "tp=4", 4), ("gqa", "gated", "tp=8", 8), ("gqa", "gated", "tp=4,sp=false", 4),
    ("mla", "gated", "tp=4", 4),
    ("gqa", "parallel", "tp=4", 4), ("gqa", "shared", "tp=4", 4), ("gqa", "moe", "ep=4", 4),
    ("gqa", "moe", "tp=2,ep=4,etp=2", 8),
    ("gqa", "shared", "tp=2,ep=4,sp=false", 8), ("gqa", "gated", "cp=4", 4),
    ("gqa", "gated", "cp=4,cp_kind=allgather", 4),
    ("gqa", "gated", "cp=4,cp_kind=ulysses", 4), ("gqa", "gated", "cp=8,cp_kind=ulysses", 8), ("gqa", "shared", "tp=2,cp=2,ep=4", 8),
    ("mla", "shared", "tp=2,cp=4,cp_kind=ring2xulysses2,ep=8", 8), ("gqa", "gated", "tp=2,recompute=full", 2),
    ("gqa", "moe", "ep=2,recompute=full", 2), ("gqa", "shared", "tp=2,recompute=full", 2),
    ("gqa", "plain", "cp=2,recompute=selective(core_attn)", 2), ("gqa", "gated", "tp=2,recompute=selective(mlp)", 2),
    ("gqa", "gated", "cp=2,cp_kind=ulysses,recompute=selective(core_attn)", 2),
]  # fmt: skip
AXES = ("tp", "ring", "ulysses", "ep", "etp", "cp")


def model_of(mixer: str, feed: str) -> ModelSpec:
    beside = feed == "parallel"
    ffn = FEEDS["gated" if beside else feed]
    layer = Layer(mixer=MIXERS[mixer], ffn=ffn, norms=1 if beside else 2, parallel=beside)
    return uniform("small", layer, LAYERS, hidden=HIDDEN, vocab=VOCAB)


class Products(TorchDispatchMode):
    """FLOPs of the matrix products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm"):
            a, b = args[-2:]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        elif name == "bmm":
            a, b = args
            self.flops += 2 * a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2]
        elif name == "_grouped_mm":
            a, b = args[:2]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[-1]
        return out


@contextmanager
def one_rank(world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def balanced(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Routing that gives every expert the same number of tokens."""

    def route(self: Router, x: torch.Tensor) -> Any:
        experts, weights, scores = forward(self, x)
        even = torch.arange(experts.numel()) % self.spec.experts
        return even.view_as(experts), weights, scores

    return route


def count_collectives(monkeypatch: pytest.MonkeyPatch, mesh: Mesh) -> Counter[str]:
    moved: Counter[str] = Counter()

    def axis_of(group: Any) -> str:
        ranks = tuple(dist.get_process_group_ranks(group))
        return next(a for a in AXES if mesh.axis(a).size > 1 and mesh.axis(a).ranks == ranks)

    def counted(name: str, full: Callable[..., torch.Tensor]) -> None:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            moved[axis_of(kwargs["group"])] += full(*args).nbytes
            return real(*args, **kwargs)

        monkeypatch.setattr(dist, name, call)

    counted("all_reduce", lambda x, *_: x)
    counted("all_gather_single", lambda out, x, *_: out)
    counted("reduce_scatter_single", lambda out, x, *_: x)
    counted("all_to_all_single", lambda out, x, *_: x)
    real_p2p = dist.batch_isend_irecv

    def p2p(ops: list[Any]) -> Any:
        for op in ops:
            if op.op is dist.isend:
                moved[axis_of(op.group)] += op.tensor.nbytes
        return real_p2p(ops)

    monkeypatch.setattr(dist, "batch_isend_irecv", p2p)
    return moved


@pytest.mark.parametrize(
    ("mixer", "feed", "text", "world"), [pytest.param(*c, marks=[pytest.mark.slow] * (i % 2)) for i, c in enumerate(CASES)]
)
def test_kept_bytes_collectives_and_flops_are_those_of_the_program(
    mixer: str, feed: str, text: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, layout, device = model_of(mixer, feed), Layout.parse(text, world), torch.device("cpu")
    job = Job(model, load_cluster(f"cpu:1x{world}"), load_execution("axisplan"), SEQ, 64, "bf16", moe_imbalance=1.0)
    monkeypatch.setattr(Router, "forward", balanced(Router.forward))
    with one_rank(world):
        mesh = Mesh(layout, model, device)
        build = Build(model, layout, mesh, TensorParallel(mesh.tp, layout.sp), torch.bfloat16, device, Balance())
        decoder = Decoder(build, parts(layout, model, 0)[0])
        for parameter in decoder.parameters():
            torch.nn.init.normal_(parameter.data, std=0.02)
        own = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
        kept: dict[int, tuple[int, torch.Tensor]] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in own and storage.nbytes():
                kept.setdefault(storage.data_ptr(), (storage.nbytes(), t))
            return t

        held = spans(layout, SEQ, mesh.cp.rank)
        ids = torch.randint(0, VOCAB, (layout.micro_batch, sum(held[1::2])))
        moved = count_collectives(monkeypatch, mesh)
        groups = {a: mesh.axis(a).ranks if mesh.axis(a).size > 1 else () for a in AXES}
        products = Products()
        with products, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            decoder(ids, Tokens(held), ids.clone()).sum().backward()

    costs = [embedding_operations(job, layout), *[layer_operations(job, layout, model.layer(i)) for i in range(LAYERS)]]
    costs.append(head_operations(job, layout))
    found = sum(size for size, _ in kept.values())
    if layout.recompute == "none":
        assert sum(c.saved_bytes for c in costs) == pytest.approx(found, abs=1024, rel=0)  # offsets of experts, a dozen numbers
    again = [op for c in costs[1:-1] for op in recomputed(c.forward, layout.recompute_rules.of(0), stops_early=True)]
    operations = [op for cost in costs for op in cost.operations()] + again

    expected: Counter[str] = Counter()
    for op in (op for op in operations if isinstance(op, Collective)):
        if groups[op.axis]:
            expected[next(a for a in AXES if groups[a] == groups[op.axis])] += int(op.bytes * op.count)
    assert dict(moved) == dict(expected)

    linear = sum(op.flops for op in operations if isinstance(op, (Matmul, GroupedMatmul)))
    assert products.flops == linear
