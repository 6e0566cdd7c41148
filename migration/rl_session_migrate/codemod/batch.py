"""Many files: rewritten in parallel, each by itself, with what one must know of another looked up on the way.

A file that cannot be read or parsed is a result, never the end of the run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from enum import StrEnum
from pathlib import Path

import attrs
import libcst as cst

from rl_session_migrate.codemod.rewrite import (
    STEP_WORDS,
    Rewritten,
    could_matter,
    handed_in_open_steps,
    moving_functions,
    rewrite,
)
from rl_session_migrate.receivers import Names

__all__ = ["FileResult", "FileStatus", "migrate_file", "migrate_files"]

SMALL = 200_000
"""Bytes of files with sites below which starting processes costs more than it saves."""


class FileStatus(StrEnum):
    """What became of a file."""

    REWRITTEN = "rewritten"
    UNCHANGED = "unchanged"
    FAILED = "failed"


@attrs.frozen(kw_only=True)
class FileResult:
    """One file after the codemod; nothing has been written yet.

    Attributes:
        path: The file.
        status: What became of it.
        result: Its text and its sites; None if it failed.
        error: Why it failed.
        num_lines: How many lines it has.
    """

    path: Path
    status: FileStatus
    result: Rewritten | None = None
    error: str = ""
    num_lines: int = 0


def migrate_file(path: Path, *, known: Sequence[Path] = (), names: Names | None = None) -> FileResult:
    """Rewrite one file, in memory.

    Args:
        path: The file.
        known: The files of the run, among which imported helpers are looked up.
        names: Extra names of tenants.
    """
    return _migrate(path, _Files(known, names))


def _migrate(path: Path, files: _Files) -> FileResult:
    lookup, names = _Lookup(path, files), files.names
    try:
        data = path.read_bytes()
    except OSError as error:
        return FileResult(path=path, status=FileStatus.FAILED, error=f"cannot be read: {error.strerror or error}")
    num_lines = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
    try:
        result = rewrite(data, str(path), names=names, elsewhere=lookup)
    except SyntaxError as error:
        where = f"line {error.lineno}, column {error.offset}: " if error.lineno is not None else ""
        why = f"{where}no Python: {error.msg}"
        return FileResult(path=path, status=FileStatus.FAILED, error=why, num_lines=num_lines)
    except cst.ParserSyntaxError as error:
        first = str(error.message).splitlines()[0]
        why = f"line {error.raw_line}, column {error.raw_column + 1}: no Python: {first}"
        return FileResult(path=path, status=FileStatus.FAILED, error=why, num_lines=num_lines)
    except RecursionError:
        why = "nested too deeply"
        return FileResult(path=path, status=FileStatus.FAILED, error=why, num_lines=num_lines)
    except Exception as error:  # ValueError of the compiler (null bytes) among them
        why = f"left as it is: {type(error).__name__}: {error}"
        return FileResult(path=path, status=FileStatus.FAILED, error=why, num_lines=num_lines)
    status = FileStatus.REWRITTEN if result.changed else FileStatus.UNCHANGED
    return FileResult(path=path, status=status, result=result, num_lines=num_lines)


class _Files:
    """The files of a run, and what is known of their functions. Each is read once a process."""

    def __init__(self, known: Sequence[Path], names: Names | None) -> None:
        self.known = {path.resolve() for path in known}
        self.names = names
        self._found: dict[Path, Rewritten | None] = {}
        self._movers: dict[Path, frozenset[str]] = {}
        self._steps: dict[Path, dict[str, str]] | None = None

    def migrated(self, path: Path) -> Rewritten | None:
        """A file after the codemod; None while it is at work on it (files may import each other), or where it cannot be."""
        if path not in self._found:
            self._found[path] = None
            with contextlib.suppress(Exception):
                self._found[path] = rewrite(
                    path.read_bytes(), str(path), names=self.names, elsewhere=_Lookup(path, self)
                )
        return self._found[path]

    def movers(self, path: Path) -> frozenset[str]:
        """Functions of a file that move a policy or value."""
        if path not in self._movers:
            self._movers[path] = frozenset()
            with contextlib.suppress(Exception):
                self._movers[path] = moving_functions(path.read_bytes(), str(path), self.names)
        return self._movers[path]

    def steps(self) -> Mapping[Path, Mapping[str, str]]:
        """By file, its functions that another file calls while a train step is open, with who does.

        Whom those functions call in turn counts too: a step that is open when they are called is open when they call.
        """
        if self._steps is None:
            self._steps = {}
            todo = [path for path in sorted(self.known) if any(word in self._bytes(path) for word in STEP_WORDS)]
            while todo:
                path = todo.pop()
                found: list[tuple[str, str]] = []
                with contextlib.suppress(Exception):
                    lookup = _Lookup(path, self)
                    found = handed_in_open_steps(self._bytes(path), str(path), self.names, lookup)
                for name, by in found:
                    todo += self._note_step(path, name, f"{by} of {path.name}")
        return self._steps

    def _note_step(self, importer: Path, name: str, by: str) -> Iterator[Path]:
        module, _, function = name.rpartition(".")
        assert self._steps is not None
        for path in _Lookup(importer, self).paths(module):
            if path != importer and function not in self._steps.setdefault(path, {}):
                self._steps[path][function] = by
                yield path

    def _bytes(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError:
            return b""


class _Lookup:
    """Finds functions of the run by the names that one file imports them under."""

    def __init__(self, importer: Path, files: _Files) -> None:
        self._importer = importer.resolve()
        self._files = files

    def carries(self, name: str) -> bool:
        """Whether an imported function pushes weights through refit blocks only."""
        module, _, function = name.rpartition(".")
        found = [self._files.migrated(path) for path in self.paths(module)]
        return any(result is not None and function in result.carriers for result in found)

    def is_safe(self, name: str) -> bool:
        """Whether an imported function does everything in scopes."""
        module, _, function = name.rpartition(".")
        found = [self._files.migrated(path) for path in self.paths(module)]
        return bool(found) and all(result is not None and function in result.safe for result in found)

    def moves(self, name: str) -> bool:
        """Whether an imported function moves a policy or value."""
        module, _, function = name.rpartition(".")
        return any(function in self._files.movers(path) for path in self.paths(module))

    @property
    def has_steps(self) -> bool:
        """Whether another file keeps steps open around a function of this one."""
        return bool(self._files.steps().get(self._importer))

    def opens_step_around(self, function: str) -> str:
        """Who, of another file, calls a function of this one while a train step is open."""
        return self._files.steps().get(self._importer, {}).get(function, "")

    def paths(self, module: str) -> Iterator[Path]:
        stripped = module.lstrip(".")
        if not module:
            return
        tail = Path(*stripped.split(".")) if stripped else Path()
        num_dots = len(module) - len(stripped)
        if num_dots:
            base = self._importer.parents[num_dots - 1] / tail
            yield from sorted({base.with_suffix(".py"), base / "__init__.py"} & self._files.known)
            return
        ends = (f"/{tail.as_posix()}.py", f"/{tail.as_posix()}/__init__.py")
        yield from sorted(path for path in self._files.known if path.as_posix().endswith(ends))


def migrate_files(
    paths: Sequence[Path],
    *,
    names: Names | None = None,
    jobs: int | None = None,
    on_done: Callable[[FileResult], None] = lambda result: None,
) -> list[FileResult]:
    """Rewrite files, in memory.

    Args:
        paths: The files.
        names: Extra names of tenants.
        jobs: How many processes; by default one a core. One means none but this one.
        on_done: Called with each result as it comes.

    Returns:
        The results in the order of ``paths``.
    """
    sizes = {path: _size_that_matters(path) for path in paths}
    num_jobs = min(jobs or os.cpu_count() or 1, max(1, sum(1 for size in sizes.values() if size)))
    is_small = jobs is None and sum(sizes.values()) < SMALL
    results: dict[Path, FileResult] = {}

    def done(result: FileResult) -> None:
        results[result.path] = result
        on_done(result)

    files = _Files(paths, names)
    if num_jobs == 1 or is_small:
        for path in paths:
            done(_migrate(path, files))
    else:
        heavy = sorted((path for path in paths if sizes[path]), key=lambda path: -sizes[path])
        for path in paths:
            if not sizes[path]:
                done(_migrate(path, files))
        _in_parallel(heavy, paths, names, num_jobs, done)
    return [results[path] for path in paths]


def _size_that_matters(path: Path) -> int:
    """Bytes of a file that can have sites; 0 of any other."""
    try:
        data = path.read_bytes()
    except OSError:
        return 0
    return len(data) if could_matter(data) else 0


def _in_parallel(
    heavy: Sequence[Path],
    known: Sequence[Path],
    names: Names | None,
    num_jobs: int,
    done: Callable[[FileResult], None],
) -> None:
    # Fresh processes: a fork would copy whatever threads a progress display has.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_jobs, mp_context=context, initializer=_begin, initargs=(tuple(known), names))
    try:
        futures: dict[Future[FileResult], Path] = {pool.submit(_migrate_here, path): path for path in heavy}
        for future in as_completed(futures):
            try:
                done(future.result())
            except Exception as error:  # a process that died takes its file with it, not the run
                done(FileResult(path=futures[future], status=FileStatus.FAILED, error=f"its process died: {error}"))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_shared: _Files | None = None
"""What a process of the pool knows of the run's files, kept from one file to the next."""


def _begin(known: Sequence[Path], names: Names | None) -> None:
    global _shared  # noqa: PLW0603 (a process of a pool has nothing else that outlives a task)
    _shared = _Files(known, names)


def _migrate_here(path: Path) -> FileResult:
    assert _shared is not None
    return _migrate(path, _shared)
