"""A factory of policies that are closed afterwards; contents are compared at every move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import Make, Net, Rig, adamw
from torch import nn

import rl_session as rs
from rl_session.testing import EmulatedDevice


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """``make(model, optimizer factory or None, session=..., **attach)``."""
    sessions: list[rs.Session] = []

    def build(
        model: nn.Module | None = None,
        optimizer: Callable[[nn.Module], Any] | None = adamw,
        *,
        session: rs.Session | None = None,
        **options: Any,
    ) -> Rig:
        log = tmp_path / "run.jsonl"
        if session is None:
            session = rs.Session(log if not sessions else None, verify="checksum")
            sessions.append(session)
        model = model if model is not None else Net()
        made = optimizer(model) if optimizer is not None else None
        options.setdefault("device", EmulatedDevice())
        policy = session.attach(model, made, **options)
        return Rig(policy, model, made, session, log)

    yield build
    for session in reversed(sessions):
        session.close()


@pytest.fixture
def single_rank_process_group(tmp_path: Path) -> Iterator[None]:
    """torch.distributed with one rank, for what only needs a mesh."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
