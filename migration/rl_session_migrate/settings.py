"""What a project says in its ``pyproject.toml``: one reader for the linter and the codemod.

[tool.rl-session.migrate]
policies = ["learner"]          # names that are policies here
values = ["baseline"]
engines = ["sampler"]
ignore = ["pg"]                 # names that are no tenant here
exclude = ["third_party/*"]     # files and folders that the codemod leaves out

``[tool.rl-session.lint]`` is handed on as it is; what its values mean is the linter's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from rl_session.errors import ConfigError
from rl_session_migrate.receivers import Names

__all__ = ["Settings", "read_settings"]

_NAMES = ("policies", "values", "engines", "ignore")
_LINT = ("select", "ignore", "exclude")

Table = Mapping[str, list[str]]


@attrs.frozen(kw_only=True)
class Settings:
    """A project's settings.

    Attributes:
        names: Extra names of tenants.
        exclude: Patterns of files and folders that the codemod leaves out.
        lint: The linter's table, each of its keys a list of strings.
        path: The file that says so; None where there is none.
    """

    names: Names = attrs.field(factory=Names)
    exclude: tuple[str, ...] = ()
    lint: Table = attrs.field(factory=lambda: {key: [] for key in _LINT})
    path: Path | None = None


def read_settings(start: Path) -> Settings:
    """The settings of the project that a path belongs to: of the nearest ``pyproject.toml`` at or above it that has some.

    Raises:
        ConfigError: A file on the way cannot be read, or a table says what cannot be.
    """
    here = start.resolve()
    for folder in (here, *here.parents):
        path = folder / "pyproject.toml"
        tool = _read(path) if path.is_file() else {}
        if tool:
            return _settings(tool, path)
    return Settings()


def _read(path: Path) -> Mapping[str, Any]:
    try:
        tool: Mapping[str, Any] = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("rl-session", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        facts = (f"{type(error).__name__}: {error}",)
        raise ConfigError(f"reading the configuration in {path}", facts, "valid TOML") from error
    return tool


def _settings(tool: Mapping[str, Any], path: Path) -> Settings:
    migrate = _table(tool, "migrate", (*_NAMES, "exclude"), path)
    names = Names(**{key: migrate[key] for key in _NAMES})
    return Settings(names=names, exclude=tuple(migrate["exclude"]), lint=_table(tool, "lint", _LINT, path), path=path)


def _table(tool: Mapping[str, Any], name: str, keys: tuple[str, ...], path: Path) -> dict[str, list[str]]:
    table = tool.get(name, {})
    attempted = f"reading {path}: [tool.rl-session.{name}]"
    if not isinstance(table, dict):
        raise ConfigError(attempted, ("it is no table",), f'{keys[0]} = ["..."]')
    unknown = set(table) - set(keys)
    if unknown:
        raise ConfigError(attempted, (f"no such key: {', '.join(sorted(unknown))}",), f"one of {', '.join(keys)}")
    found: dict[str, list[str]] = {}
    for key in keys:
        value = table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(attempted, (f"{key} is {value!r}",), f'{key} = ["..."]')
        found[key] = value
    return found
