"""Context parallelism: which tokens a rank holds, and attention across the ranks that hold a sequence together.

A sequence is cut into 2 n chunks for a ring of n; rank r takes chunks r and 2 n - 1 - r, front and back, so that every rank has
equally many causal pairs. Inside a ring place, Ulysses ranks hold consecutive parts.

Ring (arXiv:2310.01889): queries stay, keys and values go round, n - 1 passes; partial outputs are merged by their logsumexp. In
backward keys and values go round again, with their gradients one pass behind, which after n passes are home.
Ulysses (arXiv:2309.14509): an all-to-all makes of a token split a head split for q, k and v, and back for the output; key/value
heads are repeated where there are fewer than ranks. Both together: Ulysses inside, the ring across.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.layout import Layout
from planner.runtime import kernels
from planner.runtime.attention import Tokens, attend, grad_of_sinks, with_sinks
from planner.runtime.attention_blocks import merge
from planner.runtime.collectives import all_gather, all_to_all, reduce_scatter
from planner.runtime.mesh import Axis, Mesh
from planner.runtime.norms import wanted
from profiles.errors import InputError

Rule = tuple[int, int, float]
"""(window, chunk, scale) of attention."""


def spans(layout: Layout, seq_len: int, cp_rank: int) -> tuple[int, ...]:
    """(start, length) pairs of the positions that a context-parallel rank holds, in the order it holds them."""
    ring, ulysses = layout.ring, layout.ulysses
    place, inner = divmod(cp_rank, ulysses)
    pieces = ring_spans(ring, seq_len, place)
    share = sum(pieces[1::2]) // ulysses
    if share * ulysses * ring != seq_len:
        raise InputError(
            "seq_len", seq_len, f"must be a multiple of {2 * ring * ulysses if ring > 1 else ulysses} for cp={layout.cp}"
        )
    return cut(pieces, inner * share, share)


def ring_spans(ring: int, seq_len: int, place: int) -> tuple[int, ...]:
    """What place ``place`` of the ring holds, front chunk first."""
    if ring == 1:
        return (0, seq_len)
    if seq_len % (2 * ring):
        raise InputError(
            "seq_len", seq_len, f"must be a multiple of {2 * ring} for a ring of {ring}", seq_len // (2 * ring) * 2 * ring
        )
    step = seq_len // (2 * ring)
    return (place * step, step, (2 * ring - 1 - place) * step, step)


def cut(pieces: tuple[int, ...], start: int, count: int) -> tuple[int, ...]:
    """Elements ``start .. start + count`` of the tokens that ``pieces`` lists."""
    out: list[int] = []
    for a, n in zip(pieces[::2], pieces[1::2], strict=True):
        low, high = max(0, start), min(n, start + count)
        if low < high:
            out += [a + low, high - low]
        start -= n
    return tuple(out)


def take(x: Tensor, held: tuple[int, ...]) -> Tensor:
    """The columns of [batch, sequence] that ``held`` lists."""
    if held == (0, x.shape[1]):
        return x
    return torch.cat([x[:, a : a + n] for a, n in zip(held[::2], held[1::2], strict=True)], 1)


# -- attention across ranks -----------------------------------------------------------------------------------------------


class ContextAttention:
    """Attention of this rank's queries against the whole sequence's keys and values."""

    def __init__(self, mesh: Mesh) -> None:
        self.ring, self.ulysses, self.layout = mesh.ring, mesh.ulysses, mesh.layout

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, window: int, chunk: int, scale: float, sinks: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """[s, b, heads, width] of this rank's tokens -> [s, b, heads, v width] of the same."""
        n = self.ulysses.size
        if n == 1:
            return self._across(q, k, v, sinks, tokens, window, chunk, scale)
        if q.shape[2] % n:
            raise InputError(
                "cp_kind", self.layout.cp_kind, f"ulysses = {n} must divide the {q.shape[2]} heads of a tensor-parallel rank"
            )
        if k.shape[2] % n:
            if n % k.shape[2]:
                raise InputError(
                    "cp_kind", self.layout.cp_kind, f"ulysses = {n} and {k.shape[2]} key/value heads do not divide each other"
                )
            k, v = (t.repeat_interleave(n // k.shape[2], 2) for t in (k, v))
        q, k, v = (_HeadsForTokens.apply(t, self.ulysses) for t in (q, k, v))
        place = ring_spans(self.layout.ring, tokens.count * n * self.layout.ring, self.ring.rank)
        documents = None if tokens.documents is None else all_gather(tokens.documents.t().contiguous(), self.ulysses).t()
        if sinks is not None:
            sinks = sinks.chunk(n)[self.ulysses.rank]
        out = self._across(q, k, v, sinks, Tokens(place, documents), window, chunk, scale)
        return _TokensForHeads.apply(out, self.ulysses)

    def _across(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, tokens: Tokens, window: int, chunk: int, scale: float
    ) -> Tensor:  # fmt: skip
        if self.ring.size == 1:
            return attend(q, k, v, tokens, window, chunk, scale, sinks)
        length = tokens.count * self.ring.size
        held = tuple(ring_spans(self.ring.size, length, r) for r in range(self.ring.size))
        function = _Gathered if self.layout.cp_kind == "allgather" else _Ring
        return function.apply(q, k, v, sinks, tokens.documents, self.ring, held, (window, chunk, scale))


class _HeadsForTokens(torch.autograd.Function):
    """[s, b, heads, d] of the rank's tokens -> [s * n, b, heads / n, d] of the group's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _heads_for_tokens(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _tokens_for_heads(grads[0], ctx.axis), None


class _TokensForHeads(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _tokens_for_heads(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _heads_for_tokens(grads[0], ctx.axis), None


def _heads_for_tokens(x: Tensor, axis: Axis) -> Tensor:
    s, b, h, d = x.shape
    parts = x.reshape(s, b, axis.size, h // axis.size, d).permute(2, 0, 1, 3, 4).reshape(axis.size * s, b, h // axis.size, d)
    return all_to_all(parts, axis)


def _tokens_for_heads(x: Tensor, axis: Axis) -> Tensor:
    got = all_to_all(x, axis)
    s = x.shape[0] // axis.size
    return got.view(axis.size, s, *x.shape[1:]).permute(1, 2, 0, 3, 4).reshape(s, x.shape[1], axis.size * x.shape[2], x.shape[3])


class _Ring(torch.autograd.Function):
    """Saves q, k, v, the merged output and logsumexp of this rank alone: blocks of others come round again in backward.

    While a block is computed with, the next one is on its way.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Tensor | None, axis: Axis,
        held: Sequence[tuple[int, ...]], rule: Rule,
    ) -> Tensor:  # fmt: skip
        ring = _Blocks(axis, held, documents, rule)
        coming = ring.send((k, v))
        out, lse = kernels.attend(q, k, v, *ring.arguments(axis.rank))
        out = out.to(lse.dtype)
        for turn in range(1, axis.size):
            blocks = coming.wait()
            if turn < axis.size - 1:
                coming = ring.send(blocks)
            source = (axis.rank - turn) % axis.size
            rows, keys = ring.seen(source)
            part, low = kernels.attend(q[rows], *(t[keys] for t in blocks), *ring.arguments(source, rows, keys))
            merge(out[rows], lse[:, :, rows], part, low)
        out, lse = with_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        ring: _Blocks = ctx.ring
        axis, grad = ring.axis, grads[0].contiguous()
        sink_grad = grad_of_sinks(grad, out, lse, sinks)
        if sinks is not None and not wanted(ctx, 0):
            return None, None, None, sink_grad, None, None, None, None
        coming = ring.send((k, v))
        dq, *sums = (t.to(lse.dtype) for t in kernels.attend_grad(grad, q, k, v, out, lse, *ring.arguments(axis.rank)))
        for turn in range(1, axis.size):
            following = ring.send(tuple(sums))
            blocks = coming.wait()
            if turn < axis.size - 1:
                coming = ring.send(blocks)
            source = (axis.rank - turn) % axis.size
            rows, keys = ring.seen(source)
            theirs = (t[keys].contiguous() for t in blocks)
            low = lse[:, :, rows].contiguous()
            parts = kernels.attend_grad(grad[rows], q[rows], *theirs, out[rows], low, *ring.arguments(source, rows, keys))
            dq[rows].add_(parts[0])
            sums = list(following.wait())
            sums[0][keys].add_(parts[1])
            sums[1][keys].add_(parts[2])
        dk, dv = ring.send(tuple(sums)).wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), sink_grad, None, None, None, None


