"""Processors that hand records on: receivers see every record, and cannot change or break the file."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from rl_session.audit import AuditLog, ComponentMoved, PolicyClosed, read_audit
from rl_session.audit.forward import to_callable, to_logging, to_structlog

EVENT = PolicyClosed(reason="close")
MOVED = ComponentMoved(component="params", from_tier="host", to_tier="device", nbytes=8, seconds=0.1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def test_any_callable_gets_a_copy_of_each_record(path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def receive(record: dict[str, Any]) -> None:
        seen.append(dict(record))
        record.clear()

    with AuditLog(path, processors=[to_callable(receive)]) as log:
        log.write(EVENT, policy="actor")
        log.write(MOVED)
    assert [record["event"] for record in seen] == ["policy.closed", "component.moved"]
    assert seen == [record.to_dict() for record in read_audit(path)]


def test_a_callable_may_stand_alone_without_a_file() -> None:
    seen: list[Any] = []
    with AuditLog(None, processors=[to_callable(seen.append)]) as log:
        log.write(EVENT)
    assert seen[0]["reason"] == "close"


def test_standard_logging_gets_the_name_as_message_and_the_record_as_audit(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("application.audit")
    with caplog.at_level(logging.INFO, logger=logger.name):
        with AuditLog(path, processors=[to_logging(logger)]) as log:
            log.write(EVENT, policy="actor")
    (record,) = caplog.records
    assert record.getMessage() == "policy.closed actor"
    assert record.name == "application.audit"
    assert record.audit["reason"] == "close"  # type: ignore[attr-defined]


def test_standard_logging_below_its_level_gets_nothing_and_the_file_does(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("application.quiet")
    with caplog.at_level(logging.WARNING, logger=logger.name):
        with AuditLog(path, processors=[to_logging(logger, logging.DEBUG)]) as log:
            log.write(EVENT)
    assert not caplog.records
    assert sum(1 for _ in read_audit(path)) == 1


@pytest.fixture
def application() -> Iterator[list[Any]]:
    """An application with a structlog configuration of its own."""
    seen: list[Any] = []

    def keep(_logger: Any, _method: str, record: Any) -> Any:
        seen.append(dict(record))
        raise structlog.DropEvent

    structlog.configure(processors=[structlog.processors.add_log_level, keep])
    yield seen
    structlog.reset_defaults()


def test_a_structlog_logger_gets_the_event_and_its_values_under_its_own_configuration(
    path: Path, application: list[Any]
) -> None:
    logger = structlog.get_logger().bind(host="node-1")
    with AuditLog(path, processors=[to_structlog(logger, "warning")]) as log:
        log.write(MOVED, policy="actor", transition_id=4)
    (seen,) = application
    assert (seen["event"], seen["level"], seen["host"]) == ("component.moved", "warning", "node-1")
    assert (seen["policy"], seen["transition_id"], seen["nbytes"]) == ("actor", 4, 8)
    (record,) = read_audit(path)
    assert record.extra == {}, "what the application binds is not in the file"


@pytest.mark.parametrize("make", [to_callable, to_structlog], ids=["callable", "structlog"])
def test_a_receiver_that_raises_costs_no_record(path: Path, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def __call__(self, *args: Any) -> None:
            raise ZeroDivisionError

        info = __call__

    with AuditLog(path, processors=[make(Broken())]) as log:
        log.write(EVENT)
        log.write(EVENT)
    assert sum(1 for _ in read_audit(path)) == 2
    assert log.dropped == 0
    assert len(caplog.records) == 1


def test_several_receivers_each_see_every_record(path: Path) -> None:
    first: list[Any] = []
    second: list[Any] = []
    with AuditLog(path, processors=[to_callable(first.append), to_callable(second.append)]) as log:
        log.write(EVENT)
    assert first == second
    assert first[0] is not second[0]
