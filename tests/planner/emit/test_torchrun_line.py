"""The line that launch.sh becomes is one that torchrun's own parser takes: nodes, processes, rendezvous, and the worker's words."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from plans import job_of, plan_of, renamed
from starts import started

from planner.emit.core import EmitSettings, emit

CASES = [
    ("axisplan", "h100-sxm:1x8", "tp=8,micro_batch=1"), ("axisplan", "h100-sxm:4x8", "tp=8,micro_batch=1"),
    ("axisplan", "gb200-nvl72:1x64", "tp=8,micro_batch=1"), ("deepspeed", "h100-sxm:2x8", "zero=3"), ("accelerate", "h100-sxm:2x8", "zero=3"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "cluster", "layout"), CASES)
def test_torchruns_parser_takes_the_line(tmp_path: Path, target: str, cluster: str, layout: str) -> None:
    from torch.distributed.run import config_from_args, get_args_parser

    job = job_of(renamed("llama-3.1-8b", "a $(id) 'b'"), cluster, target)
    out = tmp_path / "a folder"
    emit(plan_of(job, layout), target, "torchrun", out, EmitSettings())
    for extra in ([], ["--steps", "7"], ["--check"]):
        arguments = get_args_parser().parse_args(started(out, *extra, node_rank=1 if job.cluster.hosts > 1 else 0))
        config, command, command_words = config_from_args(arguments)
        assert config.min_nodes == config.max_nodes == job.cluster.hosts
        assert config.nproc_per_node == job.cluster.gpus // job.cluster.hosts
        if job.cluster.hosts > 1:
            assert (arguments.node_rank, arguments.master_addr, arguments.master_port) == (1, "head", 29500)
        if extra == ["--check"]:
            assert (command, command_words) == (str(tmp_path / "bin" / "axisplan"), ["worker", "check", str(out / "plan.json")])
        elif target == "axisplan":
            assert command_words[:3] == ["worker", "train", str(out / "plan.json")]
        else:
            assert str(out / "train.py") in command_words
            assert command_words[-len(extra) :] == extra or not extra


def test_every_launch_script_of_every_launcher_is_clean(tmp_path: Path) -> None:
    options = {"kubernetes": {"image": "a/b:c"}}
    scripts: list[Path] = []
    for target, cluster, layout in CASES[2:]:
        plan = plan_of(job_of("llama-3.1-8b", cluster, target), layout)
        for launcher in ("torchrun", "slurm", "kubernetes", "skypilot"):
            out = tmp_path / f"{target}-{launcher}"
            emit(plan, target, launcher, out, EmitSettings(options=options.get(launcher, {})))
            scripts += [p for p in out.iterdir() if p.suffix in (".sh", ".sbatch")]
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
    assert subprocess.run(["shellcheck", *scripts], capture_output=True, text=True).stdout == ""
