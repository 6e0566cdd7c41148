"""A small policy on several ranks: in one process with a scripted group, or as Ray actors on one shared cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_rig
from rank_rig import Rig, Tiny, make_optimizer

import rl_session as rs
from rl_session.audit.check import assert_log_is_consistent
from rl_session.testing import EmulatedDevice, FakeWorkers


@pytest.fixture(scope="session", autouse=True)
def _by_value() -> None:
    """Workers cannot import ``rank_rig``: what it defines travels with the call."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(rank_rig)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """One Ray cluster on this machine, for all tests of this process."""
    import ray

    ray.init(num_cpus=32, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Make rigs; their sessions are closed at the end, whatever state they are in."""
    made: list[Rig] = []

    def build(
        workers: Any = None,
        *,
        warm: bool = True,
        capacity: int | None = None,
        session: rs.Session | None = None,
        name: str = "actor",
        offload: rs.OffloadConfig | None = None,
        session_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> Rig:
        path = tmp_path / f"audit{len(made)}.jsonl"
        session = session or rs.Session(path, verify="checksum", **(session_options or {}))
        policy = session.policy(
            name,
            model=Tiny,
            optimizer=make_optimizer,
            workers=workers if workers is not None else FakeWorkers(4),
            device=EmulatedDevice(capacity),
            offload=offload,
            **options,
        )
        rig = Rig(session, policy, path)
        made.append(rig)
        if warm:
            with policy.training_mode():
                rig.train()
        return rig

    yield build
    for rig in made:
        rig.session.close()
    for rig in made:
        if rig.path.exists():
            assert_log_is_consistent(rig.path)
