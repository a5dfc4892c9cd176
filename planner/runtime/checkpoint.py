"""Checkpoints with torch.distributed.checkpoint: readable under any layout, written beside training, never over a good one.

``out/checkpoints/step-00000020/`` holds one checkpoint, ``out/checkpoints/latest`` the name of the last whole one: it is renamed
into place after every rank has written and the metadata is there. A rank killed at any moment leaves it naming a whole checkpoint.

Each rank writes the boxes of the whole parameters that it holds (masters and both moments), so a checkpoint knows nothing of the
layout that wrote it. Saving copies them to host memory first, each box on one of the ranks that hold it (12 bytes a parameter in
all; ``cost_models.checkpoints``), and writes from a thread over a group of its own; loading reads each box into its place, without
a copy of the whole.
"""

from __future__ import annotations

import datetime
import json
import shutil
import threading
import warnings
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as read_state
from torch.distributed.checkpoint.state_dict_saver import save as write_state

from planner.runtime.checkpoint_index import CheckedReader
from planner.runtime.data_parallel import Piece
from profiles.errors import AxisplanError, InputError, clipped, one_line
from profiles.files import write_text

FORMAT = 1
PARTS = ("parameter", "exp_avg", "exp_avg_sq")


class Boxes(Tensor):
    """The boxes of one named tensor that this rank holds, as torch.distributed.checkpoint's ``_Checkpointable``."""

    pieces: list[Piece]

    @staticmethod
    def of(pieces: list[Piece]) -> Boxes:
        made = torch.empty((), dtype=pieces[0].tensor.dtype).expand(pieces[0].shape).as_subclass(Boxes)  # a size without storage
        made.pieces = pieces
        return made

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(p.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(p), properties=TensorProperties(dtype=p.tensor.dtype), size=torch.Size(p.shape)
                ),
            )
            for p in self.pieces
        ]  # fmt: skip

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(p) for p in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(p.tensor for p in self.pieces if torch.Size(p.offsets) == index.offset)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=torch.Size(piece.sizes))


def state_of(trainer: Any, *, once: bool = False) -> dict[str, Any]:
    """Everything of a trainer that a checkpoint holds, by name; tensors are the live ones. ``once``: of what replicas hold alike,
    this rank's part."""
    together: dict[str, list[Piece]] = {}
    for part in PARTS:
        for piece in trainer.optimizer.pieces(part, once=once):
            together.setdefault(f"{part}/{piece.name}", []).append(piece)
    state: dict[str, Any] = {name: Boxes.of(pieces) for name, pieces in together.items()}
    for decoder in trainer.decoders.values():
        state |= {f"buffer/{name}": buffer for name, buffer in decoder.named_buffers()}
    return state


class Checkpoints:
    """The checkpoints of one run. Made by every rank at the same point of the program."""

    def __init__(self, folder: Path, keep: int = 2, timeout_seconds: float = 600.0) -> None:
        self.folder, self.keep, self.patience = folder, keep, timeout_seconds
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_seconds))
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    def save(self, trainer: Any, step: int, facts: dict[str, Any], wait: bool = False) -> None:
        """Write the state after ``step`` steps. Returns once it is copied to host memory; ``wait``: once it is written."""
        self.finish()
        state = {name: _copied(value) for name, value in state_of(trainer, once=True).items()}
        target = self._place(step)
        meta = {"format": FORMAT, "step": step, "world": dist.get_world_size(), **facts}
        if dist.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
        dist.barrier(self._group)
        self._thread = threading.Thread(target=self._write, args=(state, target, meta), name="checkpoint")
        self._thread.start()
        if wait:
            self.finish()

    def _place(self, step: int) -> Path:
        """A folder that holds no whole checkpoint: one of an earlier run, which may be all there is, is never written over."""
        names = (f"step-{step:08d}{again}" for again in chain([""], (f"-{n}" for n in count(2))))
        return next(path for path in map(self.folder.joinpath, names) if not (path / "axisplan.json").is_file())

    def _write(self, state: dict[str, Any], target: Path, meta: dict[str, Any]) -> None:
        try:
            write_state(state, checkpoint_id=target, process_group=self._group)
            self._name_it(target, meta)
        except BaseException as error:
            self._failed = error
            if dist.get_rank() == 0 and not (target / "axisplan.json").is_file():
                shutil.rmtree(target, ignore_errors=True)  # a full disk gets its space back; what is named as whole stays

    def _name_it(self, target: Path, meta: dict[str, Any]) -> None:
        """Rank 0 says that the checkpoint is whole; every rank fails where it could not."""
        said: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                write_text(target / "axisplan.json", json.dumps(meta))
                write_text(self.folder / "latest", target.name + "\n")
            except OSError as error:
                said = [one_line(error)]
                (target / "axisplan.json").unlink(missing_ok=True)
            else:
                self._drop_old(target)
        dist.broadcast_object_list(said, 0, group=self._group)
        if said[0] is not None:
            raise OSError(said[0])

    def _drop_old(self, newest: Path) -> None:
        older = sorted(p for p in self.folder.glob("step-*") if p.is_dir() and p != newest)
        for path in older[: max(0, len(older) - self.keep + 1)]:
            shutil.rmtree(path, ignore_errors=True)

    def settle(self) -> None:
        """Wait for the save under way, at most as long as a collective may take, and keep a fault of it to itself: for a run that
        ends with a fault of its own."""
        if self._thread is not None:
            self._thread.join(self.patience)
            self._thread = self._failed = None

    def finish(self) -> None:
        """Wait for the save under way. Raises AxisplanError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise AxisplanError(f"the checkpoint under {self.folder} could not be written: {clipped(_cause(failed), 300)}")


def _cause(error: BaseException) -> str:
    """What went wrong below an exception of torch.distributed.checkpoint, which quotes the tracebacks of all ranks."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    for rank, (cause, _) in sorted(failures.items()):
        while cause.__cause__ is not None or cause.__context__ is not None:
            cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        return f"rank {rank}: {one_line(cause)}"
    return one_line(error)


