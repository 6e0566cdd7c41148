"""Any sequence of anything: scopes, steps, legacy calls, checkpoints, engines, evictions and faults, against a model.

Two policies and an engine share a device, eagerly or lazily, with room for all or not. After every step each policy is in the
mode that the model says, its bytes are where the model says (found by looking at storages, and by what the device counts), and
they are bit for bit those of a twin in plain torch that did the same. What must be refused is refused by the named error; what
fails leaves a state that the rules of scopes allow. At the end the log replays without a contradiction, to that same placement.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lifecycle_model import COMPONENTS, LEGACY, Engine, Policy, Refused, World
from stage import BACKENDS, Player, Stage, figures
from twins import SEQS, TOKENS, broken_loss, loss_fn, make_batch, nan_loss

import rl_session as rs
from rl_session.audit.check import assert_log_is_consistent
from rl_session.audit.replay import replay

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
WHO = st.sampled_from(list(BACKENDS))
SEEDS = st.integers(0, 3)
MODES = ["training", "logprob", "refit", "offloaded"]
_BY_CODE = {getattr(rs, name).code: name for name in rs.__all__ if name.endswith("Error")}
_LEVEL = {"none": 0, "host": 1, "device": 2}


class Noted(Exception):  # noqa: N818 (what a body's error carries)
    """The way out of a scope failed while the block's own error was on its way."""

    def __init__(self, note: str) -> None:
        super().__init__(note)
        found = re.search(r"\[(RLS\d+)\]", note)
        assert found, note
        self.name = _BY_CODE[found[1]]


def name_of(error: Exception) -> str:
    return error.name if isinstance(error, Noted) else type(error).__name__


