"""Tokenised text in memory-mapped files, and which sequences a step trains on.

The order of sequences follows from (seed, epoch) alone, so every layout sees the same batches: a data-parallel rank takes its run
of the step's sequences, a context-parallel rank its spans of each sequence.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from profiles.errors import InputError, clipped, one_line
from profiles.files import naming, new_folder, write_text

BYTE_END = 256
"""Byte-level tokens: 0-255 are bytes, 256 ends a document."""
BLOCK = 16 << 20
"""Bytes of a text that are read at a time."""


@dataclass(frozen=True)
class Batch:
    """Sequences of one step on one data-parallel rank: ids and labels [sequences, tokens]; documents numbered in each, or None."""

    ids: Tensor
    labels: Tensor
    documents: Tensor | None = None


class Source(Protocol):
    """Where sequences come from."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """The sequences numbered ``indices`` (numbers grow without end: epochs are the source's business)."""
        ...


class TokenFile:
    """``tokens.bin`` and ``tokens.json`` as ``prepare`` writes them, cut into sequences of ``seq_len`` tokens.

    ``reset``: attention and loss stay inside documents. ``field`` is what InputErrors name: raised
    where the file is not there or too short.
    """

    def __init__(
        self, folder: Path, seq_len: int, seed: int = 0, reset: bool = False, vocab: int | None = None, field: str = "data"
    ) -> None:  # fmt: skip
        meta_path = folder / "tokens.json"
        try:
            meta = json.loads(meta_path.read_text(encoding="utf-8"))
            self.tokens: npt.NDArray[Any] = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r", shape=(meta["count"],))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(field, folder, f"is not prepared data ({error}); make it with axisplan data prepare") from None
        if vocab is not None and meta["vocab"] > vocab:
            raise InputError(field, folder, f"has {meta['vocab']} kinds of tokens, the model's vocabulary is {vocab}", vocab)
        self.count = (len(self.tokens) - 1) // seq_len
        if self.count < 1:
            raise InputError(field, folder, f"has {len(self.tokens)} tokens, a sequence needs {seq_len + 1}")
        self.seq_len, self.seed, self.reset, self.end = seq_len, seed, reset, int(meta["end"])
        self._epoch, self._order = -1, np.arange(0)

    def _place(self, index: int) -> int:
        epoch, at = divmod(index, self.count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.count)
        return int(self._order[at])

    def batch(self, indices: Sequence[int]) -> Batch:
        return self.at([self._place(i) for i in indices])

    def at(self, places: Sequence[int]) -> Batch:
        """The sequences at these places of the file, 0 the first."""
        rows = [self.tokens[p * self.seq_len : (p + 1) * self.seq_len + 1] for p in places]
        both = torch.from_numpy(np.stack(rows).astype(np.int64))
        ids, labels = both[:, :-1].contiguous(), both[:, 1:].contiguous()
        if not self.reset:
            return Batch(ids, labels)
        ends = (ids == self.end).long()
        return Batch(ids, labels.masked_fill(ids == self.end, -100), ends.cumsum(1) - ends)


def shifted(batch: Batch, places: int) -> tuple[Tensor, Tensor]:
    """(ids, labels) ``places`` tokens on, as a multi-token-prediction module takes them. Where the sequence, or the document, has
    ended there is no label; ids beyond the sequence are 0."""
    ids, labels = torch.zeros_like(batch.ids), torch.full_like(batch.labels, -100)
    ids[:, :-places], labels[:, :-places] = batch.ids[:, places:], batch.labels[:, places:]
    if batch.documents is not None:
        labels[:, :-places].masked_fill_(batch.documents[:, places:] != batch.documents[:, :-places], -100)
    return ids, labels


Encode = Callable[[Path], Iterator[npt.NDArray[Any]]]
"""The tokens of a text file, piece by piece."""


def prepare(files: Sequence[Path], out: Path, tokenizer: str = "bytes") -> dict[str, Any]:
    """Tokenise text files into ``out/tokens.bin`` and ``tokens.json``; returns what the latter holds.

    ``tokenizer``: ``bytes``, or the path of a Hugging Face ``tokenizer.json``. Each file is one document.
    Raises InputError for a file that is not there, not text, or empty.
    """
    encode, vocab, end = _tokenizer(tokenizer)
    dtype = "uint16" if vocab <= 2**16 else "uint32"
    partial, count = out / f".tokens.bin.{os.getpid()}", 0
    with new_folder(out):
        try:
            with naming(out / "tokens.bin"), partial.open("wb") as target:
                for path in files:
                    count += _document(path, encode, end, dtype, target)
            os.replace(partial, out / "tokens.bin")
        finally:
            partial.unlink(missing_ok=True)
    meta = {"dtype": dtype, "count": count, "vocab": vocab, "end": end, "tokenizer": str(tokenizer), "documents": len(files)}
    write_text(out / "tokens.json", json.dumps(meta))
    return meta


def _document(path: Path, encode: Encode, end: int, dtype: str, target: BinaryIO) -> int:
    """Write a file's tokens and the one that ends it; how many."""
    count, pieces = 0, encode(path)
    while True:
        try:
            ids = next(pieces, None)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError("data", path, f"cannot be read as text: {error}") from None
        if ids is None:
            break
        target.write(ids.astype(dtype).tobytes())
        count += len(ids)
    if not count:
        raise InputError("data", path, "is empty")
    target.write(np.asarray([end], dtype=dtype).tobytes())
    return count + 1


def _tokenizer(name: str) -> tuple[Encode, int, int]:
    """(encode, vocabulary, id that ends a document)."""
    if name == "bytes":
        return _bytes, BYTE_END + 1, BYTE_END
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InputError("tokenizer", name, "needs the package tokenizers; install axisplan[hf]", "bytes") from None
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise InputError("tokenizer", name, "is neither bytes nor a tokenizer.json", "bytes")
    try:
        made = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise InputError("tokenizer", name, f"is no tokenizer.json: {clipped(one_line(error), 200)}", "bytes") from None
    vocab = made.get_vocab_size()
    ends = [i for token in ("<|end_of_text|>", "<|endoftext|>", "</s>", "<|im_end|>") if (i := made.token_to_id(token)) is not None]

    def encode(text: Path) -> Iterator[npt.NDArray[Any]]:
        yield np.asarray(made.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids, dtype=np.uint32)

    return encode, vocab, ends[0] if ends else vocab - 1


def _bytes(path: Path) -> Iterator[npt.NDArray[Any]]:
    """A UTF-8 file's bytes, a block at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            decoder.decode(block)
            yield np.frombuffer(block, dtype=np.uint8)
    decoder.decode(b"", final=True)


def indices_of(step: int, global_batch: int, dp: int, dp_rank: int) -> range:
    """Numbers of the sequences that a data-parallel rank trains on in ``step``."""
    share = global_batch // dp
    start = step * global_batch + dp_rank * share
    return range(start, start + share)
