"""Megatron-LM's command line -> Layout: an argument file or a launch script, its words read and never run."""

from __future__ import annotations

import re
from typing import Any

from cost_models.layout import Layout, even_split
from planner.emit.imported import Imported, fill_world
from planner.emit.megatron.flags import Flags
from planner.emit.megatron.shell import flags as flags_of
from profiles.errors import InputError

CP_KINDS = {"p2p": "ring", "a2a": "ulysses", "allgather": "allgather"}
MODEL = {
    "num-layers": "layers", "hidden-size": "hidden", "num-attention-heads": "heads", "num-query-groups": "kv_heads", "kv-channels": "head_dim",
    "ffn-hidden-size": "ffn", "vocab-size": "vocab", "num-experts": "experts", "moe-router-topk": "top_k", "moe-ffn-hidden-size": "expert_ffn",
    "mtp-num-layers": "mtp",
}  # fmt: skip


def read(text: str, where: str, world: int | None = None) -> Imported:
    """Raises InputError for values that are no numbers, or degrees that do not fill the world."""
    return read_flags(flags_of(text), where, world)


def read_flags(given: Flags, where: str, world: int | None) -> Imported:
    """``read`` of flags that are taken apart already."""
    flags = {name.removeprefix("--").replace("_", "-"): values for name, values in given.items()}
    if not {"tensor-model-parallel-size", "num-layers", "micro-batch-size"} & set(flags):
        raise InputError("FILE", where, "has none of Megatron-LM's flags (--tensor-model-parallel-size, --num-layers, ...)")
    said = Reader(flags)
    values = degrees(said)
    layout = fill_world(values | data_parallel(said, values, said.world or world), said.world or world, where)
    layers = said.number("num-layers", 0)
    layout = layout.with_(**pipeline(said, layout, layers))
    layout = layout.with_(recompute=recompute(said, layout, layers))
    model = {name: said.number(flag) for flag, name in MODEL.items() if flag in flags} | latent(said)
    job = {
        "seq_len": said.number("seq-length", 0), "global_batch": said.number("global-batch-size", layout.micro_batch * layout.dp),
        "precision": precision(flags), "optimizer": {"adam": "adamw"}.get(said.text("optimizer", "adam"), said.text("optimizer", "adam")),
    }  # fmt: skip
    problems = [
        *layers_fill_stages(said, layout, layers),
        *experts_by_layer(said, layers),
        *recompute_fits(said, layout, layers),
        *ranks_by_arrival(said),
    ]
    return Imported("megatron", layout, job, model, tuple(said.notes), tuple(problems))


class Reader:
    """Flags with typed access; remembers what was worth saying."""

    def __init__(self, flags: Flags) -> None:
        self.flags, self.notes = flags, list[str]()

    def has(self, name: str) -> bool:
        return name in self.flags

    def text(self, name: str, default: str = "") -> str:
        values = self.flags.get(name)
        return values[0] if values else default

    def number(self, name: str, default: int | None = None) -> int:
        values = self.flags.get(name)
        if not values:
            if default is None:
                raise InputError(f"--{name}", "", "has no value")
            return default
        try:
            return int(values[0].replace("_", ""))
        except ValueError:
            raise InputError(f"--{name}", values[0], "must be a whole number that stands in the file") from None

    @property
    def world(self) -> int | None:
        """GPUs that torchrun starts, where both of its numbers stand in the file."""
        nodes, per_node = self.text("nnodes", "1"), self.text("nproc-per-node")
        return int(nodes) * int(per_node) if nodes.isdecimal() and per_node.isdecimal() else None


def degrees(said: Reader) -> dict[str, Any]:
    tp = said.number("tensor-model-parallel-size", 1)
    moe = said.has("num-experts") and said.number("num-experts") > 0
    out: dict[str, Any] = {
        "tp": tp, "pp": said.number("pipeline-model-parallel-size", 1), "cp": said.number("context-parallel-size", 1),
        "ep": said.number("expert-model-parallel-size", 1), "sp": said.has("sequence-parallel") and tp > 1,
        "micro_batch": said.number("micro-batch-size", 1), "order": "tp-cp-pp-dp" if said.has("use-tp-pp-dp-mapping") else "tp-cp-dp-pp",
        "etp": said.number("expert-tensor-parallel-size", tp) if moe else 1,
    }  # fmt: skip
    if said.has("sequence-parallel") and tp == 1:
        said.notes.append("--sequence-parallel beside tp = 1: Megatron-LM turns it off without a word")
    if moe and not said.has("expert-tensor-parallel-size") and tp > 1:
        said.notes.append(f"--expert-tensor-parallel-size is not given: Megatron-LM takes tp = {tp}")
    out |= context(said, out["cp"])
    if moe:
        out |= dispatch(said)
    if said.has("optimizer-cpu-offload"):
        out["offload"] = ("optimizer",)
    return out


