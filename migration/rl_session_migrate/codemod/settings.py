"""What a project says in ``[tool.rl-session.migrate]`` of its ``pyproject.toml``: names of tenants, and what to leave out."""

from __future__ import annotations

import tomllib
from pathlib import Path

import attrs

from rl_session.errors import ConfigError
from rl_session_migrate.lint.config import load_config
from rl_session_migrate.receivers import Names

__all__ = ["Settings", "read_settings"]

_KNOWN = ("policies", "values", "engines", "ignore-names", "exclude")


@attrs.frozen
class Settings:
    """A project's settings.

    Attributes:
        names: Extra names of tenants.
        exclude: Patterns of files and folders to leave out.
    """

    names: Names = attrs.field(factory=Names)
    exclude: tuple[str, ...] = ()


def read_settings(start: Path) -> Settings:
    """The settings of the project that a path belongs to: of the nearest ``pyproject.toml`` above it that has some.

    Raises:
        ConfigError: The file is no TOML, or the table says something unknown.
    """
    names = load_config(start).names  # reads the same table, and refuses what is no TOML
    here = start.resolve()
    for folder in [here, *here.parents]:
        file = folder / "pyproject.toml"
        if file.is_file():
            tool = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("rl-session", {})
            if "migrate" in tool or "lint" in tool:
                return Settings(names, _exclude(tool.get("migrate", {}), file))
    return Settings(names)


def _exclude(table: dict[str, object], file: Path) -> tuple[str, ...]:
    unknown = sorted(set(table) - set(_KNOWN))
    patterns = table.get("exclude", [])
    if unknown or not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(
            f"reading {file}: [tool.rl-session.migrate]",
            (f"no such key: {', '.join(unknown)}" if unknown else f"exclude is {patterns!r}",),
            f"one of {', '.join(_KNOWN)}, each a list of strings",
        )
    return tuple(patterns)
