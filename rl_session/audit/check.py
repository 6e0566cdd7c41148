"""Whether a log is whole and makes sense: every rule that records keep among each other, verified in one pass.

What is *wrong* (a finding) is told from what is *unfinished*: a killed process leaves a log that is consistent as far as it
goes. The state is replayed by ``rl_session.audit.replay``, which reports what contradicts it; this module knows the rules
of envelopes, sums, budgets, modes and nesting. Memory is bounded by what is open at one time.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import attrs

from rl_session.audit.envelope import SCHEMA
from rl_session.audit.events import EVENTS
from rl_session.audit.naming import rank_of
from rl_session.audit.reader import AuditReader, Cursor
from rl_session.audit.replay import LogSource, PolicyState, Replay, as_reader
from rl_session.audit.schema import field_kinds
from rl_session.lifecycle import CALL_MODES, NESTING, Mode

__all__ = ["CheckResult", "Finding", "Unfinished", "assert_log_is_consistent", "check"]

_MAX_FINDINGS = 1000

_Dict = dict[str, Any]
_MODES = frozenset(mode.value for mode in Mode)
_MODE_FIELDS = frozenset({"mode", "outer_mode", "restored_mode", "from_mode", "to_mode"})


class _Shape:
    """The types that the fields of one event may have on a line."""

    def __init__(self, kinds: dict[str, frozenset[type]]) -> None:
        self._kinds = kinds
        self._modes = tuple(name for name in kinds if name in _MODE_FIELDS)
        self._values: Callable[[_Dict], Any] = (
            itemgetter(*kinds) if len(kinds) > 1 else lambda r: (r[next(iter(kinds))],)
        )
        # Combinations of types that were found to be right: a set look-up instead of a loop.
        self._right: set[tuple[type, ...]] = set()

    def problem_of(self, record: _Dict) -> str:
        """What does not fit, in words; empty where all does."""
        try:
            types = tuple(map(type, self._values(record)))
        except KeyError:
            types = ()
        if types not in self._right:
            for name, kinds in self._kinds.items():
                if type(record.setdefault(name, None)) not in kinds:
                    return f"{name} is {record[name]!r}"
            self._right.add(types or tuple(map(type, self._values(record))))
        for name in self._modes:
            if record[name] not in _MODES:
                return f"{name} is {record[name]!r}, which is no mode"
        return ""


_SHAPES = {name: _Shape(field_kinds(cls)) for name, cls in EVENTS.items()}
# A record names the method and not its arguments: train() may have been train(eval_mode=True).
_EVAL_TRAIN = CALL_MODES["train(eval_mode=True)"] - CALL_MODES["train"]
_LEGAL: dict[str, frozenset[str]] = {
    **{method: frozenset(mode.value for mode in modes) for method, modes in CALL_MODES.items()},
    "train": frozenset(mode.value for mode in CALL_MODES["train"] | _EVAL_TRAIN),
}


@attrs.frozen(kw_only=True)
class Finding:
    """Something in the log that cannot be right.

    Attributes:
        code: Short and stable, for a filter.
        message: For a person.
        source: Whose record shows it, if it is about one.
        seq: Of that record.
        path: Its file.
        line: Its line in the file, from 1.
    """

    code: str
    message: str
    source: str | None = None
    seq: int | None = None
    path: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}: " if self.path is not None else ""
        who = f" ({self.source} {self.seq})" if self.source is not None else ""
        return f"{where}{self.code}: {self.message}{who}"


@attrs.frozen(kw_only=True)
class Unfinished:
    """Something that began and has no end in the log, because the writer ended first.

    Attributes:
        kind: ``"session"``, ``"policy"``, ``"scope"``, ``"transition"``, ``"call"``, ``"step"``, ``"engine"`` or
            ``"line"`` (a torn last line).
        name: What it is called: the mode, ``"offloaded -> training"``, the method.
        policy: The policy, if it is about one.
        id: The number of a scope or transition.
        source: Who wrote its beginning.
        seq: Of its beginning.
    """

    kind: str
    name: str
    policy: str | None = None
    id: int | None = None
    source: str | None = None
    seq: int | None = None


@attrs.frozen(kw_only=True)
class CheckResult:
    """What a check found.

    Attributes:
        findings: What is wrong, in order; the first thousand.
        unfinished: What began and did not end.
        notes: What is not wrong and no record explains: bytes that user code made.
        num_findings: How many there are in all.
        num_records: How many records were read.
    """

    findings: list[Finding]
    unfinished: list[Unfinished]
    notes: list[Finding]
    num_findings: int
    num_records: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, and everything ended."""
        return not self.findings and not self.unfinished

    @property
    def is_consistent(self) -> bool:
        """Whether nothing is wrong; what a killed process leaves is consistent and unfinished."""
        return not self.findings


