"""Attention of a block of queries against a block of keys: the kernel below attention, ring attention and Ulysses.

Tensors are [sequence, batch, heads, width]; keys and values may have fewer heads (GQA). Which tokens a block holds is told by
*spans*: (start, length) pairs of positions, e.g. ``[0, 4, 12, 4]`` for tokens 0-3 and 12-15. A query at position i sees a key
at position j when ``j <= i``, ``i - j < window`` (0 = no window), both lie in the same ``chunk`` (0 = none) and, with documents,
in the same document. Backward takes the *whole* row's output and logsumexp, so that the parts of a ring add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 1024
"""Queries whose scores are held at a time where a mask has to be written out."""


def attend_shapes(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Empty (out [s, b, heads, v width], logsumexp [b, heads, s])."""
    s, b, h, _ = q.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(s, b, h, v.shape[-1]), q.new_empty(b, h, s, dtype=dtype)


def pairs(q_spans: Sequence[int], k_spans: Sequence[int], window: int = 0, chunk: int = 0) -> int:
    """Query-key pairs that attention over these spans computes (documents not counted)."""
    total = 0
    for k0, kn in _spans(k_spans):
        for q0, qn in _spans(q_spans):
            for i in range(q0, q0 + qn) if (window or chunk) else ():
                low = max(k0, i - window + 1 if window else 0, i // chunk * chunk if chunk else 0)
                total += max(0, min(i, k0 + kn - 1) - low + 1)
            if not (window or chunk):
                first = min(max(k0 - q0, 0), qn)
                last = min(max(k0 + kn - 1 - q0, first), qn)
                rising = last - first
                total += rising * (q0 + first - k0 + 1) + rising * (rising - 1) // 2 + (qn - last) * kn
    return total


def _spans(spans: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(spans[::2], spans[1::2], strict=True)


def _positions(spans: Sequence[int], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(a, a + n, device=device) for a, n in _spans(spans)])


def _shape_of(q_spans: Sequence[int], k_spans: Sequence[int], window: int, chunk: int, documents: bool) -> str:
    """``causal`` (the same tokens on both sides), ``full`` (every pair), ``parts`` (spans of which each is one of these to each other,
    or unseen), or ``mask``."""
    top = max(a + n for a, n in _spans(q_spans))
    low = min(a for a, _ in _spans(k_spans))
    if documents or (window and top - low > window) or (chunk and low // chunk != (top - 1) // chunk):
        return "mask"
    if list(q_spans) == list(k_spans) and all(a < b for a, b in zip(q_spans[::2], q_spans[2::2], strict=False)):
        return "causal"
    if max(a + n for a, n in _spans(k_spans)) - 1 <= min(a for a, _ in _spans(q_spans)):
        return "full"
    apart = all(q == k or k[0] + k[1] <= q[0] or q[0] + q[1] <= k[0] for q in _spans(q_spans) for k in _spans(k_spans))
    return "parts" if apart else "mask"


def _mask(
    rows: slice, q_spans: Sequence[int], k_spans: Sequence[int], window: int, chunk: int, q_document: Tensor | None,
    k_document: Tensor | None, device: torch.device,
) -> Tensor:  # fmt: skip
    """[1 or b, 1, rows, keys], True where a query sees a key."""
    i, j = _positions(q_spans, device)[rows, None], _positions(k_spans, device)[None, :]
    seen = j <= i
    if window:
        seen &= i - j < window
    if chunk:
        seen &= i // chunk == j // chunk
    if q_document is None or k_document is None:
        return seen[None, None]
    same = q_document[:, rows, None] == k_document[:, None, :]
    return (seen & same)[:, None]


def attend_forward(
    q: Tensor, k: Tensor, v: Tensor, q_document: Tensor | None, k_document: Tensor | None, q_spans: Sequence[int],
    k_spans: Sequence[int], window: int, chunk: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [s, b, heads, v width] (contiguous) and logsumexp [b, heads, s]; a query that sees no key has output 0, -inf."""
    kind = _shape_of(q_spans, k_spans, window, chunk, q_document is not None)
    if kind == "parts":
        return _forward_in_parts(q, k, v, q_spans, k_spans, scale)
    qh, kh, vh = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    if kind != "mask" and (kernel := _fused(q)):
        width = _padded(q.shape[-1], v.shape[-1])
        keys = kernel.keys(_pad(kh, width), _pad(vh, width), q.shape[2])
        got, low = kernel.forward(_pad(qh, width), *keys, kind == "causal", scale)
        return got[..., : v.shape[-1]].permute(2, 0, 1, 3).contiguous(), low.contiguous()  # the kernel's own order for one sequence
    out, lse = attend_shapes(q, v)
    for rows in _row_blocks(q.shape[0]):
        mask = None if kind == "full" else _mask(rows, q_spans, k_spans, window, chunk, q_document, k_document, q.device)
        scores = _scores(qh[:, :, rows], kh, mask, scale)
        part = scores.logsumexp(-1)
        weights = (scores - part.clamp_min(torch.finfo(part.dtype).min).unsqueeze(-1)).exp_()
        lse[:, :, rows] = part
        out[rows] = _weighted(weights, vh).permute(2, 0, 1, 3).to(out.dtype)
    return out, lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_document: Tensor | None, k_document: Tensor | None,
    q_spans: Sequence[int], k_spans: Sequence[int], window: int, chunk: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v (shapes of q, k, v) given the whole row's ``out`` and ``lse``."""
    kind = _shape_of(q_spans, k_spans, window, chunk, q_document is not None)
    if kind == "parts":
        return _backward_in_parts(grad, q, k, v, out, lse, q_spans, k_spans, scale)
    qh, kh, vh, oh, gh = (t.permute(1, 2, 0, 3) for t in (q, k, v, out, grad))
    if kind != "mask" and (kernel := _fused(q)):
        width = _padded(q.shape[-1], v.shape[-1])
        grads, queries, keys, values, outs = (_pad(t, width) for t in (gh, qh, kh, vh, oh))
        keys, values = kernel.keys(keys, values, q.shape[2])
        dq, dk, dv = kernel.backward(grads, queries, keys, values, outs, lse, kind == "causal", scale)
        return _gathered(dq, q), _gathered(dk, k), _gathered(dv, v)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
    heads = k.shape[2]
    for rows in _row_blocks(q.shape[0]):
        mask = None if kind == "full" else _mask(rows, q_spans, k_spans, window, chunk, q_document, k_document, q.device)
        part = lse[:, :, rows].clamp_min(torch.finfo(lse.dtype).min)
        weights = (_scores(qh[:, :, rows], kh, mask, scale) - part.unsqueeze(-1)).exp_()
        g, o = gh[:, :, rows].to(lse.dtype), oh[:, :, rows].to(lse.dtype)
        grouped = [t.unflatten(1, (heads, -1)) for t in (weights, g, (g * o).sum(-1, keepdim=True))]
        dv += torch.einsum("bkgqs,bkgqd->sbkd", grouped[0], grouped[1])
        score_grad = grouped[0] * (torch.einsum("bkgqd,bksd->bkgqs", grouped[1], vh.to(lse.dtype)) - grouped[2]) * scale
        dq[rows] = torch.einsum("bkgqs,bksd->qbkgd", score_grad, kh.to(lse.dtype)).flatten(2, 3).to(q.dtype)
        dk += torch.einsum("bkgqs,bkgqd->sbkd", score_grad, qh[:, :, rows].to(lse.dtype).unflatten(1, (heads, -1)))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


# -- attention by parts: queries and keys in spans that do not overlap but where they are the same ---------------------------------


@dataclass(frozen=True)
class _Part:
    """The queries of a span against the keys that all of them see (``keys``: their places), or against their own span, causally."""

    rows: slice
    keys: tuple[slice, ...]
    q_spans: tuple[int, int]
    k_spans: tuple[int, ...]


@lru_cache(maxsize=256)
def _parts(q_spans: tuple[int, ...], k_spans: tuple[int, ...]) -> tuple[_Part, ...]:
    out, row, starts = [], 0, [0]
    for _, length in _spans(k_spans):
        starts.append(starts[-1] + length)
    for span in _spans(q_spans):
        rows, row = slice(row, row + span[1]), row + span[1]
        for sees in (lambda k, q=span: k[0] + k[1] <= q[0], lambda k, q=span: k == q):
            seen = [(slice(at, at + k[1]), k) for at, k in zip(starts, _spans(k_spans), strict=False) if sees(k)]
            if seen:
                out.append(_Part(rows, tuple(place for place, _ in seen), span, tuple(n for _, k in seen for n in k)))
    return tuple(out)


def _at(x: Tensor, places: tuple[slice, ...]) -> Tensor:
    return x[places[0]] if len(places) == 1 else torch.cat([x[place] for place in places])


def _forward_in_parts(
    q: Tensor, k: Tensor, v: Tensor, q_spans: Sequence[int], k_spans: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    shape, low = attend_shapes(q, v)
    out, lse = torch.zeros_like(shape, dtype=low.dtype), torch.full_like(low, -math.inf)
    for part in _parts(tuple(q_spans), tuple(k_spans)):
        rows, keys, values = part.rows, _at(k, part.keys), _at(v, part.keys)
        got = attend_forward(q[rows], keys, values, None, None, part.q_spans, part.k_spans, 0, 0, scale)
        merge(out[rows], lse[:, :, rows], *got)
    return out.to(q.dtype), lse


def _backward_in_parts(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_spans: Sequence[int], k_spans: Sequence[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (torch.zeros_like(t, dtype=lse.dtype) for t in (q, k, v))
    for part in _parts(tuple(q_spans), tuple(k_spans)):
        rows, keys, values, low = part.rows, _at(k, part.keys), _at(v, part.keys), lse[:, :, part.rows].contiguous()
        got = attend_backward(
            grad[rows], q[rows], keys, values, out[rows], low, None, None, part.q_spans, part.k_spans, 0, 0, scale
        )  # fmt: skip
        dq[rows].add_(got[0])
        sizes = [place.stop - place.start for place in part.keys]
        for place, for_k, for_v in zip(part.keys, got[1].split(sizes), got[2].split(sizes), strict=True):
            dk[place].add_(for_k)
            dv[place].add_(for_v)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def merge(out: Tensor, lse: Tensor, part: Tensor, low: Tensor) -> None:
    """Add a block's result to the rows' running result, in place: online softmax."""
    both = torch.logaddexp(lse, low)
    safe = both.clamp_min(torch.finfo(both.dtype).min)
    ours, theirs = ((t - safe).exp_().permute(2, 0, 1).unsqueeze(-1) for t in (lse, low))
    out.mul_(ours).add_(part * theirs)
    lse.copy_(both)


def _row_blocks(length: int) -> list[slice]:
    return [slice(low, min(low + ROWS, length)) for low in range(0, length, ROWS)]


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[b, heads, q, k] in the accumulation type; -inf where masked."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(dtype).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bkgqd,bksd->bkgqs", grouped, k.to(dtype)).flatten(1, 2) * scale
    return scores if mask is None else scores.masked_fill_(~mask, -math.inf)


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bkgqs,bksd->bkgqd", weights.unflatten(1, (v.shape[1], -1)), v.to(weights.dtype)).flatten(1, 2)


def _gathered(grad: Tensor, like: Tensor) -> Tensor:
    """A kernel's gradient [b, heads, s, width] as [s, b, heads, width] of ``like``, repeated heads summed: one pass, one tensor."""
    turned = grad[..., : like.shape[-1]].permute(2, 0, 1, 3)
    if turned.shape[2] == like.shape[2]:
        return turned.contiguous()
    return turned.unflatten(2, (like.shape[2], -1)).sum(3)


def _padded(*widths: int) -> int:
    return math.ceil(max(widths) / 8) * 8 if len(set(widths)) > 1 or widths[0] % 8 else widths[0]


def _pad(t: Tensor, width: int) -> Tensor:
    return t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1]))


class _CpuFlash:
    @staticmethod
    def keys(k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """As they are: the kernel serves ``heads`` queries' heads from fewer."""
        return k, v

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        low = lse.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, low, 0.0, causal, scale=scale
        )


class _CudaFlash:
    @staticmethod
    def keys(k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """Repeated to ``heads``, which every version of the kernel takes."""
        times = heads // k.shape[1]
        return (k, v) if times == 1 else (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        got = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return got[0], got[1]

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[:0], scale=scale
        )


def _fused(q: Tensor) -> type[_CpuFlash] | type[_CudaFlash] | None:
    """The fused kernel for these tensors, None where scores must be written out."""
    if q.device.type == "cpu":
        return _CpuFlash
    if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256:
        return _CudaFlash
    return None
