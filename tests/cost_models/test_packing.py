import pytest

from cost_models.attention_ops import causal_pairs
from cost_models.execution import Execution
from cost_models.job import Job
from cost_models.layers import layer_operations
from cost_models.layout import Layout
from cost_models.packing import documents_of, packing, rank_shares
from profiles.errors import InputError
from profiles.hardware import load_cluster
from profiles.huggingface import load_model
from profiles.operations import Attend


def test_documents_of_one_length_have_the_pairs_of_that_length() -> None:
    found = packing(((512, 10),), 4096)
    assert found.pairs == 8 * causal_pairs(512)
    assert found.share == pytest.approx(8 * causal_pairs(512) / causal_pairs(4096))


def test_one_document_a_sequence_is_the_whole_triangle_shared_evenly() -> None:
    found = packing(((8192, 1),), 8192, 8)
    assert (found.share, found.imbalance) == (1.0, 1.0)
    assert packing(((8192, 1),), 8192, 2, balanced=False).imbalance == pytest.approx(2 * 3 / 4, rel=1e-3)


def test_shares_of_ranks_are_counted_exactly() -> None:
    """Two documents of 4 over two ranks: front-and-back gives tokens 0 1 6 7 and 2 3 4 5."""
    assert rank_shares([8], 2) == [18, 18]
    assert rank_shares([8], 2, balanced=False) == [10, 26]
    assert rank_shares([4, 4], 2) == [3 + 7, 7 + 3]
    assert rank_shares([6, 2], 2) == [3 + 3, 7 + 11]


def test_mixed_lengths_unbalance_a_front_and_back_split_but_not_one_by_document() -> None:
    mixed = documents_of("256x100,1024x20,16384x2")
    assert packing(mixed, 16384, 8).imbalance > 1.2
    assert packing(mixed, 16384, 8, each_document=True).imbalance == pytest.approx(1.0)
    assert packing(mixed, 16384).share < 0.7


def test_the_worst_batch_is_the_longest_document_where_documents_are_not_cut() -> None:
    assert packing(documents_of("512x10,20000x1"), 8192).worst_tokens == 20000
    assert packing(documents_of("512x10"), 8192).worst_tokens == 8192


def test_a_job_with_documents_pays_for_their_pairs_on_the_busiest_rank() -> None:
    model, cluster = load_model("llama-3.1-8b"), load_cluster("h100-sxm:1x8")
    whole = Job(model, cluster, Execution(), 16384, 8)
    packed = Job(model, cluster, Execution(), 16384, 8, documents=documents_of("1024x1"))
    layout = Layout(cp=4)

    def attention(job: Job) -> Attend:
        return next(op for op in layer_operations(job, layout, model.layer(0)).forward if isinstance(op, Attend))

    assert attention(whole).pairs == causal_pairs(16384) // 4
    assert attention(packed).pairs == pytest.approx(16 * causal_pairs(1024) / 4)


@pytest.mark.parametrize("text", ["", "x", "512y2", "0x3", "-5x2", "512x0"])
def test_a_bad_histogram_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="documents"):
        documents_of(text)
