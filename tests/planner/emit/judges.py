"""The real parsers as judges of random plans: what each is asked of a plan, and what in its answer is not the plan's.

``judged(name, kind, count, seed)`` draws plans of a target (of all targets in turn, for a launcher) and yields each plan's name with
the complaints: empty where the parser takes it and reads the degrees of the plan. The tests ask for a few plans, ``benchmarks/emission.py``
for many.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml
from oracles import Oracle, where
from plans import job_of, plan_of
from samples import layouts
from starts import started

from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.stage_states import stage_holding
from planner.emit import accelerate
from planner.emit.core import TARGETS, EmitSettings, Program, emit, program_of
from planner.emit.environment import capability
from planner.plan import Plan

Answer = dict[str, Any]
Ask = Callable[["Case"], list[str]]
KINDS = ("dense", "moe")
MODELS: dict[str, dict[str, tuple[tuple[str, ...], ...]]] = {
    "axisplan": {
        "dense": (("llama-3.1-8b", "h100-sxm:8x8"), ("qwen2.5-7b", "a100-sxm:2x8")),
        "moe": (("qwen3-30b-a3b", "h100-sxm:8x8"), ("mixtral-8x7b", "h100-sxm:4x8")),
    },
    "megatron": {
        "dense": (("llama-3.1-8b", "h100-sxm:8x8"), ("qwen3-4b", "h100-sxm:2x8"), ("gpt3-175b", "a100-sxm:32x8"), ("qwen2.5-7b", "b200:4x8")),
        "moe": (
            ("mixtral-8x7b", "h100-sxm:8x8"), ("qwen3-30b-a3b", "h100-sxm:8x8"), ("deepseek-v3", "h100-sxm:64x8"),
            ("gpt-oss-20b", "b200:4x8"), ("glm-4.5-air", "h100-sxm:16x8"),
        ),
    },
    "megatron-bridge": {
        "dense": (("llama-3.1-8b", "h100-sxm:8x8"), ("gpt3-175b", "a100-sxm:32x8"), ("qwen2.5-7b", "b200:4x8")),
        "moe": (("qwen3-30b-a3b", "h100-sxm:8x8"), ("glm-4.5-air", "h100-sxm:16x8"), ("mixtral-8x7b", "h100-sxm:8x8")),
    },
    "torchtitan": {
        "dense": (("llama-3.1-8b", "h100-sxm:8x8"), ("qwen3-8b", "h100-sxm:2x8"), ("llama-3.1-405b", "h100-sxm:64x8")),
        "moe": (("qwen3-30b-a3b", "h100-sxm:8x8"), ("deepseek-v2-lite", "h100-sxm:4x8"), ("gpt-oss-20b", "b200:4x8")),
    },
    "deepspeed": {
        "dense": (("llama-3.1-8b", "h100-sxm:8x8"), ("qwen2.5-7b", "a100-sxm:2x8", "fp16")),
        "moe": (("qwen3-30b-a3b", "h100-sxm:8x8"), ("mixtral-8x7b", "h100-sxm:4x8"), ("deepseek-v3", "h100-sxm:32x8")),
    },
    "accelerate": {
        "dense": (("llama-3.1-8b", "h100-sxm:8x8"), ("qwen2.5-7b", "a100-sxm:2x8", "fp16"), ("llama-3-70b", "h100-sxm:32x8", "fp8")),
        "moe": (("qwen3-30b-a3b", "h100-sxm:8x8"), ("mixtral-8x7b", "h100-sxm:4x8")),
    },
}  # fmt: skip
"""Model, cluster, precision (default bf16) of each target's jobs."""


@dataclass(frozen=True)
class Case:
    """A plan to be judged; ``index`` counts the plans of a run."""

    target: str
    job: Job
    layout: Layout
    index: int = 0

    @cached_property
    def plan(self) -> Plan:
        return plan_of(self.job, self.layout, legal=False)

    @cached_property
    def program(self) -> Program:
        return program_of(self.plan, self.target, EmitSettings())

    @property
    def name(self) -> str:
        return f"{self.target} {self.job.model.name} {self.layout.text()}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that launch.sh sets to plain values."""
        return {v.name: v.value for v in self.program.environment if isinstance(v.value, str) and v.how != "suggest"}


