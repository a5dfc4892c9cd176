"""What the runtime does not run is not planned for it, by a named rule; it can still be estimated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.execution import load_execution
from cost_models.job import Job
from cost_models.layout import Layout
from planner.legality import limits_of, read_layout, require_job, violations
from planner.rules.core import Case, targets
from planner.rules.planning import FEATURES, PLANNING
from planner.solve import PlanRequest, solve
from profiles.errors import InputError
from profiles.hardware import load_cluster
from profiles.huggingface import load_model, model_names

LLAMA = Job(load_model("llama-tiny"), load_cluster("cpu:1x2"), load_execution("axisplan"), 64, 8, "fp32")
MODELS = {
    "jamba-v0.1": "state-space layers", "minimax-text-01": "linear-attention layers", "gpt-oss-20b": "clamped activation",
    "falcon-h1-7b": "layers with two mixers", "gemma-2-9b": "layers with more than two norms", "opt-350m": "an embedding of another width",
}  # fmt: skip


@pytest.mark.parametrize(("name", "words"), MODELS.items())
def test_a_model_that_the_runtime_does_not_run_is_estimated_and_not_planned(name: str, words: str) -> None:
    job = Job(load_model(name), load_cluster("h100-sxm:1x8"), load_execution("axisplan"), 2048, 16)
    with pytest.raises(InputError, match=words) as refused:
        solve(PlanRequest(job))
    assert refused.value.field == "model"
    assert not [v for v in violations(job, read_layout(job, "tp=1")) if v.field == "model"]
    require_job(replace(job, execution=load_execution("megatron")))


def test_sparse_attention_with_an_indexer_is_not_trained_as_if_it_were_dense() -> None:
    base = load_model("deepseek-v2-lite")
    indexed = tuple(
        k.model_copy(update={"mixer": k.mixer.model_copy(update={"index_heads": 4, "index_dim": 64})}) for k in base.kinds
    )
    job = Job(base.model_copy(update={"kinds": indexed}), load_cluster("h100-sxm:1x8"), load_execution("axisplan"), 2048, 16)
    with pytest.raises(InputError, match="indexer"):
        require_job(job)


@pytest.mark.parametrize(
    ("changes", "field", "nearest"),
    [
        ({"precision": "fp16"}, "precision", "bf16"),
        ({"precision": "fp8"}, "precision", "bf16"),
        ({"optimizer": "muon"}, "optimizer", "adamw"),
    ],
)
def test_precisions_and_optimizers_that_the_runtime_lacks_are_refused_before_planning(changes, field, nearest) -> None:
    with pytest.raises(InputError) as refused:
        solve(PlanRequest(replace(LLAMA, **changes)))
    assert (refused.value.field, refused.value.nearest) == (field, nearest)


@pytest.mark.slow
def test_every_built_in_model_that_is_not_refused_is_built_with_its_own_number_of_parameters() -> None:
    torch = pytest.importorskip("torch")
    from planner.dryrun.world import fake_rank
    from planner.runtime.mesh import Mesh
    from planner.runtime.model import Build, Decoder, parts
    from planner.runtime.moe import Balance
    from planner.runtime.tensor import TensorParallel

    built = 0
    with fake_rank(0, 1):
        for name in model_names():
            model = load_model(name)
            job = replace(LLAMA, model=model)
            if any(True for r in PLANNING.values() for _ in r.breaks(Case(job, Layout(), limits_of(job)))):
                continue
            mesh = Mesh(Layout(), model, torch.device("cpu"))
            tp = TensorParallel(mesh.tp, False)
            build = Build(model, Layout(), mesh, tp, torch.bfloat16, torch.device("meta"), Balance())
            made = Decoder(build, parts(Layout(), model, 0)[0])
            stored = model.moe is not None and model.moe.selection_bias_stored  # a buffer here, a parameter in that checkpoint
            held = [*made.parameters(), *(made.buffers() if stored else ())]
            assert sum(p.numel() for p in held) == model.parameters.total + model.parameters.mtp, name
            built += 1
    assert built > 90


def test_limits_name_features_that_exist() -> None:
    for target in targets():
        named = limits_of(replace(LLAMA, execution=replace(LLAMA.execution, name=target))).lacks
        assert set(named) <= set(FEATURES), target
