"""Rigs whose sessions are closed at the end, and whose logs are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_rig import Rig

from rl_session.audit.check import assert_log_is_consistent


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Make rigs; their sessions are closed at the end, and their logs checked."""
    made: list[Rig] = []

    def build(**arguments: Any) -> Rig:
        rig = Rig(tmp_path / f"run{len(made)}.jsonl", **arguments)
        made.append(rig)
        return rig

    yield build
    assert torch.is_grad_enabled()
    for rig in made:
        rig.fake.heal()
        rig.fake.finish_requests()
        rig.device.heal()
        rig.session.close()
        assert_log_is_consistent(rig.path)
