"""Sequences packed from documents: what a histogram of document lengths means for attention, context parallelism and memory.

Queries see only their own document, so a packed sequence has fewer query-key pairs than a whole one; ranks that share a sequence
front-and-back no longer have equal pairs unless each document is shared that way.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from cost_models.attention_ops import causal_pairs
from profiles.errors import InputError

SAMPLES = 100
"""Sequences drawn to average over."""

Histogram = tuple[tuple[int, int], ...]
"""(length in tokens, how many documents) of each length."""


class Packing(NamedTuple):
    """Of packed sequences of one length: ``pairs`` query-key pairs a sequence (mean), ``share`` of them in the pairs of one whole
    document, ``imbalance`` max / mean pairs of the ranks that share a sequence, ``worst_tokens`` of a microbatch of one sequence
    when documents are not cut but batched whole up to the sequence length (a longer document comes alone)."""

    pairs: float
    share: float
    imbalance: float
    worst_tokens: int


def documents_of(text: str) -> Histogram:
    """Read ``512x1000,4096x20`` (length x count). Raises InputError."""
    out = []
    for part in text.split(","):
        length, _, count = part.strip().partition("x")
        if not (length.isdigit() and (count or "1").isdigit() and int(length) and int(count or 1)):
            raise InputError("documents", part, "is written LENGTHxCOUNT, both positive", "512x1000")
        out.append((int(length), int(count or 1)))
    return tuple(out)


@lru_cache(maxsize=256)
def packing(documents: Histogram, seq_len: int, parts: int = 1, *, balanced: bool = True, each_document: bool = False) -> Packing:
    """Average over ``SAMPLES`` sequences drawn from the histogram with a fixed seed, documents laid end to end and cut at the
    sequence's end. ``parts`` context-parallel ranks share a sequence: front-and-back (``balanced``) or in runs, of the sequence or
    of ``each_document``.
    """
    if not documents:
        raise InputError("documents", "", "a histogram needs at least one length", "512x1")
    draw = random.Random(0)
    lengths, weights = zip(*documents, strict=True)
    rest: list[int] = []
    total = worst = 0.0
    for _ in range(SAMPLES):
        sequence: list[int] = []
        while sum(sequence) < seq_len:
            length = rest.pop() if rest else draw.choices(lengths, weights)[0]
            room = seq_len - sum(sequence)
            sequence.append(min(length, room))
            if length > room:
                rest.append(length - room)
        pairs = float(sum(causal_pairs(n) for n in sequence))
        total += pairs
        worst += pairs / parts if each_document and balanced else max(rank_shares(sequence, parts, balanced=balanced))
    mean = total / SAMPLES
    return Packing(mean, mean / causal_pairs(seq_len), worst * parts / total, max(seq_len, *lengths))


def rank_shares(sequence: Sequence[int], parts: int, *, balanced: bool = True) -> list[float]:
    """Query-key pairs of each rank that shares one packed ``sequence`` of document lengths."""
    length = sum(sequence)
    blocks = 2 * parts if balanced else parts
    edges = [length * i // blocks for i in range(blocks + 1)]
    shares = [0.0] * parts
    start = 0
    for document in sequence:
        for block in range(blocks):
            low, high = max(edges[block], start) - start, min(edges[block + 1], start + document) - start
            if low < high:
                rank = min(block, blocks - 1 - block) if balanced else block
                shares[rank] += causal_pairs(high) - causal_pairs(low)
        start += document
    return shares
