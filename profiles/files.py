"""Files written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from profiles.errors import InputError

LARGEST_JSON_BYTES = 64 << 20


class Refused(Exception):
    """YAML that is whole and still not read here; the message is the rule it breaks."""


class _NoDuplicates(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The safe loader, which refuses a mapping with one key twice (YAML 1.2, section 3.2.1.3: keys are unique)."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        lines: dict[Any, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise Refused(f"has {key.value} twice, in lines {lines[key.value]} and {line}: keep one")
                lines[key.value] = line
        return super().construct_mapping(node, deep=deep)


def load_yaml(text: str) -> Any:
    """The document of a YAML text, by the safe loader. Raises ``Refused`` for aliases (a small file could grow into a large one) and
    for a key that stands twice in one mapping; yaml.YAMLError where it is not YAML."""
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=_NoDuplicates)):
        raise Refused("uses YAML aliases (*name), which are not read here: write the values out")
    return yaml.load(text, Loader=_NoDuplicates)


def write_text(path: Path, text: str) -> None:
    """Write one file beside its place, then rename it there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with naming(path), os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name ``path`` in an OSError that names no file, as the system's does for a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
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
    path = Path(path)
    try:
        if path.stat().st_size > LARGEST_JSON_BYTES:
            raise InputError(field, path, f"is larger than {LARGEST_JSON_BYTES >> 20} MiB")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(field, path, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(field, path, f"is not JSON: {error}") from None