def check(source: LogSource) -> CheckResult:
    """Replay a log and verify every rule.

    Args:
        source: What ``read_audit`` takes, or a reader.

    Raises:
        AuditError: It is not an audit log.
    """
    return _Checker(as_reader(source)).run()


@attrs.define
class _Source:
    """What is known of one writer: what its next record must be like, and what it opened."""

    next_seq: int = 0
    time_ns: int = 0
    mono_ns: int = 0
    session: _Dict | None = None
    closed: _Dict | None = None
    engines: dict[tuple[str, str | None], _Dict] = attrs.field(factory=dict)


@attrs.define
class _Moves:
    """What the ``component.moved`` of one transition add up to."""

    moved: int = 0
    elided: int = 0
    num: int = 0
    committed: _Dict | None = None
    at: tuple[str, int] = ("", 0)

    def add(self, record: _Dict) -> None:
        if record["elided"]:
            self.elided += record["nbytes"]
        else:
            self.moved += record["nbytes"]
        self.num += 1

    def differences(self) -> list[tuple[str, str]]:
        """Code and message for each sum that the transition's record gives otherwise."""
        told = self.committed or {}
        sums = (("bytes_moved", self.moved), ("bytes_elided", self.elided), ("num_moves", self.num))
        return [
            (name, f"transition {told['transition_id']}: {name} is {told[name]}, its component.moved give {found}")
            for name, found in sums
            if told[name] != found
        ]


