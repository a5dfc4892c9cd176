"""Megatron-Bridge's overrides -> Layout: each is turned back into the flag it stands for, and read as Megatron-LM's."""

from __future__ import annotations

import re
from dataclasses import replace

from planner.emit.imported import Imported
from planner.emit.megatron.bridge import FIELDS, LISTS, PRECISIONS, SWITCHES, TARGET, unquoted
from planner.emit.megatron.flags import Flags
from planner.emit.megatron.layout import PRECISIONS as FLAGS_OF_PRECISION
from planner.emit.megatron.reading import read_flags
from planner.emit.megatron.shell import flags as flags_of
from planner.emit.megatron.shell import words
from profiles.errors import InputError

OVERRIDE = re.compile(r"(\+{0,2})(\w+(?:\.\w+)+|mixed_precision)=(.*)", re.DOTALL)
FLAG_OF = {field: flag for flag, fields in FIELDS.items() for field in fields[:1]}
SWITCH_OF = {fields[0]: flag for flag, fields in SWITCHES.items() if fields}


def read(text: str, where: str, world: int | None = None) -> Imported:
    """A script that starts the generic recipe, or its overrides alone. Raises InputError where there is none, or as Megatron's reading."""
    found = [match for word in words(text) if (match := OVERRIDE.fullmatch(word))]
    if not any(match[2].startswith("model.") for match in found):
        raise InputError("FILE", where, "has no override of Megatron-Bridge (model.tensor_model_parallel_size=4, ...)")
    flags: Flags = {
        name: values for name, values in flags_of(text).items() if name in ("--nnodes", "--nproc-per-node", "--nproc_per_node")
    }
    for match in found:
        flags |= flag_of(match[2], match[3])
    made = read_flags(flags, where, world)
    added = [
        f"{match[2]} is added with +, which is taken without a word where there is no such field" for match in found if match[1]
    ]
    return replace(made, execution=TARGET, problems=(*made.problems, *added))


def flag_of(name: str, value: str) -> Flags:
    """The flag that stands for an override; {} for a switch that is off."""
    if name == "mixed_precision":
        kind = next((ours for ours, theirs in PRECISIONS.items() if theirs == value), "")
        if not kind:
            raise InputError(name, value, f"is one of {', '.join(PRECISIONS.values())}", "bf16_mixed")
        return dict(FLAGS_OF_PRECISION[kind])
    if flag := SWITCH_OF.get(f"{name}={value}"):
        return {flag: ()}
    flag = FLAG_OF.get(name, "--" + name.partition(".")[2].replace("_", "-"))
    if value in ("true", "false"):
        return {flag: ()} if value == "true" else {}
    plain = unquoted(value)
    return {flag: tuple(plain.strip("[]").split(",")) if flag in LISTS else (plain,)}
