"""Any sequence of scopes, refits, faults and evictions: the budget holds, and nothing but the last whole push is served."""

from __future__ import annotations

import gc
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from engine_rig import ONE, Rig, loss_fn, prompts
from hypothesis import HealthCheck, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import rl_session as rs
from rl_session.audit.check import assert_log_is_consistent

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
OPERATIONS = ["wake", "sleep", "bucket", "update_weights", "generate", "reset_cache"]


class Loop(RuleBasedStateMachine):
    """A policy and an engine on one device, driven at random; the model is the CRC of the last push that succeeded."""

    @initialize(
        capacity=strategies.sampled_from([4, 5, 6, 8, 20]),
        release=strategies.sampled_from(["eager", "lazy"]),
        level=strategies.sampled_from([1, 2]),
        host=strategies.booleans(),
    )
    def start(self, capacity: int, release: str, level: int, host: bool) -> None:
        gc.collect()
        gc.disable()  # the device counts what lives: when cycles die must not depend on what ran before
        self.folder = tempfile.TemporaryDirectory()
        self.rig = Rig(
            Path(self.folder.name) / "run.jsonl",
            capacity=capacity * ONE,
            release=release,
            sleep_level=level,
            fake={"accepts_host_weights": host},
        )
        self.capacity = capacity * ONE
        self.scopes: list[Any] = []
        self.served = self.rig.fake.fingerprint
        """CRC of the weights that may be served."""

    # -- what a program does -------------------------------------------------------------------------------------

    def enter(self, scope: Any) -> None:
        scope.__enter__()
        self.scopes.append(scope)

    @rule(which=strategies.sampled_from(["awake", "weights", "generation", "training", "logprob", "offloaded"]))
    def open(self, which: str) -> None:
        rig = self.rig
        scope = {
            "awake": rig.engine.awake,
            "weights": lambda: rig.engine.awake(tags=["weights"]),
            "generation": rig.policy.generation_mode,
            "training": rig.policy.training_mode,
            "logprob": rig.policy.logprob_mode,
            "offloaded": rig.policy.offloaded,
        }[which]()
        with suppress(rs.RLSessionError):
            self.enter(scope)

    @precondition(lambda self: self.scopes)
    @rule()
    def close(self) -> None:
        with suppress(rs.WorldError):
            self.scopes.pop().__exit__(None, None, None)

    @rule(bucket=strategies.sampled_from([None, 1, 1000]))
    def refit(self, bucket: int | None) -> None:
        before = self.rig.engine.version
        with suppress(rs.RLSessionError):
            self.rig.policy.refit(bucket_nbytes=bucket)
        if self.rig.engine.version > before:
            self.served = self.rig.weights_crc()

    @rule()
    def generate(self) -> None:
        try:
            found = self.rig.engine.generate(prompts())
        except (rs.StaleWeightsError, rs.ModeError, rs.EngineError, rs.FaultedError):
            return
        assert int(found["fingerprint"][0]) == self.served

    @rule()
    def train(self) -> None:
        with suppress(rs.ModeError):
            self.rig.policy.train(prompts(), loss_fn)

    @rule()
    def sleep(self) -> None:
        with suppress(rs.RLSessionError):
            self.rig.engine.sleep()

    @rule(nbytes=strategies.sampled_from([0, ONE, 3 * ONE]))
    def make_room(self, nbytes: int) -> None:
        with suppress(rs.RLSessionError):
            self.rig.session.make_room(nbytes)

    # -- what happens to it --------------------------------------------------------------------------------------

    @rule(
        operation=strategies.sampled_from(OPERATIONS),
        k=strategies.integers(1, 3),
        point=strategies.sampled_from(["before", "half", "after"]),
        returns_false=strategies.booleans(),
    )
    def break_engine(self, operation: Any, k: int, point: Any, returns_false: bool) -> None:
        returns_false = returns_false and operation != "generate"  # what that returns is no answer
        self.rig.fake.fail(operation, k, point, False if returns_false else None)

    @rule()
    def heal(self) -> None:
        self.rig.fake.heal()
        self.rig.engine.recover()

    # -- what holds ----------------------------------------------------------------------------------------------

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.rig.device.peak <= self.capacity
        in_use = self.rig.session.memory()["devices"][0]["in_use"]
        assert self.rig.device.resident_bytes <= in_use <= self.capacity or self.rig.engine.health == "faulted"

    @invariant()
    def what_is_said_is_so(self) -> None:
        control = self.rig.engine._control
        if control.health == "ok" and not control.pending:
            assert set(control.awake) == self.rig.fake.awake_tags
        assert self.rig.policy.health == "ok"
        if not self.scopes:
            assert control.frames == []
            assert self.rig.policy._control.frames == []
            assert self.rig.policy.mode is rs.Mode.OFFLOADED

    def teardown(self) -> None:
        try:
            self.finish()
        finally:
            gc.enable()
            self.rig.session.close()
            self.folder.cleanup()

    def finish(self) -> None:
        """What went wrong is mended, and a step is right; the log tells it without a contradiction."""
        rig = self.rig
        rig.fake.heal()
        while self.scopes:
            self.close()
        rig.engine.recover()
        rig.policy.refit()
        with rig.policy.generation_mode() as policy:
            assert int(policy.generate(prompts())["fingerprint"][0]) == rig.weights_crc()
        rig.session.close()
        assert_log_is_consistent(rig.path)


Loop.TestCase.settings = settings(
    max_examples=400 if NIGHTLY else 15,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_any_sequence = pytest.mark.slow(Loop.TestCase)
