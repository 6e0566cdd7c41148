"""Each code: its example triggers it, the mended one triggers nothing, and the documentation says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rl_session_migrate.lint import CODES, Code, lint_text
from rl_session_migrate.lint.docs import render

DOCS = Path(__file__).parents[2] / "docs" / "lint.md"


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
    assert DOCS.read_text(encoding="utf-8") == render()


def test_codes_are_numbered_by_api() -> None:
    for code in CODES.values():
        mentions_ours = "rl_session" in code.wrong
        assert mentions_ours == code.code.startswith("RLM1"), code.code
