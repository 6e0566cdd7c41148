"""A finding, and the comments that silence it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from rl_session_migrate.lint.codes import CODES, Severity

__all__ = ["Finding", "silenced"]

_NOQA = re.compile(r"#\s*noqa(?P<colon>\s*:\s*(?P<codes>[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*))?", re.IGNORECASE)


@attrs.frozen(order=True)
class Finding:
    """One mistake at one place.

    Attributes:
        path: The file.
        line: From 1.
        column: From 1.
        code: ``RLM001``.
        what: What is wrong here, in one sentence.
        why: What it leads to, in one line.
        write: What to write instead.
    """

    path: str
    line: int
    column: int
    code: str
    what: str
    why: str = attrs.field(order=False)
    write: str = attrs.field(order=False)

    @property
    def severity(self) -> Severity:
        """How bad it is."""
        return CODES[self.code].severity

    def __str__(self) -> str:
        head = f"{self.path}:{self.line}:{self.column}: {self.code} {self.what}"
        return f"{head}\n  why: {self.why}\n  write: {self.write}"

    def as_json(self) -> Mapping[str, Any]:
        """Plain values."""
        return {
            "path": self.path,
            "line": self.line,
            "column": self.column,
            "code": self.code,
            "name": CODES[self.code].name,
            "severity": self.severity.value,
            "what": self.what,
            "why": self.why,
            "write": self.write,
        }

    def as_github(self) -> str:
        """One workflow command, which GitHub shows beside the line."""
        message = _escape(f"{self.what}\nwhy: {self.why}\nwrite: {self.write}")
        path = _escape(self.path).replace(":", "%3A").replace(",", "%2C")
        return (
            f"::{self.severity.value} file={path},line={self.line},col={self.column},"
            f"title={self.code} {CODES[self.code].name}::{message}"
        )


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def silenced(line: str) -> frozenset[str] | None:
    """The codes that a ``# noqa`` comment on a line silences: an empty set means all, None means no comment."""
    found = _NOQA.search(line)
    if found is None:
        return None
    if found["colon"] is None:
        return frozenset()
    return frozenset(code.upper() for code in re.split(r"[,\s]+", found["codes"]))
