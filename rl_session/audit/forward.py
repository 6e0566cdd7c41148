"""Processors that hand each record on, to a structlog logger, to standard logging, or to any callable.

    AuditLog(path, processors=[to_logging(logging.getLogger("audit"))])

The file is written all the same, and nothing that a receiver does to its record reaches it. Receivers run under the
log's lock, in the thread that wrote; one that raises is reported once and passed over. Knows nothing of events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from structlog.typing import EventDict, Processor, WrappedLogger

__all__ = ["to_callable", "to_logging", "to_structlog"]


def to_callable(receive: Callable[[dict[str, Any]], object]) -> Processor:
    """Make a processor that calls ``receive(record)`` with a copy: the envelope and the event's fields, flat."""

    def forward(_logger: WrappedLogger, _method: str, record: EventDict) -> EventDict:
        receive(dict(record))
        return record

    return forward


def to_logging(logger: logging.Logger, level: int = logging.INFO) -> Processor:
    """Make a processor that logs each record: the event's name as the message, the whole record as ``audit``.

    Args:
        logger: A logger of the standard library. Handlers find the record as ``log_record.audit``.
        level: The level; nothing is done where the logger is not enabled for it.
    """

    def forward(_logger: WrappedLogger, _method: str, record: EventDict) -> EventDict:
        if logger.isEnabledFor(level):
            # One dictionary under one name: fields such as "name" or "args" are the log record's own.
            logger.log(level, "%s %s", record["event"], record["policy"] or "", extra={"audit": dict(record)})
        return record

    return forward


def to_structlog(logger: Any, method: str = "info") -> Processor:
    """Make a processor that logs each record on a structlog logger: the event's name as its event, the rest as values.

    Args:
        logger: What ``structlog.get_logger()`` gives, with the application's own configuration.
        method: The method that is called.
    """

    def forward(_logger: WrappedLogger, _method: str, record: EventDict) -> EventDict:
        values = dict(record)
        getattr(logger, method)(values.pop("event"), **values)
        return record

    return forward