class _Checker:
    """One pass over a log."""

    def __init__(self, reader: AuditReader) -> None:
        self._reader = reader
        self._findings: list[Finding] = []
        self._notes: list[Finding] = []
        self._num_findings = 0
        self._sources: dict[str, _Source] = {}
        self._foreign: dict[str, int] = {}
        self._moves: dict[tuple[str | None, int | None], _Moves] = {}
        # Committed with sums that do not fit; ranks whose clocks are late may still make up for it.
        self._late: dict[tuple[str | None, int | None], _Moves] = {}
        self._device_budget: int | None = None
        self._host_budget: int | None = None
        self._ranks: dict[str, int] = {}
        self._lost: set[tuple[str | None, int]] = set()
        # Policies whose ranks were asked to move: only then have they something to say.
        self._asked: set[str | None] = set()
        # Ranks of which there is a record, by policy.
        self._heard: set[tuple[str | None, int | None]] = set()
        self._record: _Dict = {}
        self._cursor: Cursor | None = None
        self._is_later = False
        self._replay = Replay(self._say, self._note)
        self._rules: dict[str, Callable[[_Dict], None]] = {
            "session.opened": self._session_opened,
            "session.closed": self._session_closed,
            "policy.created": self._policy_created,
            "scope.entered": self._scope_entered,
            "transition.started": self._transition_started,
            "transition.committed": self._transition_committed,
            "transition.rolled_back": self._transition_undone,
            "transition.failed": self._transition_undone,
            "component.moved": self._component_moved,
            "call.finished": self._call_finished,
            "worker.lost": self._worker_lost,
            "engine.woken": self._engine_woken,
            "engine.slept": self._engine_slept,
        }

    def run(self) -> CheckResult:
        num = 0
        reader, sources, rules, feed = self._reader, self._sources, self._rules, self._replay.feed
        for record, cursor in reader.walk():
            num += 1
            self._record, self._cursor = record, cursor
            name = record["source"]
            source = sources.get(name)
            if source is None:
                source = sources[name] = _Source()
            if record["run_id"] != reader.run_id and self._is_foreign(record, source):
                continue
            if record["seq"] == source.next_seq:
                source.next_seq += 1
            else:
                self._check_seq(record["seq"], source)
            if record["time_ns"] < source.time_ns or record["mono_ns"] < source.mono_ns:
                self._check_clocks(record, source)
            source.time_ns, source.mono_ns = record["time_ns"], record["mono_ns"]
            event = record["event"]
            if name[0] == "r" and record["policy"] is not None:
                self._heard.add((record["policy"], rank_of(name)))
                self._asked.add(record["policy"])
            if not self._fits(event, record):
                continue
            rule = rules.get(event)
            if rule is not None:
                rule(record)
            feed(record)
        self._cursor = None
        return self._result(num)

    # -- saying --------------------------------------------------------------------------------------------------

    def _say(self, code: str, message: str) -> None:
        self._num_findings += 1
        if len(self._findings) < _MAX_FINDINGS:
            self._findings.append(self._finding(code, message))

    def _note(self, code: str, message: str) -> None:
        if len(self._notes) < _MAX_FINDINGS:
            self._notes.append(self._finding(code, message))

    def _finding(self, code: str, message: str) -> Finding:
        cursor, record = self._cursor, self._record
        if cursor is None:
            return Finding(code=code, message=message)
        return Finding(
            code=code,
            message=message,
            source=record["source"],
            seq=record["seq"],
            path=str(cursor.path),
            line=cursor.line,
        )

    # -- envelopes -----------------------------------------------------------------------------------------------

    def _is_foreign(self, record: _Dict, source: _Source) -> bool:
        """Whether a record of another run id belongs to another run, or only says so."""
        run_id = record["run_id"]
        if record["seq"] == source.next_seq and run_id not in self._foreign:
            self._say("run_id", f"run_id {run_id!r} in the run {self._reader.run_id!r}")
            return False
        if run_id not in self._foreign:
            self._say("mixed_runs", f"records of another run, {run_id!r}, which are not looked at")
        self._foreign[run_id] = self._foreign.get(run_id, 0) + 1
        return True

    def _check_seq(self, seq: int, source: _Source) -> None:
        if seq > source.next_seq:
            missing = seq - source.next_seq
            text = f"record {source.next_seq}" if missing == 1 else f"records {source.next_seq} to {seq - 1}"
            self._say("gap", f"{text} missing")
            source.next_seq = seq + 1
        else:
            self._say("seq_back", f"seq {seq} after {source.next_seq - 1}: repeated, or out of order")

    def _check_clocks(self, record: _Dict, source: _Source) -> None:
        for name, before in (("time_ns", source.time_ns), ("mono_ns", source.mono_ns)):
            if record[name] < before:
                self._say("time_back", f"{name} went back by {(before - record[name]) / 1e9:.6f} seconds")

    def _fits(self, event: str, record: _Dict) -> bool:
        """Whether the fields are what this version's class has; of a later version nobody here can say."""
        shape = _SHAPES.get(event)
        if record["schema"] != SCHEMA:
            if not self._is_later:
                self._is_later = True
                self._note("later_schema", f"schema {record['schema']}: fields are not checked")
            return shape is not None
        if shape is None:
            self._note("unknown_event", f"{event!r} is no event of schema {SCHEMA}")
            return False
        problem = shape.problem_of(record)
        if problem:
            self._say("malformed", f"{event}: {problem}")
        return not problem

    # -- rules of single events ----------------------------------------------------------------------------------

    def _session_opened(self, record: _Dict) -> None:
        source = self._sources[record["source"]]
        if source.session is not None:
            self._say("session_twice", "a session was opened before in this log")
        source.session = record
        self._device_budget, self._host_budget = record["device_budget"], record["host_budget"]

    def _session_closed(self, record: _Dict) -> None:
        source = self._sources[record["source"]]
        if source.session is None:
            self._say("session_not_opened", "a session was closed that was not opened")
        elif source.closed is not None:
            self._say("session_twice", "the session was closed before")
        source.closed = record

    def _policy_created(self, record: _Dict) -> None:
        self._ranks[record["policy"]] = record["num_ranks"]

    def _scope_entered(self, record: _Dict) -> None:
        scopes = self._replay.open_scopes(record["policy"])
        if scopes and Mode(record["mode"]) not in NESTING[Mode(scopes[-1].mode)]:
            self._say("nesting", f"a {record['mode']} scope inside a {scopes[-1].mode} scope")

    def _transition_started(self, record: _Dict) -> None:
        self._asked.add(record["policy"])
        key = (record["policy"], record["transition_id"])
        if key not in self._moves:  # a rank's clock may be ahead
            self._moves[key] = _Moves()

    def _transition_committed(self, record: _Dict) -> None:
        key = (record["policy"], record["transition_id"])
        moves = self._moves.pop(key, None) or _Moves()
        moves.committed = record
        if moves.differences():
            if len(self._sources) == 1 and len(self._reader.paths) == 1:
                self._tell_sums(moves)
            else:
                assert self._cursor is not None
                moves.at = (str(self._cursor.path), self._cursor.line)
                self._late[key] = moves
        for name, limit in (("device", self._device_budget), ("host", self._host_budget)):
            found = record[f"{name}_bytes"]
            if limit is not None and found > limit:
                self._say("budget", f"{name}_bytes {found} after transition, over the {name}_budget of {limit}")

    def _transition_undone(self, record: _Dict) -> None:
        self._moves.pop((record["policy"], record["transition_id"]), None)

    def _tell_sums(self, moves: _Moves) -> None:
        for code, message in moves.differences():
            self._say(code, message)

    def _component_moved(self, record: _Dict) -> None:
        key = (record["policy"], record["transition_id"])
        moves = self._moves.get(key)
        if moves is not None:
            moves.add(record)
        elif key in self._late:
            self._late[key].add(record)
            if not self._late[key].differences():
                del self._late[key]
        elif rank_of(record["source"]) is not None and record["transition_id"] is not None:
            self._moves[key] = _Moves()
            self._moves[key].add(record)
        elif record["transition_id"] is not None or record["from_tier"] != "none":
            # Without a transition, bytes are only made: the copy of a reference, at attach.
            self._say("moved_outside", f"{record['component']} moved outside an open transition")

    def _call_finished(self, record: _Dict) -> None:
        method, mode = record["method"], record["mode"]
        legal = _LEGAL.get(method)
        if legal is not None and mode not in legal:
            self._say("call_mode", f"{method}() in {mode}, where it is not legal")
        elif method == "train" and Mode(mode) in _EVAL_TRAIN and record["changed"]:
            self._say("call_mode", f"train() in {mode} made or freed bytes, where it may only evaluate")

    def _worker_lost(self, record: _Dict) -> None:
        self._lost.add((record["policy"], record["rank"]))

    def _engine_woken(self, record: _Dict) -> None:
        self._sources[record["source"]].engines[record["engine"], record["policy"]] = record

    def _engine_slept(self, record: _Dict) -> None:
        self._sources[record["source"]].engines.pop((record["engine"], record["policy"]), None)

    # -- the end -------------------------------------------------------------------------------------------------

    def _result(self, num: int) -> CheckResult:
        for place in self._reader.skipped_at:
            self._place("unparsable", "a line that is no record", place.path, place.line)
        unfinished: list[Unfinished] = []
        mains = {str(path) for path in self._reader.paths}
        for place in self._reader.torn_at:
            if place.path in mains:
                unfinished.append(Unfinished(kind="line", name=str(place)))
            else:  # a part is complete: a newer one follows it
                self._place("unparsable", "half a line at the end of a part", place.path, place.line)
        for moves in self._late.values():
            for code, message in moves.differences():
                self._place(code, message, *moves.at)
        is_closed = any(s.closed is not None and s.closed["error"] is None for s in self._sources.values())
        for left in self._left_open():
            if is_closed:
                self._say(
                    "not_ended",
                    f"{left.kind} {left.name} of {left.policy or left.source} has no end in a closed session",
                )
            else:
                unfinished.append(left)
        unfinished.sort(key=lambda left: (left.source or "", -1 if left.seq is None else left.seq))
        return CheckResult(
            findings=self._findings,
            unfinished=unfinished,
            notes=self._notes,
            num_findings=self._num_findings,
            num_records=num,
        )

    def _place(self, code: str, message: str, path: str, line: int) -> None:
        self._num_findings += 1
        if len(self._findings) < _MAX_FINDINGS:
            self._findings.append(Finding(code=code, message=message, path=path, line=line))

    def _left_open(self) -> list[Unfinished]:
        """What has no end. A session that was closed by an error counts as ended; its policies may not have."""
        left = [_left("session", "session", s.session) for s in self._sources.values() if s.session and not s.closed]
        left += [
            _left("engine", name, woken)
            for source in self._sources.values()
            for (name, policy), woken in source.engines.items()
            if policy is not None or not source.closed  # an engine of no policy outlives the session: it may stay awake
        ]
        for state in self._replay.state.policies.values():
            if state.health != "closed":
                left += _of_policy(state)
        left += [
            Unfinished(kind="source", name=f"rank:{rank}", policy=policy)
            for policy, num_ranks in self._ranks.items()
            if num_ranks > 1 and policy in self._asked
            for rank in range(num_ranks)
            if (policy, rank) not in self._heard and (policy, rank) not in self._lost
        ]
        return left


