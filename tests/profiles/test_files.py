"""Files are written whole or not at all, and a fault names the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from profiles.files import new_folder, write_text


def test_a_full_disk_is_said_with_the_file_and_the_old_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full answers every write as a full disk does: with an error that names no file."""
    path = tmp_path / "plan.json"
    write_text(path, "old")
    monkeypatch.setattr(os, "fdopen", lambda handle, *_, **__: os.close(handle) or open("/dev/full", "w"))  # noqa: SIM115
    with pytest.raises(OSError, match=r"No space left on device: '.*plan.json'") as caught:
        write_text(path, "new")
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_folder_made_for_what_then_fails_is_taken_away_and_one_that_was_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(KeyError), new_folder(tmp_path / "a" / "b"):
        raise KeyError
    assert not (tmp_path / "a").exists()
    (tmp_path / "c").mkdir()
    with pytest.raises(KeyError), new_folder(tmp_path / "c"):
        raise KeyError
    assert (tmp_path / "c").is_dir()

    def fill_and_fail(folder: Path) -> None:
        with new_folder(folder):
            (folder / "kept").touch()
            raise KeyError

    with pytest.raises(KeyError):
        fill_and_fail(tmp_path / "d")
    assert (tmp_path / "d" / "kept").exists()
