"""What was the case at every instant: a log fed record by record becomes the state of every policy.

    for state in replay("run.jsonl"):
        state.policies["actor"].placement["optimizer"]

Knows the grammar of the events, and neither files nor rules of what may be: what a record contradicts is told to a
callback, and the record believed. Modes, tiers and components are the lower-case strings of the log.

Where bytes appear or vanish outside the library (a ``loss.backward()`` or ``zero_grad()`` of the user's own), no record
can say so; a replay learns of them when they move next.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

from rl_session.audit.reader import AuditReader
from rl_session.audit.state import OpenCall, OpenScope, OpenStep, OpenTransition, PolicyState, State

__all__ = [
    "OpenCall",
    "OpenScope",
    "OpenStep",
    "OpenTransition",
    "PolicyState",
    "Replay",
    "State",
    "replay",
    "state_at",
]

_Dict = dict[str, Any]
# What user code may make or grow without a call of the library: gradients, optimizer state, caches, extras.
_NEVER_GROWS = frozenset({"params"})

LogSource = str | os.PathLike[str] | IO[bytes] | AuditReader


def replay(source: LogSource) -> Iterator[State]:
    """Give the state after every record.

    Args:
        source: What ``read_audit`` takes, or a reader.

    Raises:
        AuditError: It is not an audit log.
    """
    live = Replay()
    for record in as_reader(source).dicts():
        live.feed(record)
        yield live.state


def state_at(source: LogSource, *, seq: int | None = None, time_ns: int | None = None) -> State:
    """Give the state at one instant; at the end without a limit.

    Args:
        source: What ``read_audit`` takes, or a reader.
        seq: The state after the driver's record of this number (of the only source, where there is no driver).
        time_ns: The state after the last record that is not later.

    Raises:
        AuditError: It is not an audit log.
        ValueError: The log has no record that early.
    """
    live = Replay()
    first_source = ""
    for record in as_reader(source).dicts():
        first_source = first_source or record["source"]
        if time_ns is not None and record["time_ns"] > time_ns:
            break
        is_counted = record["source"] in ("driver", first_source)
        if seq is not None and is_counted and record["seq"] > seq:
            break
        live.feed(record)
        if seq is not None and is_counted and record["seq"] == seq:
            break
    if live.num_records == 0:
        raise ValueError(f"state_at(seq={seq}, time_ns={time_ns}): the log begins later")
    return live.state


def as_reader(source: LogSource) -> AuditReader:
    """Return a reader for what a user gave."""
    return source if isinstance(source, AuditReader) else AuditReader(source)


class _Policy:
    """The state of one policy, being changed."""

    __slots__ = (
        "components",
        "health",
        "holder",
        "is_certain",
        "mode",
        "name",
        "open_call",
        "open_step",
        "origin",
        "reference_in",
        "resting_mode",
        "scopes",
        "settled",
        "snapshot",
        "transition",
        "unsure",
        "versions",
        "way_out",
        "weights_version",
    )

    def __init__(self, name: str, mode: str, components: dict[str, dict[str, int]], origin: tuple[str, int]) -> None:
        self.name = name
        self.origin = origin
        # Who made the last transition: only that process knows the mode without asking.
        self.holder = origin[0]
        self.health = "ok"
        self.mode = mode
        # Where outermost exits go. Unknown until one does, or a switch says so.
        self.resting_mode: str | None = None
        self.components = components
        # Components of which it is not known where they are, after a fault.
        self.unsure: set[str] = set()
        self.settled: set[str] = set()
        self.scopes: list[OpenScope] = []
        self.transition: OpenTransition | None = None
        # The open scope that has made its way out, and the mode it leads to.
        self.way_out: tuple[tuple[str, int | None], str] | None = None
        self.open_step: OpenStep | None = None
        self.weights_version: int | None = None
        self.versions: dict[str | None, int] = {}
        self.reference_in = False
        self.open_call: OpenCall | None = None
        self.snapshot: PolicyState | None = None

    def state(self) -> PolicyState:
        if self.snapshot is None:
            self.snapshot = PolicyState(
                name=self.name,
                health=self.health,
                mode=self.mode,
                components={name: dict(tiers) for name, tiers in self.components.items()},
                scopes=tuple(self.scopes),
                transition=self.transition,
                open_step=self.open_step,
                open_call=self.open_call,
                weights_version=self.weights_version,
                reference_in=self.reference_in,
                is_certain=not self.unsure,
                source=self.origin[0],
                seq=self.origin[1],
            )
        return self.snapshot


class Replay:
    """The state of every policy, brought forward one record at a time.

    A record that contradicts the state is believed, and the contradiction reported.

    Args:
        on_contradiction: ``f(code, message)``, called while the record is being fed.
        on_unrecorded: ``f(code, message)``, for bytes that appeared without a record, which is no fault.
    """

    def __init__(
        self,
        on_contradiction: Callable[[str, str], None] | None = None,
        on_unrecorded: Callable[[str, str], None] | None = None,
    ) -> None:
        self.num_records = 0
        self._say = on_contradiction or _nothing
        self._note = on_unrecorded or _nothing
        self._policies: dict[str, _Policy] = {}
        self._last: _Dict = {}
        self._handlers: dict[str, Callable[[_Policy, _Dict], None]] = {
            "policy.created": self._created,
            "policy.closed": self._closed,
            "policy.faulted": self._faulted,
            "policy.recovered": self._recovered,
            "scope.entered": self._entered,
            "scope.exited": self._exited,
            "transition.started": self._started,
            "transition.committed": self._committed,
            "transition.rolled_back": self._rolled_back,
            "transition.failed": self._failed,
            "component.moved": self._moved,
            "gradients.dropped": self._dropped,
            "call.finished": self._called,
            "guard.rejected": self._rejected,
            "step.opened": self._step_opened,
            "step.committed": self._step_ended,
            "step.aborted": self._step_ended,
            "reference.swapped": self._swapped,
            "checkpoint.saved": self._saved,
            "checkpoint.loaded": self._loaded,
            "weights.published": self._published,
        }

    def feed(self, record: _Dict) -> None:
        """Apply one record, as ``AuditReader.dicts`` gives it. Unknown events change nothing."""
        self.num_records += 1
        self._last = record
        handler = self._handlers.get(record["event"])
        if handler is None or record["policy"] is None:
            return
        policy = self._policies.get(record["policy"])
        if policy is None:
            if record["event"] != "policy.created":
                self._say("unknown_policy", f"{record['event']} of policy {record['policy']!r}, which was not created")
            origin = (record["source"], record["seq"])
            policy = self._policies[record["policy"]] = _Policy(record["policy"], _mode_before(record), {}, origin)
        policy.snapshot = None
        try:
            handler(policy, record)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            self._say("malformed", f"{record['event']}: a field is missing or of another kind ({error!r})")

    @property
    def state(self) -> State:
        """The state now, as a value that does not change when more is fed."""
        last = self._last
        return State(
            source=last.get("source", ""),
            seq=last.get("seq", -1),
            time_ns=last.get("time_ns", 0),
            step=last.get("step"),
            policies={name: policy.state() for name, policy in self._policies.items()},
        )

    def open_scopes(self, policy: str | None) -> list[OpenScope]:
        """The open scopes of one policy, the outermost first; none of one that was not created."""
        found = self._policies.get(policy or "")
        return found.scopes if found is not None else []

    # -- policies ------------------------------------------------------------------------------------------------

    def _created(self, policy: _Policy, record: _Dict) -> None:
        origin = (record["source"], record["seq"])
        if policy.health != "closed" and policy.origin != origin:
            self._say("created_twice", f"policy {policy.name!r} was created before and not closed")
        components = _components(record["placement"], record["nbytes"])
        self._policies[policy.name] = _Policy(policy.name, record["mode"], components, origin)

    def _closed(self, policy: _Policy, record: _Dict) -> None:
        del record
        for scope in policy.scopes:
            self._say("scope_not_exited", f"policy {policy.name!r} was closed with scope {scope.scope_id} open")
        if policy.transition is not None:
            number = policy.transition.transition_id
            self._say("transition_not_ended", f"policy {policy.name!r} was closed in transition {number}")
        if policy.open_call is not None:
            self._say("call_not_ended", f"policy {policy.name!r} was closed in {policy.open_call.method}()")
        policy.scopes.clear()
        policy.health, policy.transition, policy.open_step, policy.open_call = "closed", None, None, None

    def _faulted(self, policy: _Policy, record: _Dict) -> None:
        del record
        policy.health, policy.open_step = "faulted", None
        policy.unsure.update(policy.components)

    def _recovered(self, policy: _Policy, record: _Dict) -> None:
        policy.health, policy.open_step, policy.reference_in = "ok", None, False
        # What another process had open has ended with its hold on the policy: it is gone.
        policy.scopes = [scope for scope in policy.scopes if scope.source == record["source"]]
        if policy.transition is not None and policy.transition.source != record["source"]:
            policy.transition = None
        placement, nbytes = record.get("placement"), record.get("nbytes")
        if placement is not None and nbytes is not None:
            policy.components = _components(placement, nbytes)
            policy.unsure.clear()
        elif "grads" in policy.components:  # a recovery discards them
            policy.components["grads"] = {}
            policy.unsure.discard("grads")

    # -- scopes --------------------------------------------------------------------------------------------------

    def _entered(self, policy: _Policy, record: _Dict) -> None:
        mode, outer, depth = record["mode"], record["outer_mode"], record["depth"]
        if depth != len(policy.scopes):
            self._say("depth", f"scope {record['scope_id']}: depth {depth}, but {len(policy.scopes)} are open")
        # A scope may have been entered by a transition, from the outer mode; else the outer mode is in effect.
        if policy.scopes and outer != policy.scopes[-1].mode:
            self._say(
                "outer_mode", f"scope {record['scope_id']}: outer_mode {outer!r} is not {policy.scopes[-1].mode!r}"
            )
        if policy.mode != mode:
            self._say("mode", f"scope {record['scope_id']}: entered in {mode!r}, but {policy.mode!r} is in effect")
            policy.mode = mode
        policy.scopes.append(
            OpenScope(
                record["scope_id"],
                mode,
                outer,
                depth,
                record["call_site"],
                record["source"],
                record["seq"],
                record["time_ns"],
            )
        )

    def _exited(self, policy: _Policy, record: _Dict) -> None:
        number, source, restored = record["scope_id"], record["source"], record["restored_mode"]
        scopes = policy.scopes
        key = (source, number)
        if scopes and (scopes[-1].source, scopes[-1].scope_id) == key:
            scope: OpenScope | None = scopes.pop()
        else:
            scope = next((s for s in scopes if (s.source, s.scope_id) == key), None)
            if scope is None:
                self._say("scope_not_entered", f"scope {number} was exited and is not open")
            else:
                self._say("scope_order", f"scope {number} was exited before scope {scopes[-1].scope_id} inside it")
                scopes.remove(scope)
        if scope is not None and scope.mode != record["mode"]:
            self._say("mode", f"scope {number}: exited as {record['mode']!r}, entered as {scope.mode!r}")
        self._restore(policy, key, restored)

    def _restore(self, policy: _Policy, key: tuple[str, int | None], restored: str) -> None:
        """Judge the mode that a scope leaves behind, and follow it where it did."""
        way_out, policy.way_out = policy.way_out, None
        outer = policy.scopes[-1].mode if policy.scopes else policy.resting_mode
        if way_out is not None and way_out[0] == key:
            # Rolled back or not, after a way out the outer mode is in effect.
            outer = way_out[1] if outer is None else outer
            policy.mode = way_out[1]
        if outer is None:
            policy.resting_mode = restored
        # Closed without a way out (by a fault, close() or recover()), a scope leaves the mode as it is.
        elif restored not in (outer, policy.mode):
            self._say("restored_mode", f"scope {key[1]}: restored_mode {restored!r} is not {outer!r}")
        elif way_out is not None and way_out[0] == key and restored != way_out[1]:
            self._say("restored_mode", f"scope {key[1]}: restored_mode {restored!r}, left for {way_out[1]!r}")

    # -- transitions ---------------------------------------------------------------------------------------------

    def _started(self, policy: _Policy, record: _Dict) -> None:
        number, from_mode = record["transition_id"], record["from_mode"]
        if policy.transition is not None:
            self._say("transition_not_ended", f"transition {policy.transition.transition_id} has no end")
        if from_mode != policy.mode:
            self._say("from_mode", f"transition {number}: from_mode {from_mode!r}, but {policy.mode!r} is in effect")
            policy.mode = from_mode
        policy.holder = record["source"]
        policy.transition = OpenTransition(
            number,
            from_mode,
            record["to_mode"],
            record["reason"],
            record["scope_id"],
            record["source"],
            record["seq"],
            record["time_ns"],
        )

    def _end(self, policy: _Policy, record: _Dict) -> OpenTransition | None:
        number = record["transition_id"]
        open_one, policy.transition = policy.transition, None
        if open_one is None or open_one.transition_id != number:
            self._say("transition_not_started", f"transition {number} ended and is not open: {record['event']}")
            return None
        if (open_one.from_mode, open_one.to_mode) != (record["from_mode"], record["to_mode"]):
            started = f"{open_one.from_mode} to {open_one.to_mode}"
            ended = f"{record['from_mode']} to {record['to_mode']}"
            self._say("transition_modes", f"transition {number} started from {started} and ended from {ended}")
        return open_one

    def _committed(self, policy: _Policy, record: _Dict) -> None:
        self._end(policy, record)
        policy.mode = record["to_mode"]
        policy.unsure -= policy.settled
        policy.settled.clear()
        self._note_way_out(policy, record)
        if not policy.scopes and record["scope_id"] is None:
            policy.resting_mode = record["to_mode"]

    def _rolled_back(self, policy: _Policy, record: _Dict) -> None:
        self._end(policy, record)
        self._note_way_out(policy, record)

    def _note_way_out(self, policy: _Policy, record: _Dict) -> None:
        """A transition of a scope that is open is its way out: the way in came before ``scope.entered``."""
        key = (record["source"], record["scope_id"])
        if any((s.source, s.scope_id) == key for s in policy.scopes):
            policy.way_out = (key, record["to_mode"])

    def _failed(self, policy: _Policy, record: _Dict) -> None:
        self._end(policy, record)
        policy.unsure.update(policy.components)

    def _moved(self, policy: _Policy, record: _Dict) -> None:
        component, nbytes = record["component"], record["nbytes"]
        from_tier, to_tier = record["from_tier"], record["to_tier"]
        tiers = policy.components.setdefault(component, {})
        if component in policy.unsure:
            # Part of it may have been at its goal before; when this has ended, all of it is.
            total = max(nbytes, sum(tiers.values()))
            policy.components[component] = {} if to_tier == "none" else {to_tier: total}
            policy.settled.add(component)
            return
        if from_tier != "none":
            self._leave(policy, component, tiers, from_tier, nbytes)
        if to_tier != "none" and (nbytes or not tiers):
            tiers[to_tier] = tiers.get(to_tier, 0) + nbytes

    def _leave(self, policy: _Policy, component: str, tiers: dict[str, int], from_tier: str, nbytes: int) -> None:
        """Take bytes away from a tier, where the log must have put them unless user code did."""
        left = tiers.pop(from_tier, 0) - nbytes
        if left > 0:
            tiers[from_tier] = left
        elif left < 0:
            elsewhere = {tier: n for tier, n in tiers.items() if n}
            where = ", ".join(f"{n} on {tier}" for tier, n in elsewhere.items()) or "none elsewhere"
            text = f"{policy.name}: {nbytes} bytes of {component} moved from {from_tier}, {-left} more than were there ({where})"
            # With several policies, a storage they share may have been moved under the name of another.
            is_shared = len(self._policies) > 1 and left != -nbytes
            is_wrong = (component in _NEVER_GROWS and not is_shared) or (left == -nbytes and elsewhere)
            (self._say if is_wrong else self._note)("moved_from", text)

    def _dropped(self, policy: _Policy, record: _Dict) -> None:
        """The component.moved to "none" before it did the work."""

    # -- calls ---------------------------------------------------------------------------------------------------

    def _called(self, policy: _Policy, record: _Dict) -> None:
        policy.open_call = None
        # A call of another process was legal when it was made; its record may come after the next transition.
        if record["mode"] != policy.mode and record["source"] == policy.holder:
            self._say("mode", f"{record['method']}() in {record['mode']!r}, but {policy.mode!r} is in effect")
        _change(policy, record["changed"])

    def _rejected(self, policy: _Policy, record: _Dict) -> None:
        if record["mode"] != policy.mode:
            self._say("mode", f"{record['method']}() refused in {record['mode']!r}, but {policy.mode!r} is in effect")

    def _step_opened(self, policy: _Policy, record: _Dict) -> None:
        if policy.open_step is not None:
            self._say("step_open", f"policy {policy.name!r}: a train step was opened while one is open")
        policy.open_step = OpenStep(record["source"], record["seq"], record["time_ns"])
        _change(policy, record["changed"])

    def _step_ended(self, policy: _Policy, record: _Dict) -> None:
        if policy.open_step is None:
            self._say("step_not_open", f"policy {policy.name!r}: {record['event']} without an open train step")
        policy.open_step = None
        _change(policy, record["changed"])

    def _swapped(self, policy: _Policy, record: _Dict) -> None:
        is_in = record["direction"] == "in"
        if is_in == policy.reference_in:
            self._say("reference", f"policy {policy.name!r}: the reference was swapped {record['direction']} twice")
        policy.reference_in = is_in
        policy.open_call = OpenCall("get_reference_policy_logprobs", record["source"], record["seq"], record["time_ns"])
        tiers = policy.components.get("reference")
        if record["kind"] == "copy" and not tiers:
            self._say(
                "reference", f"policy {policy.name!r}: a reference was swapped {record['direction']}, and there is none"
            )
        if tiers and record["kind"] == "module":
            nbytes = sum(tiers.values())
            policy.components["reference"] = {"device" if is_in else "host": nbytes}

    def _saved(self, policy: _Policy, record: _Dict) -> None:
        policy.open_call = OpenCall("save_checkpoint", record["source"], record["seq"], record["time_ns"])

    def _loaded(self, policy: _Policy, record: _Dict) -> None:
        policy.open_call = OpenCall("load_checkpoint", record["source"], record["seq"], record["time_ns"])

    def _published(self, policy: _Policy, record: _Dict) -> None:
        version, engine = record["version"], record.get("engine")
        before = policy.versions.get(engine)  # each engine counts its own
        if before is not None and (version < before if record.get("skipped") else version <= before):
            self._say("weights_version", f"policy {policy.name!r}: version {version} after {before}")
        policy.versions[engine] = policy.weights_version = version


def _nothing(_code: str, _message: str) -> None:
    return


def _mode_before(record: _Dict) -> str:
    """The best guess for a policy that a log begins in the middle of."""
    mode = record.get("from_mode") or record.get("outer_mode") or record.get("mode") or ""
    return mode if isinstance(mode, str) else ""


def _components(placement: Mapping[str, str], nbytes: Mapping[str, int]) -> dict[str, dict[str, int]]:
    return {
        name: {} if placement.get(name, "none") == "none" else {placement[name]: nbytes.get(name, 0)}
        for name in dict.fromkeys((*placement, *nbytes))
    }


def _change(policy: _Policy, changed: Iterable[Mapping[str, Any]]) -> None:
    for change in changed:
        tier, nbytes = change["tier"], change["nbytes"]
        policy.components[change["component"]] = {} if tier == "none" or not nbytes else {tier: nbytes}
        policy.unsure.discard(change["component"])
