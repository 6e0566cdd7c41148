"""A finding, and the comments that silence it."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Mapping
from typing import Any

import attrs

from rl_session_migrate.lint.codes import CODES, Severity

__all__ = ["Finding", "Silencers", "silenced"]

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


class Silencers:
    """The ``# noqa`` comments of a module.

    A comment speaks for the line it stands on. At the end of a statement that goes over several lines (or of the header of a
    compound one) it speaks for all of them, since there is no other place for it once a formatter has broken the line.

    Args:
        text: The source, which parses.
    """

    def __init__(self, text: str) -> None:
        self._of_line: dict[int, list[frozenset[str]]] = {}
        if "noqa" in text.lower():
            self._read(text)

    def _read(self, text: str) -> None:
        first = 0
        comments: list[tuple[int, frozenset[str]]] = []
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            line = token.start[0]
            if token.type in _LAYOUT:
                continue
            if token.type == tokenize.COMMENT:
                codes = silenced(token.string)
                if codes is not None:
                    comments.append((line, codes))
                    self._of_line.setdefault(line, []).append(codes)
            elif token.type == tokenize.NEWLINE:
                for at, codes in comments:
                    if at == line:
                        for covered in range(first, line):
                            self._of_line.setdefault(covered, []).append(codes)
                first, comments = 0, []
            else:
                first = first or line

    def silences(self, finding: Finding) -> bool:
        """Whether a comment says that a finding is wanted as it is."""
        said = self._of_line.get(finding.line, ())
        return finding.code != "RLM000" and any(not codes or finding.code in codes for codes in said)


_LAYOUT = frozenset({tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING})


def silenced(line: str) -> frozenset[str] | None:
    """The codes that a ``# noqa`` comment silences: an empty set means all, None means no such comment."""
    found = _NOQA.search(line)
    if found is None:
        return None
    if found["colon"] is None:
        return frozenset()
    return frozenset(code.upper() for code in re.split(r"[,\s]+", found["codes"]))
