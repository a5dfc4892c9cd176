"""YAML as people write it: keys in order, text of several lines as a block, no anchors."""

from __future__ import annotations

from typing import Any

import yaml

from planner.emit.readme import comment


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def manifest(head: str, document: dict[str, Any]) -> str:
    """``document`` as YAML under the comment ``head``; every value is quoted as far as YAML needs it."""
    return f"# {comment(head)}\n" + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
