"""Data: what is prepared, and what is said where it cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from planner.runtime.data import BYTE_END, TokenFile, prepare
from planner.runtime.settings import TrainSettings, check_files, parser, read_settings
from profiles.errors import InputError


def test_texts_become_their_bytes_with_an_end_after_each(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("hé")
    (tmp_path / "b").write_text("x")
    facts = prepare([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert np.fromfile(tmp_path / "out" / "tokens.bin", "uint16").tolist() == [*"hé".encode(), BYTE_END, *b"x", BYTE_END]
    assert facts == json.loads((tmp_path / "out" / "tokens.json").read_text())
    assert facts["count"] == 6


def test_a_text_is_read_in_blocks_that_may_cut_a_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.runtime.data.BLOCK", 3)
    (tmp_path / "a").write_bytes("naïve €\r\n".encode())
    prepare([tmp_path / "a"], tmp_path)
    assert np.fromfile(tmp_path / "tokens.bin", "uint16").tolist() == [*"naïve €\r\n".encode(), BYTE_END]
    for wrong, why in ((b"abcd\xff", "cannot be read as text"), ("€".encode()[:2], "cannot be read as text"), (b"", "is empty")):
        (tmp_path / "wrong").write_bytes(wrong)
        with pytest.raises(InputError, match=f"data: '.*wrong': {why}"):
            prepare([tmp_path / "a", tmp_path / "wrong"], tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_hugging_face_tokenizer_gives_its_ids_and_its_own_end(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<unk>": 0, "best": 1, "of": 2, "times": 3, "</s>": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a").write_text("best of times")
    (tmp_path / "b").write_text("worst times")
    for named in (tmp_path, tmp_path / "tokenizer.json"):
        facts = prepare([tmp_path / "a", tmp_path / "b"], tmp_path / "out", str(named))
        assert np.fromfile(tmp_path / "out" / "tokens.bin", "uint16").tolist() == [1, 2, 3, 4, 0, 3, 4]
        assert (facts["vocab"], facts["end"], facts["documents"]) == (5, 4, 2)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer: '.*': is no tokenizer\.json: [^\n]+; nearest: bytes"):
        prepare([tmp_path / "a"], tmp_path / "out", str(tmp_path))


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


def settings_of(*words: str) -> TrainSettings:
    job = SimpleNamespace(
        seq_len=16, global_batch=2, precision="fp32", lora_rank=0, lora_targets=(), lora_alpha=0.0, frozen=()
    )  # fmt: skip
    return read_settings(parser().parse_args(["train", "plan.json", *words]), job)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--step", "2"), "arguments: '--step 2': are not known; nearest: --steps"),
        (("--steps", "two"), "--steps: 'two': invalid int value"),
        (("--set", "checkpoint_evry=2"), "--set: 'checkpoint_evry': is no training setting; nearest: checkpoint_every"),
        (("--steps", "0"), "steps: 0: should be greater than 0; nearest: 20"),
        (("--set", "final_rate=2"), "final_rate: 2: should be less than or equal to 1; nearest: 1.0"),
        (("--set", "decay=cosin"), "decay: 'cosin': should be 'constant', 'linear' or 'cosine'; nearest: cosine"),
        (("--precision", "fp16"), "precision: 'fp16': should be 'fp64', 'fp32' or 'bf16'; nearest: fp32"),
    ],
)
def test_a_training_setting_that_cannot_be_is_named_with_what_is_near(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(InputError) as caught:
        settings_of(*words)
    assert str(caught.value) == line


def test_files_that_cannot_be_used_are_named_before_anything_starts(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words")
    check_files(settings_of("--data", str(text), "--out", str(tmp_path / "new" / "run")))
    for words, line in (
        (
            ("--out", str(text)),
            rf"--out: '{text}': records and checkpoints go into a folder, and this is a file; nearest: .*text-run",
        ),
        (("--out", str(text / "run")), rf"--out: .* {text} is a file, not a folder"),
        (("--data", str(tmp_path / "none")), "data: .*none': does not exist"),
        (("--data", str(text), "--set", "initial=none"), "initial: 'none': is no folder"),
    ):
        with pytest.raises(InputError, match=line):
            check_files(settings_of("--data", str(text), *words))
    with pytest.raises(InputError, match="data: '': name a prepared folder or text files"):
        check_files(settings_of())
