"""What is known: inspect, models, clusters."""

from __future__ import annotations

from typing import Any

import click

from planner.command_line import CONTEXT, Commands, Examples, Tokens, as_json, cli, command, show_json
from profiles.errors import InputError


@command("inspect", "axisplan inspect llama-3.1-405b --seq-len 8k\naxisplan inspect path/to/config.json --json")
@click.argument("model")
@click.option(
    "--seq-len", type=Tokens(), help="Tokens a sequence, for the attention FLOPs (default: 4096, or the model's longest)."
)
@as_json
def inspect(model: str, seq_len: int | None, as_json: bool) -> None:
    """Parameters (total, active, by part), FLOPs a token and layer groups of MODEL."""
    from cost_models.flops import inspect_model
    from planner import screen
    from profiles.huggingface import load_model

    spec = load_model(model)
    document = inspect_model(spec, seq_len)
    if as_json:
        show_json(document)
    else:
        screen.show_inspect(screen.console(), spec.name, document)


@command("models", "axisplan models")
@as_json
def models(as_json: bool) -> None:
    """The models built in, by the names people write."""
    from planner import screen
    from profiles.families.registry import checked_against
    from profiles.huggingface import load_model, model_names

    if as_json:
        show_json(model_names())
        return
    rows = []
    for name in model_names():
        spec = load_model(name)
        total, active = screen.count(spec.parameters.total), screen.count(spec.parameters.active)
        rows.append((name, total, active, spec.num_layers, spec.hidden, checked_against(spec)))
    columns = ("model", "parameters", "active", "layers", "hidden", "count checked against")
    screen.console().print(screen.table("built-in models (or a Hugging Face config.json, or a folder holding one)", columns, rows))


@cli.group(
    "clusters", cls=Commands, context_settings=CONTEXT, invoke_without_command=True,
    example="axisplan clusters\naxisplan clusters show h100-sxm:64x8",
)  # fmt: skip
@as_json
@click.pass_context
def clusters(context: click.Context, as_json: bool) -> None:
    """The clusters and GPUs built in, and this machine; `axisplan clusters show h100-sxm:64x8` prints every number with its origin."""
    if context.invoked_subcommand is not None:
        return
    from planner import screen
    from profiles.catalogue import this_machine
    from profiles.hardware import cluster_names, load_cluster

    rows: list[dict[str, Any]] = []
    here = this_machine().is_file()
    for name in (*(["this"] if here else []), *cluster_names()):
        spec = load_cluster(name)
        dtype = "bf16" if "bf16" in spec.gpu.peaks else "fp16"
        rows.append(
            {
                "cluster": name,
                "gpu": spec.gpu.name,
                "aliases": spec.gpu.aliases,
                "gpus_per_node": spec.gpus_per_node,
                "usable_bytes": spec.gpu.usable_bytes,
                "peak_flops": None if spec.gpu.is_host else spec.gpu.peak_flops(dtype),
                "levels": [{"name": level.name, "size": level.size} for level in spec.levels],
            }
        )
    if as_json:
        show_json(rows)
        return
    shown = [
        (
            row["cluster"],
            row["gpu"],
            f"{row['usable_bytes'] / screen.GIB:.1f}",
            "" if row["peak_flops"] is None else f"{row['peak_flops'] / 1e12:,.0f}",
            ", ".join(f"{level['name']} {level['size']}" for level in row["levels"]),
        )
        for row in rows
    ]
    columns = ("cluster", "GPU", "usable GiB", "16-bit TFLOP/s", "domains of one node")
    screen.console().print(screen.table("built-in clusters: NAME:NODESxGPUS, e.g. h100-sxm:64x8", columns, shown, left=2))
    if not here:
        click.echo("this machine: not measured yet; `axisplan profile gpu` measures it, then it is the cluster `this`")


@clusters.command("show", cls=Examples, example="axisplan clusters show h100-sxm:64x8", context_settings=CONTEXT)
@click.argument("name")
@as_json
def clusters_show(name: str, as_json: bool) -> None:
    """Every number of a cluster, with its unit, origin and source; NAME `this` is what was measured here last."""
    from planner import screen
    from profiles.hardware import describe, load_cluster

    rows = describe(load_cluster(name))
    if as_json:
        show_json([dict(zip(("field", "value", "unit", "origin", "source"), row, strict=False)) for row in rows])
    else:
        screen.console().print(screen.table(name, ("field", "value", "unit", "origin", "source"), rows, left=5))


COLLECTIVES_EXAMPLE = """axisplan clusters collectives h100-sxm:64x8
axisplan clusters collectives h100-sxm:64x8 --ranks 64 --stride 8"""


@clusters.command("collectives", cls=Examples, example=COLLECTIVES_EXAMPLE, context_settings=CONTEXT)
@click.argument("name")
@click.option("--ranks", type=click.IntRange(2), help="Ranks of the group (default: all GPUs).")
@click.option("--stride", type=click.IntRange(1), default=1, show_default=True, help="How far apart they are.")
@as_json
def clusters_collectives(name: str, ranks: int | None, stride: int, as_json: bool) -> None:
    """Seconds of every collective by message size on a cluster, and the algorithm and protocol that NCCL takes for it."""
    from planner import screen
    from profiles.hardware import load_cluster
    from profiles.links import KINDS
    from profiles.operations import wire_bytes

    cluster = load_cluster(name)
    ranks = ranks or cluster.gpus
    if ranks < 2 or (ranks - 1) * stride >= cluster.gpus:
        raise InputError(
            "--ranks", ranks, f"2 ranks or more, {stride} apart, among {cluster.gpus} GPUs", max(cluster.gpus // stride, 2)
        )
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        for size in MESSAGES.values():
            seconds = float(cluster.collective_seconds(kind, size, ranks, stride))
            algorithm, protocol = cluster.choice(kind, size, ranks, stride)
            rate = float(wire_bytes(kind, size, ranks)) / seconds
            rows.append(
                {"collective": kind, "bytes": size, "seconds": seconds, "bus_bytes_per_second": rate, "algorithm": algorithm,
                 "protocol": protocol}
            )  # fmt: skip
    if as_json:
        show_json(rows)
        return
    names = {size: text for text, size in MESSAGES.items()}
    shown = [
        (
            r["collective"].replace("_", "-"), names[r["bytes"]], screen.seconds(r["seconds"]),
            f"{r['bus_bytes_per_second'] / 1e9:,.1f}", r["algorithm"], r["protocol"],
        )
        for r in rows
    ]  # fmt: skip
    columns = ("collective", "full buffer", "time", "GB/s on the wire", "algorithm", "protocol")
    screen.console().print(screen.table(f"{cluster.name}: {ranks} ranks, {stride} apart", columns, shown))


MESSAGES = {"1 KiB": 1 << 10, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "256 MiB": 1 << 28, "1 GiB": 1 << 30}
"""Full buffers shown, bytes."""
