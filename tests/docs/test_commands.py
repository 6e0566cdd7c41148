"""Every command that a page shows is one that can be given: the program is known, its subcommand and options exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rl_session.cli import _app

ROOT = Path(__file__).parents[2]
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").glob("**/*.md"), *(ROOT / "migration").glob("*.md")})
OTHERS = {"cd", "diff", "git", "grep", "gzip", "head", "pip", "python -m", "ray", "ulimit", "jq"}
_BLOCK = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:rl-session|make|pip install|python examples)(?=[ /`])[^`\n]*)`")


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a page, in words: of shell blocks whole, of running text where they begin like one."""
    lines = [line for block in _BLOCK.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *_INLINE.findall(text)]:
        for part in re.split(r"\||&&|;", line):
            words = [word.removeprefix(".venv/bin/") for word in shlex.split(part, comments=True)]
            if words:
                yield words


def wrong(words: list[str]) -> str:
    """What is wrong with a command; "" if nothing is."""
    program, rest = words[0], words[1:]
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
        unknown = [word for word in rest if "=" not in word and word not in targets]
        return f"no target {unknown}" if unknown else ""
    if program == "rl-session":
        return wrong_subcommand(rest)
    if program == "python" and rest and rest[0].endswith(".py"):
        script = ROOT / rest[0]
        if rest[0] == "examples/NAME.py":
            return ""
        source = script.read_text(encoding="utf-8") if script.exists() else ""
        unknown = [word for word in rest[1:] if word.startswith("--") and f'"{word}"' not in source]
        return "no such script" if not source else f"no option {unknown}" if unknown else ""
    known = program in OTHERS or " ".join(words[:2]) in OTHERS
    return "" if known else f"no program {program!r} that a reader is told of"


def wrong_subcommand(words: list[str]) -> str:
    command: click.Command = _app
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"no subcommand {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word for word in words if re.match(r"--?[a-z]", word) and word not in {*options, "--help"}]
    return f"no option {unknown}" if unknown else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_can_be_given(page: Path) -> None:
    found = [(words, wrong(words)) for words in commands(page.read_text(encoding="utf-8"))]
    assert [(" ".join(words), what) for words, what in found if what] == []


def test_the_readme_leads_from_a_clone_to_a_picture() -> None:
    given = [" ".join(words) for words in commands((ROOT / "README.md").read_text(encoding="utf-8"))]
    assert given[:2] == ["make demo", "make test"]
    assert "rl-session audit timeline runs/grpo-0.jsonl -o run.html" in given


@pytest.mark.parametrize(
    "line",
    [
        "make nothing",
        "rl-session nothing",
        "rl-session audit nothing run.jsonl",
        "rl-session audit show run.jsonl --nothing",
        "python examples/nothing.py",
        "python examples/grpo.py --nothing",
        "nothing",
    ],
)
def test_a_wrong_command_is_noticed(line: str) -> None:
    (words,) = commands(f"```sh\n{line}\n```")
    assert wrong(words)