def _left(kind: str, name: str, record: _Dict) -> Unfinished:
    return Unfinished(kind=kind, name=name, policy=record["policy"], source=record["source"], seq=record["seq"])


def _of_policy(state: PolicyState) -> list[Unfinished]:
    """What of one policy has no end."""
    name = state.name
    left = [Unfinished(kind="policy", name=name, policy=name, source=state.source, seq=state.seq)]
    left += [
        Unfinished(kind="scope", name=s.mode, policy=name, id=s.scope_id, source=s.source, seq=s.seq)
        for s in state.scopes
    ]
    t, call, step = state.transition, state.open_call, state.open_step
    if t is not None:
        modes = f"{t.from_mode} -> {t.to_mode}"
        left.append(
            Unfinished(kind="transition", name=modes, policy=name, id=t.transition_id, source=t.source, seq=t.seq)
        )
    if call is not None:
        left.append(Unfinished(kind="call", name=call.method, policy=name, source=call.source, seq=call.seq))
    if step is not None:
        left.append(Unfinished(kind="step", name="train step", policy=name, source=step.source, seq=step.seq))
    return left


def assert_log_is_consistent(source: LogSource, *, finished: bool = True) -> CheckResult:
    """Check a log in a test.

    Args:
        source: What ``read_audit`` takes, or a reader.
        finished: Whether everything has to have ended too.

    Raises:
        AssertionError: Something is wrong with it; everything found is in the message.
        AuditError: It is not an audit log.
    """
    result = check(source)
    wrong = [str(finding) for finding in result.findings]
    if finished:
        wrong += [f"unfinished: {left}" for left in result.unfinished]
    if wrong:
        raise AssertionError("\n".join([f"the log {source} is not consistent:", *wrong]))
    return result
