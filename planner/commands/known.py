"""What is known: inspect, models, clusters."""

from __future__ import annotations

from typing import Any

import click

from planner.command_line import CONTEXT, Commands, Examples, Tokens, as_json, cli, command, show_json


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
    from profiles.huggingface import load_model, model_names

    if as_json:
        show_json(model_names())
        return
    rows = []
    for name in model_names():
        spec = load_model(name)
        rows.append((name, screen.count(spec.parameters.total), screen.count(spec.parameters.active), spec.num_layers, spec.hidden))
    columns = ("model", "parameters", "active", "layers", "hidden")
    screen.console().print(screen.table("built-in models (or a Hugging Face config.json, or a folder holding one)", columns, rows))


@cli.group(
    "clusters", cls=Commands, context_settings=CONTEXT, invoke_without_command=True,
    example="axisplan clusters\naxisplan clusters show h100-sxm:64x8",
)  # fmt: skip
@as_json
@click.pass_context
def clusters(context: click.Context, as_json: bool) -> None:
    """The clusters and GPUs built in; `axisplan clusters show h100-sxm:64x8` prints every number with its origin."""
    if context.invoked_subcommand is not None:
        return
    from planner import screen
    from profiles.hardware import cluster_names, load_cluster

    rows: list[dict[str, Any]] = []
    for name in cluster_names():
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


@clusters.command("show", cls=Examples, example="axisplan clusters show h100-sxm:64x8", context_settings=CONTEXT)
@click.argument("name")
@as_json
def clusters_show(name: str, as_json: bool) -> None:
    """Every number of a cluster, with its unit, origin and source."""
    from planner import screen
    from profiles.hardware import describe, load_cluster

    rows = describe(load_cluster(name))
    if as_json:
        show_json([dict(zip(("field", "value", "unit", "origin", "source"), row, strict=False)) for row in rows])
    else:
        screen.console().print(screen.table(name, ("field", "value", "unit", "origin", "source"), rows, left=5))
