"""The reference has every public name, and each says what it takes, gives and raises: shapes, dtypes and units included."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rl_session as rs
import rl_session.adapters.nemo_rl
import rl_session.audit
import rl_session.testing
import rl_session_migrate
from rl_session.lifecycle import CALL_MODES

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PACKAGES = (rs, rl_session.testing, rl_session.audit, rl_session.adapters.nemo_rl, rl_session_migrate)
SHOWN = re.findall(r"^::: (\S+)$", "\n".join(p.read_text("utf-8") for p in REFERENCE.glob("*.md")), re.MULTILINE)
AS_THE_POLICY_SAYS = "rl_session.driver.handles"
"""What a scope yields: one line a call; the page says where the rest is."""


def resolve(path: str) -> Any:
    """The object of a dotted path."""
    for cut in range(path.count(".") + 1, 0, -1):
        module, rest = ".".join(path.split(".")[:cut]), path.split(".")[cut:]
        try:
            found: Any = importlib.import_module(module)
            for name in rest:
                found = getattr(found, name)
        except (ModuleNotFoundError, AttributeError):
            continue
        return found
    raise LookupError(path)


def objects() -> dict[str, Any]:
    """What the reference shows, modules taken apart."""
    found: dict[str, Any] = {}
    for path in SHOWN:
        value = resolve(path)
        if inspect.ismodule(value):
            own = [name for name, each in vars(value).items() if getattr(each, "__module__", "") == value.__name__]
            names = getattr(value, "__all__", [name for name in own if not name.startswith("_")])
            found |= {name: getattr(value, name) for name in names}
        else:
            found[path.rpartition(".")[2]] = value
    return found


OBJECTS = objects()


def functions() -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """Name, function, and whether it is a property; of every function and public method that the reference shows."""
    for name, value in OBJECTS.items():
        if inspect.isfunction(value):
            yield name, value, False
        if not inspect.isclass(value) or value.__module__ == AS_THE_POLICY_SAYS:
            continue
        for method in dir(value):
            raw = inspect.getattr_static(value, method)
            function = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)
            ours = inspect.isfunction(function) and function.__module__.startswith("rl_session")
            if not method.startswith("_") and ours:
                yield f"{name}.{method}", function, isinstance(raw, property)


PUBLIC = [(name, f, is_property) for name, f, is_property in functions() if name.partition(".")[0] in rs.__all__]
FUNCTIONS = [pytest.param(f, is_property, id=name) for name, f, is_property in PUBLIC]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_shown(package: Any) -> None:
    missing = [name for name in package.__all__ if name not in OBJECTS and not name.isupper()]
    assert missing == []


def test_every_shown_name_is_the_object_of_that_name() -> None:
    assert SHOWN
    for package in PACKAGES:
        for name in package.__all__:
            if name in OBJECTS:
                assert OBJECTS[name] is getattr(package, name), f"{package.__name__}.{name}"


@pytest.mark.parametrize("name", OBJECTS)
def test_every_shown_object_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(OBJECTS[name]) or not callable(OBJECTS[name])


def test_every_shown_method_has_a_docstring() -> None:
    shown = list(functions())
    assert len(shown) > 2 * len(PUBLIC)
    assert [name for name, function, _ in shown if not inspect.getdoc(function)] == []


def undocumented(function: Callable[..., Any], *, is_property: bool) -> list[str]:
    """What a docstring leaves out: parameters, and what comes back."""
    text, signature = inspect.getdoc(function) or "", inspect.signature(function)
    if not text:
        return ["everything"]
    if re.search(r"\b(?:see|as) :(?:func|meth|class):`", text, re.IGNORECASE):
        return []  # the rest is there
    names = [name for name in signature.parameters if name not in ("self", "cls")]
    missing = [name for name in names if not re.search(rf"^\s+\*{{0,2}}{name}:", text, re.MULTILINE)]
    gives = str(signature.return_annotation)
    is_told = re.search(r"^(?:Returns|Yields):", text, re.MULTILINE) or is_property
    is_plain = gives in ("None", "NoReturn", "Iterator[None]") or gives.startswith(("Scope", "LegacyScope"))
    return missing if is_told or is_plain else [*missing, "Returns"]


@pytest.mark.parametrize(("function", "is_property"), FUNCTIONS)
def test_arguments_and_results_are_told(function: Callable[..., Any], is_property: bool) -> None:
    assert undocumented(function, is_property=is_property) == []


def test_what_is_left_out_is_noticed() -> None:
    def told(x: int) -> int:
        """Something.

        Args:
            x: A number.

        Returns:
            Another.
        """
        return x

    def untold(x: int) -> int:
        """Something."""
        return x

    assert undocumented(told, is_property=False) == []
    assert undocumented(untold, is_property=False) == ["x", "Returns"]


@pytest.mark.parametrize("cls", [rs.Policy, rs.ValueModel])
def test_calls_that_give_tensors_tell_shapes_and_dtypes(cls: type) -> None:
    calls = [call for call in CALL_MODES if call.startswith("get_") or call == "score"]
    assert len(calls) >= 5
    for call in calls:
        if hasattr(cls, call):
            text = inspect.getdoc(getattr(cls, call)) or ""
            arguments, _, results = text.partition("Returns:")
            assert re.search(r"input_ids \[B, S\]`` int64", arguments), call
            assert re.search(r"\[B[^\]]*\]``.*(float32|int64)|(float32|int64).*\[B", results), call


def test_sizes_and_times_have_units_in_their_names() -> None:
    for name, function, _ in PUBLIC:
        for parameter in inspect.signature(function).parameters:
            has_unit = not re.search(r"(?:^|_)(?:size|bytes|timeout|interval|duration)$", parameter)
            assert has_unit or parameter == "acquire_timeout", (
                f"{name}({parameter})"
            )  # seconds, as everywhere in Python


@pytest.mark.parametrize("cls", [rs.Policy, rs.ValueModel])
def test_help_of_a_policy_is_enough_to_begin(cls: type) -> None:
    text = inspect.getdoc(cls) or ""
    assert re.search(r"with \w+\.training_mode\(\)", text)
    for scope in [name for name in vars(cls) if name.endswith("_mode") and not name.startswith(("resting", "_"))]:
        assert scope in text, scope
