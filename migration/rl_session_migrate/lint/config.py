"""The configuration: ``[tool.rl-session.migrate]`` and ``[tool.rl-session.lint]`` of a ``pyproject.toml``.

[tool.rl-session.migrate]
policies = ["learner"]          # names that are policies here
values = ["baseline"]
engines = ["sampler"]
ignore = ["pg"]                 # names that are no tenant here

[tool.rl-session.lint]
select = ["RLM"]
ignore = ["RLM005"]
exclude = ["third_party/*"]
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import attrs

from rl_session.errors import ConfigError
from rl_session_migrate.lint.codes import CODES
from rl_session_migrate.receivers import Names

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
    """The configuration of the nearest ``pyproject.toml`` at or above a path; the defaults where there is none.

    Raises:
        ConfigError: It cannot be read, or says what cannot be.
    """
    start = start.resolve()
    for folder in (start, *start.parents):
        path = folder / "pyproject.toml"
        if not path.is_file():
            continue
        try:
            tool = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("rl-session", {})
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(
                f"reading the configuration in {path}", (f"{type(error).__name__}: {error}",), "valid TOML"
            ) from error
        return _configured(tool, path)
    return LintConfig()


def _configured(tool: Mapping[str, Any], path: Path) -> LintConfig:
    migrate = _table(tool, "migrate", ("policies", "values", "engines", "ignore"), path)
    lint = _table(tool, "lint", ("select", "ignore", "exclude"), path)
    names = Names(
        policies=migrate["policies"],
        values=migrate["values"],
        engines=migrate["engines"],
        ignore=migrate["ignore"],
    )
    where = f"{path}: [tool.rl-session.lint]"
    return LintConfig(
        names=names,
        select=_codes(f"{where} select", lint["select"]) or ("RLM",),
        ignore=_codes(f"{where} ignore", lint["ignore"]),
        exclude=tuple(lint["exclude"]),
        root=path.parent,
    )


def _table(tool: Mapping[str, Any], name: str, keys: tuple[str, ...], path: Path) -> dict[str, list[str]]:
    table = tool.get(name, {})
    where = f"{path}: [tool.rl-session.{name}]"
    if not isinstance(table, dict):
        raise ConfigError(f"reading {where}", ("it is no table",), f'{keys[0]} = ["..."]')
    # `rl-session migrate` may keep settings of its own in its table.
    unknown = set(table) - set(keys) if name == "lint" else set()
    if unknown:
        raise ConfigError(
            f"reading {where}", (f"no such key: {', '.join(sorted(unknown))}",), f"one of {', '.join(keys)}"
        )
    found: dict[str, list[str]] = {}
    for key in keys:
        value = table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"reading {where}", (f"{key} is {value!r}",), f'{key} = ["..."]')
        found[key] = value
    return found


def _codes(where: str, given: list[str]) -> tuple[str, ...]:
    prefixes = tuple(part.strip().upper() for item in given for part in item.split(",") if part.strip())
    for prefix in prefixes:
        if not any(code.startswith(prefix) for code in CODES):
            listed = f"{min(CODES)} to {max(CODES)}, or a beginning such as RLM1"
            raise ConfigError(f"{where}: {prefix!r}", ("there is no such code",), listed)
    return prefixes
