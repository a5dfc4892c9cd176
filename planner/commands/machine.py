"""This machine and this shell: doctor, completion."""

from __future__ import annotations

import click

from planner.command_line import as_json, cli, command, show_json


@command("doctor", "axisplan doctor")
@click.option("--seconds", type=click.FloatRange(1, 600), default=60.0, show_default=True, help="The longest a backend is tried.")
@as_json
def doctor(seconds: float, as_json: bool) -> None:
    """What this machine has, what is missing, and whether the backends work; exit code 1 when something is broken."""
    from planner import screen
    from planner.doctor import examine

    found = examine(seconds)
    if as_json:
        show_json(found.to_json())
    else:
        screen.show_doctor(screen.console(), found.checks)
    if not found.healthy:
        raise click.exceptions.Exit(1)


@command("completion", 'eval "$(axisplan completion bash)"')
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """The shell's completion script; put its output into your shell's start-up file."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "axisplan", "_AXISPLAN_COMPLETE").source())
