"""The package as users see it: what it exports, what it imports, and that all of it is documented."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.metadata
import importlib.resources
import inspect
import json
import pydoc
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner

import rl_session as rs
from rl_session import audit
from rl_session.cli import _app

EXPORTED = {name: getattr(rs, name) for name in rs.__all__}
HEAVY = ("torch", "ray", "tensordict", "safetensors", "transformers")


def heavy_modules_after(script: str) -> list[str]:
    """Run ``script`` in a process of its own; what of HEAVY it has loaded at its end."""
    ending = f"\nimport json, sys\nprint()\nprint(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script + ending], capture_output=True, text=True, check=True
    )
    loaded: list[str] = json.loads(done.stdout.splitlines()[-1])
    return loaded


# -- weight ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        "import rl_session",
        "import rl_session_migrate",
        "import rl_session as rs; dir(rs); rs.ModeError, rs.Mode, rs.Placement, rs.OffloadConfig, rs.read_audit",
        "from rl_session.errors import ModeError",
        "import rl_session.cli",
    ],
)
def test_importing_loads_neither_torch_nor_ray(script: str) -> None:
    assert heavy_modules_after(script) == []


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_command_line_loads_neither_torch_nor_ray(option: str) -> None:
    script = f"""
import sys
from rl_session.cli import main
sys.argv = ["rl-session", {option!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
    assert heavy_modules_after(script) == []


@pytest.mark.parametrize(("option", "said"), [("--help", "Usage: rl-session"), ("--version", "rl-session ")])
def test_the_installed_command_answers(option: str, said: str) -> None:
    command = Path(sys.executable).with_name("rl-session")
    done = subprocess.run([command, option], capture_output=True, text=True, check=True)
    assert said in done.stdout
    assert not done.stderr


def test_the_command_says_the_version_that_is_installed() -> None:
    command = Path(sys.executable).with_name("rl-session")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["rl-session", importlib.metadata.version("rl-session")]


def test_commands_are_listed_in_the_order_of_the_code() -> None:
    told = CliRunner().invoke(_app, ["--help"]).stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in told] == ["audit", "doctor", "lint", "migrate"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("audti", "No such command 'audti'. Did you mean 'audit'?"),
        ("audit sumary", "No such command 'sumary'. Did you mean 'summary'?"),
        ("audit show run.jsonl --polcy actor", "No such option '--polcy'. Did you mean '--policy'?"),
        ("audit summary", "Missing argument 'RUN'."),
        ("audit summary run.jsonl --step two", "Invalid value for '--step' / '-s': 'two' is not a valid integer."),
    ],
)
def test_a_command_that_cannot_be_understood_says_why_and_where_help_is(words: str, says: str) -> None:
    done = CliRunner().invoke(_app, words.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: rl-session")
    assert "--help' for help." in done.stderr
    assert done.stderr.endswith(f"Error: {says}\n")


@pytest.mark.parametrize("words", ["", "audit"])
def test_without_a_command_help_is_printed(words: str) -> None:
    done = CliRunner().invoke(_app, words.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Commands:\n" in done.stderr


@pytest.mark.parametrize(("words", "inside"), [("lint loop.py", "lint"), ("migrate loop.py", "migrate")])
def test_an_interrupted_command_ends_with_the_status_that_shells_give(
    words: str, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"rl_session.cli.{inside}._run", interrupted)
    done = CliRunner().invoke(_app, words.split())
    assert (done.exit_code, done.output) == (130, "")


# -- exports --------------------------------------------------------------------------------------------------------


def test_exports_are_sorted_and_unique() -> None:
    assert list(rs.__all__) == sorted(set(rs.__all__))


def test_dir_lists_the_exports_and_nothing_else() -> None:
    assert dir(rs) == list(rs.__all__)


@pytest.mark.parametrize("name", rs.__all__)
def test_an_export_is_what_its_home_calls_by_that_name(name: str) -> None:
    home = sys.modules[rs._HOME_OF.get(name, "rl_session.errors")]
    assert EXPORTED[name] is getattr(home, name)
    assert name in home.__all__


def test_a_star_import_gives_the_exports() -> None:
    namespace: dict[str, Any] = {}
    exec("from rl_session import *", namespace)  # noqa: S102
    assert namespace.keys() - {"__builtins__"} == set(rs.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'rl_session' has no attribute 'logprob_mode'"):
        rs.logprob_mode  # noqa: B018


def told_to_type_checkers(package: ModuleType) -> dict[str, str | None]:
    """Names and their homes, as a package whose names are loaded late gives them to type checkers."""
    assert package.__file__ is not None
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    (checking,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {
        alias.name: statement.module
        for statement in checking.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def test_type_checkers_and_programs_are_told_of_the_same_names() -> None:
    told = told_to_type_checkers(rs)
    errors = dict.fromkeys(sys.modules["rl_session.errors"].__all__, "rl_session.errors")
    assert told == {**rs._HOME_OF, **errors}
    assert sorted(told) == list(rs.__all__)


def test_the_audit_gives_its_names_late_and_tells_type_checkers_of_the_same() -> None:
    homes = {name: f"rl_session.audit.{audit._HOME_OF.get(name, 'events')}" for name in audit.__all__}
    assert told_to_type_checkers(audit) == homes
    assert dir(audit) == sorted(audit.__all__)
    for name, home in homes.items():
        assert getattr(audit, name) is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match=r"module 'rl_session.audit' has no attribute 'ENVELOPE'"):
        audit.ENVELOPE  # noqa: B018


def test_both_packages_are_typed_and_importable() -> None:
    import rl_session_migrate

    for package in (rs, rl_session_migrate):
        assert package.__doc__
        assert importlib.resources.files(package).joinpath("py.typed").is_file()


def test_every_error_is_exported() -> None:
    assert set(sys.modules["rl_session.errors"].__all__) <= set(rs.__all__)


# -- documentation --------------------------------------------------------------------------------------------------


def public_methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public methods and properties that this package gives a class, inherited ones included, as functions."""
    for name in dir(cls):
        value = inspect.getattr_static(cls, name)
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        ours = inspect.isfunction(value) and value.__module__.startswith("rl_session")
        if not name.startswith("_") and ours:
            yield name, value


def public_callables() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for name, value in EXPORTED.items():
        if inspect.isfunction(value):
            found[name] = value
        elif inspect.isclass(value):
            found |= {f"{name}.{method}": function for method, function in public_methods(value)}
    return found


CALLABLES = public_callables()


def test_the_checks_below_see_the_methods() -> None:
    assert {"attach", "Policy.train", "Policy.mode", "ValueModel.train", "Step.commit", "Session.step"} <= set(
        CALLABLES
    )


@pytest.mark.parametrize("name", [name for name, value in EXPORTED.items() if inspect.isclass(value)])
def test_an_exported_class_has_a_docstring(name: str) -> None:
    assert vars(EXPORTED[name]).get("__doc__")


@pytest.mark.parametrize("name", CALLABLES)
def test_a_public_method_has_a_docstring(name: str) -> None:
    assert CALLABLES[name].__doc__


def documents_errors(function: Callable[..., Any]) -> bool:
    text = function.__doc__ or ""
    return bool(re.search(r"^\s*Raises:$", text, re.MULTILINE) or re.search(r"see :func:`\w+` for the .*errors", text))


def nodes_of(function: Callable[..., Any]) -> list[ast.AST]:
    return list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))


def raises_itself(function: Callable[..., Any]) -> bool:
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in nodes_of(function))


def helpers_of(function: Callable[..., Any], owner: object) -> Iterator[Callable[..., Any]]:
    """What a function calls: functions of its module, private methods of its class, and the policy's ``Control``."""
    control = sys.modules["rl_session.driver.control"].Control
    for node in nodes_of(function):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        where, _, name = called.rpartition(".")
        home = {"": sys.modules[function.__module__], "self": owner, "self._control": control}.get(where)
        helper = getattr(home, name, None)
        if inspect.isfunction(helper) and helper.__module__.startswith("rl_session"):
            yield helper


@pytest.mark.parametrize("name", CALLABLES)
def test_a_public_method_that_raises_says_so(name: str) -> None:
    function, owner = CALLABLES[name], EXPORTED[name.partition(".")[0]]
    helpers = list(helpers_of(function, owner))
    if raises_itself(function) or any(raises_itself(helper) or documents_errors(helper) for helper in helpers):
        assert documents_errors(function), f"{name} has no `Raises:` section"


@pytest.mark.parametrize("name", CALLABLES)
def test_errors_that_a_docstring_names_exist(name: str) -> None:
    _, _, section = (inspect.getdoc(CALLABLES[name]) or "").partition("Raises:\n")
    for line in re.findall(r"^ {4}(\w[\w, ]*):", section, re.MULTILINE):
        for error in line.split(", "):
            assert issubclass(EXPORTED.get(error) or getattr(builtins, error), BaseException)


@pytest.mark.parametrize("name", [name for name, value in EXPORTED.items() if inspect.isclass(value)])
def test_help_renders(name: str) -> None:
    assert name in pydoc.plain(pydoc.render_doc(EXPORTED[name]))
