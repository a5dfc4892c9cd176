"""Names and files of GPUs, links and clusters: what ships with the package, what a user writes, what the profiler writes.

A GPU file holds a ``GpuProfile``; a cluster file a ``ClusterSpec`` in which ``gpu`` and each level's ``link`` are a name or the
whole thing. ``like: NAME`` at the top of a shipped file starts from another one and replaces what is given (mappings key by key;
null removes); in a precision's curve it starts from that GPU's curve.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from profiles.cluster import ClusterSpec, Level
from profiles.errors import InputError
from profiles.files import read_shipped, read_yaml
from profiles.gpu import Constant, GpuProfile
from profiles.links import Link

T = TypeVar("T", GpuProfile, Link, ClusterSpec)
Row = tuple[str, float, str, str, str]
"""(field, value, unit, origin, source) of one constant."""


def _read(path: Path, field: str) -> dict[str, Any]:
    """A mapping from a YAML file, one InputError whatever is wrong with it."""
    data = read_yaml(path, field)
    if not isinstance(data, dict):
        raise InputError(field, str(path), "must be a mapping of fields", None)
    return data


WORDS = {
    "tuple_type": "must be a list", "list_type": "must be a list", "dict_type": "must be a mapping", "missing": "is missing",
    "missing_argument": "is missing", "missing_keyword_only_argument": "is missing", "dataclass_type": "must be a mapping of fields",
}  # fmt: skip
"""The validator's complaints in the words of a file."""


def _build(kind: type[T], data: Mapping[str, Any], where: str) -> T:
    """Validated object; the first broken field becomes the InputError, misspelt keys with the nearest known one."""
    try:
        return TypeAdapter(kind).validate_python(dict(data))
    except ValidationError as error:
        known = [found for found in error.errors() if found["type"] == "unexpected_keyword_argument"]
        first = (known or error.errors())[0]
        place = ".".join(str(part) for part in first["loc"]) or kind.__name__
        nearest = None
        if first["type"] == "unexpected_keyword_argument":
            nearest = next(iter(difflib.get_close_matches(str(first["loc"][-1]), _field_names(kind), 1)), None)
            rule = "no such field"
        else:
            rule = WORDS.get(first["type"]) or first["msg"].removeprefix("Value error, ")
        value = None if rule == "is missing" else shown(first["input"])
        if rule == "is missing" and place == "name":
            rule = "is missing; it stands last in a file that axisplan wrote, so this one may have been cut short"
        raise InputError(f"{where}: {place}", value, rule, nearest) from error


def shown(value: Any) -> object:
    """A value as an error shows it: what was written where that is short, else what kind of thing it is, in a file's words."""
    if isinstance(value, (int, float, str)) or value is None:
        return value
    if isinstance(value, Mapping):
        keys = ", ".join(map(str, list(value)[:3]))
        return f"a mapping of {keys}{', ...' if len(value) > 3 else ''}" if value else "an empty mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return getattr(value, "name", type(value).__name__)


def _field_names(kind: type[T]) -> list[str]:
    """Field names of a file of this kind, nested ones too."""
    schema: dict[str, Any] = TypeAdapter(kind).json_schema()
    return [name for part in [schema, *schema.get("$defs", {}).values()] for name in part.get("properties", {})]


def _merged(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        if "value" in base and "origin" in base and "origin" in over:
            return over
        joined = {key: _merged(base.get(key), over[key]) if key in over else base[key] for key in {**base, **over}}
        return {key: value for key, value in joined.items() if value is not None}
    return over


CURVES = {"matmul", "grouped"}
"""Parts of a GPU's file that hold a curve for each precision."""


def _folder(kind: str) -> Path:
    return Path(__file__).parent / "data" / kind


@cache
def _raw(kind: str, name: str) -> dict[str, Any]:
    data: dict[str, Any] = read_shipped(_folder(kind) / f"{name}.yaml")
    like = data.pop("like", None)
    if like is not None:
        data = _merged({key: value for key, value in _raw(kind, like).items() if key != "aliases"}, data)
    for section in CURVES & data.keys():
        for dtype, curve in data[section].items():
            if other := curve.pop("like", None):
                data[section][dtype] = _merged(_raw(kind, other)[section][dtype], curve)
    return data


@cache
def _names(kind: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _folder(kind).glob("*.yaml")))


@cache
def _aliases(kind: str) -> dict[str, str]:
    found = {name: name for name in _names(kind)}
    for name in _names(kind):
        for alias in _raw(kind, name).get("aliases", []):
            found[alias.lower()] = name
    return found