def context(said: Reader, cp: int) -> dict[str, Any]:
    if cp == 1:
        return {}
    kinds = set(said.flags.get("cp-comm-type", ("p2p",)))
    if len(kinds) > 1:
        raise InputError(
            "--cp-comm-type", " ".join(sorted(kinds)), "differs between layers, which a layout does not express", "p2p"
        )
    kind = kinds.pop()
    if kind == "a2a+p2p":
        sizes = said.flags.get("hierarchical-context-parallel-sizes", ())
        if len(sizes) != 2 or not all(s.isdecimal() for s in sizes):
            raise InputError("--hierarchical-context-parallel-sizes", " ".join(sizes), "must be two numbers: all-to-all, then p2p")
        return {"cp_kind": f"ring{sizes[1]}xulysses{sizes[0]}"}
    name = kind.replace("_", "").lower()
    if name not in CP_KINDS:
        raise InputError("--cp-comm-type", kind, "is p2p, a2a, all_gather or a2a+p2p", "p2p")
    return {"cp_kind": CP_KINDS[name]}


def dispatch(said: Reader) -> dict[str, Any]:
    kind = said.text("moe-token-dispatcher-type", "allgather")
    if kind == "flex":
        kind = said.text("moe-flex-dispatcher-backend", "deepep")
    out: dict[str, Any] = {"dispatcher": kind}
    if said.has("moe-expert-capacity-factor"):
        out["capacity"] = float(said.text("moe-expert-capacity-factor"))
    return out


