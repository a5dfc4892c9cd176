import pytest

from cost_models.execution import load_execution
from cost_models.formulas import memory_formulas
from cost_models.job import Job
from cost_models.layout import Layout
from cost_models.memory import stage_memory
from profiles.hardware import load_cluster
from profiles.huggingface import load_model


@pytest.mark.parametrize("text", ["tp=2,pp=4", "zero=3", "tp=2,zero=2,recompute=full"])
def test_terms_add_up_to_the_device_figure_and_say_what_falls_with_data_parallel_ranks(text: str) -> None:
    job = Job(load_model("llama-3.1-8b"), load_cluster("h100-sxm:8x8"), load_execution("deepspeed"), 4096, 256)
    layout = Layout.parse(text, 64)
    terms = memory_formulas(job, layout, 0)
    stage = stage_memory(job, layout)[0]
    assert sum(t.value for t in terms) == pytest.approx(stage.device)
    assert sum(t.value for t in terms[:5]) == pytest.approx(stage.peak_allocated)
    falling = {t.name for t in terms if t.falls_with_data_parallel}
    assert falling == {1: {"optimizer"}, 2: {"gradients", "optimizer"}, 3: {"parameters", "gradients", "optimizer"}}[layout.zero]
    assert all(t.source for t in terms)