def _resolve(kind: str, field: str, text: str) -> str:
    asked = text.strip().lower()
    if asked in _names(kind):  # the other files need not be read
        return asked
    known = _aliases(kind)
    name = known.get(asked)
    if name is None:
        nearest = difflib.get_close_matches(text.lower(), known, 3, 0.4)
        listed = list(dict.fromkeys(known[match] for match in nearest))
        raise InputError(field, text, f"not known here ({len(_names(kind))} are: axisplan clusters)", ", ".join(listed) or None)
    return name


def gpu_names() -> list[str]:
    """Names of the built-in GPUs."""
    return list(_names("gpus"))


def cluster_names() -> list[str]:
    """Names of the built-in clusters: what stands before the colon of ``h100-sxm:64x8``."""
    return list(_names("clusters"))


@cache
def _gpu(name: str) -> GpuProfile:
    return _build(GpuProfile, _raw("gpus", name), f"gpus/{name}.yaml")


def load_gpu(name: str) -> GpuProfile:
    """A GPU by name, alias (``H100-80GB-SXM``), ``this`` (as measured here last) or YAML file. InputError names the nearest."""
    if name.strip().lower() in THIS:
        return _measured_here("gpu", name, "").gpu
    if _is_path(name):
        return _build(GpuProfile, _read(Path(name), "gpu"), str(name))
    return _gpu(_resolve("gpus", "gpu", name))


@cache
def _link(name: str) -> Link:
    return _build(Link, _raw("links", name), f"links/{name}.yaml")


def load_link(name: str) -> Link:
    """A built-in link by name."""
    return _link(_resolve("links", "link", name))


def _is_path(text: str) -> bool:
    return text.endswith((".yaml", ".yml")) or os.sep in text


