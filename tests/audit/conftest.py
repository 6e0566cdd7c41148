"""A made-up run for the tools that read logs: two policies, four ranks, nested scopes, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from rl_session.audit import sibling_path

GB = 10**9
_START_NS = 1_796_064_853_000_000_000
_SIZES = {"params": 4 * GB, "optimizer": 16 * GB}
_UP = ("host", "device")
_DOWN = ("device", "host")


class FakeRun:
    """Writes lines with a clock of its own, so that every number in a test is known."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 0.0
        self.step: int | None = None
        self._lines: dict[str, list[bytes]] = {}
        self._transition = 0
        self._scope = 0
        self._policies: tuple[str, ...] = ()

    def write(self, event: str, *, source: str = "driver", policy: str | None = None, **fields: Any) -> None:
        lines = self._lines.setdefault(source, [])
        envelope = {
            "schema": 1,
            "run_id": "fake-run",
            "source": source,
            "seq": len(lines),
            "time_ns": _START_NS + round(self.now * 1e9),
            "mono_ns": 1_000_000 + round(self.now * 1e9),
            "event": event,
            "policy": policy,
            "scope_id": fields.pop("scope_id", None),
            "transition_id": fields.pop("transition_id", None),
            "step": self.step,
        }
        lines.append(orjson.dumps({**envelope, **fields}) + b"\n")
        self.now += 1e-6

    def save(self) -> Path:
        for source, lines in self._lines.items():
            path = self.path if source == "driver" else sibling_path(self.path, source)
            path.write_bytes(b"".join(lines))
        return self.path

    def open(self, *policies: str) -> None:
        self._policies = policies
        self.write(
            "session.opened", device_budget=80 * GB, host_budget=None, release="eager", verify="off", versions={}
        )
        for policy in policies:
            self.write(
                "policy.created",
                policy=policy,
                mode="offloaded",
                placement=dict.fromkeys(_SIZES, "host"),
                nbytes=_SIZES,
                num_ranks=4,
            )

    def close(self, error: str | None = None) -> None:
        for policy in self._policies:
            self.write("policy.closed", policy=policy, reason="session")
        self.write("session.closed", error=error, seconds=self.now)

    def transition(
        self,
        policy: str,
        modes: tuple[str, str],
        moves: dict[str, tuple[str, str]],
        *,
        scope_id: int | None,
        seconds: float = 0.1,
        num_ranks: int = 4,
        error: str | None = None,
        elided: bool = False,
        ends: bool = True,
    ) -> None:
        self._transition += 1
        ids = {"policy": policy, "scope_id": scope_id, "transition_id": self._transition}
        way = {"from_mode": modes[0], "to_mode": modes[1]}
        self.write("transition.started", reason=f"entering {modes[1]}_mode() at train.py:88", **ids, **way)
        self.now += seconds
        for rank in range(num_ranks):
            for component, (old, new) in moves.items():
                self.write(
                    "component.moved",
                    source=f"rank:{rank}" if num_ranks > 1 else "driver",
                    component=component,
                    from_tier=old,
                    to_tier=new,
                    nbytes=_SIZES[component] // num_ranks,
                    seconds=seconds / 2,
                    elided=elided,
                    **ids,
                )
        total = sum(_SIZES[component] for component in moves)
        if not ends:
            return
        if error is not None:
            self.write("transition.rolled_back", error=error, **ids, **way)
            return
        self.write(
            "transition.committed",
            **ids,
            **way,
            seconds=seconds,
            bytes_moved=0 if elided else total,
            bytes_elided=total if elided else 0,
            num_moves=num_ranks * len(moves),
            device_bytes=0,
            host_bytes=0,
        )

    def new_scope(self) -> int:
        self._scope += 1
        return self._scope

    def enter(self, policy: str, scope_id: int, mode: str, outer: str, depth: int, site: str = "train.py:88") -> None:
        self.write(
            "scope.entered",
            policy=policy,
            scope_id=scope_id,
            mode=mode,
            outer_mode=outer,
            depth=depth,
            via="scope",
            call_site=site,
        )

    def leave(
        self, policy: str, scope_id: int, mode: str, restored: str, seconds: float, error: str | None = None
    ) -> None:
        self.write(
            "scope.exited",
            policy=policy,
            scope_id=scope_id,
            mode=mode,
            restored_mode=restored,
            seconds=seconds,
            error=error,
        )

    def call(
        self, policy: str, method: str, mode: str, seconds: float, error: str | None = None, **fields: Any
    ) -> None:
        self.now += seconds
        self.write(
            "call.finished",
            policy=policy,
            method=method,
            mode=mode,
            seconds=seconds,
            error=error,
            changed=fields.pop("changed", []),
        )

    def training_step(self, step: int, policy: str = "actor", *, seconds: float = 0.1, num_ranks: int = 4) -> None:
        """A step of ten: 0.1 s in, 1 s of training with logprobs inside, 0.1 s out."""
        self.step = step
        moves = {"seconds": seconds, "num_ranks": num_ranks}
        outer, inner = self.new_scope(), self.new_scope()
        self.transition(policy, ("offloaded", "training"), dict.fromkeys(_SIZES, _UP), scope_id=outer, **moves)
        self.enter(policy, outer, "training", "offloaded", 0)
        self.call(policy, "train", "training", 1.0)
        self.transition(policy, ("training", "logprob"), {}, scope_id=inner, seconds=0.001)
        self.enter(policy, inner, "logprob", "training", 1, "train.py:93")
        self.call(policy, "get_logprobs", "logprob", 0.25)
        self.transition(policy, ("logprob", "training"), {}, scope_id=inner, seconds=0.001)
        self.leave(policy, inner, "logprob", "training", 0.252)
        self.transition(policy, ("training", "offloaded"), dict.fromkeys(_SIZES, _DOWN), scope_id=outer, **moves)
        self.leave(policy, outer, "training", "offloaded", 1.353 + seconds)
        self.step = None


