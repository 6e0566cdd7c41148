"""The schema of a line: frozen, so that a change of the format is a decision; and true of what is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from rl_session.audit import EVENTS, AuditLog, Change, StepCommitted, events
from rl_session.audit.schema import field_kinds, schema

jsonschema = pytest.importorskip("jsonschema")

FROZEN = Path(__file__).parents[2] / "docs" / "audit-schema.json"
REGENERATE = "python -m rl_session.audit.schema > docs/audit-schema.json"

SAMPLES: dict[Any, Any] = {
    str: "text",
    int: 7,
    float: 0.5,
    bool: True,
    list: [],
    dict: {},
    type(None): None,
}


@pytest.fixture(scope="module")
def validator() -> Any:
    return jsonschema.Draft202012Validator(schema())


def line(cls: type[events.Event], **fields: Any) -> dict[str, Any]:
    """A line of this event, with a value of an allowed type in each field."""
    envelope = {
        "schema": 1,
        "run_id": "r",
        "source": "driver",
        "seq": 0,
        "time_ns": 1,
        "mono_ns": 1,
        "event": cls.event,
        "policy": None,
        "scope_id": None,
        "transition_id": None,
        "step": None,
    }
    plain = {name: SAMPLES[min(kinds, key=lambda kind: kind.__name__)] for name, kinds in field_kinds(cls).items()}
    return {**envelope, **plain, **fields}


def test_the_schema_is_the_one_that_is_checked_in() -> None:
    """A failure here is a change of the log's format: a new field may be added, others break readers."""
    assert schema() == orjson.loads(FROZEN.read_bytes()), f"if the change is meant: {REGENERATE}"


def test_the_schema_is_written_by_running_its_module() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-m", "rl_session.audit.schema"]
    done = subprocess.run(command, check=True, capture_output=True, env=environ, timeout=60)
    assert done.stdout == FROZEN.read_bytes()


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert set(schema()["$defs"]) == {*EVENTS, "change"}


@pytest.mark.parametrize("name", sorted(EVENTS))
def test_each_event_fits_and_each_missing_or_wrong_field_does_not(name: str, validator: Any) -> None:
    good = line(EVENTS[name])
    assert list(validator.iter_errors(good)) == []
    for key in good:
        assert list(validator.iter_errors({k: v for k, v in good.items() if k != key}))
        assert list(validator.iter_errors({**good, key: {"an": ["odd", "value"]}})) or good[key] == {}


def test_what_the_log_writes_fits_the_schema(tmp_path: Path, validator: Any) -> None:
    path = tmp_path / "run.jsonl"
    with AuditLog(path) as log:
        log.write(StepCommitted(changed=[Change("grads", "none", 0)], loss=float("nan"), grad_norm=1.0), policy="a")
        log.write(events.SessionOpened(release="eager", verify="off", versions={"torch": "2"}))
        log.write(events.GuardRejected(method="train", mode="logprob", needs=["params"]))
        log.write(events.PolicyRecovered(origin="host"), step=3)
    lines = [orjson.loads(raw) for raw in path.read_bytes().splitlines()]
    assert [list(validator.iter_errors(found)) for found in lines] == [[], [], [], []]


def test_fields_that_a_processor_added_fit_and_an_unknown_event_does_not(validator: Any) -> None:
    good = line(events.PolicyClosed)
    assert not list(validator.iter_errors({**good, "host": "node-1"}))
    assert list(validator.iter_errors({**good, "event": "moon.landed"}))


def test_every_definition_is_described() -> None:
    for name, definition in schema()["$defs"].items():
        texts = [
            definition.get("description", "x"),
            *(f.get("description", "x") for f in definition["properties"].values()),
        ]
        assert all(texts), name