def _completed(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Names of GPUs and links replaced by the things, shape defaults filled in."""
    data = dict(data)
    data.pop("aliases", None)

    def gpu(value: Any) -> GpuProfile:
        if isinstance(value, str):
            return load_gpu(value)
        if not isinstance(value, dict):
            raise InputError(f"{where}: gpu", shown(value), "is the name of a GPU, or a mapping of its fields", "h100")
        return _build(GpuProfile, value, f"{where}: gpu")

    pools = data.get("pools") or []
    if isinstance(pools, list) and all(isinstance(pool, dict) for pool in pools) and pools:
        data["pools"] = [{**pool, "gpu": gpu(pool.get("gpu", ""))} for pool in pools]
        data.setdefault("gpu", data["pools"][0]["gpu"])
        data.setdefault("gpus", sum(pool.get("gpus", 0) for pool in pools if isinstance(pool.get("gpus", 0), int)))
    if "gpu" in data and not isinstance(data["gpu"], GpuProfile):
        data["gpu"] = gpu(data["gpu"])
    levels = data.get("levels")
    if isinstance(levels, list):
        filled = []
        for level in levels:
            level = dict(level) if isinstance(level, dict) else {"name": level}
            if isinstance(level.get("link"), str):
                level["link"] = load_link(level["link"])
            elif isinstance(level.get("link"), dict):
                level["link"] = _build(Link, level["link"], f"{where}: link")
            filled.append(level)
        if filled and "gpus" in data:
            filled[-1].setdefault("size", data["gpus"])
        data["levels"] = filled
    if isinstance(data.get("gpus"), int):
        data.setdefault("gpus_per_node", data["gpus"])
    if isinstance(data.get("gpus_per_node"), int):
        data.setdefault("gpus_per_host", data["gpus_per_node"])
    data.setdefault("price_per_gpu_hour", {"value": 0.0, "unit": "USD/GPU-hour", "origin": "estimate", "source": "none given"})
    data.setdefault("host_memory_bytes", {"value": 2.0**40, "unit": "bytes/host", "origin": "estimate", "source": "none given"})
    return data


THIS = ("this", "this-machine", "this machine")


def this_machine() -> Path:
    """Where the last whole measurement of this machine is kept, as ``axisplan profile gpu`` wrote it: in ``$AXISPLAN_CACHE``, else in
    the user's cache folder."""
    cache = os.environ.get("AXISPLAN_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "axisplan"
    return Path(cache) / "this.yaml"


def _measured_here(field: str, text: str, gpus: str) -> ClusterSpec:
    """``this``, or ``this:GPUS``. Raises InputError where this machine was not measured yet."""
    path = this_machine()
    if not path.is_file():
        raise InputError(
            field, text, "this machine was not measured yet: `axisplan profile gpu` measures it and keeps the result", "cpu:1x4"
        )
    cluster = _build(ClusterSpec, _completed(_read(path, field), str(path)), str(path))
    if gpus and not (gpus.isdigit() and 1 <= int(gpus) <= cluster.gpus):
        raise InputError(field, text, f"{cluster.gpus} at once were measured", f"this:{cluster.gpus}")
    return cluster.with_gpus(int(gpus)) if gpus else cluster


SHAPE = re.compile(r"^(\d+)(?:x(\d+))?$")


def load_cluster(text: str) -> ClusterSpec:
    """``h100-sxm:64x8`` (64 nodes of 8), ``h100-sxm:512`` (GPUs), ``h100-sxm`` (one node), ``this`` (what ``axisplan profile gpu``
    measured here last), or a YAML file's path.

    A GPU's name or alias stands for its usual cluster. InputError names the nearest name, or the field of the file that is wrong.
    """
    text = str(text)
    if _is_path(text) or os.path.isfile(text):
        return _build(ClusterSpec, _completed(_read(Path(text), "cluster"), text), text)
    name, _, shape = text.partition(":")
    if name.strip().lower() in THIS:
        return _measured_here("cluster", text, shape)
    kind = _resolve("clusters", "cluster", name)
    data = dict(_raw("clusters", kind))
    match = SHAPE.match(shape) if shape else None
    if shape and match is None:
        raise InputError("cluster", text, "the shape after the colon is NODESxGPUS_PER_NODE", f"{kind}:1x{data['gpus_per_node']}")
    per_node = data["gpus_per_node"]
    nodes = 1
    if match is not None and match[2]:
        nodes, per_node = int(match[1]), int(match[2])
    elif match is not None:
        total = int(match[1])
        per_node = min(per_node, max(total, 1))
        if total % per_node:
            raise InputError("cluster", text, f"whole nodes of {per_node}", f"{kind}:{max(total // per_node, 1)}x{per_node}")
        nodes = total // per_node
    if not 1 <= nodes * per_node <= 1 << 20:
        most = (1 << 20) // data["gpus_per_node"] if nodes * per_node else 1
        raise InputError("cluster", text, "between 1 and 1,048,576 GPUs", f"{kind}:{most}x{data['gpus_per_node']}")
    return _shaped(kind, data, nodes, per_node)


def _shaped(kind: str, data: dict[str, Any], nodes: int, per_node: int) -> ClusterSpec:
    """An instance of a built-in kind. Domains larger than a node the user names shrink to it, unless the node is a host of a larger
    domain (``gb200-nvl72:18x4``: eighteen trays of one rack)."""
    gpus = nodes * per_node
    host = data.get("gpus_per_host", data["gpus_per_node"])
    tray = host < data["gpus_per_node"] and per_node <= host
    levels: list[dict[str, Any]] = []
    for level in data["levels"][:-1]:
        size = level["size"] if tray else min(level["size"], per_node) if level["size"] <= data["gpus_per_node"] else level["size"]
        if size < gpus and (not levels or size > levels[-1]["size"]) and size > 1:
            levels.append({**level, "size": size})
        elif size >= gpus:
            levels.append({**level, "size": gpus})
            break
    else:
        levels.append({**data["levels"][-1], "size": gpus})
    if len(levels) > 1 and levels[-1]["size"] <= levels[-2]["size"]:
        levels.pop()
    shaped = {
        **data, "name": f"{kind}:{nodes}x{per_node}", "kind": kind, "gpus": gpus, "gpus_per_node": per_node,
        "gpus_per_host": min(host, per_node), "levels": levels,
    }  # fmt: skip
    return _build(ClusterSpec, _completed(shaped, kind), kind)


def shaped_levels(kind: str, nodes: int, per_node: int) -> tuple[Level, ...]:
    """The levels of ``kind:NODESxPER_NODE``."""
    return _shaped(kind, dict(_raw("clusters", kind)), nodes, per_node).levels


def to_yaml(thing: GpuProfile | Link | ClusterSpec) -> str:
    """The whole object as YAML that ``load_cluster`` or ``load_gpu`` reads back to an equal one. Its name, which it must have,
    stands last: a file that was cut short is refused."""
    data = TypeAdapter(type(thing)).dump_python(thing, mode="json", exclude_none=True)
    data["name"] = data.pop("name")
    return dump_yaml(data)


class _Dumper(yaml.SafeDumper):
    """Plain block style, values in full (no aliases), floats short where that loses nothing."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _short(dumper: _Dumper, value: float) -> yaml.ScalarNode:
    text = next(form for form in (f"{value:.6g}", f"{value:.12g}", repr(value)) if float(form) == value)
    mantissa, mark, power = text.partition("e")
    if "." not in mantissa and "n" not in mantissa:
        mantissa += ".0"
    return dumper.represent_scalar("tag:yaml.org,2002:float", mantissa + mark + power)


_Dumper.add_representer(float, _short)


def dump_yaml(data: dict[str, Any]) -> str:
    """YAML text of plain data as this package writes it."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=132, allow_unicode=True)


def describe(thing: ClusterSpec | GpuProfile | Link) -> list[Row]:
    """Every number of a cluster, GPU or link: (field, value, unit, origin, source)."""
    rows: list[Row] = []
    if isinstance(thing, ClusterSpec):
        for pool_gpu in [pool.gpu for pool in thing.pools] or [thing.gpu]:
            rows += [(f"{pool_gpu.name}.{row[0]}", *row[1:]) for row in describe(pool_gpu)]
        for level in thing.levels:
            rows += [(f"{level.name}.{row[0]}", *row[1:]) for row in [*_level_rows(level), *describe(level.link)]]
        rows += [_row("host_memory_bytes", thing.host_memory_bytes), _row("price_per_gpu_hour", thing.price_per_gpu_hour)]
        return rows
    if isinstance(thing, GpuProfile):
        facts = {name: getattr(thing.facts, name) for name in TypeAdapter(type(thing.facts)).json_schema()["properties"]}
        rows += [_row(name, constant) for name, constant in facts.items() if constant is not None]
        rows += [_row(f"peak.{dtype}", constant) for dtype, constant in thing.peaks.items()]
        for dtype, curve in thing.curves.items():
            rows += _curve_rows(f"matmul.{dtype}", curve)
        for dtype, grouped in thing.grouped_curves.items():
            rows += _curve_rows(f"grouped.{dtype}", grouped)
        rows += _curve_rows("attention", thing.attention)
        return rows + (_curve_rows("traffic", thing.traffic) if thing.traffic else [])
    rows.append(_row("peak_bytes_per_second", thing.peak_bytes_per_second))
    for name in ("hop_seconds", "tree_efficiency", "peer_seconds", "rails"):
        if getattr(thing, name) is not None:
            rows.append(_row(name, getattr(thing, name)))
    for kind, curves in thing.curves.items():
        for row in curves:
            rows += _curve_rows(f"{kind}[{row.ranks}]", row)
    return rows


def _level_rows(level: Level) -> list[Row]:
    """What a cluster says of a domain: its shape, and what slows its link beyond the curves."""
    rows: list[Row] = [("size", level.size, "GPUs of one domain", "datasheet", "the shape of the cluster, as named or in its file")]
    if level.link.network:
        rows.append(("oversubscription", level.oversubscription, "x below / through", "estimate", "the cluster's file; 1: none"))
        rate = 1.0 if level.rail_optimised else level.off_rail
        rows.append(("off_rail", rate, "of the achieved rate", "estimate", "the cluster's file; 1: rail-optimised"))
    return rows


def _row(field: str, constant: Constant) -> Row:
    return (field, constant.value, constant.unit, constant.origin, constant.source)


UNITS = {
    "efficiency": "of peak", "t0_seconds": "s", "alpha_seconds": "s", "m0": "rows", "n0": "columns", "k0": "elements",
    "s0": "tokens", "f0_flops": "FLOP", "g": "exponent", "memory_bytes_per_second": "B/s",
    "bytes_per_second": "B/s one way per GPU", "latent_speed": "x equal sizes",
    "sqrt_seconds": "s/sqrt(B)", "protocol_switch_bytes": "B on a rank's wire",
    "tokens0": "tokens", "w0": "SMs/tile", "padding": "share", "weight_gradient": "x forward",
    "fp8_speed": "x bf16", "full_share": "of s0", "quantise_multiplier": "x 3mk bytes", "heldout_error": "fraction",
    "head_dim_speed": "x head 128", "backward_ratio": "x forward", "rates": "bytes/s at bytes a kernel",
}  # fmt: skip


def _curve_rows(prefix: str, curve: Any) -> list[Row]:
    rows: list[Row] = []
    for name, unit in UNITS.items():
        value = getattr(curve, name, None)
        for key, number in value.items() if isinstance(value, dict) else [("", value)]:
            if number is not None:
                rows.append((f"{prefix}.{name}{f'[{key}]' if key != '' else ''}", float(number), unit, curve.origin, curve.source))
    return rows
