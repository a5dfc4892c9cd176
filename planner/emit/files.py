"""Writing a folder of files whole or not at all, from templates, with every value quoted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from string import Template

from profiles.errors import InputError
from profiles.files import naming


def fill(template: str, **values: str) -> str:
    """The named template file with its ``$name`` fields filled; a field without a value is an error in the emitter (KeyError)."""
    text = (Path(__file__).parent / "templates" / template).read_text(encoding="utf-8")
    return Template(text).substitute(values)


def write_folder(out: Path, contents: dict[str, str], executable: tuple[str, ...] = ()) -> list[Path]:
    """Write ``contents`` (file name -> text) as the folder ``out``: made beside it, then renamed.

    An existing folder is replaced only when it holds an earlier emission (it has a plan.json and nothing that is not ours).
    Raises InputError otherwise; an OSError (no space, no permission) leaves nothing behind.
    """
    import tempfile

    out = Path(out)
    if out.exists():
        if not out.is_dir():
            raise InputError("--out", out, "is a file; name a folder", f"{out}-plan")
        strangers = sorted(p.name for p in out.iterdir() if p.name not in contents)
        if strangers:
            raise InputError("--out", out, f"holds other files ({strangers[0]}); name a new or empty folder", f"{out}-plan")
    out.parent.mkdir(parents=True, exist_ok=True)
    with naming(out):
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            for name, text in contents.items():
                path = staging / name
                path.write_text(text, encoding="utf-8")
                if name in executable:
                    path.chmod(0o755)
            staging.chmod(0o755)
            if out.exists():
                shutil.rmtree(out)
            os.replace(staging, out)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    return [out / name for name in contents]