def latest(folder: Path) -> Path | None:
    """The last whole checkpoint under ``folder``, None where there is none."""
    pointer = folder / "latest"
    if not pointer.is_file():
        return None
    return folder / pointer.read_text(encoding="utf-8").strip()


def before(path: Path) -> Path | None:
    """The last checkpoint of the same run that was whole before the one at ``path``."""
    older = (p for p in path.parent.glob("step-*") if p.name < path.name and (p / "axisplan.json").is_file())
    return max(older, default=None)


def set_aside(path: Path, last: Path) -> Path:
    """Name ``last`` as the latest, and move the damaged checkpoint at ``path`` out of the way of those to come; where it is now."""
    aside = path.with_name(f"damaged-{path.name}")
    write_text(path.parent / "latest", last.name + "\n")
    if path.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    return aside


def find(path: Path) -> Path:
    """The checkpoint at ``path``: itself, or the last whole one of a run's folder or of its ``checkpoints``. Raises InputError."""
    for folder in (path, path / "checkpoints"):
        if (folder / "axisplan.json").is_file():
            return folder
        if (last := latest(folder)) is not None:
            return last
    raise InputError("checkpoint", path, "holds no whole checkpoint; axisplan run --set checkpoint_every=N writes them")


def read_facts(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself. Raises InputError where it is none."""
    try:
        facts: dict[str, Any] = json.loads((path / "axisplan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("checkpoint", path, f"is not a whole checkpoint ({error})", before(path)) from None
    if facts.get("format") != FORMAT:
        raise InputError("checkpoint", path, f"has format {facts.get('format')}; this axisplan reads {FORMAT}", FORMAT)
    return facts


def load(trainer: Any, path: Path) -> dict[str, Any]:
    """Read a checkpoint, written under any layout, into a trainer of the same model; returns its facts."""
    facts = read_facts(path)
    trainer.optimizer.prepare(facts["step"])
    try:
        read_state(state_of(trainer), storage_reader=CheckedReader(path))
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        why = f"does not fit this model, or is damaged: {clipped(_cause(error), 300)}"
        raise InputError("checkpoint", path, why, before(path)) from None
    trainer.optimizer.publish()
    return facts


def _copied(value: Any) -> Any:
    if isinstance(value, Boxes):
        return Boxes.of([Piece(p.name, p.shape, p.offsets, p.sizes, p.tensor.detach().to("cpu", copy=True)) for p in value.pieces])
    return value.detach().to("cpu", copy=True)


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name (``parameter/...``, ``exp_avg/...``, ``buffer/...``) -> shape of every whole tensor in a checkpoint."""
    try:
        found = CheckedReader(path).read_metadata().state_dict_metadata
    except Exception as error:
        raise InputError("checkpoint", path, f"has no readable .metadata: {clipped(one_line(error), 300)}", before(path)) from None
    return {name: tuple(data.size) for name, data in found.items() if isinstance(data, TensorStorageMetadata)}


def read_whole(path: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    """One whole tensor of a checkpoint, in this process alone. Raises InputError where the checkpoint is damaged."""
    state = {name: torch.empty(shape)}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            read_state(state, storage_reader=CheckedReader(path), no_dist=True)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        why = f"is damaged: {name} cannot be read: {clipped(_cause(error), 300)}"
        raise InputError("checkpoint", path, why, before(path)) from None
    return state[name]