@pytest.fixture
def fake_run(tmp_path: Path) -> FakeRun:
    """A run without records."""
    return FakeRun(tmp_path / "run.jsonl")


@pytest.fixture
def whole_run(fake_run: FakeRun) -> Path:
    """Three steps of one policy with four ranks; nothing goes wrong."""
    fake_run.open("actor")
    for step in range(3):
        fake_run.training_step(step)
    fake_run.close()
    return fake_run.save()


@pytest.fixture
def bad_run(fake_run: FakeRun) -> Path:
    """All that goes wrong, in a run that ends in the middle of a transition."""
    return write_bad_run(fake_run)


def write_bad_run(run: FakeRun, critic: str = "critic") -> Path:
    run.open("actor", critic)
    run.training_step(0)
    run.step = 1
    scope = run.new_scope()
    run.transition(
        "actor",
        ("offloaded", "training"),
        {},
        scope_id=scope,
        error="DeviceMemoryError: rank 2 needs 17.5 GB, 4.1 GB are free",
    )
    run.write("warning", policy="actor", code="slow_pin", message="pinning failed", nbytes=None, count=None)
    scope = run.new_scope()
    run.transition("actor", ("offloaded", "logprob"), {"params": _UP}, scope_id=scope)
    run.enter("actor", scope, "logprob", "offloaded", 0, "train.py:93")
    run.write("guard.rejected", policy="actor", method="train", mode="logprob", needs=["training", "resident"])
    run.call("actor", "get_logprobs", "logprob", 0.2, "NonFiniteError: [RLS306] NaN in the logits")
    run.transition("actor", ("logprob", "offloaded"), {"params": _DOWN}, scope_id=scope, elided=True)
    run.leave("actor", scope, "logprob", "offloaded", 0.31, "NonFiniteError")
    run.training_step(2)
    run.step = 3
    scope = run.new_scope()
    run.transition(critic, ("offloaded", "training"), dict.fromkeys(_SIZES, _UP), scope_id=scope)
    run.enter(critic, scope, "training", "offloaded", 0, "train.py:120")
    run.call(critic, "train", "training", 0.8)
    run.write("worker.lost", policy=critic, rank=2, cause="exit code -9")
    run.write("policy.faulted", policy=critic, cause="rank 2 was lost", remedy="policy.recover()")
    scope = run.new_scope()
    run.transition("actor", ("offloaded", "training"), {"params": _UP}, scope_id=scope, ends=False)
    return run.save()


@pytest.fixture
def hostile_run(fake_run: FakeRun) -> Callable[[str], Path]:
    """Makes a run in which a policy is called what the test likes."""
    return lambda name: write_bad_run(fake_run, name)
