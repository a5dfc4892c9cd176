"""Files are written whole or not at all, and a fault names the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner.emit.files import write_folder
from profiles.errors import InputError
from profiles.files import LARGEST_YAML_BYTES, new_folder, read_json, read_yaml, write_text


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


def test_a_folder_that_takes_no_file_is_said_with_the_name_that_was_asked_for() -> None:
    """/proc takes none, not even from root."""
    for write in (lambda path: write_text(path, "x"), lambda path: write_folder(path, {"plan.json": "{}"})):
        with pytest.raises(OSError, match="No such file or directory") as caught:
            write(Path("/proc/launch"))
        assert caught.value.filename == "/proc/launch"


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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1", "not valid YAML"), ("a: &x [*x]\n", "aliases"), ("a: &x [1]\nb: [*x, *x]\n", "aliases"), ("a: 1\na: 2\n", "a twice"),
        ("[" * 100_000, "maximum nesting depth"), ("{a: " * 100_000, "nested deeper than 64"), ("- " * 50_000, "nested deeper than 64"),
        ("a: " + "9" * 5000, "not usable YAML"), ("!!python/object/apply:os.system ['true']", "not valid YAML"), ("a: \x00", "not valid YAML"),
        ("? [1, 2]\n: 3\n", "not valid YAML"),
    ],
)  # fmt: skip
def test_hostile_yaml_is_one_line_that_names_field_and_file(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=says) as caught:
        read_yaml(path, "cluster")
    assert caught.value.field == "cluster"
    assert "hostile.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_text_no_file_or_too_large_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_bytes(b"#" * (LARGEST_YAML_BYTES + 1))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, says in (
        ("large", "larger than 4 MiB"), ("binary", "not text in UTF-8"), ("absent", "No such file"), ("pipe", "not a regular file")
    ):  # fmt: skip
        with pytest.raises(InputError, match=says):
            read_yaml(tmp_path / f"{name}.yaml", "cluster")
    (tmp_path / "cut.json").write_text('{"a": [1,')
    with pytest.raises(InputError, match="not JSON"):
        read_json(tmp_path / "cut.json", "plan")
