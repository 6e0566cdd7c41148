"""The linter's configuration: what to look for and where, from ``[tool.rl-session.lint]`` and the command line.

[tool.rl-session.lint]
select = ["RLM"]
ignore = ["RLM005"]
exclude = ["third_party/*"]
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import attrs

from rl_session.errors import ConfigError
from rl_session_migrate.lint.codes import CODES
from rl_session_migrate.receivers import Names
from rl_session_migrate.settings import read_settings

__all__ = ["LintConfig", "load_config"]


@attrs.frozen(kw_only=True)
class LintConfig:
    """What to look for, and where.

    Attributes:
        names: Extra names of tenants.
        select: Prefixes of codes to report.
        ignore: Prefixes of codes not to report; they win.
        exclude: Patterns of paths to leave out.
        root: The folder that ``exclude`` is relative to.
    """

    names: Names = attrs.field(factory=Names)
    select: tuple[str, ...] = ("RLM",)
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    root: Path | None = None

    def reports(self, code: str) -> bool:
        """Whether a code is reported. A file that cannot be read is, always."""
        return code == "RLM000" or (code.startswith(self.select) and not (self.ignore and code.startswith(self.ignore)))

    def excludes(self, path: Path) -> bool:
        """Whether a file is left out."""
        name = path.as_posix()
        if self.root is not None and path.is_absolute() and path.is_relative_to(self.root):
            name = path.relative_to(self.root).as_posix()
        return any(fnmatch(name, pattern) or fnmatch(name, f"*/{pattern}") for pattern in self.exclude)

    def chosen(self, select: Iterable[str] | None, ignore: Iterable[str] | None) -> LintConfig:
        """This configuration with the choice of the command line.

        Raises:
            ConfigError: There is no such code.
        """
        changes: dict[str, Any] = {}
        if select:
            changes["select"] = _codes("--select", list(select))
        if ignore:
            changes["ignore"] = (*self.ignore, *_codes("--ignore", list(ignore)))
        return attrs.evolve(self, **changes)


def load_config(start: Path) -> LintConfig:
    """The configuration of the project that a path belongs to; the defaults where there is none.

    Raises:
        ConfigError: It cannot be read, or says what cannot be.
    """
    settings = read_settings(start)
    where = f"{settings.path}: [tool.rl-session.lint]"
    return LintConfig(
        names=settings.names,
        select=_codes(f"{where} select", settings.lint["select"]) or ("RLM",),
        ignore=_codes(f"{where} ignore", settings.lint["ignore"]),
        exclude=tuple(settings.lint["exclude"]),
        root=settings.path.parent if settings.path is not None else None,
    )


def _codes(where: str, given: list[str]) -> tuple[str, ...]:
    prefixes = tuple(part.strip().upper() for item in given for part in item.split(",") if part.strip())
    for prefix in prefixes:
        if not any(code.startswith(prefix) for code in CODES):
            listed = f"{min(CODES)} to {max(CODES)}, or a beginning such as RLM1"
            raise ConfigError(f"{where}: {prefix!r}", ("there is no such code",), listed)
    return prefixes
