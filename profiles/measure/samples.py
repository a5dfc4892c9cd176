"""What the profiler writes down: one record a measured operation, the failed ones included."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from profiles.errors import InputError
from profiles.files import write_text
from profiles.measure.timing import Timing
from profiles.operations import Attend, Collective, GroupedMatmul, Matmul, Operation, Pointwise

Op = TypeVar("Op", bound=Operation)
OPERATIONS: dict[str, type[Any]] = {c.__name__: c for c in (Matmul, GroupedMatmul, Attend, Pointwise, Collective)}


@dataclass(frozen=True, slots=True)
class Sample(Generic[Op]):
    """Seconds one operation took: the median of its repeats and their quartiles ``low`` and ``high``.

    ``form`` says which kernel stood for it (a matrix product's layout, a pointwise kind). ``held_out`` samples are not fitted but
    judge the fit. ``failed`` holds the reason where there is no time (out of memory, not supported). For a collective: its
    ``ranks``, the ``stride`` between them, the ``groups`` that communicated at once, and the axis ``beside`` it, whose groups did the
    same at the same time (the time is then that of both).
    """

    operation: Op
    seconds: float = 0.0
    low: float = 0.0
    high: float = 0.0
    form: str = ""
    held_out: bool = False
    failed: str = ""
    ranks: int = 1
    stride: int = 1
    groups: int = 1
    beside: str = ""

    def timed(self, timing: Timing) -> Sample[Op]:
        return replace(self, seconds=timing.seconds, low=timing.low, high=timing.high)

    @property
    def spread(self) -> float:
        return (self.high - self.low) / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        record = {k: getattr(self, k) for k in self.__slots__ if k != "operation"}
        return {"op": type(self.operation).__name__, **asdict(self.operation), **record}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Sample:
        own = {k: record[k] for k in cls.__slots__ if k in record}
        kind = OPERATIONS[record["op"]]
        return cls(kind(**{k: record[k] for k in kind.__slots__ if k in record}), **own)


def usable(samples: Iterable[Sample], kind: type[Op], *, held_out: bool | None = False) -> list[Sample[Op]]:
    """The timed samples of one kind of operation; ``held_out`` None takes both those fitted and those kept apart."""
    timed = (s for s in samples if isinstance(s.operation, kind) and not s.failed and s.seconds > 0)
    return [cast("Sample[Op]", s) for s in timed if held_out is None or s.held_out is held_out]


def save_samples(path: str | Path, samples: Sequence[Sample], **facts: object) -> None:
    """Writes samples and the facts about the run (date, host, device) as JSON, whole or not at all."""
    lines = ",\n  ".join(json.dumps(s.to_json()) for s in samples)
    write_text(Path(path), f'{{"facts": {json.dumps(facts)},\n "samples": [\n  {lines}\n]}}\n')


def load_samples(path: str | Path) -> tuple[list[Sample], dict[str, Any]]:
    """Samples and facts of a file that ``save_samples`` wrote; InputError where it is something else."""
    try:
        content = json.loads(Path(path).read_text())
        return [Sample.from_json(r) for r in content["samples"]], content.get("facts", {})
    except OSError as error:
        raise InputError("samples", path, f"cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise InputError("samples", path, "is not a file of samples that `axisplan profile` wrote") from None
