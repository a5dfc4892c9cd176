"""What a user calls a model -> ModelSpec: a built-in name, a Hugging Face config.json, a folder holding one, or a ModelSpec YAML.

Raw JSON is read, never through transformers: files on the hub keep spellings that transformers rewrites, and planning must not
import it. Reading is bounded (``profiles.files``), and no field is above ``fields.MAX_COUNT``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from profiles.errors import InputError
from profiles.families.registry import read_config
from profiles.files import LARGEST_YAML_BYTES, parse_yaml, read_text
from profiles.model import ModelSpec

DATA = Path(__file__).parent / "data"
NOISE = re.compile(r"meta|hf|instruct|chat|base|it|pt|preview|thinking|v0\.\d")
"""Words of a checkpoint's name that do not change its shapes."""


@lru_cache(maxsize=1)
def model_names() -> list[str]:
    """The built-in models, by the name users write, sorted."""
    return sorted(entry.name[: -len(".json")] for entry in (DATA / "models").iterdir() if entry.name.endswith(".json"))


@lru_cache(maxsize=1)
def _aliases() -> dict[str, str]:
    aliases: dict[str, str] = json.loads((DATA / "model_aliases.json").read_text())
    return {_squeeze(alias): name for alias, name in aliases.items()} | {_squeeze(name): name for name in model_names()}


def _squeeze(text: str) -> str:
    """A name without its organisation, case, separators and words that do not change shapes."""
    words = re.split(r"[-_\s]+", text.strip().rsplit("/", 1)[-1].lower())
    return "".join(word for word in words if not NOISE.fullmatch(word))


def resolve(text: str) -> str:
    """The built-in name meant by ``text`` (any case, organisation prefix, ``_`` or ``-``, ``-Instruct``, ``-hf``).

    Raises InputError with the nearest names.
    """
    known = _aliases()
    squeezed = _squeeze(text)
    if squeezed in known:
        return known[squeezed]
    close = get_close_matches(squeezed, list(known), n=6, cutoff=0.5)
    nearest = list(dict.fromkeys(known[key] for key in close))[:3]
    rule = "is no built-in model, config.json, folder with one, or ModelSpec YAML; `axisplan models` lists the built-in ones"
    raise InputError("model", text, rule, ", ".join(nearest) or None)


def load_model(text: str | Path) -> ModelSpec:
    """The model that ``text`` names: a file, a folder, or a built-in name. Raises InputError with one clear line."""
    given = str(text)
    if not given.strip() or "\0" in given:
        rule = "is empty: give a built-in name, a config.json, a folder or a ModelSpec YAML"
        raise InputError("model", given.replace("\0", ""), rule)
    path = Path(given).expanduser()
    try:
        if path.is_dir():
            return _from_folder(path)
        if path.exists():
            return _from_file(path)
    except OSError as error:
        raise InputError("model", given[:200], f"cannot be read ({error.strerror or error})") from error
    if isinstance(text, Path) or path.suffix in (".json", ".yaml", ".yml") or given.startswith(("/", "./", "../", "~")):
        raise InputError("model", given, "no such file or folder")
    return built_in(resolve(given))


@lru_cache(maxsize=256)
def built_in(name: str) -> ModelSpec:
    """A built-in model by its exact name."""
    raw = json.loads((DATA / "models" / f"{name}.json").read_text())
    return read_config(raw, name)


def _from_folder(path: Path) -> ModelSpec:
    config = path / "config.json"
    if not config.is_file():
        # A built-in name may also be the name of some folder here; the built-in wins when the folder holds no config.
        if _squeeze(str(path)) in _aliases() and len(path.parts) == 1:
            return built_in(resolve(str(path)))
        raise InputError("model", str(path), "is a folder without a config.json")
    return _from_file(config)


def _from_file(path: Path) -> ModelSpec:
    content = read_text(path, "model", LARGEST_YAML_BYTES)
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    if path.suffix in (".yaml", ".yml"):
        return from_yaml(content, str(path), name)
    raw = parse_json(content, str(path))
    return from_spec(raw, str(path), name) if "kinds" in raw and "pattern" in raw else from_config(raw, str(path), name or "model")


def from_config(raw: Mapping[str, Any], source: str, name: str) -> ModelSpec:
    """The ModelSpec of the config.json at ``source``. Raises InputError naming the field and the file."""
    try:
        return read_config(raw, name)
    except InputError as error:
        raise InputError(error.field, error.value, f"{error.rule} (in {source})", error.nearest) from None


def parse_json(content: str, source: str) -> dict[str, Any]:
    """A JSON object. Raises InputError with line and column when the text is truncated or is not JSON."""
    try:
        raw = json.loads(content)
    except json.JSONDecodeError as error:
        cut = " (truncated?)" if error.pos >= len(content.rstrip()) - 1 else ""
        rule = f"is not valid JSON: {error.msg}, line {error.lineno} column {error.colno}{cut}"
        raise InputError("model", source, rule) from None
    except (ValueError, RecursionError):
        raise InputError("model", source, "is not usable JSON: nested too deep, or a number too long") from None
    if not isinstance(raw, dict):
        raise InputError("model", source, f"holds a JSON {type(raw).__name__}, not an object: not a config.json")
    return raw


def from_yaml(content: str, source: str, name: str) -> ModelSpec:
    """A ModelSpec written by hand."""
    raw = parse_yaml(content, "model", source)
    if not isinstance(raw, dict):
        raise InputError("model", source, "is not a ModelSpec: expected keys such as name, hidden, vocab, kinds, pattern")
    if "model_type" in raw and "kinds" not in raw:
        return from_config({str(key): value for key, value in raw.items()}, source, name)
    return from_spec(raw, source, name)


def from_spec(raw: Mapping[Any, Any], source: str, name: str) -> ModelSpec:
    """A ModelSpec from its own fields; ``name`` and ``family`` may be left out. Raises InputError naming the first wrong field."""
    try:
        return ModelSpec.model_validate({"name": name, "family": "custom", **raw})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "model"
        value = first.get("input")
        shown = value if isinstance(value, (int, float, str, bool)) or value is None else type(value).__name__
        message = first["msg"].removeprefix("Value error, ")
        more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise InputError(place, shown, f"{message}{more} in {source}") from None