class _Gathered(torch.autograd.Function):
    """The ``allgather`` kind: every rank gathers all keys and values, and again in backward. Saves what the ring saves."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Tensor | None, axis: Axis,
        held: Sequence[tuple[int, ...]], rule: Rule,
    ) -> Tensor:  # fmt: skip
        everyone = None
        if documents is not None:
            everyone = all_gather(documents.t().contiguous(), axis).t().contiguous()
        ctx.rest = (documents, everyone, held[axis.rank], tuple(x for part in held for x in part), *rule)
        out, lse = kernels.attend(q, all_gather(k, axis), all_gather(v, axis), *ctx.rest)
        out, lse = with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.axis = axis
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        axis, grad = ctx.axis, grads[0].contiguous()
        sink_grad = grad_of_sinks(grad, out, lse, sinks)
        if sinks is not None and not wanted(ctx, 0):
            return None, None, None, sink_grad, None, None, None, None
        dq, dk, dv = kernels.attend_grad(grad, q, all_gather(k, axis), all_gather(v, axis), out, lse, *ctx.rest)
        return dq, reduce_scatter(dk, axis), reduce_scatter(dv, axis), sink_grad, None, None, None, None


@dataclass
class _Coming:
    """Tensors on their way here; what was sent stays alive until they have come."""

    tensors: tuple[Tensor, ...]
    works: list[dist.Work]
    sent: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        self.sent = ()
        return self.tensors


class _Blocks:
    """Which parts of another place's block this rank's queries see, and how blocks travel to the next place."""

    def __init__(self, axis: Axis, held: Sequence[tuple[int, ...]], documents: Tensor | None, rule: Rule) -> None:
        self.axis, self.held, self.rule = axis, held, rule
        self.length = sum(held[0][1::2])
        self.documents = None
        if documents is not None:
            self.documents = all_gather(documents.contiguous(), axis).view(axis.size, *documents.shape)

    def seen(self, source: int) -> tuple[slice, slice]:
        """(query rows, key rows) to compute against the block of ``source``: an earlier place's front half is seen by all
        queries, a later place's block by the back half alone."""
        half, whole = self.length // 2, slice(0, self.length)
        return (whole, slice(0, half)) if source < self.axis.rank else (slice(half, self.length), whole)

    def arguments(self, source: int, rows: slice | None = None, keys: slice | None = None) -> tuple[Any, ...]:
        """What ``kernels.attend`` takes after q, k, v."""
        mine, theirs = self.axis.rank, source
        rows, keys = rows or slice(0, self.length), keys or slice(0, self.length)
        documents: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.documents is not None:
            documents = self.documents[mine][:, rows].contiguous(), self.documents[theirs][:, keys].contiguous()
        spans_of = [cut(self.held[p], s.start, s.stop - s.start) for p, s in ((mine, rows), (theirs, keys))]
        return (*documents, *spans_of, *self.rule)

    def send(self, tensors: tuple[Tensor, ...]) -> _Coming:
        """Send to the next place, receive from the one before."""
        axis = self.axis
        sent = tuple(t.contiguous() for t in tensors)
        got = tuple(torch.empty_like(t) for t in sent)
        after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
        sends = [dist.P2POp(dist.isend, t, group=axis.group, group_peer=after) for t in sent]
        receives = [dist.P2POp(dist.irecv, t, group=axis.group, group_peer=before) for t in got]
        return _Coming(got, dist.batch_isend_irecv(sends + receives), sent)
