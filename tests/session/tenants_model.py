"""What lazily kept participants and an engine on one device must do, in plain Python: a model that knows no torch and no library.

Written from what the documentation states, not from the code: nothing leaves unless room is short; then disposable gradients go
first, then what the participant used least recently has and does not need, of one participant the clean before the dirty, whole
components, and none that a later and larger one makes unnecessary. Leaving costs the bytes that were written since they came,
coming costs all of them. Everything else is free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Engine", "NoRoomError", "Participant", "World"]

REST, LOGPROB, TRAINING, REFIT = "rest", "logprob", "training", "refit"


class NoRoomError(Exception):
    """The entry must be refused, before anything moves."""


class Part:
    """One component: its storages, whether it is on the device, and which of them were written since they came."""

    def __init__(self, units: dict[str, int], *, on_device: bool = True) -> None:
        self.units = units
        self.on_device = on_device
        self.dirty = set(units)

    @property
    def nbytes(self) -> int:
        return sum(self.units.values())

    @property
    def dirty_nbytes(self) -> int:
        return sum(self.units[name] for name in self.dirty)


class Candidate(NamedTuple):
    """What may leave."""

    owner: Participant | Engine
    component: str
    nbytes: int
    dirty_nbytes: int
    disposable: bool

    def order(self) -> tuple[bool, int, bool, int]:
        return not self.disposable, self.owner.last_used, self.dirty_nbytes > 0, self.dirty_nbytes


class Participant:
    """A policy or a value model that rests off the device where it may.

    Attributes:
        parts: Component to its bytes, those that exist and are kept: parameters, optimizer state, extras.
        grads: Bytes of gradients that a step consumed and nobody dropped.
        scopes: The modes of its open scopes.
        version: Counts what may have changed its weights.
    """

    def __init__(self, name: str, params: dict[str, int], *, trains: bool, state: dict[str, int] | None = None) -> None:
        self.name = name
        self.parts = {"params": Part(params)}
        self.trains = trains
        self.future_state = state or {}
        self.grads = 0
        self.scopes: list[str] = []
        self.last_used = 0
        self.version = 0

    @property
    def row(self) -> str:
        return self.scopes[-1] if self.scopes else REST

    @property
    def nbytes(self) -> int:
        return self.grads + sum(part.nbytes for part in self.parts.values() if part.on_device)

    def candidates(self, entering: str | None) -> list[Candidate]:
        """What may leave, if it stays where it is or is on its way to ``entering``."""
        row = self.row
        found = []
        for name, part in self.parts.items():
            if name == "params":
                needed = row != REST or entering not in (None, REST)
            else:
                needed = entering == TRAINING or row in (LOGPROB, TRAINING)
            if part.on_device and not needed:
                found.append(Candidate(self, name, part.nbytes, part.dirty_nbytes, disposable=False))
        if self.grads and row != TRAINING:
            found.append(Candidate(self, "grads", self.grads, 0, disposable=True))
        return found


class Engine:
    """A generation engine that stays awake until its room is needed. Its sleeping and waking are its own business."""

    name = "engine"

    def __init__(self, weights: int, kv_cache: int) -> None:
        self.sizes = {"weights": weights, "kv_cache": kv_cache}
        self.awake: set[str] = set()
        self.at_work = False
        self.last_used = 0
        self.pushed: tuple[str, int] | None = None

    @property
    def nbytes(self) -> int:
        return sum(self.sizes[tag] for tag in self.awake)

    def candidates(self) -> list[Candidate]:
        if not self.awake or self.at_work:
            return []
        kept = self.sizes["weights"] if "weights" in self.awake else 0
        return [Candidate(self, "engine", self.nbytes, kept, disposable=False)]


class World:
    """Everybody on one device.

    Attributes:
        bytes_in: Bytes that must have been copied to the device until now.
        bytes_out: Likewise to the host.
        evicted: What room was made from: for each time, the set of (owner, component).
    """

    def __init__(self, participants: Iterable[Participant], engine: Engine, capacity: int) -> None:
        self.participants = {each.name: each for each in participants}
        self.engine = engine
        self.capacity = capacity
        self.bytes_in = self.bytes_out = 0
        self.evicted: list[frozenset[tuple[str, str]]] = []
        self._clock = 100

    @property
    def in_use(self) -> int:
        return self.engine.nbytes + sum(each.nbytes for each in self.participants.values())

    def use(self, who: Participant | Engine) -> None:
        self._clock += 1
        who.last_used = self._clock

    # -- room ----------------------------------------------------------------------------------------------------

    def make_room(
        self, nbytes: int, reserve: int = 0, newcomer: Participant | None = None, entering: str | None = None
    ) -> None:
        """Evict until ``nbytes`` more fit, and ``reserve`` if it can be had."""
        short = self.in_use + nbytes - self.capacity
        if short + reserve <= 0:
            return
        candidates = self.engine.candidates()
        for each in self.participants.values():
            candidates += each.candidates(entering if each is newcomer else None)
        available = sum(c.nbytes for c in candidates)
        if available < short:
            raise NoRoomError
        chosen = _choose(max(short, min(short + reserve, available)), candidates)
        if chosen:
            self.evicted.append(frozenset((c.owner.name, c.component) for c in chosen))
        for candidate in chosen:
            self._leave(candidate)

    def _leave(self, candidate: Candidate) -> None:
        owner = candidate.owner
        if isinstance(owner, Engine):
            owner.awake = set()
        elif candidate.component == "grads":
            owner.grads = 0
        else:
            self._send_away(owner.parts[candidate.component])

    def _send_away(self, part: Part) -> None:
        if part.on_device:
            self.bytes_out += part.dirty_nbytes
            part.on_device, part.dirty = False, set()

    def _bring(self, part: Part) -> None:
        if not part.on_device:
            self.bytes_in += part.nbytes
            part.on_device = True

    # -- what users do -------------------------------------------------------------------------------------------

    def enter(self, who: Participant, mode: str) -> None:
        """A scope of ``who``."""
        self.use(who)
        coming = [part for name, part in who.parts.items() if name == "params" or mode == TRAINING]
        params = who.parts["params"].nbytes
        made = reserve = 0
        if mode == TRAINING and who.trains:
            made, reserve = 0 if who.grads else params, 0 if "optimizer" in who.parts else 2 * params
        self.make_room(sum(p.nbytes for p in coming if not p.on_device) + made, reserve, who, mode)
        for part in coming:
            self._bring(part)
        who.scopes.append(mode)
        if mode == TRAINING:
            self.write(who)

    def leave(self, who: Participant) -> None:
        """The end of the innermost scope: nothing moves."""
        who.scopes.pop()

    def write(self, who: Participant, unit: str | None = None) -> None:
        """Somebody writes, or may: one storage of the parameters, or all that is on the device."""
        who.version += 1
        if unit is not None:
            who.parts["params"].dirty.add(unit)
            return
        for part in who.parts.values():
            if part.on_device:
                part.dirty = set(part.units)

    def has_room_to_train(self, who: Participant) -> bool:
        """Whether gradients, and a first optimizer state, fit beside what is there now."""
        made = who.parts["params"].nbytes - who.grads
        made += 0 if "optimizer" in who.parts else sum(who.future_state.values())
        return self.in_use + made <= self.capacity

    def train(self, who: Participant, *, keeps_gradients: bool) -> None:
        """Steps inside TRAINING; the optimizer's state is there afterwards."""
        self.use(who)
        who.parts.setdefault("optimizer", Part(who.future_state))
        who.grads = who.parts["params"].nbytes if keeps_gradients else 0
        self.write(who)

    def offload(self, who: Participant) -> None:
        """``offload()``: really."""
        who.grads = 0
        for part in who.parts.values():
            self._send_away(part)

    def wake(self, *tags: str, reserve: int = 0) -> None:
        """What of ``tags`` is asleep wakes, after room was made for it."""
        missing = [tag for tag in tags if tag not in self.engine.awake]
        if not missing:
            return
        was, self.engine.at_work = self.engine.at_work, True
        try:
            self.make_room(sum(self.engine.sizes[tag] for tag in missing), reserve)
        finally:
            self.engine.at_work = was
        self.engine.awake |= set(missing)

    def refit(self, who: Participant, *, skipped: bool) -> None:
        """``policy.refit(engine)``; a push that would change nothing may be skipped."""
        if not skipped:
            self.enter(who, REFIT)
            self.wake("weights", reserve=who.parts["params"].nbytes)
            self.engine.pushed = (who.name, who.version)
            self.leave(who)
        self.wake("weights", "kv_cache")


def _choose(needed: int, candidates: list[Candidate]) -> list[Candidate]:
    """The shortest prefix in the order of leaving that frees enough, without those that then need not leave after all."""
    queue = sorted(candidates, key=Candidate.order)
    length = next(n for n in range(len(queue) + 1) if sum(c.nbytes for c in queue[:n]) >= needed)
    chosen = queue[:length]
    for candidate in queue[:length][::-1]:
        rest = [each for each in chosen if each is not candidate]
        if not candidate.disposable and sum(each.nbytes for each in rest) >= needed:
            chosen = rest
    return chosen
