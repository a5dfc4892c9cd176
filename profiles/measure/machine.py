"""This machine as a cluster: GPUs (or CPU processes) and links, measured with as many workers at once as will train."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles.catalogue import to_yaml
from profiles.files import write_text
from profiles.hardware import ClusterSpec, Constant, Level
from profiles.links import KINDS
from profiles.measure import gpu, links
from profiles.measure.fitting import no_link, source_of
from profiles.measure.gpu import Collector, GpuMeasurement, Progress
from profiles.measure.launch import run_workers
from profiles.measure.links import LinkMeasurement
from profiles.measure.samples import save_samples
from profiles.measure.timing import Noise, others_busy, patience

GPU_SHARE = 0.55
"""Of the budget, for the device; the rest is for the links, where there is more than one worker."""
SIZES = {"cpu": [1 << p for p in (10, 14, 18, 20, 22, 23, 24)], "cuda": [1 << p for p in range(10, 31, 2)]}
"""Message sizes: 1 KiB to 16 MiB on a CPU (closer together where bytes count), to 1 GiB in steps of four on GPUs."""


@dataclass
class MachineMeasurement:
    """``cluster`` is None where an interruption left too little to fit."""

    gpu: GpuMeasurement
    links: LinkMeasurement | None
    cluster: ClusterSpec | None
    interrupted: bool = False

    @property
    def noise(self) -> Noise:
        """The worse of the two parts'."""
        return max((self.gpu.noise, *([self.links.noise] if self.links else [])), key=lambda n: (n.noisy, n.spread))

    def save(self, path: str | Path) -> str:
        """Writes the cluster as YAML that ``load_cluster`` reads, and the samples beside it (``.samples.json``); after an interruption
        that left no cluster, the device alone (YAML that ``load_gpu`` reads), or only the samples. Says what was written."""
        samples = self.gpu.samples + (self.links.samples if self.links else [])
        beside = Path(path).with_suffix(".samples.json")
        save_samples(beside, samples, **{**(self.links.facts if self.links else {}), **self.gpu.facts})
        found = self.cluster or self.gpu.profile
        if found is None:
            return f"interrupted before there was enough to fit: only samples are written, to {beside}"
        write_text(Path(path), to_yaml(found))
        if self.cluster is None:
            return f"interrupted before the links were measured: {path} holds the device alone (a cluster file's `gpu:`)"
        return f"written to {path}; plan with --cluster {path}"


def profile_machine(
    processes: int | None = None,
    *,
    budget_seconds: float = 60.0,
    device: str | None = None,
    dtypes: tuple[str, ...] | None = None,
    threads: int = 1,
    progress: Progress | None = None,
) -> MachineMeasurement:
    """Measures device and links with ``processes`` workers at once (default: the GPUs there are; 4 on a CPU) and fits a cluster.

    One start of the workers serves both. Takes about ``budget_seconds`` and the workers' start (some seconds). Ctrl-C returns what
    there is. Raises InputError for an impossible request, AxisplanError where a worker fails.
    """
    device, chosen = gpu.check(device, dtypes, 1, budget_seconds)
    processes = processes or gpu.workers(None, device)
    gpu.check(device, dtypes, processes, budget_seconds)
    share = GPU_SHARE if processes > 1 else 1.0
    job: dict[str, Any] = {"device": device, "gpu": {"dtypes": list(chosen), "budget_seconds": budget_seconds * share}}
    if processes > 1:
        job["links"] = {
            "axes": links.default_axes(processes), "kinds": list(KINDS), "sizes": SIZES[device], "alone": False,
            "budget_seconds": budget_seconds * (1 - GPU_SHARE),
        }  # fmt: skip
    others, interrupted = others_busy(), False
    collector = _TwoParts(progress, share)
    try:
        run_workers(job, processes, timeout_seconds=patience(budget_seconds, parts=2), on_record=collector, threads=threads)
    except KeyboardInterrupt:
        interrupted = True
    measured = gpu.finish(collector.device, processes=processes, threads=threads, interrupted=interrupted, others=others)
    linked = links.finish(collector.links, interrupted=interrupted, others=others) if processes > 1 else None
    found = cluster(measured, linked, processes) if measured.profile and (linked is None or linked.link) else None
    return MachineMeasurement(measured, linked, found, interrupted)


class _TwoParts:
    """Sends the workers' records to the device's collector, then to the links'."""

    def __init__(self, progress: Progress | None, share: float) -> None:
        self.device, self.links = Collector(progress, 0.0, share), Collector(progress, share, 1.0)

    def __call__(self, record: dict[str, Any]) -> None:
        linked = record.get("section") == "links" or "backend" in record.get("facts", {})
        (self.links if linked else self.device)(record)


def cluster(measured: GpuMeasurement, linked: LinkMeasurement | None, processes: int) -> ClusterSpec:
    """One node of ``processes`` GPUs whose only level is the measured link."""
    profile, facts = measured.profile, measured.facts
    assert profile is not None
    source = source_of(facts)
    link = linked.link if linked and linked.link else no_link(source)
    memory = Constant(facts["host_memory_bytes"], "bytes/host", "measured", source)
    free = Constant(0.0, "USD/GPU-hour", "estimate", "a machine at hand")
    level = Level(name="host", size=max(processes, 1), link=link)
    return ClusterSpec(
        name="this", gpu=profile, gpus=processes, gpus_per_node=processes, levels=(level,), gpus_per_host=processes,
        host_memory_bytes=memory, price_per_gpu_hour=free, date=str(facts["date"]), host=str(facts["host"]),
    )  # fmt: skip
