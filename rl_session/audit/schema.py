"""The JSON Schema of a line, made from the event classes: the envelope, and one definition for each event.

    python -m rl_session.audit.schema > docs/audit-schema.json

Knows the classes and nothing of files. Readers stay tolerant; the schema says what this version writes.
"""

from __future__ import annotations

import sys
import types
import typing
from typing import Any

import attrs
import orjson

from rl_session.audit import events
from rl_session.audit.envelope import ENVELOPE, SCHEMA
from rl_session.audit.events import EVENTS, Change, Event

__all__ = ["field_kinds", "schema"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    # NaN and infinities have no form in JSON.
    float: {"type": ["number", "null"]},
    bool: {"type": "boolean"},
    types.NoneType: {"type": "null"},
}
_ENVELOPE: dict[str, dict[str, Any]] = {
    "schema": {"const": SCHEMA, "description": "Version of the line format."},
    "run_id": {"type": "string", "description": "Which run wrote it."},
    "source": {"type": "string", "description": "Which process of the run: driver, driver:<actor or pid>, rank:<n>."},
    "seq": {"type": "integer", "minimum": 0, "description": "Position among the lines of that source, without gaps."},
    "time_ns": {"type": "integer", "description": "Wall clock, nanoseconds since 1970."},
    "mono_ns": {"type": "integer", "description": "Monotonic clock of the source, nanoseconds."},
    "event": {"type": "string", "description": "Name of the event."},
    "policy": {"type": ["string", "null"], "description": "The policy concerned."},
    "scope_id": {"type": ["integer", "null"], "description": "The innermost scope concerned."},
    "transition_id": {"type": ["integer", "null"], "description": "The transition that it belongs to."},
    "step": {"type": ["integer", "null"], "description": "The session's step number."},
}


def schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12) of one line.

    Fields that a processor added are allowed: a definition says what is there at least.
    """
    return {
        "$schema": _DIALECT,
        "$id": f"https://rl-session.invalid/audit/v{SCHEMA}.json",
        "title": "A line of an rl-session audit log",
        "type": "object",
        "properties": _ENVELOPE,
        "required": list(ENVELOPE),
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in EVENTS],
        "$defs": {**{name: _definition(cls) for name, cls in EVENTS.items()}, "change": _change()},
    }


def field_kinds(cls: type[Event]) -> dict[str, frozenset[type]]:
    """Return, for each field of an event, the exact types that its value may have on a line."""
    return {name: _kinds(hint) for name, hint in _hints(cls).items()}


def _hints(cls: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, vars(events))
    return {field.name: hints[field.name] for field in attrs.fields(cls)}


def _kinds(hint: Any) -> frozenset[type]:
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return frozenset().union(*(_kinds(part) for part in typing.get_args(hint)))
    if origin is tuple:
        return frozenset({list})
    if hint is float:
        return frozenset({float, int, types.NoneType})
    return frozenset({origin or hint})


def _definition(cls: type[Event]) -> dict[str, Any]:
    doc = (cls.__doc__ or "").strip()
    texts = _field_texts(doc)
    fields = {name: {**_of(hint), "description": texts[name]} for name, hint in _hints(cls).items()}
    return {
        "description": " ".join(doc.partition("\n\n    Attributes:")[0].split()),
        "properties": {"event": {"const": cls.event}, **fields},
        "required": ["event", *fields],
    }


def _change() -> dict[str, Any]:
    texts = _field_texts(Change.__doc__ or "")
    fields = {name: {**_of(hint), "description": texts[name]} for name, hint in _hints(Change).items()}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _of(hint: Any) -> dict[str, Any]:
    """The schema of a value."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Change:
        return {"$ref": "#/$defs/change"}
    if origin is types.UnionType:
        kinds = [kind for part in inner for kind in _as_list(_of(part)["type"])]
        rest = next((_of(part) for part in inner if part is not types.NoneType), {})
        return {**rest, "type": list(dict.fromkeys(kinds))}
    if origin is tuple:
        return {"type": "array", "items": _of(inner[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of(inner[1])}
    return dict(_PLAIN[hint])


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _field_texts(doc: str) -> dict[str, str]:
    """What the ``Attributes:`` of a docstring say, by name."""
    texts: dict[str, str] = {}
    name = ""
    for line in doc.partition("Attributes:\n")[2].splitlines():
        indent = len(line) - len(line.lstrip())
        if indent == 8:
            name, _, text = line.strip().partition(": ")
            texts[name] = text
        elif indent > 8 and name:
            texts[name] += f" {line.strip()}"
    return texts


def main() -> None:
    """Write the schema to standard output."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    sys.stdout.buffer.write(orjson.dumps(schema(), option=options))


if __name__ == "__main__":
    main()
