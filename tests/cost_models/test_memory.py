"""Memory by stage and moment: published measurements, bulk against one by one, bounds, step order."""

import random

import numpy as np
import pytest

from cost_models.activations import chunk_memory, runs_of
from cost_models.execution import Execution, load_execution
from cost_models.job import Job
from cost_models.layout import SCHEDULES, Layout
from cost_models.memory import StageMemory, fits, stage_memory
from cost_models.memory_bulk import device_bytes
from cost_models.runs import load_runs, read_rows
from cost_models.unit_memory import unit_memory
from profiles.errors import InputError
from profiles.hardware import load_cluster
from profiles.huggingface import load_model

GIB = 2**30


def job(
    name: str = "llama-3.1-8b",
    execution: Execution | str = "megatron",
    gpus: int = 64,
    seq_len: int = 4096,
    batch: int = 256,
    **more: object,
) -> Job:
    facts = load_execution(execution) if isinstance(execution, str) else execution
    return Job(load_model(name), load_cluster(f"h100-sxm:{max(1, gpus // 8)}x8"), facts, seq_len, batch, **more)


def worst(work: Job, text: str, gpus: int = 64) -> StageMemory:
    return max(stage_memory(work, Layout.parse(text, gpus)), key=lambda s: s.peak_allocated)


# -- measured runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(data: object) -> list:
    rows = [r for r in read_rows(data / "runs.csv") if r["measured_peak_mem_GiB"] and r["info_grade"] == "A"]  # type: ignore[operator]
    runs, _ = load_runs(rows)
    return runs


@pytest.mark.parametrize(
    ("source", "figure", "count", "limit"), [("SimuMax", "allocated", 22, 0.015), ("torchtitan", "reserved", 12, 0.03)]
)
def test_measured_peaks_are_predicted_from_byte_counts_alone(
    measured: list, source: str, figure: str, count: int, limit: float
) -> None:
    errors = []
    for run in measured:
        if source in run.source:
            assert run.memory_figure == figure
            found = max(getattr(s, f"peak_{figure}") for s in stage_memory(run.job, run.layout))
            errors.append(abs(found / GIB / run.memory_gib - 1))
    assert len(errors) == count
    assert sum(errors) / count <= limit
    assert max(errors) <= 3 * limit


# -- the moments of a step -------------------------------------------------------------------------------------------------


def test_categories_add_up_and_figures_are_ordered() -> None:
    for stage in stage_memory(job(), Layout.parse("tp=2,pp=4", 64)):
        assert stage.parameters + stage.gradients + stage.optimizer + stage.activations + stage.temporary == pytest.approx(
            stage.peak_allocated
        )
        assert stage.peak_allocated < stage.peak_reserved < stage.device
        assert stage.init_peak < stage.device
        assert stage.needed == stage.device


def test_no_category_is_negative_where_a_moment_holds_less_than_the_steady_gradients() -> None:
    for precision in ("fp32", "bf16"):
        job = Job(load_model("llama-tiny"), load_cluster("cpu:1x4"), load_execution("axisplan"), 128, 16, precision)
        for text in ("dp_replicate=2,dp_shard=2,zero=3,micro_batch=4", "dp_shard=4,zero=3", "dp_shard=4,zero=2,micro_batch=2"):
            (stage,) = stage_memory(job, Layout.parse(text, 4))
            parts = (stage.parameters, stage.gradients, stage.optimizer, stage.activations, stage.temporary)
            assert min(parts) >= 0, (precision, text)
            assert sum(parts) == pytest.approx(stage.peak_allocated, rel=1e-12)


@pytest.mark.parametrize(("pp", "batch", "in_flight"), [(4, 256, (4, 3, 2, 1)), (4, 8, (1, 1, 1, 1)), (4, 16, (2, 2, 2, 1))])
def test_1f1b_keeps_min_of_microbatches_and_stages_left(pp: int, batch: int, in_flight: tuple[int, ...]) -> None:
    work = job(batch=batch)
    layout = Layout.parse(f"tp=2,pp={pp}", 64)
    for rank, count in enumerate(in_flight):
        kept = chunk_memory(work, layout, rank).kept
        assert stage_memory(work, layout)[rank].activations == pytest.approx(count * kept)


def test_the_first_stage_holds_most_microbatches_and_the_last_one_the_logits() -> None:
    first, *_, last = stage_memory(job(), Layout.parse("pp=4", 64))
    assert (first.peak_at, last.peak_at) == ("backward of a layer", "loss")
    assert first.activations > last.activations
    head = unit_memory(job(), Layout(), "head")
    assert head.kept > 2 * 4096 * 128_256
    middle = chunk_memory(job(), Layout.parse("pp=4", 64), 1)
    assert middle.loss is None


def test_the_peak_is_not_the_sum_of_maxima() -> None:
    work, layout = job(), Layout.parse("tp=2,recompute=full", 64)
    chunk = chunk_memory(work, layout, 0)
    stage = stage_memory(work, layout)[0]
    assert chunk.loss is not None
    assert stage.activations + stage.temporary < chunk.kept + chunk.loss + unit_memory(work, layout, 0).saved


def test_recompute_keeps_less_and_an_uneven_choice_lies_between() -> None:
    peaks = [worst(job(), f"tp=2,pp=2,recompute={r}").activations for r in ("none", "0-7:full/8-31:none", "full")]
    assert peaks[0] > peaks[1] > peaks[2]


