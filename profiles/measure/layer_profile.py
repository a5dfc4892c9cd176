"""LayerProfile: measured layers as a file, which the planner takes in place of analytic values (``--profile FILE``).

One row a layer kind, TP degree, micro batch and sequence length. Importing this needs no torch.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from profiles.errors import InputError
from profiles.files import read_json, read_yaml, write_text

Positive = Annotated[int, Field(gt=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Key = tuple[str, int, int, int]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))


class LayerRow(_Record):
    """One layer on one rank: ``tp`` says of how many ways its local shapes are one.

    Seconds are medians of one microbatch's forward and backward, ``*_spread`` their interquartile range over the median. FLOPs as
    the dispatcher sees them. ``saved_bytes``: tensors kept from forward to backward, parameters and buffers excluded, the layer's
    input included where it is kept. ``peak_bytes``: most bytes alive at once beyond parameters and buffers, gradients included.
    ``failed`` holds the reason where there is nothing else (out of memory).
    """

    name: str = Field(min_length=1)
    tp: Positive = 1
    micro_batch: Positive
    seq_len: Positive
    dtype: str = "fp32"
    forward_seconds: Amount = 0.0
    backward_seconds: Amount = 0.0
    forward_spread: Amount = 0.0
    backward_spread: Amount = 0.0
    forward_flops: Amount = 0.0
    backward_flops: Amount = 0.0
    parameter_bytes: Amount = 0.0
    saved_bytes: Amount = 0.0
    peak_bytes: Amount = 0.0
    failed: str = ""

    @property
    def key(self) -> Key:
        return (self.name, self.tp, self.micro_batch, self.seq_len)


class LayerProfile(_Record):
    """Rows, and where, when and how they were measured (``processes`` at once)."""

    version: Literal[1] = 1
    host: str = ""
    date: str = ""
    device: str = ""
    processes: Positive = 1
    noise: str = ""
    rows: tuple[LayerRow, ...]

    @cached_property
    def _by_key(self) -> dict[Key, LayerRow]:
        return {row.key: row for row in self.rows if not row.failed}

    def row(self, name: str, tp: int, micro_batch: int, seq_len: int) -> LayerRow | None:
        """The measured row of exactly these shapes; None where they were not measured, or failed."""
        return self._by_key.get((name, tp, micro_batch, seq_len))

    def save(self, path: str | Path) -> None:
        """Writes YAML (``.yaml``, ``.yml``) or JSON, whole or not at all."""
        data = self.model_dump(mode="json")
        text = yaml.safe_dump(data, sort_keys=False, width=132) if _is_yaml(path) else json.dumps(data, indent=1) + "\n"
        write_text(Path(path), text)

    @classmethod
    def load(cls, path: str | Path) -> LayerProfile:
        """Reads what ``save`` wrote. InputError names the field that is wrong."""
        data = read_yaml(path, "profile") if _is_yaml(path) else read_json(path, "profile")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "missing":
                what = ".".join(map(str, first["loc"]))
                raise InputError("profile", path, f"lacks {what}: not a file of axisplan profile layer --out") from None
            raise InputError(f"profile.{'.'.join(map(str, first['loc']))}", first["input"], first["msg"]) from None


def _is_yaml(path: str | Path) -> bool:
    return Path(path).suffix in (".yaml", ".yml")
