"""Fixtures for test suites of loops.

A suite asks for them in its ``conftest.py``:

    pytest_plugins = ["rl_session.testing.pytest"]

There is no entry point: that would load torch at the start of every test run of an environment that has this library.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rl_session.generation.fake import FakeEngine
from rl_session.offload.device import EmulatedDevice
from rl_session.session import Session
from rl_session.testing.audit import CapturedAudit, captured_audit

__all__ = ["audit_records", "checked_session", "emulated_device", "fake_engine"]


@pytest.fixture
def emulated_device() -> EmulatedDevice:
    """A device whose freed memory is NaN, so that what is read too late shows. Set ``.capacity`` for a limit."""
    device = EmulatedDevice()
    device.poison()
    return device


@pytest.fixture
def audit_records() -> Iterator[CapturedAudit]:
    """The records of every session that the test opens; at the end they must replay without a contradiction."""
    with captured_audit() as captured:
        yield captured
    captured.assert_consistent()


@pytest.fixture
def checked_session(audit_records: CapturedAudit) -> Iterator[Session]:
    """A session that compares contents at every move (``verify="checksum"``), closed after the test."""
    del audit_records
    with Session(verify="checksum") as session:
        yield session


@pytest.fixture
def fake_engine(emulated_device: EmulatedDevice) -> FakeEngine:
    """A generation engine on ``emulated_device``, with 64 KiB of weights and as much of a KV cache."""
    return FakeEngine(emulated_device, weights=2**16, kv_nbytes=2**16)
