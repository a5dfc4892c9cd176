"""Files written whole or not at all, and read within bounds: whatever a file holds, it is its document or one InputError."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from profiles.errors import InputError, one_line

LARGEST_JSON_BYTES, LARGEST_YAML_BYTES = 64 << 20, 4 << 20
DEEPEST_YAML = 64
"""Levels of a YAML document: what is parsed in C would overflow its stack on a hundred thousand of them."""
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Refused(Exception):
    """YAML that is whole and still not read here; the message is the rule it breaks."""


class _NoDuplicates(_Loader):  # type: ignore[misc]
    """The safe loader, which refuses a mapping with one key twice (YAML 1.2, section 3.2.1.3: keys are unique)."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        lines: dict[Any, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise _Refused(f"has {key.value} twice, in lines {lines[key.value]} and {line}: keep one")
                lines[key.value] = line
        return super().construct_mapping(node, deep=deep)


def _bounded(text: str) -> None:
    """Raises _Refused for aliases (a small file could grow into a large one, or hold itself) and for nesting without end."""
    depth = 0
    for event in yaml.parse(text, Loader=_NoDuplicates):
        if isinstance(event, yaml.AliasEvent):
            raise _Refused("uses YAML aliases (*name), which are not read here: write the values out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST_YAML:
            raise _Refused(f"is nested deeper than {DEEPEST_YAML} levels")


def read_text(path: Path | str, field: str, largest: int) -> str:
    """The text of a regular file of at most ``largest`` bytes. Raises InputError naming ``field``."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise InputError(field, path, "is not a regular file")
        with path.open("rb") as file:
            data = file.read(largest + 1)
    except OSError as error:
        raise InputError(field, path, f"cannot be read: {error.strerror}") from None
    if len(data) > largest:
        raise InputError(field, path, f"is larger than {largest >> 20} MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(field, path, "is not text in UTF-8") from None


def parse_yaml(text: str, field: str, source: Path | str) -> Any:
    """The document of a YAML text, by the safe loader. Raises InputError naming ``field`` and ``source`` where it is not YAML, uses
    aliases, gives a key twice, or is nested without end."""
    try:
        _bounded(text)
        return yaml.load(text, Loader=_NoDuplicates)
    except _Refused as refused:
        raise InputError(field, source, str(refused)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1} column {mark.column + 1}" if mark else ""
        raise InputError(field, source, f"is not valid YAML: {getattr(error, 'problem', None) or one_line(error)}{where}") from None
    except (RecursionError, ValueError) as error:
        raise InputError(field, source, f"is not usable YAML: {one_line(error)}") from None


def read_yaml(path: Path | str, field: str) -> Any:
    """The document of a YAML file of at most ``LARGEST_YAML_BYTES``. Raises InputError as ``read_text`` and ``parse_yaml``."""
    return parse_yaml(read_text(path, field, LARGEST_YAML_BYTES), field, path)


def read_shipped(path: Path) -> Any:
    """The document of a YAML file that ships with these packages, which needs none of ``read_yaml``'s guards."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)


def write_text(path: Path, text: str) -> None:
    """Write one file beside its place, then rename it there."""
    import tempfile

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name ``path`` in an OSError that names no file, as the system's does for a write to a full disk, or one of ours beside it
    (``.NAME.``...), which nobody asked for."""
    try:
        yield
    except OSError as error:
        ours = any(part.startswith(f".{path.name}.") for part in Path(str(error.filename or "")).parts[-2:])
        if (error.filename is None or ours) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[None]:
    """Make a folder and those above it; where what follows fails, take away the ones made here that are still empty."""
    made = []
    for folder in (path, *path.parents):
        if folder.exists():
            break
        made.append(folder)
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in made:
            try:
                folder.rmdir()
            except OSError:  # it holds something
                break
        raise


def read_json(path: Path | str, field: str) -> Any:
    """The document of a JSON file. Raises InputError naming ``field`` where it cannot be read or is not JSON."""
    text = read_text(path, field, LARGEST_JSON_BYTES)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(field, path, f"is not JSON: {error}") from None
