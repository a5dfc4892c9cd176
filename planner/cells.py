"""Cells of tables that know where their text may break."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement
    from rich.text import Text


class AtCommas:
    """A LAYOUT text in a cell too narrow for it: its lines end at commas outside brackets, not inside a word."""

    def __init__(self, text: str) -> None:
        self.text, self.parts = text, re.findall(r"(?:[^,(]|\([^)]*\)?)+,?", text)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(max(map(len, self.parts)), len(self.text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        lines = [""]
        for part in self.parts:
            if lines[-1] and len(lines[-1]) + len(part) > options.max_width:
                lines.append("")
            lines[-1] += part
        yield Text("\n".join(lines), overflow="fold")
