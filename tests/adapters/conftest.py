"""A session that logs, and whose log must be consistent when the test is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rl_session as rs
from rl_session.audit.check import assert_log_is_consistent


@pytest.fixture
def audit_path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def session(audit_path: Path) -> Iterator[rs.Session]:
    """Closed at the end, and its log replayed and checked, with every tier and byte in it."""
    session = rs.Session(audit_path)
    yield session
    session.close()
    assert_log_is_consistent(audit_path)
