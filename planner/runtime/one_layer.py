"""One decoder layer as the runtime runs it, for the profiler: a rank's own shapes under tensor parallelism, in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from cost_models.layout import Layout, divisors, nearest
from planner.runtime.attention import Tokens
from planner.runtime.mesh import Mesh
from planner.runtime.model import Build, DecoderLayer
from planner.runtime.moe import Balance
from planner.runtime.parameter import blocks_of, fill
from planner.runtime.tensor import TensorParallel
from profiles.errors import InputError
from profiles.model import Attention, LatentAttention, Layer, Mlp, ModelSpec, Moe


class _Layer(nn.Module):
    def __init__(self, layer: DecoderLayer, tokens: Tokens) -> None:
        super().__init__()
        self.layer, self.tokens = layer, tokens

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.tokens)


def build(
    model: dict[str, Any], kind: int, micro_batch: int, seq_len: int, tp: int, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, Tensor]:
    """Layer kind ``kind`` of ``model`` (a ModelSpec as a mapping) with the local shapes of degree ``tp``, and its input
    [seq_len, micro_batch, hidden]. Collectives are not part of it. Raises InputError where the shapes do not divide by ``tp``."""
    spec = ModelSpec.model_validate(model)
    local = spec.model_copy(update={"kinds": (local_layer(spec.kinds[kind], tp),), "pattern": (0,)})
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    layout = Layout()
    mesh = Mesh(layout, local, device)
    tensor = TensorParallel(mesh.tp, False)
    layer = DecoderLayer(Build(local, layout, mesh, tensor, dtype, device, Balance()), local.layer(0), 0)
    blocks = blocks_of(layer)
    for name, value in layer.named_parameters():
        fill(value.data, name, blocks[name], 0)
    x = torch.randn(seq_len, micro_batch, spec.hidden, dtype=dtype, device=device, requires_grad=True)
    return _Layer(layer, Tokens((0, seq_len))), x


def local_layer(layer: Layer, tp: int) -> Layer:
    """What a rank of degree ``tp`` holds of ``layer`` (heads, KV heads replicated below one, feed-forward widths)."""
    mixer, ffn = layer.mixer, layer.ffn
    changes: dict[str, Any] = {}
    if isinstance(mixer, Attention):
        kv = mixer.kv_heads // tp if mixer.kv_heads % tp == 0 else 1
        changes["mixer"] = mixer.model_copy(update={"heads": share("heads", mixer.heads, tp), "kv_heads": kv})
    elif isinstance(mixer, LatentAttention):
        changes["mixer"] = mixer.model_copy(update={"heads": share("heads", mixer.heads, tp)})
    if isinstance(ffn, Mlp):
        changes["ffn"] = ffn.model_copy(update={"width": share("width", ffn.width, tp)})
    elif isinstance(ffn, Moe) and ffn.shared_width:
        changes["ffn"] = ffn.model_copy(update={"shared_width": share("shared_width", ffn.shared_width, tp)})
    return layer.model_copy(update=changes)


def share(field: str, size: int, tp: int) -> int:
    if size % tp:
        raise InputError("tp", tp, f"must divide the {size} of {field}", nearest(divisors(size), tp))
    return size // tp
