"""What policies and an engine on one device must do, in plain Python: a model that knows no torch and no library.

Written from what the documentation states: the mode table, the nesting table, the scope rules, the table of legacy calls.
A policy is a placement, a stack of scopes and a resting mode. Each public operation either says why it must be refused, and
changes nothing, or changes the model; on the way it notes every state in which a failure may leave it (``trail``).

Components are P (parameters), B (buffers), G (gradients), O (optimizer state) and X (an extra, which moves as O does).
Tiers are "device", "host" and "none".
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["COMPONENTS", "LEGACY", "Engine", "Frame", "Policy", "Refused", "World"]

COMPONENTS = "PBGOX"
_HEIGHT = {"none": 0, "host": 1, "device": 2}

Cells = Mapping[str, str]
"""Component to what is asked of it: "device", "host", "as is", "open stays" or "open to host"."""


def _cells(weights: str, grads: str, rest: str) -> Cells:
    return {"P": weights, "B": weights, "G": grads, "O": rest, "X": rest}


TABLE: Mapping[str, Cells] = {
    "training": _cells("device", "device", "device"),
    "logprob": _cells("device", "open stays", "by logprob flag"),
    "refit": _cells("device", "open to host", "by refit flag"),
    "generation": _cells("device", "open stays", "by logprob flag"),
    "resident": _cells("device", "as is", "as is"),
    "offloaded": _cells("host", "open to host", "host"),
}
NESTING: Mapping[str, str] = {
    "training": "training logprob refit offloaded",
    "logprob": "logprob refit offloaded",
    "refit": "refit offloaded",
    "generation": "generation logprob offloaded",
    "offloaded": "offloaded",
}
CALLS: Mapping[str, str] = {
    "infer": "training resident logprob generation",
    "train": "training resident",
    "iter_weights": "refit resident offloaded",
    "load_checkpoint": "training resident offloaded",
    "sample": "generation",
}
NEEDS_DEVICE = {mode for mode, cells in TABLE.items() if cells["P"] == "device"}

# Legacy calls: backend to call to (mode that it rests in, weights, gradients, optimizer).
LEGACY: Mapping[str, Mapping[str, tuple[str, str, str, str]]] = {
    "dtensor": {
        "prepare_for_training": ("training", "device", "device", "device"),
        "prepare_for_lp_inference": ("logprob", "device", "device", "by logprob flag"),
        "finish_inference": ("offloaded", "host", "host", "as is"),
        "offload_before_refit": ("refit", "as is", "as is", "host"),
        "offload_after_refit": ("offloaded", "host", "host", "host"),
    },
    "megatron": {
        "prepare_for_training": ("training", "device", "device", "device"),
        "prepare_for_lp_inference": ("logprob", "device", "open stays", "by logprob flag"),
        "finish_inference": ("offloaded", "host", "as is", "as is"),
        "offload_before_refit": ("refit", "as is", "open to host", "by refit flag"),
        "offload_after_refit": ("offloaded", "host", "open to host", "by refit flag"),
    },
}


class Refused(Exception):  # noqa: N818 (not an error: what must happen)
    """The library must refuse, with an error of one of these names, and change nothing."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.names = names


class Frame:
    """An open scope of a policy."""

    def __init__(self, key: int, mode: str, row: str, stored: dict[str, str], *, engine: bool) -> None:
        self.key, self.mode, self.row, self.stored, self.has_engine = key, mode, row, stored, engine


