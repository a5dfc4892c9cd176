"""What a run does beside its plan: the settings, and where they are read from. Needs no torch, so that a fault is said at once."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from profiles.errors import InputError


class TrainSettings(BaseModel):
    """What a run does beside the plan: data, steps, optimizer, where results go."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seq_len: int = Field(gt=0)
    global_batch: int = Field(gt=0)
    precision: Literal["fp64", "fp32", "bf16"] = "fp32"
    steps: int = Field(20, gt=0)
    learning_rate: float = Field(3e-4, gt=0)
    warmup_steps: int = Field(0, ge=0)
    decay: Literal["constant", "linear", "cosine"] = "cosine"
    final_rate: float = Field(0.1, ge=0, le=1)
    """The rate at the last step, as a share of ``learning_rate``."""
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = Field(0.1, ge=0)
    clip: float = Field(1.0, ge=0)
    """Largest gradient norm; 0 = not clipped."""
    balance: Literal["sequence", "switch", "none"] = "sequence"
    """Form of the routers' auxiliary loss (``moe``)."""
    balance_coefficient: float = Field(1e-3, ge=0)
    mtp_weight: float = Field(0.3, ge=0)
    """What the mean loss of the multi-token-prediction modules counts (DeepSeek-V3 section 4.2: 0.3, later 0.1)."""
    bias_rate: float = Field(1e-3, ge=0)
    """How far a selection bias moves in a step (DeepSeek-V3)."""
    lora_rank: int = Field(0, ge=0)
    """Rank of the adapters that alone are trained; 0 = the model is (``adapters``)."""
    lora_targets: tuple[str, ...] = ()
    """Parts of the model whose linear layers carry adapters; empty = all."""
    lora_alpha: float = Field(0.0, ge=0)
    """Adapters are scaled by this over their rank; 0 = by one."""
    frozen: tuple[str, ...] = ()
    """Parts of the model that are not trained."""
    seed: int = 0
    data: tuple[Path, ...] = ()
    """A folder of ``axisplan data prepare``, or text files (read as bytes)."""
    eval_data: tuple[Path, ...] = ()
    """Held-out data, in the same form: its loss is in the records of the steps that ``eval_every`` names, and of the last."""
    eval_every: int = Field(0, ge=0)
    """Steps between evaluations; 0 = at the end only."""
    eval_sequences: int = Field(0, ge=0)
    """Evaluate on this many sequences, the first ones; 0 = all."""
    tensorboard: bool = False
    """Write the records for TensorBoard too, under ``out``/tensorboard."""
    reset_documents: bool = False
    """Attention and loss stay inside documents."""
    initial: Path | None = None
    """A Hugging Face model folder to start from (default: values from the seed)."""
    device: Literal["plan", "cpu", "cuda"] = "plan"
    """What the processes compute on; plan: what the plan was made for (``devices``)."""
    out: Path | None = None
    """Where checkpoints and records go; None = nowhere."""
    checkpoint_every: int = Field(0, ge=0)
    """Steps between checkpoints (and one at the end); 0 = none."""
    keep: int = Field(2, ge=1)
    """Checkpoints kept."""
    resume: bool = True
    """Continue from the last whole checkpoint under ``out``."""
    timeout_seconds: float = Field(600.0, gt=0)
    """How long a collective may wait for another rank."""


class _Words(argparse.ArgumentParser):
    """A parser whose faults are InputErrors."""

    def error(self, message: str) -> NoReturn:
        kind, _, rest = message.removeprefix("argument ").partition(": ")
        if kind == "unrecognized arguments":
            near = get_close_matches(rest.split()[0], self._option_string_actions, 1)
            raise InputError("arguments", rest, "are not known", next(iter(near), None))
        rule, _, value = rest.rpartition(": ")
        raise InputError(kind, value.strip("'"), rule or "is missing")


