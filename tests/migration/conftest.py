"""Rigs of the shim's tests, made and closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shim_rig import Actor, Critic, MainGrad, Rig

import rl_session as rs
from rl_session.audit.check import assert_log_is_consistent
from rl_session.testing import EmulatedDevice
from rl_session_migrate import LegacyPolicy, LegacyValue
from rl_session_migrate.shim import notice


@pytest.fixture(autouse=True)
def _forget_warnings() -> Iterator[None]:
    """Each test begins as if no call site had been warned about."""
    notice._warned.clear()
    yield
    notice._warned.clear()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Make rigs; their sessions are closed at the end and their logs checked."""
    made: list[Rig] = []

    def build(
        *,
        kind: str = "policy",
        backend: str = "dtensor",
        flat: bool = False,
        config: Any = None,
        log: bool = True,
        capacity: int | None = None,
        reference: Any = None,
        seed: int = 0,
        **offload: Any,
    ) -> Rig:
        torch.manual_seed(seed)
        model = Actor() if kind == "policy" else Critic()
        optimizer = MainGrad(model.parameters()) if flat else torch.optim.AdamW(model.parameters(), lr=0.05)
        path = tmp_path / f"run{len(made)}.jsonl"
        session = rs.Session(path if log else None, verify="checksum")
        options: dict[str, Any] = {"device": EmulatedDevice(capacity), "offload": rs.OffloadConfig(**offload)}
        if kind == "policy":
            policy: Any = session.attach(model, optimizer, name="actor", reference=reference, **options)
            legacy: Any = LegacyPolicy(policy, backend=backend, config=config)  # type: ignore[arg-type]
        else:
            policy = session.attach_value(model, optimizer, name="critic", **options)
            legacy = LegacyValue(policy, backend=backend, config=config)  # type: ignore[arg-type]
        policy.device.poison()
        rig = Rig(session, legacy, model, optimizer, path)
        made.append(rig)
        return rig

    yield build
    for rig in made:
        rig.device.heal()
        rig.session.close()
        if rig.path.exists():
            assert_log_is_consistent(rig.path)
