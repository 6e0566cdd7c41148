"""The bites: small changes, each of which takes one mechanism away, and the tests that must notice.

A bite is text to find in one file (exactly once) and what to put in its place. They stand in the `*.toml` files beside this
one. Knows how to read them, not how to run them.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import attrs

__all__ = ["HERE", "ROOT", "Bite", "BiteError", "load"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_KEYS = {"mechanism", "file", "find", "replace", "tests"}


class BiteError(Exception):
    """A bite that cannot be applied, or that says too little."""


@attrs.frozen
class Bite:
    """One mechanism, and how it is taken away.

    Attributes:
        area: The file it stands in: "scopes", "engine", ...
        mechanism: What is taken away, as a sentence that is true while it is there.
        file: The file that is changed, from the root of the repository.
        find: The text that is replaced; it is there once.
        replace: What stands there instead.
        tests: The tests that notice: every one of them fails.
    """

    area: str
    mechanism: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of the fault catalogue that it guards: those whose tests it names."""
        names = (test.partition("::")[2] for test in self.tests)
        return tuple(sorted({int(name.split("_")[2]) for name in names if name.startswith("test_row_")}))

    def matches(self, words: tuple[str, ...]) -> bool:
        """Whether every one of ``words`` is somewhere in it."""
        text = " ".join((self.area, self.mechanism, self.file, *self.tests)).lower()
        return all(word.lower() in text for word in words)

    def applied(self, root: Path = ROOT) -> str:
        """The text of the file without the mechanism.

        Raises:
            BiteError: What is to be replaced is not there once, or what comes out is no Python.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        count = text.count(self.find)
        if count != 1:
            raise BiteError(f"{self.mechanism}: what it replaces stands {count} times in {self.file}")
        changed = text.replace(self.find, self.replace)
        try:
            compile(changed, self.file, "exec")
        except SyntaxError as error:
            raise BiteError(f"{self.mechanism}: {self.file} would be no Python: {error}") from error
        return changed


def load() -> list[Bite]:
    """Every bite, in the order of the files.

    Raises:
        BiteError: An entry says too much or too little.
    """
    found: list[Bite] = []
    for path in sorted(HERE.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["bite"]:
            if entry.keys() != _KEYS or not entry["tests"] or entry["find"] == entry["replace"]:
                raise BiteError(f"{path.name}: {entry.get('mechanism', entry)!r} is no bite: it takes {sorted(_KEYS)}")
            found.append(Bite(path.stem, **{**entry, "tests": tuple(entry["tests"])}))
    return found
