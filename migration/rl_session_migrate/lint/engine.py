"""Runs the checks over texts, files and folders, several files at a time.

A file that mentions nothing of either API is not analysed, only compiled.
"""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import attrs
import libcst as cst

from rl_session.errors import ConfigError
from rl_session_migrate.lint.codes import CODES
from rl_session_migrate.lint.config import LintConfig
from rl_session_migrate.lint.findings import Finding, Silencers
from rl_session_migrate.lint.interpret import Interpreter
from rl_session_migrate.lint.judge import PathJudge
from rl_session_migrate.lint.plan import Plan
from rl_session_migrate.lint.syntax import check_syntax
from rl_session_migrate.outline import Function
from rl_session_migrate.receivers import telling_names
from rl_session_migrate.sites import Module, analyse
from rl_session_migrate.tree import parse

__all__ = ["Report", "find_files", "lint_files", "lint_text"]

_MENTIONS = tuple(sorted(name.encode() for name in telling_names()))
_PARALLEL_FROM = 300_000
"""Bytes of source from which starting processes pays."""
_LEFT_OUT = frozenset({".git", ".hg", ".venv", "venv", "__pycache__", "node_modules", ".tox", "build", "dist"})


@attrs.frozen
class Report:
    """What a run found.

    Attributes:
        findings: By file, line and column.
        num_files: How many files were looked at.
        num_unreadable: How many of them could not be parsed; each has an RLM000 finding.
    """

    findings: tuple[Finding, ...]
    num_files: int

    @property
    def num_unreadable(self) -> int:
        """Files that could not be read."""
        return len({finding.path for finding in self.findings if finding.code == "RLM000"})


def lint_text(text: str | bytes, path: str = "<string>", config: LintConfig | None = None) -> tuple[Finding, ...]:
    """Check one module.

    Args:
        text: Its source.
        path: Shown in findings.
        config: What to report; everything by default.

    Returns:
        The findings, in the order of the source. A module that cannot be parsed has one, RLM000.
    """
    config = config or LintConfig()
    raw = text.encode() if isinstance(text, str) else text
    configured = (name.encode() for name in config.names.all)
    if not any(name in raw for name in (*_MENTIONS, *configured)):
        unreadable = _compiles(raw, path)
        return () if unreadable is None else (unreadable,)
    try:
        source = parse(raw, path)
    except (cst.ParserSyntaxError, SyntaxError, ValueError, LookupError, RecursionError) as error:
        return (_unreadable(error, path),)
    module = analyse(source, config.names)
    found = sorted({finding for finding in _check(module) if config.reports(finding.code)})
    silencers = Silencers(source.module.code) if found else None
    return tuple(finding for finding in found if silencers is None or not silencers.silences(finding))


def _check(module: Module) -> Iterator[Finding]:
    yield from check_syntax(module)
    if not module.sites and not module.helpers:
        return
    told = set()
    plans: dict[Function, Plan] = {}
    for finding in _walk(module, plans, loops=True).verdicts.findings():
        told.add((finding.line, finding.column))
        yield finding
    for finding in _walk(module, plans, loops=False).verdicts.half_prepared():
        if (finding.line, finding.column) not in told:
            yield finding


def _walk(module: Module, plans: dict[Function, Plan], *, loops: bool) -> PathJudge:
    """Walk every function of a module."""
    judges: list[PathJudge] = []

    def make(interpreter: Interpreter) -> PathJudge:
        judges.append(PathJudge(module, interpreter))
        return judges[0]

    interpreter = Interpreter(module, make, loops=loops, plans=plans)
    for function in module.outline.functions.values():
        if interpreter.is_relevant(function):
            interpreter.run(function)
    return judges[0]


def _compiles(raw: bytes, path: str) -> Finding | None:
    """A file of no interest is not analysed, only compiled: a broken file should not look clean."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # strange escapes are somebody else's findings
        try:
            compile(raw, path, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        except SyntaxError as error:
            says = f"cannot be parsed: {error.msg}"
            line, column = max(error.lineno or 1, 1), max(error.offset or 1, 1)
            return Finding(path, line, column, "RLM000", says, CODES["RLM000"].why, "Python that parses")
        except (ValueError, RecursionError, MemoryError) as error:  # null bytes; too deep
            return _unreadable(error, path)
    return None


def _unreadable(error: Exception, path: str) -> Finding:
    line, column = 1, 1
    if isinstance(error, cst.ParserSyntaxError):
        line, column = max(error.raw_line, 1), error.raw_column + 1
        says = error.message.partition("\n")[0]
    else:
        says = f"{type(error).__name__}: {error}"
    return Finding(path, line, column, "RLM000", f"cannot be parsed: {says}", CODES["RLM000"].why, "Python that parses")


# -- files -------------------------------------------------------------------------------------------------------


def find_files(paths: Iterable[Path], config: LintConfig) -> list[Path]:
    """The Python files at and below paths. Files named directly are taken whatever they are called.

    Raises:
        ConfigError: A path does not exist.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_file():
            found[path] = None
        elif path.is_dir():
            for folder, folders, names in os.walk(path):
                folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
                for name in sorted(names):
                    file = Path(folder) / name
                    if name.endswith(".py") and not config.excludes(file.resolve()):
                        found[file] = None
        else:
            raise ConfigError(
                f"checking {str(path)!r}",
                ("there is no such file or folder",),
                "rl-session lint with a file or folder that is there",
            )
    return list(found)


def lint_files(
    files: Sequence[Path],
    config: LintConfig,
    *,
    jobs: int | None = None,
    progress: Callable[[Path], None] | None = None,
) -> Report:
    """Check files.

    Args:
        files: The files, as :func:`find_files` gives them.
        config: What to report.
        jobs: How many processes; None takes one a core if there is enough to do, 1 stays in this one.
        progress: Called when a file is done.
    """
    found: list[Finding] = []
    for path, findings in _run(files, config, jobs):
        found += findings
        if progress is not None:
            progress(path)
    return Report(tuple(sorted(found)), len(files))


def _run(files: Sequence[Path], config: LintConfig, jobs: int | None) -> Iterator[tuple[Path, tuple[Finding, ...]]]:
    if jobs is None:
        size = sum(path.stat().st_size for path in files if path.exists())
        jobs = min(os.cpu_count() or 1, len(files)) if size >= _PARALLEL_FROM else 1
    if jobs <= 1:
        for path in files:
            yield path, _lint_file(path, config)
        return
    # Spawned, not forked: the caller may have threads. Large files first, so that the last one does not keep all waiting.
    order = sorted(files, key=lambda path: path.stat().st_size if path.exists() else 0, reverse=True)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        results = pool.map(
            _lint_file, order, [config] * len(order), chunksize=max(1, min(16, len(order) // (jobs * 8)))
        )
        yield from zip(order, results, strict=True)


def _lint_file(path: Path, config: LintConfig) -> tuple[Finding, ...]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        return (_unreadable(error, str(path)),)
    return lint_text(raw, str(path), config)