@cache
def jobs(target: str, kind: str) -> tuple[Job, ...]:
    made = []
    for model, cluster, *precision in MODELS[target][kind]:
        seq_len = 2048 if model == "gpt3-175b" else 4096 if target in ("torchtitan", "axisplan") else 8192
        made.append(job_of(model, cluster, target, seq_len, 1536, *precision))
    return tuple(made)


def cases(targets: tuple[str, ...], kind: str, count: int, seed: int) -> Iterator[Case]:
    """Random legal plans, the targets' jobs in turn."""
    every = [(target, job) for target in targets for job in jobs(target, kind)]
    streams = [layouts(job, seed + i) for i, (_, job) in enumerate(every)]
    for index in range(count):
        (target, job), stream = every[index % len(every)], streams[index % len(every)]
        yield Case(target, job, Layout.parse(next(stream).text()), index)


def judged(name: str, kind: str, count: int, seed: int, ask: Ask | None = None) -> Iterator[tuple[str, list[str]]]:
    """(plan, complaints) of ``count`` random plans; ``ask``: a judge that is open already."""
    targets = (name,) if name in TARGETS else tuple(MODELS)
    if ask is not None:
        yield from ((case.name, ask(case)) for case in cases(targets, kind, count, seed))
        return
    with JUDGES[name]() as opened:
        yield from judged(name, kind, count, seed, opened)


def driven(driver: str, *variables: str) -> AbstractContextManager[Callable[[Answer], Answer]]:
    """The process of a driver, asked one question after the other."""

    @contextmanager
    def opened() -> Iterator[Callable[[Answer], Answer]]:
        oracle = Oracle(driver, *variables)
        try:
            yield oracle.ask
        finally:
            oracle.close()

    return opened()


def complaint(answer: Answer, **wanted: Any) -> list[str]:
    """The parser's error, or what it read otherwise."""
    if not answer["ok"]:
        return [f"{answer['stage']}: {answer['error']}"]
    return [f"{name} is {answer[name]}, the plan's {value}" for name, value in wanted.items() if answer[name] != value]


# -- targets -----------------------------------------------------------------------------------------------------------------


@contextmanager
def axisplan_judge() -> Iterator[Ask]:
    """The runtime's own words and settings, and its trainer on fake tensors: parameters of a rank are the plan's."""
    from planner.dryrun.world import program as built
    from planner.runtime.settings import parser, read_settings

    def ask(case: Case) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            whole = plan_of(case.job, case.layout)
            for name, text in {"plan.json": whole.text(), **case.program.files}.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            given = parser().parse_args([w.text if not w.base else folder + w.text for w in case.program.words[1:]])
            plan = Plan.load(given.plan)
            settings = read_settings(given, plan.job())
        said = {"seq_len": settings.seq_len, "global_batch": settings.global_batch, "layout": plan.layout_object, "ok": True}
        found = complaint(said, seq_len=case.job.seq_len, global_batch=case.job.global_batch, layout=case.layout)
        stage = case.index % case.layout.pp
        whole_units = case.layout.with_(zero=min(case.layout.zero, 2))  # ZeRO 3 pads what it cuts
        with built(case.job, whole_units, case.layout.rank_at({"pp": stage})) as trainer:
            mine = {id(p): p.numel() for decoder in trainer.decoders.values() for p in decoder.parameters()}
        wanted = stage_holding(case.job, whole_units, stage)[0].all
        return found + (
            [] if sum(mine.values()) == wanted else [f"{sum(mine.values())} parameters on the rank, the plan's {wanted}"]
        )

    yield ask


def megatron_question(case: Case, rank: int = 0, build: bool = False) -> Answer:
    """``build``: with the local layers, which need no GPU's packages."""
    local = "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion"
    argv = [w.text for w in case.program.words[1:]] + (local.split() if build else [])
    arch = capability(case.job.cluster.gpu.name) or 9
    return {"world": case.layout.world, "rank": rank, "argv": argv, "environment": case.environment, "arch": arch, "build": build}


@contextmanager
def megatron_judge() -> Iterator[Ask]:
    """Megatron-LM's parser, validation, configuration and process groups: the groups are the layout's, rank by rank."""
    with driven("megatron_cli.py", "AXISPLAN_ORACLE_MEGATRON", "AXISPLAN_MEGATRON") as oracle:

        def ask(case: Case) -> list[str]:
            layout, rank = case.layout, case.index * 7919 % case.layout.world
            answer = oracle(megatron_question(case, rank))
            axes = ("tp", "cp", "dp", "pp") + (("ep", "etp", "edp") if case.job.model.moe else ())
            wanted = {name: list(layout.group(rank, name)) for name in axes}
            if answer["ok"]:
                answer |= {"groups": {name: answer["groups"][name] for name in axes}, "vpp": answer["vpp"] or 1}
            return complaint(answer, groups=wanted, dp=layout.dp, vpp=layout.vpp, sp=layout.sp)

        yield ask


