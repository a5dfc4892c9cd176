"""Two plans side by side, or a plan and a measured run: what differs first, the largest difference on top."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cost_models.layout import Layout
from planner.plan import Plan
from profiles.errors import InputError

LARGEST_BYTES = 64 << 20
WARM_UP = 0.25
"""Share of a run's first steps that is left out: caches and allocators warm up."""
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """One field, its value on either side, and the change in per cent of the first where both are numbers."""

    section: str
    field: str
    first: Any
    second: Any
    unit: str = ""
    change_percent: float | None = None


@dataclass(frozen=True)
class Comparison:
    """``differences`` by section, the largest of each first; ``same``: fields equal on both sides; ``verdict`` in a sentence."""

    kind: str
    differences: tuple[Difference, ...]
    same: tuple[str, ...]
    verdict: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def load_side(path: Path) -> Plan | list[dict[str, Any]]:
    """A plan, or the records of a run: its folder, or JSON lines as ``axisplan run --json`` prints them. Raises InputError for others."""
    if path.is_dir() and (metrics := path / "metrics.jsonl").is_file():
        path = metrics
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise InputError("file", path, f"is larger than {LARGEST_BYTES >> 20} MiB")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("file", path, f"cannot be read: {getattr(error, 'strerror', None) or 'not text'}") from None
    first = next((line for line in text.splitlines() if line.strip()), "")
    if _is_step(_parsed(first)):
        return list(_records(text, path))
    return Plan.load(path)


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_step(record: Any) -> bool:
    return isinstance(record, dict) and "step" in record and _number(record.get("seconds"))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _records(text: str, path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        record = _parsed(line)
        if not _is_step(record) or record["seconds"] <= 0:
            raise InputError("run", path, f"line {number} is no step of a run (a JSON object with step and seconds)")
        yield record


def compare_files(first: Path, second: Path) -> Comparison:
    """Compare what two files hold; a run is compared with the plan whichever comes first."""
    a, b = load_side(first), load_side(second)
    if isinstance(a, Plan) and isinstance(b, Plan):
        return compare_plans(a, b)
    if isinstance(a, Plan) and isinstance(b, list):
        return compare_run(a, b)
    if isinstance(b, Plan) and isinstance(a, list):
        return compare_run(b, a)
    raise InputError("file", second, "both are runs; one of the two must be a plan")


# -- two plans --------------------------------------------------------------------------------------------------------------


def compare_plans(a: Plan, b: Plan) -> Comparison:
    """Inputs, layout, figures, seconds by cause and memory of the fullest stage."""
    found = [*_inputs(a, b), *_layouts(a, b), *_figures(a, b), *_seconds(a, b), *_memory(a, b)]
    differences = tuple(d for d in found if d.first != d.second)
    same = tuple(f"{d.section}: {d.field}" for d in found if d.first == d.second)
    return Comparison("plans", differences, same, _verdict(a, b))


def _verdict(a: Plan, b: Plan) -> str:
    if a.text() == b.text():
        return "the same plan"
    job = [name for name in ("model", "cluster", "execution", "job") if a.inputs.get(name) != b.inputs.get(name)]
    ratio = b.step_seconds / a.step_seconds
    pace = (
        "as fast as" if abs(ratio - 1) < 1e-9 else f"{100 * abs(ratio - 1):.3g} % {'slower' if ratio > 1 else 'faster'} a step than"
    )
    apart = f"; they were made for different inputs ({', '.join(job)})" if job else ""
    overlap = _low(a) <= b.step_seconds <= _high(a)
    sure = (
        ""
        if job or ratio == 1
        else "; within the first one's 80 % interval"
        if overlap
        else "; outside the first one's 80 % interval"
    )
    return f"B is {pace} A{sure}{apart}"


def _low(plan: Plan) -> float:
    return float(plan.estimate.get("step_seconds_low", plan.step_seconds))


def _high(plan: Plan) -> float:
    return float(plan.estimate.get("step_seconds_high", plan.step_seconds))


def _inputs(a: Plan, b: Plan) -> Iterator[Difference]:
    for name in ("model", "cluster", "execution"):
        first, second = getattr(a, name), getattr(b, name)
        if a.inputs.get(name) == b.inputs.get(name):
            yield Difference("input", name, first.get("name"), second.get("name"))
            continue
        named = Difference("input", name, first.get("name"), second.get("name"))
        if named.first != named.second:
            yield named
            continue
        for key in sorted({*first, *second}):
            if first.get(key) != second.get(key):
                yield Difference("input", f"{name}.{key}", _short(first.get(key)), _short(second.get(key)))
    settings = a.job_settings.model_dump(), b.job_settings.model_dump()
    for key in settings[0]:
        yield _numbers("input", key, settings[0][key], settings[1].get(key))


def _short(value: Any) -> Any:
    text = json.dumps(value, sort_keys=True)
    return value if len(text) <= 60 else text[:57] + "..."


def _layouts(a: Plan, b: Plan) -> Iterator[Difference]:
    first, second = a.layout_object, b.layout_object
    names = [f.name for f in fields(Layout)]
    for name in names:
        yield _numbers("layout", name, _plain(getattr(first, name)), _plain(getattr(second, name)))
    if first.world != second.world:
        yield _numbers("layout", "gpus", first.world, second.world)


def _plain(value: Any) -> Any:
    return "|".join(map(str, value)) if isinstance(value, tuple) else value


def _figures(a: Plan, b: Plan) -> Iterator[Difference]:
    keys = ("step_seconds", "tokens_per_second_per_gpu", "mfu", "hfu", "bubble_fraction")
    rows = [_numbers("figure", key, a.estimate.get(key), b.estimate.get(key), "s" if key == "step_seconds" else "") for key in keys]
    rows.append(_numbers("figure", "proved", a.certificate.proved, b.certificate.proved))
    yield from rows


def _seconds(a: Plan, b: Plan) -> Iterator[Difference]:
    first, second = a.estimate.get("seconds", {}), b.estimate.get("seconds", {})
    causes = sorted({*first, *second}, key=lambda c: -abs(second.get(c, 0.0) - first.get(c, 0.0)))
    for cause in causes:
        yield _numbers("seconds", cause, first.get(cause, 0.0), second.get(cause, 0.0), "s")


def _memory(a: Plan, b: Plan) -> Iterator[Difference]:
    first, second = fullest(a), fullest(b)
    keys = sorted({*first, *second} - {"stage"}, key=lambda k: -abs(second.get(k, 0.0) - first.get(k, 0.0)))
    yield _numbers("memory", "fullest stage", first.get("stage"), second.get("stage"))
    for key in keys:
        yield _numbers("memory", key, first.get(key, 0.0), second.get(key, 0.0), "bytes")


def fullest(plan: Plan) -> dict[str, Any]:
    """The memory of the stage whose device needs most."""
    return max(plan.estimate["memory"], key=lambda s: float(s["device"]))


def _numbers(section: str, field: str, first: Any, second: Any, unit: str = "") -> Difference:
    change = 100 * (second / first - 1) if _number(first) and _number(second) and first else None
    return Difference(section, field, first, second, unit, change)


# -- a plan and a run -------------------------------------------------------------------------------------------------------


def compare_run(plan: Plan, records: Sequence[Record]) -> Comparison:
    """Predicted against measured: the median step after the warm-up, tokens/s, and the peak of allocated memory."""
    if not records:
        raise InputError("run", "", "holds no step")
    warm = list(records)[int(len(records) * WARM_UP) :]
    seconds = statistics.median(float(r["seconds"]) for r in warm)
    tokens = plan.job().tokens
    rows = [
        _numbers("figure", "step_seconds", plan.step_seconds, seconds, "s"),
        _numbers("figure", "tokens_per_second", tokens / plan.step_seconds, tokens / seconds),
    ]
    peaks = [float(r["peak_bytes"]) for r in records if _number(r.get("peak_bytes"))]
    if peaks:
        predicted = max(float(s["peak_allocated"]) for s in plan.estimate["memory"])
        rows.append(_numbers("memory", "peak_allocated", predicted, max(peaks), "bytes"))
    for name, values in _phases(warm).items():
        rows.append(_numbers("seconds", name, plan.estimate.get("seconds", {}).get(name), statistics.median(values), "s"))
    inside = _low(plan) <= seconds <= _high(plan)
    ratio = seconds / plan.step_seconds
    verdict = (
        f"measured {seconds:.4g} s a step over {len(warm)} steps, predicted {plan.step_seconds:.4g} s: {100 * abs(ratio - 1):.3g} % "
        f"{'longer' if ratio > 1 else 'shorter'}, {'inside' if inside else 'outside'} the 80 % interval {_low(plan):.4g} to {_high(plan):.4g} s"
    )
    return Comparison("run", tuple(rows), (), verdict)


def _phases(records: Sequence[Record]) -> dict[str, list[float]]:
    """Seconds by phase, where the run recorded them (``seconds_by``)."""
    out: dict[str, list[float]] = {}
    for record in records:
        for name, value in (record.get("seconds_by") or {}).items() if isinstance(record.get("seconds_by"), dict) else ():
            if _number(value):
                out.setdefault(str(name), []).append(float(value))
    return out
