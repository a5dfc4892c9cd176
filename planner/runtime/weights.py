"""Hugging Face checkpoints: read box by box into any layout, and written from a checkpoint of any layout.

Host memory: reading holds one box at a time (files are memory-mapped); writing holds one output file (``SHARD_BYTES``) and one
parameter beyond it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cost_models.checkpoints import EXPORT_FILE
from planner.runtime import checkpoint
from planner.runtime.adapters import is_adapter
from planner.runtime.data_parallel import Piece
from profiles.errors import InputError
from profiles.files import write_text
from profiles.model import ModelSpec

SHARD_BYTES = EXPORT_FILE
GPT2 = {
    "embed_tokens.weight": "wte.weight", "embed_positions": "wpe.weight", "norm": "ln_f", "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2", "o_proj": "attn.c_proj", "up_proj": "mlp.c_fc", "down_proj": "mlp.c_proj",
}  # fmt: skip
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_AFTER = {"input_layernorm": "post_attention_layernorm", "post_attention_layernorm": "post_feedforward_layernorm"}
POST_NORM = {"olmo2": _AFTER, "olmo3": _AFTER}
"""Families whose norms follow their blocks, and what they call them."""
PREFIXES = ("", "model.", "transformer.", "model.language_model.", "language_model.model.")


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in a Hugging Face checkpoint: the tensor's name (``{expert}``: one tensor an expert), whether it is
    stored [inputs, outputs], and which of ``parts`` equal parts of its outputs it is."""

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1


def place(family: str, name: str) -> Place:
    """The place of the runtime's parameter ``name`` in a checkpoint of ``family`` (without prefix)."""
    if family == "gpt2":
        return _gpt2(name)
    if family in POST_NORM:
        name = re.sub(r"(layers\.\d+\.)(\w+_layernorm)", lambda m: m[1] + POST_NORM[family][m[2]], name)
    layer, _, rest = name.rpartition("mlp.")
    if match := re.fullmatch(r"experts\.(\w+)", rest):
        if family == "mixtral":
            return Place(f"{layer}block_sparse_moe.experts.{{expert}}.{MIXTRAL[match[1]]}.weight")
        return Place(f"{name.rpartition('.')[0]}.{{expert}}.{match[1]}.weight")
    if family == "mixtral":
        return Place(name.replace("mlp.gate.", "block_sparse_moe.gate."))
    if family in ("qwen2_moe", "qwen3_next"):
        name = name.replace("mlp.shared_experts.", "mlp.shared_expert.")
    return Place(f"{name}.weight" if name.endswith("shared_expert_gate") else name)


def _gpt2(name: str) -> Place:
    head, _, kind = name.rpartition(".")
    match = re.fullmatch(r"layers\.(\d+)\.(?:self_attn\.|mlp\.)?(\w+)", head)
    if match is None:
        return Place(GPT2.get(name) or f"{GPT2[head]}.{kind}")
    at = f"h.{match[1]}."
    if match[2] in ("q_proj", "k_proj", "v_proj"):
        return Place(f"{at}attn.c_attn.{kind}", kind == "weight", "qkv".index(match[2][0]), 3)
    return Place(f"{at}{GPT2[match[2]]}.{kind}", kind == "weight" and match[2].endswith("proj"))


