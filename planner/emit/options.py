"""Options of a target and a launcher (``--set KEY=VALUE``): which there are, and what their values may look like.

Each module reads those that it knows (``read_options``); a name that neither knows is refused once, for both (``refuse_unknown``).
Values of Slurm end up in ``#SBATCH`` lines and names in Kubernetes objects, where nothing can be quoted safely: each option has a
pattern, and what does not match is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiles.errors import InputError

if TYPE_CHECKING:
    from planner.emit.core import Program


@dataclass(frozen=True)
class Option:
    """``pattern`` must match the whole value; ``what`` says in words what is allowed, ``example`` shows one."""

    pattern: str
    what: str
    example: str
    default: str = ""


WORD = Option(r"[A-Za-z0-9][A-Za-z0-9_.,:+/@=-]*", "is one word of letters, digits and _.,:+/@=-", "gpu")
IMAGE = Option(r"[A-Za-z0-9][A-Za-z0-9_.:/@#+-]*", "is a container image", "nvcr.io/nvidia/pytorch:25.09-py3")
TIME = Option(r"(\d+-)?\d+(:\d\d){0,2}", "is Slurm's [days-]hours:minutes:seconds", "24:00:00")
PATH = Option(r"/[^\x00-\x1f\x7f:,]*", "is an absolute path without commas and colons", "/mnt/data")
NAME = Option(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "is a Kubernetes name: up to 63 small letters, digits and -", "training")


def needed(program: Program) -> dict[str, Option]:
    """The variables that ``program`` wants set, as options of a launcher that starts it far from the user's shell."""
    return {need.name: Option(r"[^\x00]*", f"names {need.what}", need.example) for need in program.needs}


def refuse_unknown(given: Mapping[str, str], known: Mapping[str, Mapping[str, Option]]) -> None:
    """Raise InputError for a name that is nobody's: who takes what, and the nearest name of all."""
    every = [name for options in known.values() for name in options]
    for key in given:
        if key not in every:
            close = difflib.get_close_matches(key, every, 1) or [name for name in every if plain_name(name) == plain_name(key)]
            takes = "; ".join(f"{who} takes {', '.join(options) or 'no options'}" for who, options in known.items())
            raise InputError("--set", key, takes, close[0] if close else None)


def read_options(given: Mapping[str, str], known: Mapping[str, Option]) -> dict[str, str]:
    """The known options, those that were not given at their defaults; InputError for a value that one cannot take."""
    for key, option in known.items():
        if key in given and not re.fullmatch(option.pattern, given[key]):
            raise InputError(f"--set {key}", given[key], option.what, option.example)
    return {key: given.get(key, option.default) for key, option in known.items()}


def plain_name(text: str, *, longest: int = 40, fallback: str = "axisplan") -> str:
    """``text`` as a name that every launcher takes: small letters, digits and single dashes, a letter first."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name or not name[0].isalpha():
        name = f"{fallback}-{name}".strip("-")
    return name[:longest].strip("-")
