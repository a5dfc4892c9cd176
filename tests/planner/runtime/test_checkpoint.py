"""Checkpoints: continued under another layout as if nothing had happened, and never destroyed by a death."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.runtime.checkpoint import latest

SAVING = Path(__file__).resolve().parent / "checkpoint_programs.py"
CHANGES = [
    ("llama", (4, "tp=2,pp=2,micro_batch=2"), (4, "dp=4,zero=1")), ("llama", (4, "dp=4,zero=3"), (2, "dp=2,zero=1")),
    ("gpt", (4, "dp=2,pp=2,zero=2"), (4, "tp=4")), ("mqa", (2, "dp=2,zero=1"), (4, "tp=4,sp=false")),
    ("moe-v3", (4, "dp=4,ep=4"), (4, "tp=2,dp=2,ep=2,etp=2")), ("mla", (4, "pp=2,dp=2,ep=2,zero=3"), (1, "micro_batch=4")),
    ("moe-v3", (4, "dp=4,ep=4,zero=1"), (4, "dp=4,ep=2,zero=2")), ("moe-v3", (4, "dp=4,ep=4,zero=2"), (2, "dp=2,ep=2,zero=1")),
    ("llama", (4, "dp_replicate=2,dp_shard=2,zero=2"), (4, "dp=4,zero=2")), ("llama", (4, "cp=2,dp=2,zero=1"), (4, "dp=4,zero=3")),
]  # fmt: skip
CASES = [pytest.param(*case, marks=[] if number % 3 == 1 else pytest.mark.slow) for number, case in enumerate(CHANGES)]


@pytest.mark.parametrize(("model", "before", "after"), CASES)
def test_training_continues_under_another_layout(
    processes: Callable[..., list[Any]], tmp_path: Path, model: str, before: tuple[int, str], after: tuple[int, str]
) -> None:
    facts = {"folder": str(tmp_path), "steps": 3, "more": 3, "model": model}
    expected = processes(before[0], "train_and_save", layout=before[1], **facts)[0]
    got = processes(after[0], "load_and_train", layout=after[1], **facts)[0]
    assert got == pytest.approx(expected, rel=1e-9)
    assert latest(tmp_path) == tmp_path / "step-00000003"


def test_training_goes_on_while_a_checkpoint_is_written(processes: Callable[..., list[Any]], tmp_path: Path) -> None:
    """A save returns once the state is copied; what is written is that state, and it is named only when it is whole."""
    for found in processes(2, "step_while_saving", file=SAVING, folder=str(tmp_path)):
        assert found == {"named_while_writing": None, "named_after": "step-00000001", "moved": True, "as_it_was": True}


@pytest.mark.parametrize("keep", [1, 2])
def test_the_last_checkpoints_are_kept_and_the_older_ones_go(
    processes: Callable[..., list[Any]], tmp_path: Path, keep: int
) -> None:
    processes(2, "save_each_step", folder=str(tmp_path), layout="dp=2,zero=1", steps=4, keep=keep)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == [f"step-{n:08d}" for n in range(5 - keep, 5)]
    assert latest(tmp_path) == tmp_path / "step-00000004"


def test_a_damaged_checkpoint_is_said_in_one_line(tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save

    from planner.runtime.checkpoint import find, read_whole, shapes
    from profiles.errors import InputError

    with pytest.raises(InputError, match=r"holds no whole checkpoint; .*checkpoint_every"):
        find(tmp_path)
    save({"a": torch.ones(1000)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert read_whole(tmp_path / "saved", "a", (1000,)).sum() == 1000
    (file,) = (tmp_path / "saved").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(InputError, match=r"^checkpoint: '.*saved': is damaged: a cannot be read: rank 0: [^\n]*$"):
        read_whole(tmp_path / "saved", "a", (1000,))
    (tmp_path / "saved" / ".metadata").write_bytes(b"")
    with pytest.raises(InputError, match=r"has no readable \.metadata"):
        shapes(tmp_path / "saved")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("what", ["*.distcp", ".metadata", "axisplan.json", "all"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_continued(
    processes: Callable[..., list[Any]], tmp_path: Path, what: str
) -> None:
    losses = processes(2, "save_each_step", folder=str(tmp_path), layout="dp=2,zero=1", steps=4)[0]
    newest = tmp_path / "step-00000004"
    if what == "all":
        shutil.rmtree(newest)
    for file in () if what == "all" else newest.glob(what):
        cut(file)
    got = processes(2, "load_and_train", folder=str(tmp_path), layout="dp=2,zero=1", steps=3, more=1)
    assert got == [losses[3:]] * 2
    assert latest(tmp_path) == tmp_path / "step-00000003"
    assert (tmp_path / "damaged-step-00000004").is_dir() == (what != "all")


def test_where_every_checkpoint_is_damaged_the_oldest_is_named(processes: Callable[..., list[Any]], tmp_path: Path) -> None:
    processes(2, "save_each_step", folder=str(tmp_path), layout="dp=2,zero=1", steps=2)
    for file in tmp_path.glob("step-*/*.distcp"):
        cut(file)
    with pytest.raises(AssertionError, match=r"step-00000001': does not fit this model, or is damaged"):
        processes(2, "load_and_train", folder=str(tmp_path), layout="dp=2,zero=1", steps=1, more=1)


def test_an_index_that_names_anything_but_an_index_is_not_executed(tmp_path: Path) -> None:
    import pickle

    from planner.runtime.checkpoint import read_whole, shapes
    from profiles.errors import InputError

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "harm",)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(InputError, match=r"names pathlib\.Path\.touch, which no checkpoint"):
        shapes(tmp_path)
    with pytest.raises(InputError, match=r"names pathlib\.Path\.touch, which no checkpoint"):
        read_whole(tmp_path, "a", (1,))
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("full", [False, True])
def test_a_rank_that_dies_while_a_checkpoint_is_named_leaves_it_and_a_full_disk_leaves_the_one_before(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from planner.runtime import checkpoint

    def gone(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    def no_room(path: Path, text: str) -> None:
        if path.name == "latest":
            raise OSError(28, "No space left on device")
        path.write_text(text)

    saver = checkpoint.Checkpoints.__new__(checkpoint.Checkpoints)
    saver.folder, saver.keep, saver._group, saver._failed = tmp_path, 1, None, None
    for name in ("step-00000002", "step-00000004"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000002" / "axisplan.json").write_text("{}")
    (tmp_path / "latest").write_text("step-00000002\n")
    monkeypatch.setattr(checkpoint, "write_state", lambda *_, **__: None)
    monkeypatch.setattr(checkpoint.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(checkpoint.dist, "broadcast_object_list", gone)
    if full:
        monkeypatch.setattr(checkpoint, "write_text", no_room)
    saver._write({}, tmp_path / "step-00000004", {"format": checkpoint.FORMAT})
    assert isinstance(saver._failed, RuntimeError)
    last = checkpoint.latest(tmp_path)
    assert last is not None and last.name == ("step-00000002" if full else "step-00000004")
    assert (last / "axisplan.json").is_file()
    assert (tmp_path / "step-00000004").exists() is not full


class Asked:
    """Pickled as a call of ``getattr``."""

    def __init__(self, *of: Any) -> None:
        self.of = of

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.of


def test_an_index_written_by_an_early_python_3_11_is_read_and_getattr_is_called_for_nothing_else() -> None:
    import io
    import pickle

    import torch
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    from planner.runtime.checkpoint_index import Foreign, _Checked

    early = pickle.dumps(Asked(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    assert _Checked(io.BytesIO(early)).load() is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    for of in ((_MEM_FORMAT_ENCODING, "__init__"), (torch.Size, "numel"), (torch.float32, "itemsize")):
        with pytest.raises(Foreign, match="which no checkpoint of axisplan holds"):
            _Checked(io.BytesIO(pickle.dumps(Asked(*of)))).load()
