"""A run as far as a proof goes, read from its log: what was computed, and what was on the device when it mattered.

An *act* is a compute call: which tenant, which method, in which mode, on which weights, with what result. A *moment* is an act, a
wake of an engine or the entry of a scope, with every component that was on the device. Moves in between are not acts: they are
what two runs may do differently. Knows the grammar of the log and no rule of comparison; imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from rl_session.audit.replay import LogSource, Replay, as_reader

__all__ = ["Act", "Moment", "Run", "Wake", "read_run"]

_Dict = dict[str, Any]

_ACTS = frozenset(
    {
        "train",
        "begin_step",
        "forward_backward",
        "commit",
        "abort",
        "get_logprobs",
        "get_reference_policy_logprobs",
        "get_topk_logits",
        "score",
        "get_values",
        "generate",
        "save_checkpoint",
        "load_checkpoint",
    }
)
_ANYWHERE = frozenset({"save_checkpoint", "load_checkpoint", "abort"})
"""Acts for which the mode is of no account."""
_UPDATES = frozenset({"train", "commit", "load_checkpoint"})
"""Acts after which the weights may be others."""

OnDevice = Mapping[str, Mapping[str, int]]
"""Tenant to component to bytes."""


@attrs.frozen(kw_only=True)
class Moment:
    """What was on the device at one point of a run.

    Attributes:
        kind: "call", "wake" or "scope".
        name: The method, the engine and what of it woke, or the mode.
        call_site: Where in the user's code, if the log says.
        step: The session's step number, if any.
        seq: Of the record.
        on_device: Policies and values to components to bytes; those with none are left out.
        engines: Awake engines to bytes, a waking one included.
        peak: The most bytes on the device at once since the moment before.
    """

    kind: Literal["call", "wake", "scope"]
    name: str
    call_site: str
    step: int | None
    seq: int
    on_device: OnDevice
    engines: Mapping[str, int]
    peak: int

    @property
    def nbytes(self) -> int:
        """All bytes on the device."""
        return sum(sum(parts.values()) for parts in self.on_device.values()) + sum(self.engines.values())

    def describe(self) -> str:
        """On one line: who has what on the device."""
        parts = [
            f"{tenant}: {', '.join(f'{c} {n}' for c, n in held.items())}" for tenant, held in self.on_device.items()
        ]
        parts += [f"{engine}: {nbytes} (awake)" for engine, nbytes in self.engines.items()]
        return "; ".join(parts) or "nothing"


@attrs.frozen(kw_only=True)
class Act:
    """One compute call.

    Attributes:
        tenant: The policy or value; "engine" for an engine with weights of its own.
        method: What was called.
        mode: The mode it ran in; "" where that is of no account.
        in_scope: Whether a scope of the tenant was open around it; else it ran where the tenant rested.
        served: The weights it ran on: for each engine that was awake, whose and after how many updates; of an own module, the
            number of updates.
        digest: Of its result, where the log has one.
        error: The class of what it raised, or "".
        moment: What was on the device.
    """

    tenant: str
    method: str
    mode: str
    in_scope: bool
    served: tuple[str, ...]
    digest: str | None
    error: str
    moment: Moment

    def describe(self) -> str:
        """For messages."""
        where = f" in {self.mode} mode" if self.mode else ""
        step = f", step {self.moment.step}" if self.moment.step is not None else ""
        raised = f", raised {self.error}" if self.error else ""
        return f"{self.tenant}.{self.method}(){where} at {self.moment.call_site}{step}{raised}"


@attrs.frozen(kw_only=True)
class Wake:
    """An engine, or a part of it, that took its memory.

    Attributes:
        before: Index of the act that follows.
        engine: Its name.
        tag: The part.
        moment: What was on the device beside it.
    """

    before: int
    engine: str
    tag: str
    moment: Moment


@attrs.frozen(kw_only=True)
class Run:
    """A run.

    Attributes:
        acts: Compute calls, in order.
        wakes: Wakes, in order, one for each part.
        scopes: Entries of scopes, in order.
        peak: The most bytes on the device at once.
        bytes_moved: Bytes that transitions copied.
        bytes_elided: Bytes that needed no copy.
        num_transitions: Committed ones.
        budget: The session's device budget; None where it had none of its own.
    """

    acts: list[Act]
    wakes: list[Wake]
    scopes: list[Moment]
    peak: int
    bytes_moved: int
    bytes_elided: int
    num_transitions: int
    budget: int | None

    def moments(self) -> list[Moment]:
        """Acts, wakes and entries of scopes in the order of the log, each once."""
        found = {id(m): m for m in (*(a.moment for a in self.acts), *(w.moment for w in self.wakes), *self.scopes)}
        return sorted(found.values(), key=lambda moment: moment.seq)


def read_run(source: LogSource) -> Run:
    """Read a run from its log.

    Args:
        source: What ``read_audit`` takes, or a reader.

    Raises:
        AuditError: It is not an audit log.
    """
    reading = _Reading()
    for record in as_reader(source).dicts():
        reading.feed(record)
    return reading.run()


class _Reading:
    """A run being read."""

    def __init__(self) -> None:
        self._replay = Replay()
        self._engines: dict[str, dict[str, int]] = {}
        self._published: dict[str, str] = {}
        self._updates: dict[str, int] = {}
        self._acts: list[Act] = []
        self._wakes: list[Wake] = []
        self._scopes: list[Moment] = []
        self._peak = self._since = 0
        self._moved = self._elided = self._transitions = 0
        self._budget: int | None = None

    def feed(self, record: _Dict) -> None:
        """Take one record."""
        event = record["event"]
        self._engine(event, record)
        self._replay.feed(record)
        self._peak, self._since = (max(peak, self._nbytes()) for peak in (self._peak, self._since))
        match event:
            case "session.opened":
                self._budget = record.get("device_budget")
            case "transition.committed":
                self._transitions += 1
                self._moved += record.get("bytes_moved", 0)
                self._elided += record.get("bytes_elided", 0)
            case "weights.published":
                engine, policy = str(record.get("engine")), str(record["policy"])
                self._published[engine] = f"{policy} after {self._updates.get(policy, 0)} updates"
            case "call.finished" if record["method"] in _ACTS:
                self._act(record)
            case "scope.entered":
                self._scopes.append(self._moment("scope", str(record["mode"]), record))

    def _engine(self, event: str, record: _Dict) -> None:
        if event == "engine.slept":
            self._engines.pop(record["engine"], None)
        elif event == "engine.woken" and record.get("nbytes") is not None:  # one that shares the policy's takes nothing
            name, tags = str(record["engine"]), list(record["tags"])
            awake = self._engines.setdefault(name, {})
            awake |= {tag: record["nbytes"] if index == 0 else 0 for index, tag in enumerate(tags)}
            moment = self._moment("wake", f"{name}: {', '.join(tags)}", record)
            self._wakes += [Wake(before=len(self._acts), engine=name, tag=tag, moment=moment) for tag in tags]

    def _act(self, record: _Dict) -> None:
        method, policy = str(record["method"]), record["policy"]
        error = str(record.get("error") or "").partition(":")[0]
        if policy is not None and method in _UPDATES and not error:
            self._updates[policy] = self._updates.get(policy, 0) + 1
        act = Act(
            tenant=str(policy) if policy is not None else "engine",
            method=method,
            mode="" if method in _ANYWHERE else str(record["mode"]),
            in_scope=bool(self._replay.open_scopes(policy)),
            served=self._served(method, policy),
            digest=record.get("digest"),
            error=error,
            moment=self._moment("call", method, record),
        )
        self._acts.append(act)

    def _served(self, method: str, policy: str | None) -> tuple[str, ...]:
        if method != "generate":
            return ()
        if policy is not None:
            return (f"{policy} after {self._updates.get(policy, 0)} updates",)
        return tuple(f"{name}: {self._published.get(name, 'its first weights')}" for name in sorted(self._engines))

    def _moment(self, kind: Literal["call", "wake", "scope"], name: str, record: _Dict) -> Moment:
        peak, self._since = max(self._since, self._nbytes()), self._nbytes()
        return Moment(
            kind=kind,
            name=name,
            call_site=str(record.get("call_site") or "?"),
            step=record.get("step"),
            seq=record["seq"],
            on_device=self._on_device(),
            engines={engine: sum(tags.values()) for engine, tags in self._engines.items()},
            peak=peak,
        )

    def _on_device(self) -> dict[str, dict[str, int]]:
        found = {}
        for name, policy in self._replay.state.policies.items():
            held = {c: tiers["device"] for c, tiers in policy.components.items() if tiers.get("device")}
            if held:
                found[name] = held
        return found

    def _nbytes(self) -> int:
        held = sum(sum(parts.values()) for parts in self._on_device().values())
        return held + sum(sum(tags.values()) for tags in self._engines.values())

    def run(self) -> Run:
        """What was read."""
        return Run(
            acts=self._acts,
            wakes=self._wakes,
            scopes=self._scopes,
            peak=self._peak,
            bytes_moved=self._moved,
            bytes_elided=self._elided,
            num_transitions=self._transitions,
            budget=self._budget,
        )
