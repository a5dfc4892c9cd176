"""The `axisplan` command: the guard against foreign packages of our names, and the exit codes. The commands: ``planner.commands``.

Exit codes: 0 done, 1 something failed, 2 the input is wrong, 3 nothing fits. Errors are one line on stderr.
"""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType


def not_ours() -> str | None:
    """The line to say when `planner`, `cost_models` or `profiles` would be imported from elsewhere than beside this file.

    Those are common words: a folder of that name on PYTHONPATH must not silently take the place of ours.
    """
    home = Path(__file__).resolve().parent
    for name in ("profiles", "cost_models", "planner"):
        spec = importlib.util.find_spec(name)
        where = Path(spec.origin).resolve().parent.parent if spec and spec.origin else None
        if where != home:
            return f"the package '{name}' would come from {where or 'nowhere'}, not from axisplan; take that folder off PYTHONPATH"
    return None


if problem := not_ours():
    sys.exit(f"axisplan: {problem}")

import click  # noqa: E402 - the guard comes before anything of ours is imported

from planner.commands import cli  # noqa: E402
from profiles.errors import AxisplanError, one_line  # noqa: E402


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with DESIGN.md's codes; never a traceback (AXISPLAN_TRACEBACK=1 shows one)."""
    code = 0
    ended = Ended()
    ended.listen(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # ASCII has no bars, and UTF-8 no half of a file's name
    try:
        code = cli.main(args=argv, prog_name="axisplan", standalone_mode=False) or 0
        sys.stdout.flush()
    except AxisplanError as error:
        code = fail(error, error.exit_code)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.exceptions.NoArgsIsHelpError as helped:
        click.echo(helped.format_message())
        code = 0
    except click.UsageError as error:
        where = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        code = fail(" ".join(f"{error.format_message()}{where}".split()), 2)
    except click.FileError as error:
        code = fail(error.format_message(), 2)
    except (click.Abort, KeyboardInterrupt):
        code = fail(
            f"{'ended by SIGTERM' if ended.asked else 'interrupted'}; nothing half-written was left", 143 if ended.asked else 130
        )
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        code = fail(f"{error.filename or 'a file'}: {error.strerror or one_line(error)}", 1)
    except ModuleNotFoundError as error:
        package = (error.name or "a module").partition(".")[0]
        code = fail(f"this command needs the Python package {package}, which is not installed here: pip install {package}", 1)
    except MemoryError:
        code = fail("this machine ran out of memory", 1)
    except RecursionError:
        code = fail("the input is nested too deeply", 2)
    except Exception as error:
        if os.environ.get("AXISPLAN_TRACEBACK"):
            raise
        code = fail(f"internal error: {type(error).__name__}: {one_line(error)} (AXISPLAN_TRACEBACK=1 shows where)", 1)
    finally:
        ended.rest()
    sys.exit(code)


class Ended:
    """SIGTERM, as a batch system sends it, ends a command as Ctrl-C does: in one line, its processes with it, nothing half-written."""

    asked = False
    process = 0

    def listen(self, words: list[str]) -> None:
        """Workers keep the plain signal (torchrun reads how they died, and training has its own way to leave)."""
        plain = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if plain and words[:1] != ["worker"] and threading.current_thread() is threading.main_thread():
            self.process = os.getpid()
            signal.signal(signal.SIGTERM, self._ask)

    def rest(self) -> None:
        """As it was, for whoever called ``main`` and goes on."""
        if self.process == os.getpid():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _ask(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self.process:  # a process forked from this one ends as it would have
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.asked = True
        raise KeyboardInterrupt


def fail(error: BaseException | str, code: int) -> int:
    if os.environ.get("AXISPLAN_TRACEBACK") and isinstance(error, BaseException):
        raise error
    click.echo(f"axisplan: {error if isinstance(error, str) else one_line(error)}", err=True)
    return code
