"""Where in the user's code something was called, and through which API. Knows nothing else."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

import attrs

__all__ = ["Speaker", "call_frame", "call_site", "speaker", "speaking"]

_SKIPPED = frozenset({"rl_session", "rl_session_migrate", "asyncio", "contextlib", "concurrent", "threading"})
"""Top-level packages whose frames are nobody's call site."""


@functools.cache
def _is_skipped(module: str) -> bool:
    return module.partition(".")[0] in _SKIPPED


@functools.cache
def _name_of(path: str) -> str:
    return path.rpartition(os.sep)[2]  # a Path would cost more than the rest


def call_frame() -> FrameType | None:
    """The innermost frame of the user's own code; None in a thread that has none (``asyncio.to_thread(policy.method)``)."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (inspect.stack() reads source files; this is on every scope's way)
    while frame is not None:
        if not _is_skipped(frame.f_globals.get("__name__", "")):
            return frame
        frame = frame.f_back
    return None


def call_site() -> str:
    """``file.py:line`` of the innermost frame outside this library, or "?"."""
    frame = call_frame()
    if frame is None:
        return "?"
    return f"{_name_of(frame.f_code.co_filename)}:{frame.f_lineno}"


@attrs.frozen
class Speaker:
    """Who asks, for records: ``via`` ("scope", "switch", "shim" or "session") and the call site."""

    via: str
    call_site: str


_speaker: ContextVar[Speaker | None] = ContextVar("rl_session_speaker", default=None)


@contextmanager
def speaking(via: str, site: str) -> Iterator[None]:
    """A block whose records say that it was asked for through ``via`` at ``site``."""
    token = _speaker.set(Speaker(via, site))
    try:
        yield
    finally:
        _speaker.reset(token)


def speaker() -> Speaker | None:
    """Who is speaking, where somebody said so."""
    return _speaker.get()