def test_a_checkpoint_of_several_layers_keeps_fewer_inputs_and_needs_more_at_once() -> None:
    one, four = (job(execution=Execution(recompute_unit=n)) for n in (1, 4))
    a, b = (chunk_memory(w, Layout.parse("tp=2,recompute=full", 64), 0) for w in (one, four))
    head = unit_memory(one, Layout(tp=2, sp=True), "head").kept + unit_memory(one, Layout(tp=2, sp=True), "embedding").kept
    assert (a.kept - head) == 4 * (b.kept - head)
    assert b.backward > a.backward


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s != "dualpipe"])
def test_every_schedule_has_a_memory(schedule: str) -> None:
    layout = Layout.derive({"tp": 2, "pp": 4, "schedule": schedule, **({"vpp": 2} if schedule == "interleaved" else {})}, 64)
    stages = stage_memory(job(), layout)
    assert len(stages) == 4
    assert all(s.peak_allocated > 0 for s in stages)


def test_schedules_trade_memory_as_their_papers_say() -> None:
    """GPipe keeps every microbatch; interleaving more than 1F1B; ZB-H1 as much, and what W still needs; ZB-V is level."""

    def kept(schedule: str, vpp: int = 1) -> list[float]:
        stages = stage_memory(job(batch=512), Layout.derive({"pp": 4, "schedule": schedule, "vpp": vpp}, 64))
        return [s.activations for s in stages]

    one, gpipe, interleaved, h1, v = kept("1f1b"), kept("gpipe"), kept("interleaved", 2), kept("zb-h1"), kept("zb-v", 2)
    assert gpipe[0] == pytest.approx(32 / 4 * one[0])
    assert interleaved[0] > one[0]
    assert max(h1) < 1.35 * max(one)
    assert max(v) / min(v) < 1.6 < max(one) / min(one)


def test_the_optimizer_step_can_be_the_fullest_moment() -> None:
    loop = Execution(optimizer_temporary_bytes=64)
    assert stage_memory(job(execution=loop, seq_len=512), Layout.parse("zero=0", 64))[0].peak_at == "optimizer step"


def test_offloaded_activations_leave_two_layers_on_the_device() -> None:
    here, away = worst(job(), "tp=2"), worst(job(), "tp=2,offload=activations")
    layer = unit_memory(job(), Layout(tp=2, sp=True), 0).kept
    assert away.activations == 2 * layer
    assert away.host == pytest.approx(here.activations - 2 * layer)


def test_a_job_with_too_few_sequences_is_refused() -> None:
    with pytest.raises(InputError, match="micro_batch"):
        stage_memory(job(batch=16), Layout.parse("tp=1", 64))


def test_microbatches_beyond_the_pipelines_depth_change_nothing() -> None:
    few, many = (stage_memory(job(batch=b), Layout.parse("tp=2,pp=4", 64)) for b in (64, 4096))
    assert [s.peak_allocated for s in few] == [s.peak_allocated for s in many]


def test_runs_of_layers_follow_kinds_and_recompute_rules() -> None:
    work = job("deepseek-v3", gpus=128)
    runs = runs_of(work, Layout(pp=4, recompute="0-3:full", stages=(16, 15, 15, 15)), 0)
    assert [(r.kind, r.rule.mode, r.count) for r in runs] == [(0, "full", 3), (1, "full", 1), (1, "none", 12)]


# -- ten thousand at once --------------------------------------------------------------------------------------------------


def layouts(work: Job, gpus: int, count: int, seed: int) -> list[Layout]:
    choose = random.Random(seed)
    out: list[Layout] = []
    while len(out) < count:
        schedule = choose.choice([s for s in SCHEDULES if s != "dualpipe"])
        values = {
            "tp": choose.choice([1, 2, 4, 8]), "pp": choose.choice([1, 2, 4]), "cp": choose.choice([1, 2, 4]),
            "micro_batch": choose.choice([1, 2]), "zero": choose.choice([0, 1, 2, 3]), "schedule": schedule,
            "recompute": choose.choice(["none", "full", "selective(core_attn)", "0-3:full"]),
            "ep": choose.choice([1, 2, 4]) if work.model.moe else 1, "cp_kind": choose.choice(["ring", "ulysses", "allgather"]),
            "offload": choose.choice([(), (), ("optimizer",), ("activations",)]), "vpp": 2 if schedule == "interleaved" else None,
            "sp": choose.choice([True, False]) and work.model.moe is None,
        }  # fmt: skip
        values = {k: v for k, v in values.items() if v is not None}
        values["sp"] = values["sp"] or (work.model.moe is not None and values["tp"] > 1)
        try:
            layout = Layout.derive(values, gpus)
            stage_memory(work, layout)
        except InputError:
            continue
        out.append(layout)
    return out


@pytest.mark.parametrize(
    ("name", "execution"), [("llama-3.1-8b", "megatron"), ("qwen3-30b-a3b", "axisplan"), ("deepseek-v3", "torchtitan")]
)
def test_memory_in_bulk_equals_memory_one_by_one(name: str, execution: str) -> None:
    work = job(name, execution)
    some = layouts(work, 64, 80, seed=7)
    one_by_one = np.array([max(s.needed for s in stage_memory(work, x)) for x in some])
    assert device_bytes(work, some) == pytest.approx(one_by_one, rel=1e-12)


def test_fits_names_the_worst_rank() -> None:
    small = job(memory_limit_bytes=20 * GIB, margin=0.0)
    ok, stage = fits(small, Layout.parse("tp=1,pp=4", 64))
    assert not ok
    assert stage.stage == max(stage_memory(small, Layout.parse("tp=1,pp=4", 64)), key=lambda s: s.device).stage
    assert fits(job(), Layout.parse("tp=8,recompute=full", 64))[0]
