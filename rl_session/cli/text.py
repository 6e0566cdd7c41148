"""How values look on a terminal: units, aligned tables, colours where they are wanted.

Knows nothing of logs. Text that came from a log is made printable first: a name may hold control characters, and a
terminal obeys them.
"""

from __future__ import annotations

import os
import sys
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_STYLES = {
    "dim": "dim",
    "bold": "bold",
    "head": "bold",
    "bad": "bold red",
    "warn": "yellow",
    "good": "green",
    "where": "blue",
    "offloaded": "dim",
    "logprob": "cyan",
    "training": "magenta",
    "refit": "yellow",
    "generation": "green",
    "resident": "blue",
}
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def bytes_text(nbytes: float) -> str:
    """Return a size with three digits and its decimal unit: ``3.44 MB``."""
    for size, unit in _UNITS:
        if abs(nbytes) >= size * 0.9995:
            return f"{_three(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def seconds_text(seconds: float) -> str:
    """Return a duration with three digits and its unit: ``16.3 ms``, ``2 h 04 min``."""
    if seconds >= 3600:
        hours, rest = divmod(round(seconds / 60), 60)
        return f"{hours} h {rest:02d} min"
    if seconds >= 100:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size * 0.9995:
            return f"{_three(seconds / size)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e9:.0f} ns"


def share_text(share: float) -> str:
    """Return a share in percent."""
    return f"{share * 100:.1f}%" if share < 0.1 else f"{share * 100:.0f}%"


def count_text(count: int, one: str, many: str = "") -> str:
    """Return ``1 line`` or ``1,234 lines``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def rate_text(gb_per_second: float | None) -> str:
    """Return a throughput, empty where there is none."""
    return "" if gb_per_second is None else f"{_three(gb_per_second)} GB/s"


def printable(text: str) -> str:
    """Return the text with everything a terminal would obey written out as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _three(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:,.0f}"


class Printer:
    """Writes lines, in colour where the stream is a terminal that has any and ``NO_COLOR`` is not set."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._codes: dict[str, tuple[str, str]] = {}
        self._has_colour = self._ask_rich()

    def _ask_rich(self) -> bool:
        # Into a file or a pipe there is nothing to ask, unless colours are forced.
        if not self._stream.isatty() and not os.environ.get("FORCE_COLOR"):
            return False
        # rich knows NO_COLOR, FORCE_COLOR, TERM and what Windows can do.
        from rich.console import Console

        console = Console(file=self._stream)
        return console.color_system is not None and not console.no_color

    def style(self, text: str, name: str) -> str:
        """Return the text in a style; an unknown one is no style."""
        if not self._has_colour or not text or name not in _STYLES:
            return text
        codes = self._codes.get(name)
        if codes is None:
            from rich.style import Style

            before, _, after = Style.parse(_STYLES[name]).render("\0").partition("\0")
            codes = self._codes[name] = before, after
        return f"{codes[0]}{text}{codes[1]}"

    def line(self, text: str = "") -> None:
        """Write one line."""
        self._stream.write(text + "\n")

    def head(self, text: str) -> None:
        """Write a heading, set off by an empty line."""
        self.line()
        self.line(self.style(text, "head"))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, styles: Sequence[str] = ()) -> None:
        """Write rows in aligned columns.

        Args:
            columns: Headings; one that begins with ``>`` aligns its column to the right.
            rows: Cells.
            styles: The style of each row, where there is one.
        """
        names = [column.removeprefix(">") for column in columns]
        widths = [max(len(cell) for cell in cells) for cells in zip(names, *rows, strict=True)]
        for index, row in enumerate((names, *rows)):
            cells = [
                cell.rjust(width) if column.startswith(">") else cell.ljust(width)
                for cell, width, column in zip(row, widths, columns, strict=True)
            ]
            style = "dim" if index == 0 else styles[index - 1] if styles else ""
            self.line("  " + self.style("  ".join(cells).rstrip(), style))

    def flush(self) -> None:
        """Hand on what is buffered."""
        self._stream.flush()