class Lifecycle(RuleBasedStateMachine):
    """The machine. ``world`` is the model, ``stage`` the real thing."""

    @initialize(
        release=st.sampled_from(["eager", "lazy"]),
        capacity=st.sampled_from([None, None, 3000, 3600, 5000, 8000]),
        base=st.sampled_from(["offloaded", "resident"]),
        flags=st.tuples(st.booleans(), st.booleans()),
        live_gradients=st.sampled_from(["preserve", "preserve", "refuse", "discard"]),
        optimizers=st.tuples(*[st.sampled_from(["adamw", "sgd", "fused"])] * 2),
        level=st.sampled_from([1, 1, 2]),
        delay=st.booleans(),
    )
    def start(self, flags: tuple[bool, bool], **setup: Any) -> None:
        gc.disable()  # the device counts what lives: when cycles die must not depend on what ran before
        self.folder = tempfile.TemporaryDirectory()
        setup |= {"logprob": flags[0], "refit": flags[1]}
        self.setup = setup
        self.stage = Stage(Path(self.folder.name), setup)
        self.over = False
        self.passed: tuple[str, ...] = ()
        self.faults: list[tuple[bool, dict[str, Any]]] = []
        self.served = self.stage.fake.fingerprint
        policies = []
        for player in self.stage.players.values():
            policy = Policy(player.name, sizes_of(player), flags=setup, base=setup["base"])
            policy.place["X"] = "device" if player.twin.has_extra else "none"
            policy.rest_stored = dict(policy.place)
            policies.append(policy)
        sizes = self.stage.fake._sizes
        engine = Engine(sizes, lazy=setup["release"] == "lazy", level=setup["level"])
        self.world = World(policies, engine, setup["capacity"])
        figures["examples"] += 1
        self.rebase()
        if setup["capacity"] is not None:  # both begin on the device, before it had a limit
            for name in BACKENDS:
                self.do_offload(name)
            self.stage.device.peak = 0

    # -- one step ------------------------------------------------------------------------------------------------

    def attempt(
        self, real: Callable[[], Any], effect: Callable[[], Any], *, retries: bool = False, passes: tuple[str, ...] = ()
    ) -> tuple[Any, str]:
        """Do it for real and on the model; returns the result, and the name of the error where there was one.

        Args:
            real: The operation.
            effect: What it does to the model.
            retries: Whether it tries again by itself what has failed.
            passes: Rows of the mode table that it passes on its way.

        Raises:
            AssertionError: They disagree.
        """
        figures["steps"] += 1
        self.passed = passes
        self.world.is_recording = bool(self.faults)
        needed = self.world.is_recording or self.world.capacity is not None
        self.before = self.world.copy() if needed else self.world
        self.world.trail = [self.before]
        result, error = None, None
        with self.armed() as faults:
            try:
                result = real()
            except (rs.RLSessionError, Noted) as raised:
                error = raised
        try:
            return self.judge(result, error, effect, faults, retries=retries)
        finally:
            error = None  # it holds this frame, and its own frames hold gradients

    def judge(
        self, result: Any, error: Exception | None, effect: Callable[[], Any], faults: list[Any], *, retries: bool
    ) -> tuple[Any, str]:
        """Do it on the model, and compare what came of it."""
        refused: tuple[str, ...] = ()
        try:
            effect()
        except Refused as refusal:
            refused = refusal.names
        name = "" if error is None else name_of(error)
        if any(fault.fired for fault in faults):
            figures["faults"] += 1
            if error is None and retries:
                return result, name
            assert error is not None, f"a fault went by without a word: {faults}"
            self.adopt(error, says_no=any(fault.fired and fault.error is False for fault in faults))
            return None, name
        if refused:
            figures["refusals"] += 1
            assert name in refused, f"must be refused with {refused}, not {error!r}"
        elif error is not None:
            raise AssertionError(f"should have worked; {self.setup}") from error
        return result, name

    @contextmanager
    def armed(self) -> Iterator[list[Any]]:
        """A block with the faults that were ordered; those that did not happen in it are for the next one."""
        orders = self.faults
        armed = [(self.stage.fake if is_engine else self.stage.device).fail(**order) for is_engine, order in orders]
        try:
            yield armed
        finally:
            self.faults = [order for order, fault in zip(orders, armed, strict=True) if not fault.fired]
            self.stage.device.heal()
            self.stage.fake.heal()

    def adopt(self, error: Exception, *, says_no: bool) -> None:
        """After a fault: the world must be one of those that the rules allow, and the model becomes that one."""
        text = f"{error} {error.__cause__!r} {getattr(error, '__notes__', ())}"
        assert says_no or "injected" in text, text
        self.mend()
        if self.over:
            return
        num = len(self.stage.engine._control.frames)
        worlds = [w for w in (*self.world.trail, self.world) if len(w.engine.frames) == num]
        found = [w for w in worlds if all(self.agrees(w, n) for n in BACKENDS)]
        seen = {
            n: (p.policy.mode.value, p.placement(), p.control._pending_release) for n, p in self.stage.players.items()
        }
        assert found, f"no rule allows this state after {error}: {seen}"
        self.world = found[0]
        self.world.trail = []
        self.see_engine()
        self.rebase()

    def agrees(self, world: World, name: str) -> bool:
        """Whether a policy is as ``world`` has it, or with less on the device where room may have been short."""
        policy, player = world.policies[name], self.stage.players[name]
        control = player.control
        if (policy.mode, policy.row, len(policy.frames)) != (
            control.mode.value,
            control.row.value,
            len(control.frames),
        ):
            return False
        if policy.pending != control._pending_release:
            return False
        return self.lowered(world, name) is not None

    def lowered(self, world: World, name: str) -> dict[str, str] | None:
        """The placement found, if it is the model's but for what may have been evicted; else None."""
        policy, seen = world.policies[name], self.stage.players[name].placement()
        if seen == policy.place:
            return seen
        if world.capacity is None:
            return None
        was = self.before.policies[name]
        kept = was.kept((was.row, None), *((row, None) for row in self.passed), (policy.row, None))
        wanted = policy.cells_of(policy.row)
        for c in COMPONENTS:
            if seen[c] == policy.place[c]:
                continue
            lower = _LEVEL.get(seen[c], 9) < _LEVEL[policy.place[c]]
            needed = (c in kept and c in policy.kept()) or (wanted[c] == "device" and seen[c] != "none")
            if not lower or needed or (seen[c] == "none" and (c != "G" or policy.live)):
                return None
        return seen

    # -- what is checked after every step ------------------------------------------------------------------------

    @invariant()
    def it_is_as_the_model_says(self) -> None:
        if not hasattr(self, "stage") or self.over:
            return
        for name, player in self.stage.players.items():
            policy = self.world.policies[name]
            assert player.policy.mode.value == policy.mode, name
            assert player.policy.resting_mode.value == policy.rest_mode, name
            assert player.policy.health == "ok", name
            assert [f.mode.value for f in player.control.frames] == [f.mode for f in policy.frames], name
            assert player.control._pending_release == policy.pending, name
            self.take_evictions(name)
            assert (player.policy.open_step is not None) == bool(policy.step), name
            assert not player.differences(), (name, player.differences())
        self.check_engine()
        self.check_device()
        if not any(p.frames for p in self.world.policies.values()) and not self.world.engine.frames:
            assert torch.is_grad_enabled(), "a scope left autograd off"

    def take_evictions(self, name: str) -> None:
        policy, player = self.world.policies[name], self.stage.players[name]
        seen = self.lowered(self.world, name)
        assert seen is not None, f"{name} is at {player.placement()}, not {policy.place}; {self.setup}"
        if seen != policy.place:
            policy.place = seen
            known = {frame.key for frame in self.before.policies[name].frames}
            for frame in policy.frames:
                if frame.key not in known:
                    frame.stored = dict(seen)
            if policy.rest_mode != self.before.policies[name].rest_mode:
                policy.rest_stored = dict(seen)
        if seen["G"] == "none":
            player.twin.zero_grad()  # consumed, or discarded as the configuration says
        now = (seen, policy.mode, len(policy.frames), policy.step)
        if now == player.told_at:
            return
        player.told_at = now
        told = {str(key)[0].upper(): tier.value for key, tier in player.policy.placement.items()}
        told["X"] = told.pop("E", "none")
        told.pop("R", None)
        assert told == seen, f"{name}: the library says {told}"

    def check_engine(self) -> None:
        engine, fake = self.world.engine, self.stage.fake
        handle = self.stage.engine._control
        assert len(handle.frames) == len(engine.frames)
        if handle.pending or handle.health != "ok":
            self.see_engine()
            return
        if engine.awake != set(handle.awake):
            assert self.world.capacity is not None, (engine.awake, handle.awake)
            assert not engine.frames
            assert not handle.awake
            engine.sleep()
        assert fake.awake_tags == engine.awake
        assert handle.weights == engine.weights

    def see_engine(self) -> None:
        """After a failure the engine is as it says, and what it says of what is awake is so, if nothing is pending."""
        handle = self.stage.engine._control
        engine = self.world.engine
        engine.awake, engine.weights = set(handle.awake), handle.weights
        assert self.stage.fake.awake_tags <= engine.awake or handle.pending

    def check_device(self) -> None:
        device, policies = self.stage.device, self.world.policies.values()
        held = sum(policy.on_device() for policy in policies)
        if device.resident_bytes != held + self.stage.fake.occupied:
            gc.collect()  # an error that is gone may hold gradients in a cycle of its frames
        assert device.resident_bytes == held + self.stage.fake.occupied
        if device.capacity is not None:
            assert device.peak <= device.capacity
            return
        out = device.bytes_out - self.base_out
        least, most = sum(p.out_least for p in policies), sum(p.out_most for p in policies)
        assert device.bytes_in - self.base_in == sum(p.bytes_in for p in policies)
        assert least <= out <= most, f"copied out {out}, should be {least} to {most}"
        self.rebase()

    def rebase(self) -> None:
        self.base_in, self.base_out = self.stage.device.bytes_in, self.stage.device.bytes_out
        for policy in self.world.policies.values():
            policy.bytes_in = policy.out_least = policy.out_most = 0

    # -- scopes --------------------------------------------------------------------------------------------------

    def pair(self, name: str) -> tuple[Player, Policy]:
        return self.stage.players[name], self.world.policies[name]

    @rule(name=WHO, mode=st.sampled_from([*MODES, "training", "logprob"]))
    def open(self, name: str, mode: str) -> None:
        if not self.over:
            scope = getattr(self.stage.players[name].policy, "offloaded" if mode == "offloaded" else f"{mode}_mode")()
            self.enter(name, scope, mode)

    @rule()
    def open_sampling(self) -> None:
        """Generation by the actor itself."""
        if not self.over:
            player = self.stage.players["actor"]
            self.enter("actor", player.policy.generation_mode(self.stage.sampler), "generation")

    def enter(self, name: str, scope: Any, mode: str) -> None:
        player, policy = self.pair(name)
        keys: list[int] = []
        _, error = self.attempt(scope.__enter__, lambda: keys.append(self.world.enter(policy, mode)))
        if not error:
            player.scopes.append((keys[0], scope))
            training = {"training": True, "logprob": False, "generation": False}.get(mode)
            assert training is None or player.model.training is training
            assert training is None or torch.is_grad_enabled() is training

    @precondition(lambda self: any(p.scopes for p in self.stage.players.values()))
    @rule(name=WHO, by=st.sampled_from(["end", "end", "error"]))
    def close(self, name: str, by: str) -> None:
        player, _ = self.pair(name)
        if not self.over and player.scopes and not self.is_shared(player.scopes[-1][0]):
            self.leave(name, len(player.scopes) - 1, by)

    @precondition(lambda self: any(len(p.scopes) > 1 for p in self.stage.players.values()))
    @rule(name=WHO)
    def close_out_of_order(self, name: str) -> None:
        player, _ = self.pair(name)
        if not self.over and len(player.scopes) > 1 and not any(self.is_shared(key) for key, _ in player.scopes):
            self.leave(name, len(player.scopes) - 2, "end")

    def is_shared(self, key: int) -> bool:
        return any(key == each for each, _ in self.stage.engine_scopes)

    def leave(self, name: str, index: int, by: str) -> None:
        player, policy = self.pair(name)
        key, scope = player.scopes[index]
        inner = player.scopes[index + 1 :]
        del player.scopes[index:]
        self.attempt(lambda: end(scope, by), lambda: self.world.leave(policy, key))
        for _, closed in reversed(inner):  # closed with the one around it: only a note in the log
            closed.__exit__(None, None, None)
        with pytest.raises(rs.ScopeReuseError):
            scope.__enter__()

    @precondition(lambda self: any(p.scopes for p in self.stage.players.values()))
    @rule(name=WHO)
    def lose(self, name: str) -> None:
        """The object of a scope is gone; the next call closes it."""
        player, policy = self.pair(name)
        if self.over or not player.scopes or self.is_shared(player.scopes[-1][0]):
            return
        key = player.scopes.pop()[0]
        self.attempt(player.policy.state_dict, lambda: self.world.leave(policy, key))

    # -- rest ----------------------------------------------------------------------------------------------------

    @rule(name=WHO, mode=st.sampled_from(["training", "logprob", "refit", "resident", "offloaded"]))
    def switch(self, name: str, mode: str) -> None:
        if not self.over:
            player, policy = self.pair(name)
            self.attempt(lambda: player.policy.switch(mode), lambda: self.world.switch(policy, mode))

    @rule(name=WHO)
    def offload(self, name: str) -> None:
        if not self.over:
            self.do_offload(name)

    def do_offload(self, name: str) -> None:
        player, policy = self.pair(name)
        self.attempt(player.policy.offload, lambda: self.world.switch(policy, "offloaded", evict=True))

    @rule(share=st.floats(0, 1.2))
    def make_room(self, share: float) -> None:
        if self.over:
            return
        nbytes = int(share * (self.world.capacity or 4000))

        def effect() -> None:
            for policy in self.world.policies.values():
                self.world._settle(policy)
            if not self.world.fits(None, nbytes):
                raise Refused("DeviceMemoryError")

        self.attempt(lambda: self.stage.session.make_room(nbytes), effect)

    # -- legacy calls --------------------------------------------------------------------------------------------

    @rule(name=WHO, call=st.sampled_from(list(LEGACY["dtensor"])), keep=st.booleans())
    def legacy(self, name: str, call: str, keep: bool) -> None:
        if self.over:
            return
        player, policy = self.pair(name)
        keep = keep and call == "prepare_for_lp_inference"
        arguments = {"keep_train_buffers": True} if keep else {}
        with quiet():
            self.attempt(
                lambda: getattr(player.legacy, call)(**arguments),
                lambda: self.world.legacy(policy, BACKENDS[name], call, keep=keep),
            )

    @rule(name=WHO, seed=SEEDS)
    def legacy_infer(self, name: str, seed: int) -> None:
        if self.over:
            return
        player, policy = self.pair(name)
        batch = make_batch(seed)
        result, error = self.attempt(
            lambda: player.legacy.get_logprobs(batch), lambda: self.world.legacy_call(policy, "infer")
        )
        if not error:
            assert torch.equal(result["logprobs"], player.twin.logprobs(batch))

    @rule(name=WHO, seed=SEEDS)
    def legacy_train(self, name: str, seed: int) -> None:
        player, policy = self.pair(name)
        if self.over or not self.has_room_to_train(name):
            return

        def effect() -> None:
            self.world.legacy_call(policy, "train")
            self.trained(name)

        _, error = self.attempt(lambda: player.legacy.train(make_batch(seed), loss_fn), effect)
        if not error:
            self.train_twin(name, seed)

    # -- computing -----------------------------------------------------------------------------------------------

    @rule(name=WHO, seed=SEEDS, how=st.sampled_from(["logprobs", "loss"]))
    def infer(self, name: str, seed: int, how: str) -> None:
        if self.over:
            return
        player, policy = self.pair(name)
        batch = make_batch(seed)
        call = {
            "logprobs": lambda: player.policy.get_logprobs(batch)["logprobs"],
            "loss": lambda: player.policy.train(batch, loss_fn, eval_mode=True)["loss"],
        }[how]
        result, error = self.attempt(call, lambda: self.world.call(policy, "infer"))
        if how == "logprobs" and not error:
            assert torch.equal(result, player.twin.logprobs(batch))

    @rule(seed=SEEDS)
    def reference(self, seed: int) -> None:
        if self.over:
            return
        player, policy = self.pair("actor")
        self.attempt(
            lambda: player.policy.get_reference_policy_logprobs(make_batch(seed)),
            lambda: self.world.call(policy, "infer"),
            retries=True,
        )
        self.rebase()  # the swap copies too
        policy.surely_clean.clear()
        policy.surely_dirty.clear()

    def has_room_to_train(self, name: str) -> bool:
        """Gradients and a first state are made by torch: nobody can refuse them."""
        policy, capacity = self.world.policies[name], self.world.capacity
        made = policy.sizes["G"] + (policy.sizes["O"] if policy.place["O"] == "none" else 0)
        if policy.pending:
            made += sum(policy.sizes.values())
        return capacity is None or self.stage.device.resident_bytes + made <= capacity

    def trained(self, name: str) -> None:
        """What an optimizer step leaves on the model."""
        policy = self.world.policies[name]
        policy.place |= {"O": "device", "G": "none"}
        policy.live, policy.step = False, ""
        policy.wrote(COMPONENTS)

    def train_twin(self, name: str, seed: int) -> float:
        twin = self.stage.players[name].twin
        twin.zero_grad()
        loss = twin.backward(make_batch(seed), SEQS, TOKENS)
        twin.step()
        return loss

    @rule(name=WHO, seed=SEEDS)
    def train(self, name: str, seed: int) -> None:
        player, policy = self.pair(name)
        if self.over or not self.has_room_to_train(name):
            return

        def effect() -> None:
            self.world.ready_to_train(policy)
            self.trained(name)

        result, error = self.attempt(lambda: player.policy.train(make_batch(seed), loss_fn), effect)
        if not error:
            assert float(result["loss"][0]) == self.train_twin(name, seed)
        else:
            self.twin_follows(name)

    def twin_follows(self, name: str) -> None:
        """Consumed gradients may have been dropped on the way to a refusal."""
        if self.world.policies[name].place["G"] == "none" and not self.over:
            self.stage.players[name].twin.zero_grad()

    @rule(name=WHO, seed=SEEDS, loss=st.sampled_from([nan_loss, broken_loss]))
    def train_in_vain(self, name: str, seed: int, loss: Any) -> None:
        """The user's loss fails: no step is made, and no gradient is left."""
        player, policy = self.pair(name)
        if self.over or not self.has_room_to_train(name):
            return

        def effect() -> None:
            self.world.ready_to_train(policy)
            policy.wrote("B")
            raise Refused("NonFiniteError", "BodyError")

        def real() -> None:
            try:
                player.policy.train(make_batch(seed), loss)
            except ZeroDivisionError as error:
                raise BodyError(str(error)) from error

        _, error = self.attempt(real, effect)
        self.twin_follows(name)
        if error in ("NonFiniteError", "BodyError"):
            player.twin.forward_train(make_batch(seed))

    @rule(name=WHO, seed=SEEDS)
    def train_with_a_broken_optimizer(self, name: str, seed: int) -> None:
        """``optimizer.step()`` fails half-way: restored from host copies, or faulted; never part old, part new."""
        player, policy = self.pair(name)
        if self.over or not hasattr(player.optimizer, "fails") or not self.has_room_to_train(name):
            return
        self.faults = []

        def effect() -> None:
            self.world.ready_to_train(policy)
            policy.wrote(COMPONENTS)
            raise Refused("OptimizerStepError", "FaultedError")

        player.optimizer.fails = True
        _, error = self.attempt(lambda: player.policy.train(make_batch(seed), loss_fn), effect)
        player.optimizer.fails = False
        self.twin_follows(name)
        if error in ("OptimizerStepError", "FaultedError"):
            player.twin.forward_train(make_batch(seed))
            policy.place["G"] = "none"
            player.twin.zero_grad()
        self.mend()
        self.rebase()

    # -- open steps ----------------------------------------------------------------------------------------------

    @rule(name=WHO)
    def begin(self, name: str) -> None:
        player, policy = self.pair(name)
        if self.over:
            return

        def effect() -> None:
            self.world.ready_to_train(policy)
            policy.step = "0"

        result, error = self.attempt(lambda: player.policy.begin_step(SEQS, TOKENS), effect)
        self.twin_follows(name)
        if not error:
            player.step = result

    @rule(name=WHO, seed=SEEDS, loss=st.sampled_from([loss_fn, loss_fn, loss_fn, nan_loss]))
    def accumulate(self, name: str, seed: int, loss: Any) -> None:
        player, policy = self.pair(name)
        if self.over or player.step is None or not self.has_room_to_train(name):
            return

        def effect() -> None:
            if not policy.step:
                raise Refused("StepClosedError")
            self.world.call(policy, "train")
            self.world.check_reached(policy, "PBG")
            policy.wrote("B")
            if loss is nan_loss:
                policy.place["G"], policy.live, policy.step = "none", False, ""
                raise Refused("NonFiniteError")
            policy.place["G"], policy.live = "device", True
            policy.step = str(int(policy.step) + 1)
            policy.wrote("G")

        _, error = self.attempt(lambda: player.step.forward_backward(make_batch(seed), loss), effect)
        if not error:
            player.twin.backward(make_batch(seed), SEQS, TOKENS)
        elif error == "NonFiniteError":
            player.twin.forward_train(make_batch(seed))
            player.twin.zero_grad()

    @rule(name=WHO, seed=SEEDS, by_hand=st.booleans())
    def leave_gradients(self, name: str, seed: int, by_hand: bool) -> None:
        """What makes live gradients, in one: chance alone seldom does."""
        steps: list[Callable[[], None]] = [lambda: self.open(name=name, mode="training")]
        if by_hand:
            steps.append(lambda: self.own_backward(name=name, seed=seed))
        else:
            steps += [lambda: self.begin(name=name), lambda: self.accumulate(name=name, seed=seed, loss=loss_fn)]
        for step in steps:
            step()
            self.it_is_as_the_model_says()

    @rule(name=WHO)
    def commit(self, name: str) -> None:
        player, policy = self.pair(name)
        if self.over or player.step is None or not self.has_room_to_train(name):
            return

        def effect() -> None:
            if not policy.step:
                raise Refused("StepClosedError")
            self.world.call(policy, "train")
            self.world.check_reached(policy, "PBGO")
            if policy.step == "0":
                policy.step = ""
                raise Refused("ArgumentError")
            self.trained(name)

        _, error = self.attempt(player.step.commit, effect)
        if not error:
            player.twin.step()
        else:
            self.twin_follows(name)

    @rule(name=WHO)
    def abort(self, name: str) -> None:
        player, policy = self.pair(name)
        if self.over or player.step is None:
            return

        def effect() -> None:
            if not policy.step:
                raise Refused("StepClosedError")
            policy.place["G"], policy.live, policy.step = "none", False, ""

        self.attempt(player.step.abort, effect)
        self.twin_follows(name)

    # -- what users do with their own model -----------------------------------------------------------------------

    def in_charge(self, name: str) -> bool:
        """Whether the caller may train by hand: in TRAINING, or at rest on the device."""
        policy = self.world.policies[name]
        there = all(policy.place[c] != "host" for c in "PBGO") and policy.place["P"] == "device"
        return policy.mode == policy.row and policy.mode in ("training", "resident") and there and not policy.pending

    @rule(name=WHO, seed=SEEDS)
    def own_backward(self, name: str, seed: int) -> None:
        player, policy = self.pair(name)
        if self.over or not self.in_charge(name) or not self.has_room_to_train(name):
            return
        figures["steps"] += 1
        player.twin.model.train(player.model.training)
        for model in (player.model, player.twin.model):
            with torch.enable_grad():
                model(make_batch(seed)["input_ids"]).logsumexp(-1).sum().backward()
        policy.place["G"], policy.live = "device", True
        policy.wrote("GB")
        player.by_hand |= {"G"}
        player.told_at = None  # what users make is counted when the library looks next

    @rule(name=WHO, zeroes=st.booleans())
    def own_step(self, name: str, zeroes: bool) -> None:
        player, policy = self.pair(name)
        ready = not self.over and self.in_charge(name) and policy.place["G"] == "device" and not policy.step
        if not ready or not self.has_room_to_train(name):
            return
        figures["steps"] += 1
        for optimizer in (player.optimizer, player.twin.optimizer):
            optimizer.step()
            if zeroes:
                optimizer.zero_grad()
        policy.place |= {"O": "device", "G": "none" if zeroes else "device"}
        policy.live = False
        policy.wrote(COMPONENTS)
        player.by_hand |= {"G", "O"}
        player.told_at = None

    @rule(name=WHO)
    def own_write(self, name: str) -> None:
        """Where anybody may write: weights are overwritten; where they are away, that is refused and not a crash."""
        player, policy = self.pair(name)
        if self.over:
            return
        figures["steps"] += 1
        if policy.place["P"] == "host":
            with pytest.raises(rs.OffloadedAccessError), torch.no_grad():
                player.model.mix.weight.mul_(1.5)
            with pytest.raises(rs.OffloadedAccessError):
                player.model(make_batch(0)["input_ids"])
        elif self.in_charge(name):
            for model in (player.model, player.twin.model):
                model.mix.weight.data.mul_(1.25)
            policy.wrote("P")

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def checkpoint_of(self, name: str) -> Path:
        return self.stage.folder / f"{name}.ckpt"

    @rule(name=WHO)
    def save(self, name: str) -> None:
        player, _ = self.pair(name)
        if self.over:
            return
        _, error = self.attempt(lambda: player.policy.save_checkpoint(self.checkpoint_of(name)), lambda: None)
        if not error:
            player.checkpoint = player.twin.snapshot()

    @precondition(lambda self: any(p.checkpoint for p in self.stage.players.values()))
    @rule(name=WHO)
    def load(self, name: str) -> None:
        player, policy = self.pair(name)
        if self.over or player.checkpoint is None or not self.has_room_to_train(name):
            return
        before = dict(policy.place)

        def effect() -> None:
            self.world.call(policy, "load_checkpoint")
            if policy.step or policy.live:
                raise Refused("OpenStepError")
            policy.wrote("PBOX")

        _, error = self.attempt(lambda: player.policy.load_checkpoint(self.checkpoint_of(name)), effect)
        if not error:
            player.twin.restore(player.checkpoint)
            self.state_came_back(name, before)

    def state_came_back(self, name: str, before: dict[str, str]) -> None:
        """Optimizer state is where it was; what was not there is made where the weights are."""
        player, policy = self.pair(name)
        has_state = bool(player.checkpoint[1]["state"])
        policy.place["O"] = "none" if not has_state else before["O"] if before["O"] != "none" else before["P"]

    # -- the engine ----------------------------------------------------------------------------------------------

    @rule(tags=st.sampled_from([("weights", "kv_cache"), ("weights",)]))
    def wake(self, tags: tuple[str, ...]) -> None:
        if self.over:
            return
        scope = self.stage.engine.awake(tags=list(tags))
        self.world._keys += 1
        key = self.world._keys
        _, error = self.attempt(scope.__enter__, lambda: self.world.wake(key, tags))
        if not error:
            self.stage.engine_scopes.append((key, scope))

    @rule(name=WHO)
    def open_generation(self, name: str) -> None:
        """The policy leaves, and the engine has the device."""
        if self.over:
            return
        player, policy = self.pair(name)
        scope = player.policy.generation_mode(self.stage.engine)
        keys: list[int] = []
        _, error = self.attempt(scope.__enter__, lambda: keys.append(self.world.generation(policy)))
        if not error:
            player.scopes.append((keys[0], scope))
            self.stage.engine_scopes.append((keys[0], scope))

    @precondition(lambda self: self.stage.engine_scopes)
    @rule()
    def let_go(self) -> None:
        if self.over:
            return
        key, scope = self.stage.engine_scopes[-1]
        owner = next((p for p in self.stage.players.values() if p.scopes and p.scopes[-1][0] == key), None)
        if any(key == each for p in self.stage.players.values() if p is not owner for each, _ in p.scopes):
            return  # a scope inside it is still open
        self.stage.engine_scopes.pop()
        policy = self.world.policies[owner.name] if owner is not None else None
        if owner is not None:
            owner.scopes.pop()
        self.attempt(lambda: scope.__exit__(None, None, None), lambda: self.world.end_generation(policy, key))

    @rule(name=WHO, bucket=st.sampled_from([None, 1, 500]))
    def refit(self, name: str, bucket: int | None) -> None:
        if self.over:
            return
        player, policy = self.pair(name)
        version = self.stage.engine.version
        self.stage.published.clear()
        self.attempt(
            lambda: player.policy.refit(self.stage.engine, bucket_nbytes=bucket),
            lambda: self.world.refit(policy, skipped=self.stage.published[-1:] == [True]),
            passes=("refit",),
        )
        if self.stage.published == [True]:
            assert self.served == player.twin.served(), "a push was skipped that would have changed something"
        if self.stage.engine.version > version:
            self.served = player.twin.served()

    @rule()
    def generate(self) -> None:
        if self.over:
            return
        prompts = {"input_ids": make_batch(0)["input_ids"], "input_lengths": torch.tensor([4, 3, 4])}
        result, error = self.attempt(lambda: self.stage.engine.generate(prompts), self.world.serves)
        if not error:
            assert int(result["fingerprint"][0]) == self.served, "tokens of other weights than were pushed"

    @rule()
    def sleep(self) -> None:
        if self.over:
            return

        def effect() -> None:
            if self.world.engine.frames:
                raise Refused("ScopeError")
            self.world.engine.sleep()

        self.attempt(self.stage.engine.sleep, effect)

    # -- faults --------------------------------------------------------------------------------------------------

    @rule(
        operation=st.sampled_from(["copy_out", "copy_in", "allocate", "free", "synchronize"]),
        k=st.integers(1, 6),
        point=st.sampled_from(["before", "half", "after"]),
        error=st.sampled_from([None, torch.OutOfMemoryError]),
    )
    def break_device(self, operation: str, k: int, point: str, error: Any) -> None:
        """The next step that gets there will fail there."""
        self.faults.append((False, {"operation": operation, "k": k, "point": point, "error": error}))
        self.faults = self.faults[-2:]

    @rule(
        operation=st.sampled_from(["wake", "sleep", "bucket", "update_weights", "generate", "reset_cache"]),
        k=st.integers(1, 2),
        point=st.sampled_from(["before", "half", "after"]),
        error=st.sampled_from([None, False]),
    )
    def break_engine(self, operation: str, k: int, point: str, error: Any) -> None:
        error = None if operation == "generate" else error  # what it gives is a result, not an answer
        self.faults.append((True, {"operation": operation, "k": k, "point": point, "error": error}))
        self.faults = self.faults[-2:]

    def mend(self) -> None:
        """What is faulted refuses everything until it is recovered; then it is whole again."""
        handle = self.stage.engine
        if handle.health == "faulted":
            with pytest.raises(rs.FaultedError):
                handle.sleep()
            handle.recover()
            self.forget_engine_scopes()
        for name, player in self.stage.players.items():
            if player.policy.health == "faulted":
                self.recover(name)

    def forget_engine_scopes(self, but: int = 0) -> None:
        """A recovery has ended them, those of ``generation_mode`` with the scope of the policy; ``but`` the outermost few."""
        for world in (self.world, *self.world.trail):
            world.engine.frames = world.engine.frames[:but]
        self.stage.engine_scopes = self.stage.engine_scopes[:but]
        self.see_engine()

    def recover(self, name: str) -> None:
        player = self.stage.players[name]
        with pytest.raises(rs.FaultedError):
            player.policy.get_logprobs(make_batch(0))
        try:
            player.policy.recover()
        except rs.FaultedError:
            if player.checkpoint is None:
                self.over = True
                return
            player.policy.load_checkpoint(self.checkpoint_of(name))
        except rs.WorldError:
            assert self.world.capacity is not None
        player.scopes, player.step = [], None
        player.twin.zero_grad()
        if player.differences() and player.checkpoint is not None:
            player.twin.restore(player.checkpoint)
        assert not player.differences()
        for world in (self.world, *self.world.trail):
            self.take_over(world.policies[name], player)
        self.forget_engine_scopes(len(self.stage.engine._control.frames))

    def take_over(self, policy: Policy, player: Player) -> None:
        """After a recovery the model begins anew from what is seen."""
        policy.frames, policy.step, policy.live = [], "", False
        policy.place = player.placement()
        policy.mode = policy.row = player.policy.mode.value
        policy.pending = player.control._pending_release
        policy.rest_stored = dict.fromkeys(COMPONENTS, "none")
        for key, tier in player.control.resting.items():
            policy.rest_stored["X" if key == "ema" else key[0].upper()] = tier.value
        policy.surely_clean.clear()
        policy.surely_dirty.clear()

    # -- the end -------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "stage"):
            return
        try:
            if sys.exc_info()[0] is None:  # else a step has failed, and there is nothing to add
                self.finish()
        finally:
            gc.enable()
            torch.set_grad_enabled(True)
            with suppress(rs.RLSessionError):
                self.stage.session.close()
            self.folder.cleanup()

    def finish(self) -> None:
        """Everything is closed; the log tells it without a contradiction, and ends where everything is."""
        self.faults = []
        if not self.over:
            self.read_log(finished=False)
            while self.stage.engine_scopes or any(p.scopes for p in self.stage.players.values()):
                self.close_one()
                self.it_is_as_the_model_says()
        self.stage.device.capacity = None
        self.stage.session.close()
        assert_log_is_consistent(self.stage.log)
        if not self.over:
            for player in self.stage.players.values():
                wanted = player.twin.state()
                assert all(torch.equal(t, wanted[name]) for name, t in player.tensors().items())

    def close_one(self) -> None:
        if self.stage.engine_scopes:
            before = len(self.stage.engine_scopes)
            self.let_go()
            if len(self.stage.engine_scopes) < before:
                return
        for name, player in self.stage.players.items():
            if player.scopes and not self.is_shared(player.scopes[-1][0]):
                self.leave(name, len(player.scopes) - 1, "end")
                return
        raise AssertionError("no scope can be closed")

    def read_log(self, *, finished: bool) -> None:
        """The log, replayed, gives the placement that is seen, but for what users made by hand: nobody told the log."""
        assert_log_is_consistent(self.stage.log, finished=finished)
        *_, last = replay(self.stage.log)
        for name, player in self.stage.players.items():
            told = {str(key)[0].upper(): tier for key, tier in last.policies[name].placement.items()}
            seen = player.placement()
            known = [c for c in "PBGO" if c not in player.by_hand]
            assert [told.get(c, "none") for c in known] == [seen[c] for c in known], (name, told, seen)


