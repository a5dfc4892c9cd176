"""Data: what is prepared, and what is said where it cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from planner.runtime.data import BYTE_END, TokenFile, prepare
from profiles.errors import InputError


def test_texts_become_their_bytes_with_an_end_after_each(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("hé")
    (tmp_path / "b").write_text("x")
    facts = prepare([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert np.fromfile(tmp_path / "out" / "tokens.bin", "uint16").tolist() == [*"hé".encode(), BYTE_END, *b"x", BYTE_END]
    assert facts == json.loads((tmp_path / "out" / "tokens.json").read_text())
    assert facts["count"] == 6


def test_a_file_that_cannot_be_read_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data: '.*nope.txt': cannot be read as text"):
        prepare([tmp_path / "nope.txt"], tmp_path / "new" / "folder")
    assert not (tmp_path / "new").exists()
    with pytest.raises(InputError, match="tokenizer"):
        prepare([tmp_path / "nope.txt"], tmp_path / "new", "nope.json")
    assert not (tmp_path / "new").exists()


def test_a_full_disk_is_said_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text " * 10_000)
    (tmp_path / f".tokens.bin.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*tokens.bin'"):
        prepare([tmp_path / "a"], tmp_path)


def test_every_epoch_is_an_order_of_its_own_over_all_sequences(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("".join(chr(97 + i % 26) for i in range(16 * 8)))
    prepare([tmp_path / "a"], tmp_path)
    source = TokenFile(tmp_path, 16, seed=3)
    assert source.count == 8
    first, second = (source.batch(range(e * 8, e * 8 + 8)).ids for e in range(2))
    assert (
        sorted(map(tuple, first.tolist()))
        == sorted(map(tuple, second.tolist()))
        == sorted(map(tuple, source.at(range(8)).ids.tolist()))
    )
    assert not first.equal(second)
    assert source.at([2]).ids.tolist()[0] == [97 + i % 26 for i in range(32, 48)]


def test_a_mistyped_training_setting_is_named_with_what_is_near(tmp_path: Path) -> None:
    from planner.runtime.worker import _parser, read_settings

    arguments = _parser().parse_args(["train", "plan.json", "--set", "checkpoint_evry=2"])
    with pytest.raises(InputError, match=r"--set: 'checkpoint_evry': is no training setting; nearest: checkpoint_every"):
        read_settings(arguments, {"seq_len": 16, "global_batch": 2})
