"""Recomputation in one process: how often it runs, and that gradients are those of what was never dropped."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight  # noqa: E402

from planner.runtime.recompute import Remake, again  # noqa: E402


class Block(nn.Module):
    """Two products with an activation between; ``runs`` counts forwards, ``activations`` the middle's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.runs = self.activations = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.down(self.up(x).tanh())  # type: ignore[no-any-return]

    def activation(self, x: Tensor) -> Tensor:
        self.activations += 1
        return x.tanh()

    def without_activation(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        made = self.activation(inner)
        remake = Remake(self.activation, (inner,), (made,))
        with torch.autograd.graph.saved_tensors_hooks(remake.pack, remake.unpack):
            return self.down(made)  # type: ignore[no-any-return]


def gradients(block: Block, out: Tensor, x: Tensor, *, passes: int) -> list[Tensor]:
    """Of the input and the weights, from a backward in so many passes."""
    upstream = torch.linspace(-1, 1, out.numel()).view_as(out)
    if passes == 1:
        out.backward(upstream)
    else:
        _, groups = stage_backward_input([out], [upstream], [x], iter(block.parameters()))
        stage_backward_weight(iter(block.parameters()), groups)
    return [t.grad for t in (x, block.up.weight, block.down.weight) if t.grad is not None]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_dropped_is_made_again_once_and_gradients_are_the_same(whole: bool, passes: int) -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(3, 8, requires_grad=True)
    expected = [g.clone() for g in gradients(block, block(x), x, passes=1)]
    block.zero_grad()
    x.grad, block.runs = None, 0
    out = again(block, x) if whole else block.without_activation(x)
    found = gradients(block, out, x, passes=passes)
    assert (block.runs, block.activations) == ((2, 0) if whole else (0, 2))
    assert len(found) == 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
