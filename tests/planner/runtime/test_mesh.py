"""The mesh: every rank's groups are those that the plan's layout says, in the plan's own order of ranks."""

from __future__ import annotations

import pytest
import torch

from cost_models.layout import Layout
from planner.dryrun.world import fake_rank
from planner.runtime.mesh import Mesh
from profiles.model import Attention, Layer, Moe, uniform

MODEL = uniform(
    "tied",
    Layer(mixer=Attention(heads=4, kv_heads=2, head_dim=8), ffn=Moe(experts=8, top_k=2, width=16)),
    4,
    hidden=32,
    vocab=64,
    tied=True,
)
AXES = {
    "tp": ("tp",), "cp": ("cp",), "pp": ("pp",), "dp_shard": ("dp_shard",), "dp_replicate": ("dp_replicate",), "dp_cp": ("dp", "cp"),
    "dp_shard_cp": ("dp_shard", "cp"), "etp": ("etp",), "ep": ("ep",), "edp": ("edp",),
}  # fmt: skip
"""Axis of the mesh -> the layout's axes that it is the product of."""


@pytest.mark.parametrize(
    "text",
    [
        "tp=2,pp=2,dp_replicate=2,dp_shard=2,ep=4,etp=1", "tp=2,cp=2,pp=2,dp=2,ep=2,etp=2,order=tp-pp-dp",
        "tp=2,cp=4,cp_kind=ring2xulysses2,dp=2,ep=4,etp=2", "tp=2,pp=2,dp=4,ep=8,zero=1,order=tp-cp-ep-dp-pp",
    ],
)  # fmt: skip
def test_the_groups_of_every_axis_are_those_of_the_layout(text: str) -> None:
    layout = Layout.parse(text)
    assert layout.world == 16
    for rank in range(layout.world):
        with fake_rank(rank, layout.world):
            mesh = Mesh(layout, MODEL, torch.device("cpu"))
            for name, axes in AXES.items():
                expected = layout.group(rank, *axes)
                axis = mesh.axis(name)
                assert tuple(sorted(axis.ranks)) == expected, (rank, name)
                assert axis.ranks[axis.rank] == rank, (rank, name)
            ends = {layout.coordinates(r)["pp"] for r in mesh.ends.ranks} if layout.pp > 1 else {0}
            assert ends == {0, layout.pp - 1}
