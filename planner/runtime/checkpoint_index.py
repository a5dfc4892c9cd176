"""The index of a checkpoint (``.metadata``), read without executing anything it names.

torch.distributed.checkpoint writes its index as a pickle and reads it with ``pickle.load``, which calls whatever the file names. Here
the file is gone through first by an unpickler that knows the few classes an index is made of and refuses every other name.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

METADATA = "torch.distributed.checkpoint.metadata"
NAMES = {
    *((METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")),
    *((METADATA, name) for name in ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}
"""(module, name) of all that an index may hold."""


class Foreign(Exception):
    """An index names what no index needs."""


def member(kind: Any, name: str) -> Any:
    """What ``getattr`` may be called for: Python 3.11.0 to 3.11.3 write an enumeration's member so. Raises Foreign for anything else."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise Foreign(f".metadata asks for {name!r} of {kind!r}, which no checkpoint of axisplan holds")
    return kind[name]


class _Checked(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return member
        if (module, name) not in NAMES:
            raise Foreign(f".metadata names {module}.{name}, which no checkpoint of axisplan holds")
        return super().find_class(module, name)


class CheckedReader(FileSystemReader):
    """torch's reader, which looks at an index's names before torch reads it. Raises Foreign."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        _Checked(io.BytesIO((Path(self.path) / ".metadata").read_bytes())).load()
        found: Metadata = super().read_metadata(*args, **kwargs)
        return found