def parser() -> argparse.ArgumentParser:
    """The words of ``axisplan worker``, which ``axisplan run`` and launch.sh pass on. Its faults are InputErrors."""
    made = _Words("axisplan worker", allow_abbrev=False)
    made.add_argument("action", choices=["train"])
    made.add_argument("plan", type=Path)
    made.add_argument("--settings", type=Path)
    made.add_argument("--steps", type=int)
    made.add_argument("--data", type=Path, nargs="+")
    made.add_argument("--eval-data", type=Path, nargs="+")
    made.add_argument("--eval-every", type=int)
    made.add_argument("--tensorboard", action="store_true", default=None)
    made.add_argument("--trace", type=Path)
    made.add_argument("--runs", type=Path)
    made.add_argument("--out", type=Path)
    made.add_argument("--seed", type=int)
    made.add_argument("--precision")
    made.add_argument("--device")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other training setting")
    made.add_argument("--json", action="store_true", help="records as JSON lines")
    made.add_argument(
        "--restarts", type=int, default=0, help="how often torchrun starts all workers again: the launcher's business"
    )
    return made


OF_JOB = ("seq_len", "global_batch", "precision", "lora_rank", "lora_targets", "lora_alpha", "frozen")
"""Settings that the plan's job gives."""
OF_COMMAND = ("steps", "data", "eval_data", "eval_every", "tensorboard", "out", "seed", "precision", "device")
"""Settings that are options of their own."""


def read_settings(arguments: argparse.Namespace, job: object) -> TrainSettings:
    """TrainSettings from the plan's job, the settings file and the command line, later ones first.

    Paths in the file are relative to it. Raises InputError for an unknown key or a bad value.
    """
    values: dict[str, Any] = {name: getattr(job, name) for name in OF_JOB}
    folder = Path()
    if arguments.settings is not None:
        folder = arguments.settings.resolve().parent
        values |= _of_file(arguments.settings, folder)
    values |= {name: given for name in OF_COMMAND if (given := getattr(arguments, name)) is not None}
    for pair in arguments.set:
        key, _, text = pair.partition("=")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    if values.get("out") is None:
        values["out"] = folder / "run"
    try:
        return TrainSettings.model_validate(values)
    except ValidationError as error:
        raise _refusal(error) from None


def _of_file(path: Path, folder: Path) -> dict[str, Any]:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("settings", path, f"cannot be read: {error}") from None
    if not isinstance(given, dict):
        raise InputError("settings", path, "is not a JSON object")
    for name in ("data", "eval_data"):
        if name in given:
            files = [given[name]] if isinstance(given[name], str) else given[name]
            given[name] = [str(folder / file) for file in files]
    if given.get("out"):
        given["out"] = str(folder / given["out"])
    return given


def _refusal(error: ValidationError) -> InputError:
    """The first of pydantic's faults, with the bound that was passed or the default as the nearest value."""
    first = error.errors()[0]
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        near = get_close_matches(name, TrainSettings.model_fields, 3)
        return InputError("--set", name, "is no training setting", ", ".join(near) or None)
    facts, field = first.get("ctx", {}), TrainSettings.model_fields[name]
    nearest = facts.get("ge", facts.get("le", None if field.is_required() else field.default))
    if first["type"] == "literal_error":
        words = [str(word) for word in get_args(field.annotation)]
        nearest = next(iter(get_close_matches(str(first["input"]), words, 1, 0.8)), nearest)
    rule = first["msg"].removeprefix("Input ")
    return InputError(".".join(str(p) for p in first["loc"]), first.get("input"), rule, None if nearest in ((), None) else nearest)


def check_files(settings: TrainSettings) -> None:
    """Raise InputError for data that is not there, and an ``out`` that is no folder or cannot be written to."""
    files_of(settings, "data")
    for name in ("data", "eval_data"):
        for path in getattr(settings, name):
            if not path.exists():
                raise InputError(name, path, "does not exist")
    if settings.initial is not None and not settings.initial.is_dir():
        raise InputError("initial", settings.initial, "is no folder of a Hugging Face model")
    out = settings.out
    if out is None:
        return
    first = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not first.is_dir():
        rule = (
            "records and checkpoints go into a folder, and this is a file" if first == out else f"{first} is a file, not a folder"
        )
        raise InputError("--out", out, rule, first.with_name(f"{first.stem}-run"))
    if not os.access(first, os.W_OK):
        raise InputError("--out", out, f"{first} cannot be written to")


def files_of(settings: TrainSettings, field: str) -> Sequence[Path]:
    """What ``field`` (data, eval_data) names. Raises InputError for nothing."""
    files: Sequence[Path] = getattr(settings, field)
    if not files:
        raise InputError(field, "", "name a prepared folder or text files")
    return files
