"""The bites are what they say: each still applies, names tests that exist, and together they guard the whole catalogue.

That each is noticed is found out by `make test-bites`, which takes minutes.
"""

from __future__ import annotations

import ast
from pathlib import Path

import attrs
import bite_runner
import pytest
from bites import ROOT, Bite, BiteError, load

BITES = load()
ROWS = (
    *(1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 14, 15, 17, 19, 20, 21, 23, 25, 26, 28, 29, 30, 32, 33, 35, 37, 39, 40, 41, 42),
    *(44, 45, 46, 48, 49, 51, 53, 55, 56, 57, 58, 59, 60, 62, 64, 65, 68, 69, 71, 72, 74, 76, 77, 78, 79, 80),
)
"""The rows of the catalogue of faults; the gaps are deliberate."""


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def named_rows() -> dict[int, str]:
    """Every row that has a test of its own, anywhere."""
    found: dict[int, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in names_in(path):
            if name.startswith("test_row_"):
                found[int(name.split("_")[2])] = name
    return found


def test_every_row_of_the_catalogue_has_a_test() -> None:
    assert sorted(named_rows()) == list(ROWS)


def test_every_row_is_guarded_by_a_bite() -> None:
    guarded = {row for bite in BITES for row in bite.rows}
    assert sorted(set(ROWS) - guarded) == []
    assert guarded <= set(ROWS)


def test_every_bite_applies_and_leaves_python() -> None:
    problems = []
    for bite in BITES:
        try:
            bite.applied()
        except BiteError as error:
            problems.append(str(error))
    assert problems == []


def test_every_test_that_a_bite_names_exists() -> None:
    known: dict[str, set[str]] = {}
    missing = []
    for bite in BITES:
        for test in bite.tests:
            path, _, name = test.partition("::")
            names = known.setdefault(path, names_in(ROOT / path) if (ROOT / path).exists() else set())
            if name.partition("[")[0] not in names:
                missing.append(test)
    assert missing == []


def test_no_mechanism_is_named_twice() -> None:
    names = [bite.mechanism for bite in BITES]
    assert sorted(names) == sorted(set(names))


# -- the runner itself: a check that cannot fail is none ---------------------------------------------------------------


SUBJECT = "def answer():\n    return 42\n"
TESTS = """
from subject import answer

def test_the_answer():
    assert answer() == 42

def test_nothing_much():
    assert answer() is not None
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "subject.py").write_text(SUBJECT)
    (tmp_path / "test_subject.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\n')
    return tmp_path


def bite(replace: str, test: str = "test_the_answer", find: str = "return 42") -> Bite:
    return Bite("here", "the answer is 42", "subject.py", find, replace, (f"test_subject.py::{test}",))


def judged(tree: Path, given: Bite) -> str:
    problem, _ = bite_runner.bitten(tree, given, 60.0)
    assert (tree / "subject.py").read_text() == SUBJECT, "it was put back"
    return problem


def test_a_bite_that_a_test_notices_is_noticed(tree: Path) -> None:
    assert bite_runner.baseline(tree, [bite("return 41")], 60.0) == []
    assert judged(tree, bite("return 41")) == ""


def test_a_bite_that_no_test_notices_is_told(tree: Path) -> None:
    assert judged(tree, bite("return 41", "test_nothing_much")) == ("not noticed by test_subject.py::test_nothing_much")


def test_a_bite_that_breaks_everything_proves_nothing(tree: Path) -> None:
    assert "broke" in judged(tree, bite("return 42\nraise ImportError"))


def test_a_bite_that_no_longer_applies_is_told(tree: Path) -> None:
    assert "stands 0 times" in judged(tree, bite("return 41", find="return 43"))
    assert "would be no Python" in judged(tree, bite("return ("))


def test_tests_that_fail_with_every_mechanism_in_place_are_told(tree: Path) -> None:
    (tree / "subject.py").write_text(SUBJECT.replace("42", "43"))
    (problem,) = bite_runner.baseline(tree, [bite("return 41", find="return 43")], 60.0)
    assert "fails with every mechanism in place" in problem
    absent = attrs.evolve(bite("return 41"), tests=("test_subject.py::test_that_is_not_there",))
    assert bite_runner.baseline(tree, [absent], 60.0) != []