BRIDGE_FIELDS = {
    "model.tensor_model_parallel_size": "tp", "model.pipeline_model_parallel_size": "pp", "model.context_parallel_size": "cp",
    "model.expert_model_parallel_size": "ep", "model.sequence_parallel": "sp", "train.micro_batch_size": "micro_batch",
}  # fmt: skip


def bridge_question(case: Case) -> Answer:
    overrides = [w.text for w in case.program.words if "=" in w.text]
    arch = capability(case.job.cluster.gpu.name) or 9
    return {
        "world": case.layout.world,
        "arch": arch,
        "overrides": overrides,
        "environment": case.environment,
        "values": [*BRIDGE_FIELDS],
    }


@contextmanager
def bridge_judge() -> Iterator[Ask]:
    """Megatron-Bridge's recipe under the overrides, and its own validation."""
    with driven("bridge_config.py", "AXISPLAN_ORACLE_BRIDGE", "AXISPLAN_MEGATRON_BRIDGE", "AXISPLAN_MEGATRON") as oracle:

        def ask(case: Case) -> list[str]:
            values = {name: getattr(case.layout, ours) for name, ours in BRIDGE_FIELDS.items()}
            return complaint(oracle(bridge_question(case)), dp=case.layout.dp, values=values)

        yield ask


def torchtitan_question(case: Case, rank: int = 0, build: bool = False) -> Answer:
    """In the field names of the release, or of the main branch where a checkout stands in for it."""
    release = {"release": "main"} if "AXISPLAN_TORCHTITAN" in where() else {}
    files = program_of(case.plan, "torchtitan", EmitSettings(options=release)).files
    arguments = ["--parallelism.spmd_backend=partial_dtensor"] if build else []
    return {"world": case.layout.world, "rank": rank, "files": files, "build": build, "arguments": arguments}


