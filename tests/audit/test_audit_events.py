"""The vocabulary: names, fields, and that each event survives the way to the file and back."""

from __future__ import annotations

import typing
from pathlib import Path
from types import UnionType
from typing import Any

import attrs
import orjson
import pytest

from rl_session.audit import EVENTS, AuditLog, Change, Event, StepCommitted, UnknownEvent, events, read_audit
from rl_session.audit.envelope import ENVELOPE

# The fields that the design lists. Written out again on purpose: renaming one breaks every reader.
DESIGNED_FIELDS = {
    "policy.created": {"mode", "placement", "nbytes", "num_ranks"},
    "scope.entered": {"mode", "outer_mode", "depth", "via", "call_site"},
    "scope.exited": {"mode", "restored_mode", "seconds", "error"},
    "transition.started": {"from_mode", "to_mode", "reason", "via", "call_site"},
    "transition.committed": {
        "from_mode",
        "to_mode",
        "seconds",
        "bytes_moved",
        "bytes_elided",
        "num_moves",
        "device_bytes",
        "host_bytes",
    },
    "transition.rolled_back": {"from_mode", "to_mode", "error"},
    "transition.failed": {"from_mode", "to_mode", "error"},
    "component.moved": {"component", "from_tier", "to_tier", "nbytes", "seconds", "elided"},
    "call.finished": {"method", "mode", "seconds", "error", "changed", "via", "call_site", "digest"},
    "guard.rejected": {"method", "mode", "needs"},
    "weights.published": {"version", "nbytes", "engine", "skipped"},
}

SAMPLES: dict[Any, Any] = {
    str: "optimizer",
    int: 2**40,
    float: 0.25,
    bool: True,
    dict[str, str]: {"params": "device", "grads": "none"},
    dict[str, int]: {"params": 1024},
    tuple[str, ...]: ("params", "buffers"),
    tuple[Change, ...]: (Change("grads", "none", 0), Change("optimizer", "device", 4096)),
}


def sample(cls: type[Event], *, optional: bool) -> Event:
    """An event with every field set, or with None wherever None is allowed."""
    hints = typing.get_type_hints(cls, vars(events))
    values = {}
    for field in attrs.fields(cls):
        hint = hints[field.name]
        if isinstance(hint, UnionType):
            kind, none = typing.get_args(hint)
            assert none is type(None)
            values[field.name] = SAMPLES[kind] if optional else None
        else:
            values[field.name] = SAMPLES[hint]
    return cls(**values)


@pytest.mark.parametrize("optional", [True, False], ids=["set", "none"])
@pytest.mark.parametrize("name", sorted(EVENTS))
def test_every_event_comes_back_from_the_file_as_it_went_in(tmp_path: Path, name: str, *, optional: bool) -> None:
    event = sample(EVENTS[name], optional=optional)
    with AuditLog(tmp_path / "run.jsonl", run_id="r1") as log:
        log.write(event, policy="actor", scope_id=3, transition_id=7, step=1)
    (record,) = read_audit(tmp_path / "run.jsonl")

    assert record.event == event
    assert type(record.event) is EVENTS[name]
    assert record.name == name
    assert record.extra == {}
    assert (record.schema, record.run_id, record.source, record.seq) == (1, "r1", "driver", 0)
    assert (record.policy, record.scope_id, record.transition_id, record.step) == ("actor", 3, 7, 1)
    assert record.to_dict() == orjson.loads((tmp_path / "run.jsonl").read_bytes())


def test_every_event_class_is_registered_under_a_name_of_its_own() -> None:
    classes = {
        value
        for value in vars(events).values()
        if isinstance(value, type) and issubclass(value, Event) and value not in {Event, UnknownEvent}
    }
    assert set(EVENTS.values()) == classes
    assert len(EVENTS) == len(classes)
    assert all(cls.event == name for name, cls in EVENTS.items())


def test_no_event_has_a_field_that_would_overwrite_the_envelope() -> None:
    taken = {
        (name, field.name) for name, cls in EVENTS.items() for field in attrs.fields(cls) if field.name in ENVELOPE
    }
    assert not taken


@pytest.mark.parametrize("name", sorted(DESIGNED_FIELDS))
def test_events_have_exactly_the_designed_fields(name: str) -> None:
    assert {field.name for field in attrs.fields(EVENTS[name])} == DESIGNED_FIELDS[name]


@pytest.mark.parametrize("name", sorted(EVENTS))
def test_every_field_is_documented(name: str) -> None:
    doc = EVENTS[name].__doc__ or ""
    assert all(f"        {field.name}: " in doc for field in attrs.fields(EVENTS[name]))


def test_events_are_frozen_and_lists_become_tuples() -> None:
    event = StepCommitted(changed=[Change("grads", "none", 0)], loss=0.5)
    assert event.changed == (Change("grads", "none", 0),)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        event.loss = 1.0  # type: ignore[misc]


def test_a_lone_string_is_one_need_and_not_its_letters() -> None:
    event = events.GuardRejected(method="train", mode="logprob", needs="training")
    assert event.needs == ("training",)
