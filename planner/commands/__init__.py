"""The commands, a module a subject. Each reads its input, calls one function of the packages, and shows the answer.

Importing this package registers them with ``planner.command_line.cli`` in the order in which help lists them: the order in which a
newcomer needs them. Heavy modules are imported inside the commands, so that planning starts at once and works where torch is absent.
"""

from importlib import import_module

from planner.command_line import cli

for _subject in ("known", "one_layout", "planning", "looking", "launching", "measuring", "machine"):
    import_module(f"planner.commands.{_subject}")

__all__ = ["cli"]