class BodyError(rs.RLSessionError):
    """What the user's own code raised, for :meth:`Lifecycle.attempt`."""


def end(scope: Any, by: str) -> None:
    """Leave a scope normally, or by an error of the block, which stays on top."""
    if by == "end":
        scope.__exit__(None, None, None)
        return
    error = ValueError("of the block")
    scope.__exit__(ValueError, error, None)
    if notes := getattr(error, "__notes__", ()):
        raise Noted(notes[0])


@contextmanager
def quiet() -> Iterator[None]:
    """Legacy calls warn once a line, with what to write instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def sizes_of(player: Player) -> dict[str, int]:
    """Bytes of each component when it exists."""
    named = dict(player.twin.model.named_parameters())
    trained = sum(p.nbytes for p in named.values() if p.requires_grad)
    moments = 1 if isinstance(player.optimizer, torch.optim.SGD) else 2
    return {
        "P": sum(p.nbytes for p in named.values()),
        "B": sum(b.nbytes for b in player.twin.model.buffers()),
        "G": trained,
        "O": moments * trained,
        "X": player.extra.nbytes if player.name == "rival" else 0,
    }


Lifecycle.TestCase.settings = settings(
    max_examples=int(os.environ.get("EXAMPLES", "600")) if NIGHTLY else 6,
    stateful_step_count=60 if NIGHTLY else 30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
test_any_sequence_of_anything = pytest.mark.timeout(0 if NIGHTLY else 300)(Lifecycle.TestCase)
