"""Pipeline parallelism: the schedule's order table, given sends and receives, and run.

The orders are those the cost model simulates (``cost_models.schedules.order_table``): what is predicted is what runs. ``lower``
adds the transfers: a send follows the action that made the tensor, and its receive is placed on the other rank at that same
moment of one common walk through all orders, so that every pair of ranks meets its transfers in one order and none waits for
another in a circle. The walk also knows what each message tells of the ranks behind it, so a sent tensor is let go as soon as
something arrives that can only have been sent after it was used (gloo never says that a send is over). Shapes are known from the
layout; nothing is inferred at run time. B and W are split by
``torch.distributed.pipelining``'s graph partition; what a part of the graph no longer needs is freed with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from cost_models.schedules import Action, order_table, rank_of
from planner.runtime.attention import Tokens
from planner.runtime.mesh import Axis
from planner.runtime.metrics import Clock, Mark
from profiles.errors import InputError


class Transfer(NamedTuple):
    """``kind`` send or receive of the tensor that crosses from ``chunk`` (F: to the next chunk, B: to the one before)."""

    kind: str
    what: str
    microbatch: int
    chunk: int


class Arrived(NamedTuple):
    """The tensor that this rank sent is known to have been used: F to the next chunk, B to the one before."""

    what: str
    microbatch: int
    chunk: int


Step = Action | Transfer | Arrived


@lru_cache(maxsize=64)
def lower(schedule: str, pp: int, vpp: int, microbatches: int) -> tuple[tuple[Step, ...], ...]:
    """The order of every rank, transfers included."""
    return _with_transfers(order_table(schedule, pp, vpp, microbatches), schedule, pp * vpp)


@lru_cache(maxsize=64)
def lower_forward(schedule: str, pp: int, vpp: int, microbatches: int) -> tuple[tuple[Step, ...], ...]:
    """Every rank's order of forwards alone, transfers included: ``pp`` microbatches through each of its chunks, then the next."""
    chunks = [[c for c in range(pp * vpp) if rank_of(schedule, pp, c) == rank] for rank in range(pp)]
    groups = [range(first, min(first + pp, microbatches)) for first in range(0, microbatches, pp)]
    table = [tuple(Action("F", m, c) for group in groups for c in mine for m in group) for mine in chunks]
    return _with_transfers(table, schedule, pp * vpp)


def _message(action: Action) -> str | None:
    """What passes between ranks before an action and after it: activations, gradients, or nothing."""
    return {"F": "F", "B": "B", "BW": "B"}.get(action.kind)


def _with_transfers(table: Sequence[Sequence[Action]], schedule: str, chunks: int) -> tuple[tuple[Step, ...], ...]:
    place = {action.chunk: rank for rank, order in enumerate(table) for action in order}
    last = chunks - 1
    waiting = [deque(order) for order in table]
    done: list[set[tuple[str, int, int]]] = [set() for _ in table]
    out: list[list[Step]] = [[] for _ in table]
    users = {(_message(a), a.microbatch, a.chunk): (r, i) for r, order in enumerate(table) for i, a in enumerate(order)}
    known = [[0] * len(table) for _ in table]  # rank -> how many actions of each rank it knows to be done
    mail: dict[tuple[str | None, int, int], list[int]] = {}  # message -> what its sender knew
    unconfirmed: list[list[tuple[Arrived, int, int]]] = [[] for _ in table]

    def ready(rank: int, action: Action) -> bool:
        if action.kind == "F":
            return action.chunk == 0 or ("F", action.microbatch, action.chunk - 1) in done[rank]
        if action.kind in ("B", "BW"):
            return action.chunk == last or ("B", action.microbatch, action.chunk + 1) in done[rank]
        return True

    while any(waiting):
        progress = False
        for rank, queue in enumerate(waiting):
            if not queue or not ready(rank, queue[0]):
                continue
            action = queue.popleft()
            progress = True
            out[rank].append(action)
            what = _message(action)
            heard = mail.pop((what, action.microbatch, action.chunk), known[rank])
            known[rank] = [max(pair) for pair in zip(known[rank], heard, strict=True)]
            known[rank][rank] += 1
            out[rank] += [one for one, user, index in unconfirmed[rank] if known[rank][user] > index]
            unconfirmed[rank] = [entry for entry in unconfirmed[rank] if known[rank][entry[1]] <= entry[2]]
            target = action.chunk + (1 if what == "F" else -1)
            if what is None:
                continue
            done[rank].add((what, action.microbatch, action.chunk))
            if 0 <= target <= last and place[target] != rank:
                out[rank].append(Transfer("send", what, action.microbatch, action.chunk))
                out[place[target]].append(Transfer("receive", what, action.microbatch, action.chunk))
                done[place[target]].add((what, action.microbatch, action.chunk))
                mail[what, action.microbatch, target] = list(known[rank])
                unconfirmed[rank].append((Arrived(what, action.microbatch, action.chunk), *users[what, action.microbatch, target]))
        if not progress:
            raise InputError("schedule", schedule, "its order table waits for itself")
    return tuple(tuple(order) for order in out)


