"""Activations and temporaries of ``cost_models.memory`` against what one rank of the runtime's program allocates, forward and backward,
each operation's outputs followed from birth to release."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from cost_models.execution import load_execution  # noqa: E402
from cost_models.job import Job  # noqa: E402
from cost_models.layout import Layout  # noqa: E402
from cost_models.memory import stage_memory  # noqa: E402
from planner.runtime.attention import Tokens  # noqa: E402
from planner.runtime.context import spans  # noqa: E402
from planner.runtime.mesh import Mesh  # noqa: E402
from planner.runtime.model import Build, Decoder, parts  # noqa: E402
from planner.runtime.moe import Balance, Router  # noqa: E402
from planner.runtime.tensor import TensorParallel  # noqa: E402
from profiles.hardware import load_cluster  # noqa: E402
from tests.cost_models.test_layers_runtime import VOCAB, balanced, model_of, one_rank  # noqa: E402

SEQ, LAYERS = 512, 4
CASES = [
    ("gqa", "gated", "tp=1", 1), ("gqa", "gated", "tp=1,recompute=full", 1), ("gqa", "gated", "tp=1,recompute=selective(mlp)", 1),
    ("gqa", "plain", "tp=1", 1), ("mla", "gated", "tp=2,recompute=full", 2), ("gqa", "moe", "ep=4", 4),
    ("gqa", "shared", "ep=4,recompute=full", 4), ("gqa", "gated", "tp=4", 4), ("gqa", "gated", "tp=4,recompute=full", 4),
    ("gqa", "gated", "tp=4,sp=false", 4), ("gqa", "gated", "cp=4,recompute=full", 4), ("gqa", "gated", "cp=4,cp_kind=ulysses", 4),
    ("gqa", "gated", "cp=4,cp_kind=allgather,recompute=full", 4), ("gqa", "moe", "tp=2,ep=4,etp=2,recompute=full", 8),
]  # fmt: skip


class Live(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still alive; ``own`` ones are not counted."""

    def __init__(self, own: list[Any]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.own = own
        self.seen = {storage._cdata for storage in own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.seen and storage.nbytes():
                    self.seen.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.release, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def release(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


@pytest.mark.parametrize(
    ("mixer", "feed", "text", "world"), [pytest.param(*c, marks=[pytest.mark.slow] * (i % 2)) for i, c in enumerate(CASES)]
)
def test_the_peak_of_activations_and_temporaries_is_the_programs(
    mixer: str, feed: str, text: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = model_of(mixer, feed).model_copy(update={"pattern": (0,) * LAYERS})
    layout, device = Layout.parse(text, world), torch.device("cpu")
    execution = load_execution("axisplan")
    job = Job(model, load_cluster(f"cpu:1x{world}"), execution, SEQ, layout.dp * layout.micro_batch, "bf16", moe_imbalance=1.0)
    monkeypatch.setattr(Router, "forward", balanced(Router.forward))
    with one_rank(world):
        mesh = Mesh(layout, model, device)
        build = Build(model, layout, mesh, TensorParallel(mesh.tp, layout.sp), torch.bfloat16, device, Balance())
        decoder = Decoder(build, parts(layout, model, 0)[0])
        for parameter in decoder.parameters():
            torch.nn.init.normal_(parameter.data, std=0.02)
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))  # as a gradient bucket takes it
        held = spans(layout, SEQ, mesh.cp.rank)
        ids = torch.randint(0, VOCAB, (layout.micro_batch, sum(held[1::2])))
        labels, tokens = ids.clone(), Tokens(held)
        decoder(ids, tokens, labels).sum().backward()  # makes what lasts: rotary tables
        own = [t.untyped_storage() for t in (*decoder.parameters(), *decoder.buffers(), ids, labels)]
        for layer in decoder.layers.values():
            own += [t.untyped_storage() for pair in layer.self_attn.rotary._made.values() for t in pair]
        with Live(own) as live:
            decoder(ids, tokens, labels).sum().backward()
    stage = stage_memory(job, layout)[0]
    small = layout.cp > 1 and "full" in text  # 128 tokens a rank: buffers of a few kilobytes count
    assert stage.activations + stage.temporary == pytest.approx(live.peak, rel=0.08 if small else 0.01)
