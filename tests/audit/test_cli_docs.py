"""docs/audit.md agrees with the code: its tables are made from the event classes, its commands exist.

``python tests/audit/test_cli_docs.py`` writes the tables anew.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rl_session.audit.events import EVENTS
from rl_session.audit.schema import schema
from rl_session.cli import _app

PAGE = Path(__file__).parents[2] / "docs" / "audit.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
_GROUPS = {
    "Session and policies": ("session.", "policy."),
    "Scopes and transitions": ("scope.", "transition.", "component.", "rank.", "gradients."),
    "Calls and train steps": ("call.", "guard.", "step."),
    "Reference, engines, checkpoints": ("reference.", "weights.", "engine.", "checkpoint."),
    "Workers and warnings": ("worker.", "warning", "audit."),
}


def tables() -> str:
    """The section of the page that is made from the classes."""
    definitions = schema()["$defs"]
    left = dict.fromkeys(EVENTS)
    parts = []
    for title, prefixes in _GROUPS.items():
        names = [name for name in left if name.startswith(prefixes)]
        parts.append(f"### {title}\n")
        for name in names:
            del left[name]
            parts.append(_table(name, definitions[name]))
    assert not left, f"no group for {list(left)}"
    return "\n".join(parts)


def _table(name: str, definition: dict[str, Any]) -> str:
    fields = {key: field for key, field in definition["properties"].items() if key != "event"}
    lines = [f"#### `{name}`\n", _plain(definition["description"]), ""]
    if fields:
        lines += ["| field | type | |", "| --- | --- | --- |"]
        lines += [
            f"| `{key}` | {_kind(field)} | {_plain(field.get('description', ''))} |" for key, field in fields.items()
        ]
        lines.append("")
    return "\n".join(lines)


def _plain(text: str) -> str:
    # Markdown has one backtick where the docstrings have two.
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")


def _kind(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_kind(option) for option in field["anyOf"])
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    kind = field.get("type", "any")
    if kind == "array":
        return f"list of {_kind(field['items'])}" if "items" in field else "list"
    if kind == "object":
        inner = field.get("additionalProperties")
        return f"map to {_kind(inner)}" if isinstance(inner, dict) else "map"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _write() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables()}\n{END}{after}")


def test_the_tables_of_the_page_are_those_of_the_classes() -> None:
    found = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert found.strip() == tables().strip(), "run: python tests/audit/test_cli_docs.py"


def _commands() -> list[str]:
    text = PAGE.read_text()
    return sorted(
        {match[1].strip() for match in re.finditer(r"^ *(?:\$ )?(rl-session audit [^|>#`\n]+)", text, re.MULTILINE)}
    )


@pytest.mark.parametrize("command", _commands())
def test_every_command_of_the_page_runs(command: str, whole_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole_run.parent)
    for name in ("before", "after"):
        Path(f"{name}.jsonl").write_bytes(whole_run.read_bytes())
    if "--follow" in command:
        return  # waits; tested on its own
    arguments = [word.replace("--step 7", "--step 1") for word in shlex.split(command)[1:]]
    arguments = ["1" if word == "7" else word for word in arguments]
    result = CliRunner().invoke(_app, arguments, input=whole_run.read_bytes())
    assert result.exit_code == 0, result.output


def test_the_python_of_the_page_runs(whole_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole_run.parent)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        # pandas and polars are the reader's own, and a session needs torch.
        if any(name in block for name in ("pandas", "polars", "Session(")):
            compile(block, str(PAGE), "exec")
        else:
            exec(compile(block, str(PAGE), "exec"), {})  # noqa: S102  # the page's own examples


if __name__ == "__main__":
    _write()