@dataclass
class MicroBatch:
    """One microbatch of this rank's tokens, the same on every stage: ids and labels [micro batch, tokens]; ``later``: those of
    each multi-token-prediction module."""

    ids: Tensor
    labels: Tensor
    tokens: Tokens
    later: tuple[tuple[Tensor, Tensor], ...] = ()


LossFunction = Callable[[Tensor], Tensor]
"""Token losses of a microbatch -> the number that is differentiated."""


@dataclass
class Chunk:
    """One chunk's module, and what its microbatches in flight keep."""

    index: int
    module: nn.Module
    first: bool
    last: bool
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    pending: dict[int, tuple] = field(default_factory=dict)
    """Microbatch -> what its W still needs."""
    again: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """Microbatch -> leaves that stand for parameters (``Decoder.take_again``)."""


Timed = tuple[Action, Mark, Mark]
"""An action, and when it began and ended."""


class Pipeline:
    """Runs one rank's order over its chunks. With one stage it is gradient accumulation, and no transfer exists.

    ``times``: what the last step did, and when each action began and ended (marks of ``clock``), waits for other stages left out.
    ``shape`` and ``dtype`` are those of an activation between stages. ``after_backward(chunk)`` is called whenever a microbatch's
    weight gradients of a chunk are complete: where data parallelism takes them.
    """

    def __init__(
        self, chunks: Sequence[Chunk], axis: Axis, schedule: str, vpp: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device,
        after_backward: Callable[[Chunk], None] | None = None, before: Callable[[Chunk, str, int], None] | None = None,
    ) -> None:  # fmt: skip
        self.chunks = {c.index: c for c in chunks}
        self.axis, self.schedule, self.vpp, self.shape, self.dtype, self.device = axis, schedule, vpp, shape, dtype, device
        self.after_backward, self.before = after_backward, before
        self.last = axis.size * vpp - 1
        self.clock, self.times = Clock(device), list[Timed]()
        self._place = {c: rank_of(schedule, axis.size, c) for c in range(axis.size * vpp)}

    def run(self, batches: Sequence[MicroBatch], loss: LossFunction) -> Tensor:
        """Forward and backward of every microbatch; the sum of the losses this rank computed (0 without the head)."""
        order = lower(self.schedule, self.axis.size, self.vpp, len(batches))[self.axis.rank]
        total = torch.zeros((), dtype=torch.float64, device=self.device)

        def act(step: Action, chunk: Chunk) -> None:
            if self.before is not None:
                self.before(chunk, step.kind, step.microbatch)
            if step.kind == "F":
                total.add_(self._forward(chunk, step.microbatch, batches[step.microbatch], loss))
            elif step.kind == "BW":
                self._backward(chunk, step.microbatch)
            elif step.kind == "B":
                self._backward_input(chunk, step.microbatch)
            else:
                self._backward_weight(chunk, step.microbatch)
            if step.kind in ("BW", "W") and self.after_backward is not None:
                self.after_backward(chunk)

        self._walk(order, act)
        return total

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Forward of every microbatch; the sum of the token losses this rank computed (0 without the head)."""
        order = lower_forward(self.schedule, self.axis.size, self.vpp, len(batches))[self.axis.rank]
        total = torch.zeros((), dtype=torch.float64, device=self.device)

        def act(step: Action, chunk: Chunk) -> None:
            batch = batches[step.microbatch]
            x = batch.ids if chunk.first else self._take("F", step.microbatch, chunk.index - 1)
            if chunk.last:
                total.add_(chunk.module(x, batch.tokens, batch.labels).double().sum())
            else:
                self._received["F", step.microbatch, chunk.index] = (None, chunk.module(x, batch.tokens))

        self._walk(order, act)
        return total

    @property
    def busy_seconds(self) -> float:
        """Seconds of the last run's actions: waits for other stages, reduction and update left out."""
        return sum(self.clock.seconds(began, ended) for action, began, ended in self.times if action.microbatch >= 0)

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Add what is done once a step to ``times``."""
        began = self.clock.now()
        yield
        self.times.append((Action(kind, -1, -1), began, self.clock.now()))

    def _walk(self, order: Sequence[Step], act: Callable[[Action, Chunk], None]) -> None:
        self.times.clear()
        self._sent: dict[tuple[str, int, int], tuple[dist.Work, Tensor]] = {}
        self._received: dict[tuple[str, int, int], tuple[dist.Work | None, Tensor]] = {}
        for step in order:
            if isinstance(step, Transfer):
                self._transfer(step)
                continue
            if isinstance(step, Arrived):
                self._let_go(step)
                continue
            self._arrive(step)
            began = self.clock.now()
            act(step, self.chunks[step.chunk])
            self.times.append((step, began, self.clock.now()))
            self._release()
        for work, _ in self._sent.values():
            work.wait()
        self._sent.clear()

    # -- transfers --------------------------------------------------------------------------------------------------

    def _transfer(self, step: Transfer) -> None:
        target = step.chunk + (1 if step.what == "F" else -1)
        key = (step.what, step.microbatch, step.chunk)
        if step.kind == "send":
            _, tensor = self._received.pop(key)
            work = dist.isend(tensor, group=self.axis.group, group_dst=self._place[target])
            assert work is not None
            self._sent[key] = (work, tensor)
        else:
            tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self._received[key] = (dist.irecv(tensor, group=self.axis.group, group_src=self._place[step.chunk]), tensor)

    def _release(self) -> None:
        """Let go of sent tensors that say they have left."""
        for key, (work, _) in list(self._sent.items()):
            if not work.is_completed():
                return
            del self._sent[key]

    def _let_go(self, step: Arrived) -> None:
        """Let go of a sent tensor that has been used."""
        if (sent := self._sent.pop((step.what, step.microbatch, step.chunk), None)) is not None:
            sent[0].wait()

    def _arrive(self, step: Action) -> None:
        """Wait for what the action needs from another rank."""
        needed = {"F": ("F", step.microbatch, step.chunk - 1), "B": ("B", step.microbatch, step.chunk + 1)}.get(step.kind[0])
        work = self._received.get(needed, (None,))[0] if needed is not None else None
        if work is not None:
            work.wait()

    def _take(self, what: str, microbatch: int, chunk: int) -> Tensor:
        return self._received.pop((what, microbatch, chunk))[1]

    # -- actions ----------------------------------------------------------------------------------------------------

    def _forward(self, chunk: Chunk, m: int, batch: MicroBatch, loss: LossFunction) -> Tensor | float:
        x = batch.ids if chunk.first else self._take("F", m, chunk.index - 1).requires_grad_()
        out = chunk.module(x, batch.tokens, batch.labels, batch.later) if chunk.last else chunk.module(x, batch.tokens)
        chunk.inputs[m] = x
        if chunk.last:
            chunk.again[m] = chunk.module.take_again()  # type: ignore[operator]
            chunk.outputs[m] = loss(out)
            return chunk.outputs[m].detach()
        chunk.outputs[m] = out
        self._received["F", m, chunk.index] = (None, out.detach())
        return 0.0

    def _gradient(self, chunk: Chunk, m: int) -> Tensor | None:
        return None if chunk.last else self._take("B", m, chunk.index + 1)

    def _backward(self, chunk: Chunk, m: int) -> None:
        x, out = chunk.inputs.pop(m), chunk.outputs.pop(m)
        gradient = self._gradient(chunk, m)
        if out.requires_grad:  # nothing of the first chunk may be trained
            torch.autograd.backward(out, gradient)
        self._join(chunk, m)
        self._give(chunk, m, x)

    def _give(self, chunk: Chunk, m: int, x: Tensor) -> None:
        if not chunk.first:
            assert x.grad is not None
            self._received["B", m, chunk.index] = (None, x.grad)

    def _backward_input(self, chunk: Chunk, m: int) -> None:
        x, out = chunk.inputs.pop(m), chunk.outputs.pop(m)
        grad = self._gradient(chunk, m)
        if chunk.first:
            chunk.pending[m] = (out, grad)
            return
        _, groups = stage_backward_input([out], None if grad is None else [grad], [x], self._weights(chunk, m))
        chunk.pending[m] = (groups,)
        self._give(chunk, m, x)

    def _backward_weight(self, chunk: Chunk, m: int) -> None:
        kept = chunk.pending.pop(m)
        if chunk.first:
            if kept[0].requires_grad:
                torch.autograd.backward(*kept)
        else:
            stage_backward_weight(self._weights(chunk, m), kept[0])
        self._join(chunk, m)

    def _join(self, chunk: Chunk, m: int) -> None:
        """Gradients of leaves to the parameters that they stand for."""
        for parameter, leaf in chunk.again.pop(m, ()):
            if leaf.grad is not None:
                parameter.grad = leaf.grad if parameter.grad is None else parameter.grad.add_(leaf.grad)

    def _weights(self, chunk: Chunk, m: int) -> Iterator[nn.Parameter]:
        yield from chunk.module.parameters()
        for _, leaf in chunk.again.get(m, ()):
            yield leaf  # type: ignore[misc]