class Folder:
    """The safetensors files of a Hugging Face model folder, read by slices."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise InputError("weights", path, "holds no *.safetensors files")
        self.path = path
        self._tensors: dict[str, Any] = {}
        for file in files:
            opened = safe_open(file, framework="pt")
            for name in opened.keys():  # noqa: SIM118 - not a dict
                self._tensors[name] = opened

    def has(self, name: str) -> bool:
        """Whether a tensor of that name is there, whatever prefix the file uses."""
        return any(prefix + name in self._tensors for prefix in PREFIXES)

    def find(self, name: str) -> str:
        """The stored name, whatever prefix the file uses. Raises InputError where it is missing."""
        for prefix in PREFIXES:
            if prefix + name in self._tensors:
                return prefix + name
        raise InputError("weights", self.path, f"has no tensor {name}")

    @property
    def names(self) -> list[str]:
        """The names of all tensors, as stored."""
        return sorted(self._tensors)

    def whole(self, stored: str) -> Tensor:
        """A tensor by its stored name."""
        found: Tensor = self._tensors[stored].get_tensor(stored)
        return found

    def slice(self, name: str, box: tuple[slice, ...], shape: tuple[int, ...]) -> Tensor:
        """``box`` of a stored tensor, whose whole shape must be ``shape``."""
        stored = self.find(name)
        view = self._tensors[stored].get_slice(stored)
        if tuple(view.get_shape()) != shape:
            raise InputError("weights", self.path, f"{stored} has shape {tuple(view.get_shape())}, the model needs {shape}")
        return view[box]

    def box(self, piece: Piece, family: str) -> Tensor:
        """The values of a box of a parameter."""
        where = place(family, piece.name)
        box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
        if "{expert}" in where.name:
            names = (where.name.format(expert=e) for e in range(box[0].start, box[0].stop))
            return torch.stack([self.slice(n, box[1:], piece.shape[1:]) for n in names])
        first = slice(box[0].start + where.part * piece.shape[0], box[0].stop + where.part * piece.shape[0])
        shape = (piece.shape[0] * where.parts, *piece.shape[1:])
        if where.transposed:
            return self.slice(where.name, (box[1], first), shape[::-1]).T
        return self.slice(where.name, (first, *box[1:]), shape)


def load(trainer: Any, folder: Path) -> None:
    """Read a Hugging Face model folder into a trainer, each rank its own boxes. Raises InputError where it does not fit.

    Multi-token-prediction modules are read where the folder has them (transformers saves none): else they keep their values.
    """
    files = Folder(folder)
    family, first = trainer.model.family, trainer.model.num_layers
    without = () if files.has(f"layers.{first}.eh_proj.weight") else later_layers(trainer.model)
    for piece in (*trainer.optimizer.pieces("parameter"), *trainer.frozen_pieces()):
        if not piece.name.startswith(without) and not is_adapter(piece.name):
            piece.tensor.copy_(files.box(piece, family))
    for decoder in trainer.decoders.values():
        for name, buffer in decoder.named_buffers():
            if name.startswith(without):
                continue
            shape = tuple(buffer.shape)
            buffer.copy_(files.box(Piece(name, shape, (0,) * len(shape), shape, buffer), family))
    trainer.optimizer.publish()


def later_layers(model: ModelSpec) -> tuple[str, ...]:
    """Name prefixes of the multi-token-prediction modules."""
    return tuple(f"layers.{model.num_layers + n}." for n in range(model.mtp))


def export(
    path: Path, out: Path, dtype: torch.dtype = torch.bfloat16, config: Path | None = None, shard_bytes: int = SHARD_BYTES,
    base: Path | None = None,
) -> list[Path]:  # fmt: skip
    """Write the checkpoint at ``path`` as Hugging Face safetensors under ``out``; returns the files.

    ``config``: a config.json to lay beside them; ``base``: the folder that what was not trained is taken from. One process, without
    torch.distributed.
    """
    from safetensors.torch import save_file

    model = ModelSpec.model_validate(checkpoint.read_facts(path)["model"])
    files: list[Path] = []
    index: dict[str, str] = {}
    total, held, size = 0, dict[str, Tensor](), 0

    def flush() -> None:
        nonlocal held, size
        name = f"model-{len(files) + 1:05d}.safetensors"
        partial = out / f".{name}"
        out.mkdir(parents=True, exist_ok=True)
        save_file(held, partial, metadata={"format": "pt"})
        files.append(partial.rename(out / name))
        index.update(dict.fromkeys(held, name))
        held, size = {}, 0

    for name, tensor in chain(_tensors(path, model), () if base is None else _untrained(path, model, Folder(base))):
        wanted = tensor.to(dtype if tensor.is_floating_point() and "e_score" not in name else tensor.dtype).contiguous()
        held[name], size, total = wanted, size + wanted.nbytes, total + wanted.nbytes
        if size >= shard_bytes:
            flush()
    if held:
        flush()
    write_text(out / "model.safetensors.index.json", json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1))
    if config is not None:
        shutil.copyfile(config, out / "config.json")
    return files


def _untrained(path: Path, model: ModelSpec, base: Folder) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder that a checkpoint does not hold, under their own names."""
    held = {place(model.family, name.partition("/")[2]).name for name in checkpoint.shapes(path)}
    for stored in base.names:
        if re.sub(r"experts\.\d+\.", "experts.{expert}.", stored).removeprefix("model.").removeprefix("transformer.") not in held:
            yield stored, base.whole(stored)


def _tensors(path: Path, model: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """(stored name, whole tensor) of every tensor of the Hugging Face checkpoint. The hub's layout repeats the embedding and the
    head in each multi-token-prediction module."""

    def prefix(name: str) -> str:
        return name if name.startswith("lm_head") else ("transformer." if model.family == "gpt2" else "model.") + name

    sizes = checkpoint.shapes(path)
    together: dict[str, list[tuple[Place, str]]] = {}
    for full in sizes:
        part, _, name = full.partition("/")
        if part in ("parameter", "buffer"):
            where = place(model.family, name)
            together.setdefault(where.name, []).append((where, full))
    for stored, members in sorted(together.items()):
        wholes = []
        for where, full in sorted(members, key=lambda m: m[0].part):
            whole = checkpoint.read_whole(path, full, sizes[full])
            wholes.append(whole.T if where.transposed else whole)
        if "{expert}" in stored:
            yield from ((prefix(stored.format(expert=e)), t.clone()) for e, t in enumerate(wholes[0]))
        else:
            yield prefix(stored), wholes[0] if len(wholes) == 1 else torch.cat(wholes, -1)
            ends = {
                "embed_tokens.weight": ("embed_tokens", "shared_head.head")[: 1 + model.tied],
                "lm_head.weight": ("shared_head.head",),
            }
            for layer in later_layers(model):
                yield from ((f"model.{layer}{name}.weight", wholes[0].clone()) for name in ends.get(stored, ()))
