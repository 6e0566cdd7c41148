"""Each code: its example triggers it, the mended one triggers nothing, and the documentation says so."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from world import make_batch, world

import rl_session as rs
from rl_session_migrate.lint import CODES, Code, lint_text
from rl_session_migrate.lint.docs import render

PAGE = Path(__file__).parents[2] / "docs" / "lint.md"


def codes_of(text: str) -> list[str]:
    return [finding.code for finding in lint_text(text)]


@pytest.mark.parametrize("code", CODES.values(), ids=lambda code: code.code)
def test_the_wrong_example_is_found_and_the_right_one_is_clean(code: Code) -> None:
    assert code.code in codes_of(code.wrong)
    assert set(codes_of(code.right)) <= {"RLM005"} - {code.code}


@pytest.mark.parametrize("code", CODES.values(), ids=lambda code: code.code)
def test_every_finding_says_what_why_and_what_to_write(code: Code) -> None:
    for finding in lint_text(code.wrong, "train.py"):
        what, why, write = str(finding).splitlines()
        assert re.match(r"train\.py:\d+:\d+: RLM\d{3} \S", what)
        assert re.match(r"  why: \S", why)
        assert re.match(r"  write: \S", write)


def test_the_documentation_is_made_from_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == render()


def test_codes_are_numbered_by_api() -> None:
    for code in CODES.values():
        mentions_ours = "rl_session" in code.wrong
        assert mentions_ours == code.code.startswith("RLM1"), code.code


FAILS: dict[str, type[Exception]] = {
    "RLM102": rs.ModeError,
    "RLM103": rs.NestingError,
    "RLM106": rs.ScopeReuseError,
    "RLM107": rs.ModeError,
    "RLM108": rs.ModeError,
}
"""What the wrong examples about scopes raise. The others define functions, or fail without raising."""
FOREIGN = {"RLM000", "RLM017", "RLM104"}
"""Examples that need NeMo-RL itself, or are no Python."""


def block(code: Code, kind: str) -> str:
    """An example as the page shows it."""
    section = PAGE.read_text(encoding="utf-8").split(f"### {code.code} ")[1].split("### ")[0]
    found = re.search(rf"{kind}:\n\n```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("kind", ["Wrong", "Right"])
@pytest.mark.parametrize("code", [c for c in CODES.values() if c.code not in FOREIGN], ids=lambda code: code.code)
def test_the_examples_of_the_page_do_what_the_page_says(code: Code, kind: str, tmp_path: Path) -> None:
    """Scopes run for real: the wrong program raises the error that the page names, the right one runs to its end."""
    names = world(tmp_path)
    names |= {"first": make_batch(), "second": make_batch()}
    error = FAILS.get(code.code) if kind == "Wrong" else None
    try:
        with pytest.raises(error) if error is not None else nullcontext():
            exec(compile(block(code, kind), "lint.md", "exec"), names)  # noqa: S102
    finally:
        names["session"].close()
        made = names["policy"]
        if made.health != "closed":
            made.close()
    if error is not None:
        assert error.code in code.why
