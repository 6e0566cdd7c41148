"""The errors as a family: codes, parts of the message, survival on the way to another process, and their page."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rl_session as rs
from rl_session import errors

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"
CLASSES: dict[str, type[rs.RLSessionError]] = {name: getattr(errors, name) for name in errors.__all__}
FIELDS = {
    "attempted": "policy 'actor': train()",
    "facts": ("mode: offloaded", "needed: 8 bytes"),
    "remedy": "with policy.training_mode(): ...",
    "cause": "OSError: no",
}

every_class = pytest.mark.parametrize("name", errors.__all__)


def make(name: str) -> rs.RLSessionError:
    return CLASSES[name](*FIELDS.values())


# -- the tree -------------------------------------------------------------------------------------------------------


def test_the_module_exports_each_error_it_defines() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == set(errors.__all__)
    assert errors.__all__ == sorted(errors.__all__)


def test_codes_are_unique_and_of_one_form() -> None:
    codes = [error.code for error in CLASSES.values()]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"RLS\d{3}", code) for code in codes)


@every_class
def test_each_class_has_a_code_of_its_own(name: str) -> None:
    assert "code" in vars(CLASSES[name])


@pytest.mark.parametrize(
    ("family", "builtin", "hundreds"),
    [
        (rs.UsageError, RuntimeError, "1"),
        (rs.ArgumentError, ValueError, "2"),
        (rs.WorldError, Exception, "3"),
    ],
)
def test_the_code_tells_the_family(family: type[rs.RLSessionError], builtin: type[Exception], hundreds: str) -> None:
    assert issubclass(family, builtin)
    members = {name for name, error in CLASSES.items() if issubclass(error, family)}
    assert members == {name for name, error in CLASSES.items() if error.code.startswith(f"RLS{hundreds}")}


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (rs.DeviceMemoryError, MemoryError),
        (rs.HostMemoryError, MemoryError),
        (rs.NonFiniteError, ArithmeticError),
        (rs.NestingError, rs.ScopeError),
        (rs.ScopeReuseError, rs.ScopeError),
        (rs.ScopeOrderError, rs.ScopeError),
    ],
)
def test_an_error_is_also_what_already_means_it(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)


def test_a_world_error_is_no_mistake_of_the_caller() -> None:
    world = [error for error in CLASSES.values() if issubclass(error, rs.WorldError)]
    assert not [error for error in world if issubclass(error, RuntimeError | ValueError)]


@every_class
def test_each_class_is_documented(name: str) -> None:
    assert vars(CLASSES[name]).get("__doc__")


# -- the message ----------------------------------------------------------------------------------------------------


@every_class
def test_the_message_has_what_was_attempted_the_facts_the_cause_and_what_to_write(name: str) -> None:
    assert str(make(name)).splitlines() == [
        f"[{CLASSES[name].code}] policy 'actor': train()",
        "  mode: offloaded",
        "  needed: 8 bytes",
        "  cause: OSError: no",
        "  write: with policy.training_mode(): ...",
    ]


def test_parts_that_are_missing_leave_no_line() -> None:
    assert str(rs.ModeError("train()")) == "[RLS101] train()"


def test_facts_may_be_given_as_any_sequence() -> None:
    assert rs.ModeError("train()", ["one", "two"]).facts == ("one", "two")  # type: ignore[arg-type]


def test_a_traceback_names_the_error_as_users_import_it() -> None:
    script = "from rl_session.errors import ModeError; raise ModeError('train()')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "rl_session.ModeError: [RLS101] train()"


# -- survival -------------------------------------------------------------------------------------------------------


def assert_same_error(error: BaseException, name: str) -> None:
    assert type(error) is CLASSES[name]
    assert {field: getattr(error, field) for field in FIELDS} == FIELDS
    assert str(error) == str(make(name))
    assert error.args == tuple(FIELDS.values())


@every_class
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_can_be_pickled(name: str, protocol: int) -> None:
    error = make(name)
    error.add_note("in optimizer step 2 of 3")
    back = pickle.loads(pickle.dumps(error, protocol))
    assert_same_error(back, name)
    assert back.__notes__ == ["in optimizer step 2 of 3"]


@every_class
def test_an_error_can_be_copied(name: str) -> None:
    assert_same_error(copy.copy(make(name)), name)
    assert_same_error(copy.deepcopy(make(name)), name)


def test_a_process_that_never_saw_the_errors_can_read_them(tmp_path: Path) -> None:
    file = tmp_path / "errors.pickle"
    file.write_bytes(pickle.dumps([make(name) for name in CLASSES]))
    script = (
        "import pickle, pathlib, sys\n"
        "errors = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "print(*(f'{type(e).__name__} {e.code} {e.remedy}' for e in errors), sep='\\n')\n"
        "assert not {'torch', 'ray'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{name} {error.code} {FIELDS['remedy']}" for name, error in CLASSES.items()]


@pytest.fixture
def fail_remotely() -> Iterator[Callable[[str], None]]:
    """Raises the named error in a real Ray actor, and so from ``ray.get`` here."""
    import ray

    class Raising:  # local, so that Ray sends the class itself: the actor's process cannot import this file
        def fail(self, name: str, fields: tuple[Any, ...]) -> None:
            import rl_session

            raise getattr(rl_session, name)(*fields)

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        actor = ray.remote(Raising).remote()
        yield lambda name: ray.get(actor.fail.remote(name, tuple(FIELDS.values())))
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_what_a_ray_actor_raises_is_caught_by_its_class_on_the_driver(fail_remotely: Callable[[str], None]) -> None:
    for name, cls in CLASSES.items():
        with pytest.raises(cls) as caught:
            fail_remotely(name)
        error: Any = caught.value
        assert error.code == cls.code
        assert (error.attempted, error.facts, error.remedy) == tuple(FIELDS.values())[:3]
        assert f"  write: {FIELDS['remedy']}" in str(error)
        assert_same_error(error.cause, name)  # Ray's own name for what the actor raised hides the field
    for family in (rs.UsageError, rs.RLSessionError, RuntimeError):
        with pytest.raises(family):
            fail_remotely("ModeError")
    with pytest.raises(MemoryError):
        fail_remotely("DeviceMemoryError")


# -- the page -------------------------------------------------------------------------------------------------------

SECTIONS = dict(
    re.findall(r"^## RLS\d{3} (\w+)$\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
)
HEADINGS = re.findall(r"^## (RLS.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def is_made_somewhere(name: str) -> bool:
    folders = (ROOT / "rl_session", ROOT / "migration" / "rl_session_migrate")
    sources = (path for folder in folders for path in folder.rglob("*.py") if path.name != "errors.py")
    return any(re.search(rf"\b{name}\(", path.read_text(encoding="utf-8")) for path in sources)


def test_the_page_has_a_section_for_every_class_and_a_class_for_every_section() -> None:
    assert sorted(f"{error.code} {name}" for name, error in CLASSES.items()) == HEADINGS


def test_the_table_of_the_page_is_true() -> None:
    rows = re.findall(
        r"^\| \[(RLS\d{3})\]\(#(\S+)\) \| `(\w+)` \| (?:`(\w+)`)? \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [(code, name) for code, _, name, _ in rows] == sorted((e.code, name) for name, e in CLASSES.items())
    builtins = (RuntimeError, ValueError, MemoryError, ArithmeticError)
    for code, anchor, name, builtin in rows:
        assert anchor == f"{code} {name}".lower().replace(" ", "-")
        assert builtin == "".join(b.__name__ for b in builtins if issubclass(CLASSES[name], b))


@every_class
def test_a_section_says_when_and_what_then(name: str) -> None:
    assert "**When.**" in SECTIONS[name]
    assert "**Afterwards.**" in SECTIONS[name]


@every_class
def test_the_message_of_a_section_is_one_of_that_class(name: str) -> None:
    messages = code_blocks(SECTIONS[name], "text")
    assert bool(messages) == is_made_somewhere(name)  # what nothing raises has no message to show
    for message in messages:
        assert message.startswith(f"rl_session.{name}: [{CLASSES[name].code}] ")
        assert "\n  write: " in message


@every_class
def test_what_a_section_says_to_write_works(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start = PAGE.read_text(encoding="utf-8").partition("\n## RLS000")[0]
    blocks = [*code_blocks(start, "python"), *code_blocks(SECTIONS[name], "python")]
    assert len(blocks) == 2
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)  # noqa: S102 (our own page)
    assert namespace["policy"].health == "ok"
