"""A small heap for the collector while the machine runs, and its figures at the end."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _small_heap() -> Iterator[None]:
    """Every example collects garbage: keep what the imports left out of its way."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much was tried."""
    stage = sys.modules.get("stage")
    if stage is not None and stage.figures["examples"]:
        told = ", ".join(f"{number} {what}" for what, number in stage.figures.items())
        terminalreporter.write_line(f"lifecycle machine: {told}")
