"""A run in the Chrome trace format, for Perfetto (https://ui.perfetto.dev) and ``chrome://tracing``.

Processes are policies; threads are the scopes, transitions, calls and events of the driver, and one for each rank.
Counters are the bytes by component and tier. Arrows lead from a transition to the moves it made on each rank. The format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from rl_session.audit.naming import rank_of
from rl_session.audit.nodes import Move, Node, NodeBuilder, own_fields, whole, words
from rl_session.audit.replay import Replay

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_THREADS = {"scope": (1, "scopes"), "transition": (2, "transitions"), "call": (3, "calls"), "event": (4, "events")}
_FIRST_RANK_THREAD = 10
_TIERS = ("device", "host")


def trace_chunks(records: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    """Yield the trace file piece by piece."""
    tracer = _Tracer()
    yield b'{"displayTimeUnit":"ms","traceEvents":[\n'
    is_first = True
    for event in tracer.run(records):
        yield (b"" if is_first else b",\n") + orjson.dumps(event)
        is_first = False
    yield b'\n],"otherData":' + orjson.dumps(tracer.facts) + b"}\n"


def trace_events(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the trace events of a run."""
    return list(_Tracer().run(records))


class _Tracer:
    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self._nodes = NodeBuilder()
        self._replay = Replay()
        self._pids: dict[str | None, int] = {}
        self._threads: set[tuple[int, int]] = set()
        self._counters: dict[tuple[int, str], dict[str, int]] = {}
        self._num_flows = 0

    def run(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for record in records:
            if not self.facts:
                self.facts = {"run_id": record["run_id"], "start_ns": record["time_ns"], "schema": record["schema"]}
            for node in self._nodes.feed(record):
                yield from self._tree(node)
            self._replay.feed(record)
            if record.get("policy") is not None and record["event"] != "transition.started":
                yield from self._memory(record)
        for node in self._nodes.finish():
            yield from self._tree(node)

    def _memory(self, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Say how many bytes lie where, each time that changes."""
        policy = record["policy"]
        state = self._replay.state.policies.get(policy)
        components = state.components if state is not None and state.health != "closed" else {}
        yield from self._named(policy)
        pid = self._pids[policy]
        for tier in _TIERS:
            before = self._counters.get((pid, tier), {})
            now = {words(component): whole(tiers.get(tier, 0)) for component, tiers in components.items()}
            # A component that is gone goes to zero, or its last value would stand for ever.
            now = {**dict.fromkeys(before, 0), **now}
            if now != before:
                self._counters[pid, tier] = now
                at = _micros(self._nodes.clock.seconds(record))
                yield {"ph": "C", "name": f"{tier} bytes", "pid": pid, "tid": 0, "ts": at, "args": now}

    def _tree(self, root: Node) -> Iterator[dict[str, Any]]:
        for node in root.walk():
            yield from self._node(node)

    def _node(self, node: Node) -> Iterator[dict[str, Any]]:
        tid, thread = _THREADS[node.kind]
        yield from self._named(node.policy)
        pid = self._pids[node.policy]
        yield from self._thread(pid, tid, thread)
        at = _micros(node.start)
        end = _micros(self._nodes.now if node.end is None else node.end)
        event = {"name": _title(node), "cat": node.kind, "pid": pid, "tid": tid, "ts": at, "args": _arguments(node)}
        if node.kind == "event" and end == at:
            yield {**event, "ph": "i", "s": "t"}
        else:
            yield {**event, "ph": "X", "dur": round(end - at, 3), **({"cname": "terrible"} if _is_bad(node) else {})}
        for move, start, end in node.lay_out():
            yield from self._move(node, (pid, tid), move, _micros(start), _micros(end))

    def _move(
        self, node: Node, where: tuple[int, int], move: Move, start: float, end: float
    ) -> Iterator[dict[str, Any]]:
        """A move on a rank, with the arrow from its transition; in process the transition's arguments list it."""
        rank = rank_of(move.source)
        if rank is None:
            return
        pid, tid = where
        thread = _FIRST_RANK_THREAD + rank
        yield from self._thread(pid, thread, f"rank {rank}")
        transition = node.record.get("transition_id")
        yield {
            "ph": "X",
            "name": f"{move.component} {move.from_tier} -> {move.to_tier}",
            "cat": "move",
            "pid": pid,
            "tid": thread,
            "ts": start,
            "dur": round(end - start, 3),
            "args": {"nbytes": move.nbytes, "elided": move.elided, "transition_id": transition},
        }
        self._num_flows += 1
        arrow = {"name": "moves", "cat": "flow", "id": self._num_flows, "pid": pid}
        # An arrow leaves from inside its transition: ranks' clocks may be off by a little.
        last = _micros(self._nodes.now if node.end is None else node.end)
        leaves = min(max(start, _micros(node.start)), last)
        yield {**arrow, "ph": "s", "tid": tid, "ts": leaves}
        yield {**arrow, "ph": "f", "bp": "e", "tid": thread, "ts": max(start, leaves)}

    # -- names ---------------------------------------------------------------------------------------------------

    def _named(self, policy: str | None) -> Iterator[dict[str, Any]]:
        if policy in self._pids:
            return
        pid = self._pids[policy] = len(self._pids) + 1
        name = "session" if policy is None else policy
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}

    def _thread(self, pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
        if (pid, tid) in self._threads:
            return
        self._threads.add((pid, tid))
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _is_bad(node: Node) -> bool:
    return node.status in ("failed", "rolled back")


def _title(node: Node) -> str:
    if node.kind == "transition":
        return f"{node.from_mode} -> {node.to_mode}"
    return f"{node.name}()" if node.kind == "call" else node.name


def _arguments(node: Node) -> dict[str, Any]:
    said = {
        "status": node.status,
        "error": node.error,
        "step": node.step,
        "call_site": node.call_site,
        "reason": node.reason,
        "scope_id": node.record.get("scope_id"),
        "transition_id": node.record.get("transition_id"),
    }
    if node.kind == "transition":
        said |= {"bytes_moved": node.bytes_moved, "bytes_elided": node.bytes_elided}
        said["moves"] = [
            f"{move.component} {move.from_tier} -> {move.to_tier} {move.nbytes}{' elided' if move.elided else ''}"
            for move in node.moves
        ]
    if node.kind in ("event", "call"):
        said |= own_fields(node.record)
    return {key: value for key, value in said.items() if value not in (None, "", [])}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)
