"""What a project says in ``[tool.rl-session.migrate]`` of its ``pyproject.toml``: names of tenants, and what to leave out."""

from __future__ import annotations

import tomllib
from pathlib import Path

import attrs

from rl_session.errors import ConfigError
from rl_session_migrate.receivers import Names

__all__ = ["Settings", "read_settings"]

_LISTS = ("policies", "values", "engines", "ignore", "exclude")


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
    """The settings of the project that a path belongs to: of the nearest ``pyproject.toml`` above it.

    Raises:
        ConfigError: The file is no TOML, or the table says something unknown.
    """
    here = start.resolve()
    for folder in [here, *here.parents]:
        file = folder / "pyproject.toml"
        if file.is_file():
            return _parse(file)
    return Settings()


def _parse(file: Path) -> Settings:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: no TOML", (str(error),), "repair the file") from error
    table = document.get("tool", {}).get("rl-session", {}).get("migrate", {})
    for key, value in table.items():
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if key not in _LISTS or not is_list:
            raise ConfigError(
                f"{file}: [tool.rl-session.migrate] {key} = {value!r} is not known, or no list of strings",
                (f"known: {', '.join(_LISTS)}",),
                '[tool.rl-session.migrate]\npolicies = ["learner"]',
            )
    names = {key: frozenset(table.get(key, ())) for key in ("policies", "values", "engines", "ignore")}
    return Settings(Names(**names), tuple(table.get("exclude", ())))