def data_parallel(said: Reader, values: dict[str, Any], world: int | None) -> dict[str, Any]:
    """ZeRO stage, and how data parallelism splits into shards and replicas."""
    strategy = said.text("data-parallel-sharding-strategy", "no_shard")
    if said.has("use-torch-fsdp2"):
        zero = 3
    elif said.has("use-megatron-fsdp"):
        zero = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}.get(strategy, 3)
    else:
        zero = int(said.has("use-distributed-optimizer"))
    if world is None:
        return {"zero": zero}
    fixed = values["tp"] * values["pp"] * values["cp"]
    dp = world // fixed if world % fixed == 0 else 1
    replicate = said.number("num-distributed-optimizer-instances", 1) if zero else dp
    return {"zero": zero, "dp_replicate": replicate, "dp_shard": max(1, dp // replicate)}


def pipeline(said: Reader, layout: Layout, layers: int) -> dict[str, Any]:
    """Virtual stages and the layers of each chunk."""
    if layout.pp == 1:
        return {}
    if said.has("pipeline-model-parallel-layout"):
        counts = layers_of(said.text("pipeline-model-parallel-layout"))
        if len(counts) % layout.pp:
            raise InputError(
                "--pipeline-model-parallel-layout", len(counts), f"has {len(counts)} stages, no multiple of pp = {layout.pp}"
            )
        return _virtual(len(counts) // layout.pp, counts if len(set(counts)) > 1 else ())
    if said.has("num-virtual-stages-per-pipeline-rank"):
        return _virtual(said.number("num-virtual-stages-per-pipeline-rank"))
    if said.has("num-layers-per-virtual-pipeline-stage") and layers:
        each = said.number("num-layers-per-virtual-pipeline-stage")
        if each < 1 or layers % (layout.pp * each):
            raise InputError(
                "--num-layers-per-virtual-pipeline-stage", each, f"{layers} layers do not divide by pp * it = {layout.pp * each}"
            )
        return _virtual(layers // layout.pp // each)
    first, last = said.number("decoder-first-pipeline-num-layers", 0), said.number("decoder-last-pipeline-num-layers", 0)
    if first or last:
        return _virtual(1, ends(layers, layout.pp, first, last))
    extra = int(said.has("account-for-embedding-in-pipeline-split")), int(said.has("account-for-loss-in-pipeline-split"))
    if sum(extra) and layers:
        return _virtual(1, even_split(layers, layout.pp, *extra))
    return {}


def _virtual(vpp: int, stages: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"vpp": vpp, "schedule": "interleaved" if vpp > 1 else "1f1b", "stages": stages}


def ends(layers: int, pp: int, first: int, last: int) -> tuple[int, ...]:
    """Layers of each stage where the first, the last or both have a number of their own."""
    middle = pp - bool(first) - bool(last)
    rest = layers - first - last
    if middle < 1 or rest % middle:
        raise InputError("--decoder-first-pipeline-num-layers", first or last, f"leaves {rest} layers for {middle} stages")
    return (*((first,) if first else ()), *(rest // middle,) * middle, *((last,) if last else ()))


def layers_of(text: str) -> tuple[int, ...]:
    """Layers of each stage of a layout string such as ``Et*3|(t*4|)*6t*5L``."""
    plain = re.sub(r"[\s,]", "", text)
    expanded = plain
    while match := re.search(r"\(([^()]*)\)\*(\d+)", expanded):
        if int(match[2]) > 10_000:
            break
        expanded = expanded[: match.start()] + match[1] * int(match[2]) + expanded[match.end() :]
    expanded = re.sub(r"[()]", "", expanded)
    if not re.fullmatch(r"E?(?:[tm](?:\*\d+)?|[|L])*", expanded) or expanded.count("L") > 1:
        raise InputError(
            "--pipeline-model-parallel-layout", text, "is made of E, t, m, L, | and repetitions, e.g. Et*7|t*9|t*9|t*7L"
        )
    if "m" in expanded.rpartition("|")[0]:
        raise InputError(
            "--pipeline-model-parallel-layout", text, "has MTP modules (m) before the last stage; here they stand with the head"
        )
    return tuple(sum(int(n or 1) for n in re.findall(r"t(?:\*(\d+))?", stage)) for stage in expanded.split("|"))


def recompute(said: Reader, layout: Layout, layers: int) -> str:
    """``full`` for uniform, the first n layers of every chunk for block, ``selective(...)`` with its modules."""
    kind = "selective" if said.has("recompute-activations") else said.text("recompute-granularity")
    if kind == "selective":
        return str(
            Layout.read(f"recompute=selective({','.join(said.flags.get('recompute-modules') or ('core_attn',))})")["recompute"]
        )
    if kind != "full":
        return "none"
    if said.text("recompute-method") != "block":
        return "full"
    n = said.number("recompute-num-layers", 1)
    parts, start = [], 0
    for count in layout.stages or even_split(layers, layout.chunks):
        if first := min(n, count):
            parts.append(f"{start}-{start + first - 1}:full")
        start += count
    return "/".join(parts) or "none"


def latent(said: Reader) -> dict[str, Any]:
    """Whether attention is latent."""
    if not said.has("multi-latent-attention"):
        return {}
    if not said.has("kv-lora-rank"):
        said.notes.append("--kv-lora-rank is not given: Megatron-LM's command line takes 32, its configuration class 512")
    return {"latent": True}


# -- what Megatron-LM's parser lets pass (targets.md 1.4; the rest are rules of layouts) -----------------------------------------


def layers_fill_stages(said: Reader, layout: Layout, layers: int) -> list[str]:
    """Virtual stages by their number, which hold as many layers each."""
    flag = "num-virtual-stages-per-pipeline-rank"
    if not said.has(flag) or layers % layout.chunks == 0:
        return []
    return [
        f"--{flag} {layout.vpp}: {layers} layers do not divide by pp * it = {layout.chunks}, which Megatron-LM sees when it builds"
    ]


def experts_by_layer(said: Reader, layers: int) -> list[str]:
    """A pattern of experts of another length than the model."""
    text = re.sub(r"\s", "", said.text("moe-layer-freq"))
    lists = re.findall(r"\[([\d,]+)\](?:\*(\d+))?", text)
    if not lists or not layers:
        return []
    length = sum(len(values.split(",")) * int(times or 1) for values, times in lists)
    return [f"--moe-layer-freq {text} is for {length} layers, the model has {layers}"] if length != layers else []


def recompute_fits(said: Reader, layout: Layout, layers: int) -> list[str]:
    """More layers to recompute than a stage has."""
    if said.text("recompute-granularity") != "full" or not layers:
        return []
    wanted, most = said.number("recompute-num-layers", 1), max(layout.stages or even_split(layers, layout.chunks))
    return [f"--recompute-num-layers {wanted} is more than the {most} layers of a stage"] if wanted > most else []


def ranks_by_arrival(said: Reader) -> list[str]:
    """torchrun's dynamic rendezvous on several nodes."""
    if said.text("rdzv-backend") != "c10d" or said.has("node-rank") or said.text("nnodes", "1") == "1":
        return []
    return [
        "torchrun's c10d rendezvous without --node-rank numbers nodes as they arrive: which ranks share a node is left to chance"
    ]


def precision(flags: Flags) -> str:
    if "fp4-format" in flags:
        return "nvfp4"
    if "fp8-format" in flags:
        return "mxfp8" if flags.get("fp8-recipe", ("",))[0] == "mxfp8" else "fp8"
    return "bf16" if "bf16" in flags else "fp16" if "fp16" in flags else "fp32"
