"""sbatch files: hostile values are inert, ranks follow the host list, and a start on the wrong nodes stops with the map (I02)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from plans import job_of, plan_of, renamed

from planner.emit.core import EmitSettings, emit
from planner.emit.options import plain_name
from planner.placement import group_place
from planner.plan import Plan
from profiles.errors import InputError

HOSTILE = "x$(touch pwned)`id`'\"\n#SBATCH --wrap=id"


def plan(
    cluster: str = "h100-sxm:2x8", layout: str = "tp=8,micro_batch=1", model: object = "llama-3.1-8b", global_batch: int = 128
) -> Plan:
    return plan_of(job_of(model, cluster, "axisplan", global_batch=global_batch), layout)  # type: ignore[arg-type]


def folder(tmp_path: Path, made: Plan | None = None, **options: str) -> Path:
    out = tmp_path / "launch folder"
    emit(made or plan(), "axisplan", "slurm", out, EmitSettings(options=options))
    return out


def test_the_batch_file_asks_for_the_plans_nodes_and_gpus_one_task_a_node(tmp_path: Path) -> None:
    text = (folder(tmp_path, partition="gpu", time="1-00:00:00") / "job.sbatch").read_text()
    wanted = [
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--distribution=block",
        "--partition=gpu",
        "--time=1-00:00:00",
    ]
    assert [w for w in wanted if f"#SBATCH {w}\n" not in text] == []


def test_a_rack_of_hosts_is_as_many_slurm_nodes_as_it_has_hosts(tmp_path: Path) -> None:
    out = folder(tmp_path, plan("gb200-nvl72:1x72", "tp=8,dp_shard=9,micro_batch=1", global_batch=144))
    text = (out / "job.sbatch").read_text()
    assert "#SBATCH --nodes=18\n" in text
    assert "#SBATCH --gpus-per-node=4\n" in text
    assert "within=rack" in text
    assert "--nnodes 18 --nproc-per-node 4" in (out / "launch.sh").read_text()


@pytest.mark.parametrize(
    ("tp", "per_host", "domain", "place"), [(8, 8, 8, "node"), (4, 8, 8, "node"), (8, 4, 72, "rack"), (16, 8, 8, "any")]
)
def test_what_must_hold_a_tensor_parallel_group(tp: int, per_host: int, domain: int, place: str) -> None:
    assert group_place(tp, per_host, domain) == place


@pytest.mark.parametrize("option", ["partition", "account", "qos", "time", "constraint", "container", "mounts"])
def test_a_hostile_option_is_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(InputError, match=f"--set {option}"):
        folder(tmp_path, **{option: HOSTILE})
    assert not (tmp_path / "launch folder").exists()


def test_an_unknown_option_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        folder(tmp_path, partitions="gpu")
    assert refused.value.nearest == "partition"


def test_a_hostile_model_name_stays_in_comments(tmp_path: Path) -> None:
    out = folder(tmp_path, plan(model=renamed("llama-3.1-8b", HOSTILE)))
    text = (out / "job.sbatch").read_text()
    assert f"#SBATCH --job-name={plain_name(HOSTILE)}\n" in text
    assert "\n#SBATCH --wrap" not in text
    assert [line for line in text.splitlines() if "$(touch" in line and not line.startswith("# ")] == []


def test_scripts_are_clean_under_bash_and_shellcheck(tmp_path: Path) -> None:
    out = folder(
        tmp_path, plan(model=renamed("llama-3.1-8b", HOSTILE)), container="nvcr.io/nvidia/pytorch:25.09-py3", mounts="/data:/data"
    )
    for name in ("job.sbatch", "node.sh", "launch.sh"):
        subprocess.run(["bash", "-n", out / name], check=True)
    found = subprocess.run(
        ["shellcheck", *(out / n for n in ("job.sbatch", "node.sh", "launch.sh"))], capture_output=True, text=True
    )
    assert found.stdout == ""


# -- the start check, with Slurm's commands played by scripts ---------------------------------------------------------------


FAKES = {
    "scontrol": "#!/bin/bash\nprintf '%s\\n' $FAKE_HOSTS\n",
    "srun": """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
