"""The errors a user can cause, and the exit code of each (DESIGN.md, "When nothing fits")."""

from __future__ import annotations


class AxisplanError(Exception):
    """Something outside the input failed: one clear line, exit code 1."""

    exit_code = 1


class InputError(AxisplanError):
    """A value that cannot be used: names the field, the value, the rule and the nearest legal value. Exit code 2.

    ``nearest`` is None where no single change of this field would repair it.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, rule: str, nearest: object = None) -> None:
        self.field, self.value, self.rule, self.nearest = field, value, rule, nearest
        shown = value if isinstance(value, (int, float, bool)) or value is None else repr(clipped(str(value), 200))
        line = f"{field}: {shown}: {rule}"
        if nearest is not None:
            line += f"; nearest: {nearest}"
        super().__init__(clipped(" ".join(line.split()), 3000))


class DoesNotFit(AxisplanError):
    """No legal layout fits in memory. Exit code 3; never carries a time."""

    exit_code = 3


def clipped(text: str, most: int) -> str:
    """``text``, its middle left out where it is longer than ``most``."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[len(text) - most // 2 :]}"


def one_line(error: BaseException) -> str:
    """The first thing worth saying of any exception, on one line."""
    text = " ".join(str(error).split())
    return clipped(text, 3000) or type(error).__name__