class Policy:
    """One policy.

    Attributes:
        place: Component to tier.
        live: Whether its gradients are nobody's yet.
        step: Whether a train step of the library is open; "" where none is, else how many chunks it has as "0", "1", ...
        surely_clean: Components whose host copy must be good, so that nothing is copied when they leave.
        surely_dirty: Components that must be copied.
    """

    def __init__(self, name: str, sizes: Mapping[str, int], *, flags: Mapping[str, Any], base: str) -> None:
        self.name = name
        self.sizes = dict(sizes)
        self.lazy = flags["release"] == "lazy"
        self.by_flag = {"by logprob flag": flags["logprob"], "by refit flag": flags["refit"]}
        self.live_gradients = flags["live_gradients"]
        self.place = {"P": "device", "B": "device", "G": "none", "O": "none", "X": "none"}
        self.live = False
        self.step = ""
        self.frames: list[Frame] = []
        self.mode = self.row = "resident"
        self.rest_mode = base
        self.rest_cells: Cells | None = None
        self.rest_stored = dict(self.place)
        self.pending = False
        self.bytes_in = 0
        self.out_least = self.out_most = 0
        self.surely_clean: set[str] = set()
        self.surely_dirty: set[str] = set(COMPONENTS)

    # -- the table -----------------------------------------------------------------------------------------------

    def cells_of(self, row: str, cells: Cells | None = None) -> Cells:
        """What a row asks, with flags decided."""
        asked = cells if cells is not None else TABLE[row]
        return {
            c: ("host" if self.by_flag[cell] else "as is") if cell in self.by_flag else cell
            for c, cell in asked.items()
        }

    def target(
        self, cells: Cells, stored: Mapping[str, str] | None = None, *, lazy: bool | None = None
    ) -> dict[str, str]:
        """Where everything goes; ``stored`` is what an exit comes back to."""
        keeps = self.live and self.live_gradients != "discard"
        found = {}
        for c, cell in cells.items():
            now = self.place[c]
            before = stored[c] if stored is not None and stored[c] != "none" else now
            if cell in ("device", "host"):
                tier = cell
            elif cell == "as is":
                tier = before
            elif not keeps:
                tier = "none"
            else:
                tier = "host" if cell == "open to host" else before
            if now == "none":
                tier = "none"
            if self.lazy if lazy is None else lazy:
                tier = max(tier, now, key=_HEIGHT.__getitem__)
            found[c] = tier
        return found

    # -- moving --------------------------------------------------------------------------------------------------

    def move(
        self,
        mode: str,
        row: str,
        cells: Cells | None = None,
        stored: Mapping[str, str] | None = None,
        *,
        evict: bool = False,
    ) -> None:
        """A transition."""
        asked = self.cells_of(row, cells)
        if self.live and self.live_gradients == "refuse" and asked["G"] in ("open stays", "open to host"):
            raise Refused("OpenStepError")
        target = self.target(asked, stored, lazy=False if evict else None)
        self.account(target, row, rests=not self.frames)
        had_live = self.live
        self.place = target
        if target["G"] == "none":
            self.live = False
            if had_live:
                self.step = ""
        self.mode, self.row, self.pending = mode, row, False

    def account(self, target: Mapping[str, str], row: str, *, rests: bool) -> None:
        """Count the bytes that a move copies, and note what the host copies are worth afterwards."""
        for c, tier in target.items():
            now, size = self.place[c], self.sizes[c]
            if now == "device" and tier == "host":
                self.out_least += size if c in self.surely_dirty else 0
                self.out_most += 0 if c in self.surely_clean else size
            if now == "host" and tier == "device":
                self.bytes_in += size
                self.surely_clean.add(c)
                self.surely_dirty.discard(c)
        if row in ("training", "resident") or (rests and row != "offloaded"):
            self.surely_clean.clear()
        if rests and row == "offloaded":
            self.surely_clean -= {c for c in COMPONENTS if target[c] == "device"}
        self.surely_clean.discard("G")

    def wrote(self, components: Iterable[str]) -> None:
        """Something was written on the device."""
        self.surely_dirty |= set(components)
        self.surely_clean -= set(components)

    def outside(self) -> tuple[str, str, Mapping[str, str], Cells | None]:
        """Mode, row, stored placement and cells of the innermost scope, or of rest."""
        if self.frames:
            frame = self.frames[-1]
            return frame.mode, frame.row, frame.stored, None
        return self.rest_mode, self.rest_mode, self.rest_stored, self.rest_cells

    def go_outside(self) -> None:
        """The way back; if it is refused, the mode stands and the release is pending."""
        mode, row, stored, cells = self.outside()
        try:
            self.move(mode, row, cells, stored)
        except Refused:
            self.mode, self.row, self.pending = mode, row, True
            raise

    def as_if_the_way_out_failed(self) -> Policy:
        """What it is when the transition to the outer mode was rolled back."""
        left = copy.deepcopy(self)
        left.mode, left.row, *_ = left.outside()
        left.pending = True
        left.surely_clean.clear()  # in the outer mode anybody may write
        return left

    def as_if_the_way_out_failed_from(self, key: int) -> Policy:
        """As :meth:`as_if_the_way_out_failed`, from inside a scope."""
        inside = copy.deepcopy(self)
        inside.frames = [frame for frame in inside.frames if frame.key != key]
        return inside.as_if_the_way_out_failed()

    # -- what it takes -------------------------------------------------------------------------------------------

    def on_device(self) -> int:
        """Bytes on the device."""
        return sum(self.sizes[c] for c in COMPONENTS if self.place[c] == "device")

    def kept(self, *rows: tuple[str, Cells | None]) -> set[str]:
        """Components on the device that an eager release would leave there on the way through ``rows``; by default of its own."""
        probe = copy.copy(self)
        for row, cells in rows or ((self.row, None),):
            probe.place = probe.target(probe.cells_of(row, cells), lazy=False)
        return {c for c in COMPONENTS if self.place[c] == "device" and probe.place[c] == "device"}

    def held(self, *rows: tuple[str, Cells | None]) -> int:
        """Bytes that cannot be taken from it."""
        return sum(self.sizes[c] for c in self.kept(*rows))

    def demand(self, row: str, cells: Cells | None = None, stored: Mapping[str, str] | None = None) -> int:
        """Bytes that it must have on the device on the way to ``row``."""
        target = self.target(self.cells_of(row, cells), stored)
        stays = self.kept((self.row, None), (row, None))
        comes = {c for c in COMPONENTS if self.place[c] == "host" and target[c] == "device"}
        made = self.sizes["G"] if row == "training" and stored is None and self.place["G"] == "none" else 0
        return sum(self.sizes[c] for c in stays | comes) + made

    @property
    def is_occupant(self) -> bool:
        """Whether it works on the device, so that no engine may begin there."""
        return bool(self.frames) and self.frames[-1].mode != "refit" and self.frames[-1].row in NEEDS_DEVICE