code=0
for host in $FAKE_RUNS_ON; do SLURMD_NODENAME=${host%%:*} FAKE_HOST=${host##*:} "$@" || code=$?; done
exit $code
""",
    "hostname": '#!/bin/bash\necho "$FAKE_HOST"\n',
    "nvidia-smi": "#!/bin/bash\nfor ((i = 0; i < ${FAKE_GPUS:-8}; i++)); do echo GPU $i; done\n",
    "axisplan": '#!/bin/bash\n[ "$1 $2" != "worker start" ] || exec "${@:3}"\n',
    "torchrun": '#!/bin/bash\necho "torchrun rank $NODE_RANK master $MASTER_ADDR:$MASTER_PORT $*"\n',
}


def start(
    out: Path, tmp_path: Path, hosts: str, runs_on: str | None = None, gpus: int = 8, *arguments: str
) -> subprocess.CompletedProcess[str]:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, text in FAKES.items():
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    env = {
        **os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(out),
        "SLURM_JOB_NODELIST": "x", "SLURM_JOB_ID": "7", "FAKE_HOSTS": hosts,
        "FAKE_RUNS_ON": runs_on or " ".join(f"{h}:{h}.site" for h in hosts.split()), "FAKE_GPUS": str(gpus),
    }  # fmt: skip
    return subprocess.run(["bash", out / "job.sbatch", *arguments], env=env, capture_output=True, text=True, check=False)


def test_ranks_follow_the_host_list_whatever_order_tasks_arrive_in(tmp_path: Path) -> None:
    done = start(folder(tmp_path), tmp_path, "gpu02 gpu01", "gpu01:gpu01.site gpu02:gpu02.site")
    assert done.returncode == 0, done.stderr
    started = [line for line in done.stdout.splitlines() if line.startswith("torchrun")]
    assert [line.split()[:5] for line in started] == [
        ["torchrun", "rank", "1", "master", "gpu02:20007"],
        ["torchrun", "rank", "0", "master", "gpu02:20007"],
    ]
    assert all("--nnodes 2 --nproc-per-node 8" in line for line in started)


def test_a_missing_node_stops_the_job(tmp_path: Path) -> None:
    done = start(folder(tmp_path), tmp_path, "gpu01")
    assert done.returncode == 1
    assert "the plan is for 2 nodes, this job has 1: gpu01" in done.stderr
    assert "torchrun" not in done.stdout


def test_two_tasks_on_one_host_stop_the_job_with_the_map(tmp_path: Path) -> None:
    done = start(folder(tmp_path), tmp_path, "gpu01 gpu02", "gpu01:same gpu02:same")
    assert done.returncode == 1
    assert "host same is node 0 and node 1 at once" in done.stderr
    assert "0-7" in done.stderr
    assert "8-15" in done.stderr
    assert "torchrun" not in done.stdout


def test_nodes_with_fewer_gpus_stop_the_job(tmp_path: Path) -> None:
    done = start(folder(tmp_path), tmp_path, "gpu01 gpu02", gpus=4)
    assert done.returncode == 1
    assert "node 0 (gpu01.site) has 4 GPUs, the plan needs 8" in done.stderr


def places(lines: str, **variables: object) -> subprocess.CompletedProcess[str]:
    from importlib.resources import files

    from planner.emit.files import fill

    assert (files("planner.emit") / "templates" / "places.awk").is_file()
    command = ["awk", *(x for k, v in variables.items() for x in ("-v", f"{k}={v}")), fill("places.awk")]
    return subprocess.run(command, input=lines, capture_output=True, text=True, check=False)


def test_a_tensor_parallel_group_across_nodes_is_named_with_its_hosts() -> None:
    done = places("place 0 a a.x 6 -\nplace 1 b b.x 6 -\n", nodes=2, per_node=6, tp=4, within="node")
    assert done.returncode == 1
    assert "tensor-parallel group of ranks 4 to 7 spans a.x and b.x" in done.stderr


def test_a_group_across_hosts_must_share_its_rack() -> None:
    inside = "place 0 a a 4 s0\nplace 1 b b 4 s0\nplace 2 c c 4 s1\nplace 3 d d 4 s1\n"
    assert places(inside, nodes=4, per_node=4, tp=8, within="rack").returncode == 0
    done = places(inside.replace("place 1 b b 4 s0", "place 1 b b 4 s1"), nodes=4, per_node=4, tp=8, within="rack")
    assert done.returncode == 1
    assert "tensor-parallel group of ranks 0 to 7 spans a and b" in done.stderr


def test_check_goes_through_to_every_node(tmp_path: Path) -> None:
    done = start(folder(tmp_path), tmp_path, "gpu01 gpu02", None, 8, "--check")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("worker check") == 2


def test_the_readme_names_the_log_that_slurm_writes(tmp_path: Path) -> None:
    out = folder(tmp_path)
    job = (out / "job.sbatch").read_text()
    assert "#SBATCH --output=%x-%j.log\n" in job
    name = job.partition("--job-name=")[2].split()[0]
    assert f"`axisplan measure {name}-JOBID.log --plan plan.json" in (out / "README.md").read_text()
