"""Where in the user's code something was called. Knows nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

__all__ = ["call_site"]

_SKIPPED = (
    str(Path(__file__).parent.parent) + os.sep,
    str(Path(asyncio.__file__).parent) + os.sep,
    contextlib.__file__,
)


def call_site() -> str:
    """``file.py:line`` of the innermost frame outside this package (and outside ``contextlib`` and ``asyncio``)."""
    frame = sys._getframe(1)  # noqa: SLF001 (inspect.stack() reads source files; this is on every scope's way)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_SKIPPED):
            return f"{name.rpartition(os.sep)[2]}:{frame.f_lineno}"  # a Path would cost more than the rest
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "?"
