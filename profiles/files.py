"""Files written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from profiles.errors import InputError

LARGEST_JSON_BYTES = 64 << 20


def write_text(path: Path, text: str) -> None:
    """Write one file beside its place, then rename it there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
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
