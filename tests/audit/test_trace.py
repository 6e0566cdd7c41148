"""The Chrome trace: valid, nested, with arrows to the ranks and counters of the memory."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rl_session.audit import read_audit
from rl_session.audit.trace import trace_events
from rl_session.cli import _app

GB = 10**9


@pytest.fixture
def events(whole_run: Path) -> list[dict[str, Any]]:
    return trace_events(read_audit(whole_run).dicts())


def named(events: list[dict[str, Any]], kind: str) -> dict[tuple[int, int], str]:
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == kind}


def test_policies_are_processes_and_ranks_are_threads(events: list[dict[str, Any]]) -> None:
    assert set(named(events, "process_name").values()) == {"session", "actor"}
    threads = set(named(events, "thread_name").values())
    assert threads >= {"scopes", "transitions", "calls", "rank 0", "rank 3"}


def test_bars_of_one_thread_nest(events: list[dict[str, Any]]) -> None:
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for bars in threads.values():
        open_bars: list[tuple[float, float]] = []
        for start, end in sorted(bars, key=lambda bar: (bar[0], -bar[1])):
            while open_bars and open_bars[-1][1] <= start:
                open_bars.pop()
            assert not open_bars or end <= open_bars[-1][1]
            open_bars.append((start, end))


def test_an_arrow_leads_from_each_transition_to_each_move_on_a_rank(events: list[dict[str, Any]]) -> None:
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    moves = [event for event in events if event.get("cat") == "move"]
    assert len(starts) == len(ends) == len(moves) == 3 * 2 * 2 * 4
    transitions = [event for event in events if event.get("cat") == "transition"]
    for number, start in starts.items():
        assert any(bar["ts"] <= start["ts"] <= bar["ts"] + bar["dur"] for bar in transitions)
        assert any((move["tid"], move["ts"]) == (ends[number]["tid"], ends[number]["ts"]) for move in moves)


def test_counters_follow_the_memory_and_end_at_zero_on_the_device(events: list[dict[str, Any]]) -> None:
    counters = [event for event in events if event["ph"] == "C" and event["name"] == "device bytes"]
    assert max(counter["args"].get("optimizer", 0) for counter in counters) == 16 * GB
    assert set(counters[-1]["args"].values()) == {0}
    assert [counter["ts"] for counter in counters] == sorted(counter["ts"] for counter in counters)


def test_what_failed_says_why(bad_run: Path) -> None:
    events = trace_events(read_audit(bad_run).dicts())
    failed = [event for event in events if event.get("args", {}).get("status") == "rolled back"]
    assert [event["args"]["error"][:17] for event in failed] == ["DeviceMemoryError"]
    assert any(event.get("args", {}).get("status") == "unfinished" for event in events)


def test_the_command_writes_one_json_document(whole_run: Path, events: list[dict[str, Any]]) -> None:
    result = CliRunner().invoke(_app, ["audit", "trace", str(whole_run)])
    assert result.exit_code == 0
    document = json.loads(whole_run.with_name("run.trace.json").read_text())
    assert document["traceEvents"] == events
    assert document["otherData"]["run_id"] == "fake-run"
    assert all({"ph", "pid", "name"} <= event.keys() for event in document["traceEvents"])


def test_standard_input_to_standard_output(whole_run: Path) -> None:
    result = CliRunner().invoke(_app, ["audit", "trace", "-"], input=whole_run.read_bytes())
    assert json.loads(result.stdout)["traceEvents"]