@contextmanager
def torchtitan_judge() -> Iterator[Ask]:
    """TorchTitan's ConfigManager and mesh dimensions."""
    with driven("torchtitan_build.py", "AXISPLAN_ORACLE_TORCHTITAN") as oracle:

        def ask(case: Case) -> list[str]:
            dims = {axis: getattr(case.layout, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")}
            return complaint(oracle(torchtitan_question(case)), dims=dims)

        yield ask


@contextmanager
def deepspeed_judge() -> Iterator[Ask]:
    """DeepSpeedConfig under a fake group of the plan's size; keys that DeepSpeed's source does not know are complained of."""
    with driven("deepspeed_config.py", "AXISPLAN_ORACLE_DEEPSPEED") as oracle:

        def ask(case: Case) -> list[str]:
            document = json.loads(case.program.files["ds_config.json"])
            replicas = case.layout.dp if case.layout.tp > 1 else None
            answer = oracle({"world": case.layout.world, "replicas": replicas, "sp": case.layout.cp, "config": document})
            return complaint(answer, train_batch_size=case.job.global_batch, unread=[])

        yield ask


@contextmanager
def accelerate_judge() -> Iterator[Ask]:
    """Accelerate's loader and launcher: the environment it would set is launch.sh's, its tp groups the layout's."""
    with driven("accelerate_config.py", "AXISPLAN_ORACLE_ACCELERATE") as oracle:

        def ask(case: Case) -> list[str]:
            text = case.program.files["accelerate.yaml"]
            answer = oracle({"world": case.layout.world, "yaml": text})
            ours = accelerate.exported(yaml.safe_load(text))
            if answer["ok"]:
                answer["environment"] = {name: answer["environment"].get(name) for name in ours}
            return complaint(answer, environment=ours, tp=list(case.layout.group(0, "tp")) if case.layout.tp > 1 else [])

        yield ask


# -- launchers ---------------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[dict[str, str], ...]] = {
    "torchrun": ({},),
    "slurm": ({}, {"partition": "gpu", "time": "1-02:30:00"}, {"mem": "400G", "container": "nvcr.io/nvidia/pytorch:25.09-py3"}),
    "kubernetes": (
        {"image": "a/b:c"}, {"image": "a/b:c", "namespace": "team-a", "claim": "data", "mount": "/mnt/my data"},
        {"image": "a/b:c", "network-resource": "rdma/hca", "service-account": "train", "priority-class": "high", "name": "job-7"},
    ),
    "skypilot": ({}, {"spot": "true"}, {"infra": "k8s", "setup": "pip install axisplan"}, {"image": "a/b:c"}),
}  # fmt: skip


@contextmanager
def emitted(case: Case, launcher: str) -> Iterator[Path]:
    """The launch folder of a plan, for a while."""
    options = OPTIONS[launcher][case.index % len(OPTIONS[launcher])]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "a folder"
        emit(case.plan, case.target, launcher, out, EmitSettings(options=options))
        yield out


@contextmanager
def torchrun_judge() -> Iterator[Ask]:
    """torchrun's own parser takes the line that launch.sh becomes, on a node of the middle."""
    from torch.distributed.run import config_from_args, get_args_parser

    def ask(case: Case) -> list[str]:
        hosts = case.job.cluster.hosts
        rank = random.Random(case.index).randrange(hosts)
        with emitted(case, "torchrun") as out:
            words = started(out, node_rank=rank)
        arguments = get_args_parser().parse_args(words)
        config, _, _ = config_from_args(arguments)
        found = {"ok": True, "nodes": (config.min_nodes, config.max_nodes), "processes": config.nproc_per_node}
        if hosts > 1:
            found["place"] = (arguments.node_rank, arguments.master_addr, arguments.master_port)
        place = {"place": (rank, "head", 29500)} if hosts > 1 else {}
        return complaint(found, nodes=(hosts, hosts), processes=case.job.cluster.gpus // hosts, **place)

    yield ask


@contextmanager
def slurm_judge() -> Iterator[Ask]:
    """``sbatch --test-only`` against a controller whose 64 nodes do not exist."""
    from slurms import controller

    with tempfile.TemporaryDirectory() as folder, controller(Path(folder), 64, 8) as environment:

        def ask(case: Case) -> list[str]:
            with emitted(case, "slurm") as out:
                command = ["sbatch", "--test-only", "job.sbatch"]
                done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, timeout=60, check=False)
            hosts = case.job.cluster.hosts
            where = "gpu01" if hosts == 1 else f"gpu[01-{hosts:02d}]"
            return [] if done.returncode == 0 and f"on nodes {where} in partition gpu" in done.stderr else [done.stderr[-300:]]

        yield ask


@contextmanager
def kubernetes_judge() -> Iterator[Ask]:
    """Kubeflow's models keep every field, Kubernetes' schemas take the pods strictly."""
    with driven("kubernetes_objects.py", "AXISPLAN_ORACLE_KUBERNETES") as oracle:

        def ask(case: Case) -> list[str]:
            with emitted(case, "kubernetes") as out:
                objects = [yaml.safe_load((out / name).read_text()) for name in ("trainjob.yaml", "pytorchjob.yaml")]
            pods = (1, min(case.job.cluster.hosts, 2))
            asked = [complaint(oracle({"object": o}), dropped=[], pods=n) for o, n in zip(objects, pods, strict=True)]
            return list(itertools.chain(*asked))

        yield ask


@contextmanager
def skypilot_judge() -> Iterator[Ask]:
    """SkyPilot's own Task."""
    with driven("skypilot_task.py", "AXISPLAN_ORACLE_SKYPILOT") as oracle:

        def ask(case: Case) -> list[str]:
            with emitted(case, "skypilot") as out:
                task = yaml.safe_load((out / "task.yaml").read_text())
            return complaint(oracle({"task": task}), nodes=case.job.cluster.hosts, run=task["run"])

        yield ask


JUDGES: dict[str, Callable[[], AbstractContextManager[Ask]]] = {
    "axisplan": axisplan_judge, "megatron": megatron_judge, "megatron-bridge": bridge_judge, "torchtitan": torchtitan_judge,
    "deepspeed": deepspeed_judge, "accelerate": accelerate_judge, "torchrun": torchrun_judge, "slurm": slurm_judge,
    "kubernetes": kubernetes_judge, "skypilot": skypilot_judge,
}  # fmt: skip
"""Every target and every launcher by its name; opening one skips the test where its parser is not installed."""