class Engine:
    """A generation engine that shares the device.

    Attributes:
        awake: Tags that are awake.
        frames: For each open scope its key and the tags that it asks for.
        weights: "first", "pushed", "discarded" or "torn".
    """

    TAGS = ("weights", "kv_cache")

    def __init__(self, sizes: Mapping[str, int], *, lazy: bool, level: int) -> None:
        self.sizes, self.lazy, self.level = dict(sizes), lazy, level
        self.awake: set[str] = set()
        self.frames: list[tuple[int, tuple[str, ...]]] = []
        self.weights = "first"

    def sleep(self) -> None:
        """It sleeps; the second level loses what it had."""
        if self.awake and self.level == 2 and self.weights != "torn":
            self.weights = "discarded"
        self.awake = set()

    @property
    def held(self) -> int:
        """Bytes that cannot be taken from it."""
        return sum(self.sizes[tag] for tag in self.awake) if self.frames else 0


class World:
    """Everybody on one device.

    Attributes:
        trail: States in which a failure of the operation under way may leave the world.
    """

    def __init__(self, policies: Iterable[Policy], engine: Engine, capacity: int | None) -> None:
        self.policies = {policy.name: policy for policy in policies}
        self.engine = engine
        self.capacity = capacity
        self.trail: list[World] = []
        self.is_recording = False
        """Whether the trail is kept: it is, where something may fail."""
        self._keys = 0

    def copy(self) -> World:
        """Another world like it, without a trail."""
        trail, self.trail = self.trail, []
        try:
            return copy.deepcopy(self)
        finally:
            self.trail = trail

    def note(self, policy: Policy | None = None) -> None:
        """A failure may leave the world as it is now; with ``policy``, that one as it is given."""
        if not self.is_recording:
            return
        left = self.copy()
        if policy is not None:
            left.policies[policy.name] = policy
        self.trail.append(left)

    def fits(self, policy: Policy | None, demand: int, *, engine: int = 0) -> bool:
        """Whether there is room when everything that may leave has left."""
        if self.capacity is None:
            return True
        others = sum(each.held() for each in self.policies.values() if each is not policy)
        return others + demand + max(engine, self.engine.held) <= self.capacity

    # -- scopes of policies --------------------------------------------------------------------------------------

    def _settle(self, policy: Policy) -> None:
        """A release that is pending is made up for before anything else."""
        if policy.pending:
            _, row, stored, cells = policy.outside()
            self._come(policy, row, cells, stored)
            policy.go_outside()
            self.note()

    def _come(self, policy: Policy, row: str, cells: Cells | None, stored: Mapping[str, str] | None) -> None:
        """What a transition to ``row`` does to the engine, and whether there is room."""
        engine = self.engine
        comes = row in NEEDS_DEVICE and (cells is None or cells["P"] == "device")
        if comes and engine.awake and not engine.frames and not engine.lazy:
            engine.sleep()
        if not self.fits(policy, policy.demand(row, cells, stored)):
            raise Refused("DeviceMemoryError")

    def _may_nest(self, policy: Policy, mode: str) -> bool:
        if not policy.frames:
            return True
        outer = policy.frames[-1]
        by_row = outer.mode in (outer.row, mode) or mode in NESTING[outer.row].split()
        return mode in NESTING[outer.mode].split() and by_row

    def check_enter(self, policy: Policy, mode: str) -> None:
        """Whether a scope may be opened at all."""
        if not self._may_nest(policy, mode) or (self.engine.frames and mode in NEEDS_DEVICE):
            raise Refused("NestingError")

    def enter(self, policy: Policy, mode: str, *, row: str = "", engine: bool = False) -> int:
        """Open a scope; returns its key."""
        row = row or mode
        if not engine:
            self.check_enter(policy, mode)
        elif not self._may_nest(policy, mode):
            raise Refused("NestingError")
        self._settle(policy)
        moves = mode != policy.mode or row != policy.row or (policy.rest_cells is not None and not policy.frames)
        if moves:
            before = dict(policy.place)
            self._come(policy, row, None, None)
            was_frames = policy.frames
            policy.frames = [*was_frames, Frame(0, mode, row, {}, engine=engine)]  # not at rest any more
            try:
                policy.move(mode, row)
            finally:
                policy.frames = was_frames
            if not policy.frames:
                policy.rest_stored = before
            stored = dict(policy.place)
        else:
            stored = dict(policy.outside()[2])
        self._keys += 1
        policy.frames.append(Frame(self._keys, mode, row, stored, engine=engine))
        return self._keys

    def leave(self, policy: Policy, key: int) -> None:
        """Close a scope, those inside it first."""
        failures: list[Refused] = []
        out_of_order = policy.frames[-1].key != key
        while key in [frame.key for frame in policy.frames]:
            frame = policy.frames.pop()
            mode, row, stored, cells = policy.outside()
            is_parked = cells is not None and not policy.frames
            if policy.mode == mode and policy.row == row and not is_parked:
                continue
            self.note(policy.as_if_the_way_out_failed())
            try:
                self._come(policy, row, cells, stored)
                policy.go_outside()
            except Refused as refused:
                policy.mode, policy.row, policy.pending = mode, row, True
                failures.append(refused)
            del frame
        if failures:
            raise failures[0]
        if out_of_order:
            raise Refused("ScopeOrderError")

    # -- rest ----------------------------------------------------------------------------------------------------

    def switch(self, policy: Policy, mode: str, *, evict: bool = False, cells: Cells | None = None) -> None:
        """Change the resting mode."""
        if policy.frames:
            raise Refused("ScopeError")
        if self.engine.frames and mode in NEEDS_DEVICE:
            raise Refused("NestingError")
        same = mode == policy.mode == policy.rest_mode and cells is None and policy.rest_cells is None
        if same and not policy.pending and not evict:
            return
        self._come(policy, mode, cells, None)
        policy.move(mode, mode, cells, evict=evict)
        policy.rest_mode, policy.rest_cells, policy.rest_stored = mode, cells, dict(policy.place)

    def legacy(self, policy: Policy, backend: str, call: str, *, keep: bool = False) -> None:
        """A lifecycle call of the legacy API."""
        if policy.frames:
            raise Refused("ShimInScopeError")
        mode, weights, grads, rest = LEGACY[backend][call]
        if keep:
            rest = "as is"
            grads = "as is" if backend == "megatron" else grads
        if mode == "refit" and policy.place["P"] != "device":
            mode = "offloaded"  # there is nothing to read on the device
        self.switch(policy, mode, cells=policy.cells_of("", _cells(weights, grads, rest)))

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(self, policy: Policy, what: str) -> None:
        """Whether a call may be made, after what it makes up for."""
        if what in ("infer", "train"):
            self._settle(policy)
        legal = CALLS[what].split()
        if policy.mode not in legal or policy.row not in legal:
            raise Refused("ModeError")

    def legacy_call(self, policy: Policy, what: str) -> None:
        """A compute call of the legacy API: outside scopes it is legal wherever the bytes are that it needs."""
        if not policy.frames:
            if any(policy.place[c] == "host" for c in ("PB" if what == "infer" else "PBGO")):
                raise Refused("ModeError")
            if policy.mode not in CALLS[what].split():
                mode = "logprob" if what == "infer" else "training"
                self.switch(policy, mode, cells=_cells("as is", "as is", "as is"))
        if what == "infer":
            self.call(policy, what)
            return
        if policy.step:
            raise Refused("OpenStepError", "ModeError")
        self.ready_to_train(policy)

    def ready_to_train(self, policy: Policy) -> None:
        """Whether gradients may be made: nobody's are in the way, and nothing is away."""
        self.call(policy, "train")
        if policy.step or (policy.live and policy.live_gradients != "discard"):
            raise Refused("OpenStepError")
        if policy.live:
            policy.place["G"], policy.live = "none", False
        if policy.place["G"] != "none":
            policy.place["G"] = "none"  # consumed ones are dropped wherever they are
        self.check_reached(policy, "PBO")

    def check_reached(self, policy: Policy, components: str) -> None:
        """RESIDENT leaves gradients and optimizer state where they were: what is to be written must not be away."""
        if any(policy.place[c] == "host" for c in components):
            raise Refused("OffloadedAccessError")

    # -- the engine ----------------------------------------------------------------------------------------------

    def wake(self, key: int, tags: tuple[str, ...]) -> None:
        """Open a scope of the engine."""
        self.check_engine()
        missing = [tag for tag in self.engine.TAGS if tag in tags and tag not in self.engine.awake]
        needed = sum(self.engine.sizes[tag] for tag in {*self.engine.awake, *missing})
        if missing and not self.fits(None, 0, engine=needed):
            raise Refused("DeviceMemoryError")
        self.engine.awake |= set(missing)
        self.engine.frames.append((key, tags))

    def generation(self, policy: Policy) -> int:
        """The policy leaves and the engine wakes, in one block; returns its key."""
        key = self.enter(policy, "generation", row="offloaded", engine=True)
        self.note(policy.as_if_the_way_out_failed_from(key))
        self._note_left(policy, key)
        try:
            self.wake(key, Engine.TAGS)
        except Refused:
            self.leave(policy, key)
            raise
        return key

    def _note_left(self, policy: Policy, key: int) -> None:
        """A failure may leave the world as if the scope had been left at once."""
        if self.is_recording:
            left = self.copy()
            left.leave(left.policies[policy.name], key)
            self.trail.append(left)

    def end_generation(self, policy: Policy | None, key: int) -> None:
        """The engine is let go, then the policy moves back."""
        failures: list[Refused] = []
        try:
            self.let_go(key)
        except Refused as refused:
            failures.append(refused)
        if policy is not None:
            left = copy.deepcopy(policy)
            left.frames = [frame for frame in left.frames if frame.key != key]
            self.note(left.as_if_the_way_out_failed())
            try:
                self.leave(policy, key)
            except Refused as refused:
                failures.append(refused)
        self.note()
        if failures:
            raise failures[0]

    def check_engine(self) -> None:
        """Whether an engine may begin beside the policies."""
        if any(policy.is_occupant for policy in self.policies.values()):
            raise Refused("NestingError")

    def let_go(self, key: int) -> None:
        """Close a scope of the engine, those inside it too."""
        at = [each for each, _ in self.engine.frames].index(key)
        out_of_order = at != len(self.engine.frames) - 1
        del self.engine.frames[at:]
        if not self.engine.frames and not self.engine.lazy:
            self.engine.sleep()
        if out_of_order:
            raise Refused("ScopeOrderError")

    def serves(self) -> None:
        """Whether the engine may be asked for tokens."""
        asked = {tag for _, tags in self.engine.frames for tag in tags}
        if asked != set(self.engine.TAGS) or self.engine.awake != set(self.engine.TAGS):
            raise Refused("ModeError")
        if self.engine.weights in ("discarded", "torn"):
            raise Refused("StaleWeightsError")

    def refit(self, policy: Policy, *, skipped: bool) -> None:
        """Push the weights of a policy: REFIT, the engine's weights wake, the push, back, the rest wakes.

        What would change nothing may be skipped; whether it was is for the caller to check.
        """
        engine = self.engine
        was_asleep = not engine.awake
        row = policy.frames[-1].row if policy.frames else policy.rest_mode
        keeps = row not in NEEDS_DEVICE
        if was_asleep and not keeps and engine.level == 2:
            raise Refused("UsageError")
        if not skipped:
            self._push(policy, sleeps=was_asleep and not keeps)
        if keeps and not engine.frames:
            if not self.fits(None, 0, engine=sum(engine.sizes.values())):
                raise Refused("DeviceMemoryError")
            engine.awake = set(engine.TAGS)
        self.note()

    def _push(self, policy: Policy, *, sleeps: bool) -> None:
        engine = self.engine
        if policy.frames and "refit" not in NESTING[policy.frames[-1].mode].split():
            raise Refused("NestingError")
        key = self._enter_refit(policy)
        fits = self.fits(None, 0, engine=sum(engine.sizes[tag] for tag in {*engine.awake, "weights"}))
        if fits:
            engine.awake.add("weights")
            engine.weights = "pushed"
        if sleeps and not engine.frames:
            engine.sleep()
        lazy, engine.lazy = engine.lazy, True  # what is refitted is put back to what it was, no more
        try:
            self.leave(policy, key)
        finally:
            engine.lazy = lazy
        self.note()
        if not fits:
            raise Refused("DeviceMemoryError")

    def _enter_refit(self, policy: Policy) -> int:
        """The engine that is refitted stays as it is, and its scopes are no hindrance."""
        engine, frames, awake = self.engine, self.engine.frames, set(self.engine.awake)
        self.engine.frames = [(0, ())] if frames else []
        lazy, engine.lazy = engine.lazy, True
        engine.frames = []
        try:
            key = self.enter(policy, "refit")
        finally:
            engine.lazy, engine.frames, engine.awake = lazy, frames, awake
        self.note(policy.as_if_the_way_out_failed_from(key))
        self._note_left(policy, key)
        return key
