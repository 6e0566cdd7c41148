"""Source files: which there are, reading them, and writing one so that it is never half written.

Knows nothing of Python code.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rl_session.errors import UsageError

__all__ = ["ChangedMeanwhileError", "discover", "write_atomically"]

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "env", "build", "dist", "__pypackages__"})


class ChangedMeanwhileError(OSError):
    """A file is no longer what it was when it was read."""


def discover(paths: Sequence[Path], exclude: Iterable[str] = ()) -> list[Path]:
    """The source files under some paths, each once, sorted.

    Folders are searched for ``*.py``; hidden folders, environments, caches and build outputs are left out, unless they are named
    themselves. A file that is named is taken whatever its name.

    Args:
        paths: Files and folders.
        exclude: Patterns; a file is left out if its path, or the name of a folder above it, matches one.

    Raises:
        UsageError: A path does not exist.
    """
    patterns = tuple(exclude)
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise UsageError(f"migrate {path}: there is no such file or folder", (), "rl-session migrate src/")
        for file in [path] if path.is_file() else _python_files(path):
            if path.is_file() or not _is_excluded(file, path, patterns):
                found.setdefault(file.resolve(), file)
    return sorted(found.values())


def _python_files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(root, name)


def _is_excluded(file: Path, folder: Path, patterns: Sequence[str]) -> bool:
    relative = file.relative_to(folder)
    candidates = [str(file), str(relative), *relative.parts]
    return any(fnmatch.fnmatch(candidate, pattern) for pattern in patterns for candidate in candidates)


def write_atomically(path: Path, data: bytes, *, expected: bytes) -> None:
    """Replace the content of a file, wholly or not at all; its mode stays.

    Args:
        path: The file; a link is followed.
        data: The new content.
        expected: What it held when it was read.

    Raises:
        ChangedMeanwhileError: It holds something else now.
        OSError: It could not be written; it is as it was.
    """
    target = path.resolve()
    if target.read_bytes() != expected:
        raise ChangedMeanwhileError(f"{path}: changed since it was read; run the migration again")
    mode = target.stat().st_mode & 0o7777
    # In the same folder, so that the rename stays on one file system and is atomic.
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, mode)  # noqa: PTH101 (a name without a Path, from mkstemp)
        os.replace(name, target)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)  # noqa: PTH108
        raise
