"""Spans: pairs of records, streamed, with nothing lost where a log stops."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from rl_session.audit import AuditLog, events, read_audit
from rl_session.audit.spans import SpanBuilder, spans


@pytest.fixture
def found(clean_log: Path) -> list[Any]:
    return list(spans(clean_log))


def test_every_pair_is_one_complete_span(clean_log: Path, found: list[Any]) -> None:
    names = Counter(record.name for record in read_audit(clean_log))
    kinds = Counter(span.kind for span in found)
    assert kinds["scope"] == names["scope.entered"]
    assert kinds["transition"] == names["transition.started"]
    assert kinds["call"] == names["call.finished"]
    assert kinds["step"] == names["step.opened"]
    assert (kinds["session"], kinds["policy"], kinds["session_step"]) == (1, 1, 2)
    assert all(span.complete for span in found)
    assert all(span.start_ns <= span.end_ns for span in found)


def test_spans_are_given_when_they_end_and_lie_inside_the_session(found: list[Any]) -> None:
    assert [span.end_ns for span in found] == sorted(span.end_ns for span in found)
    session = found[-1]
    assert session.kind == "session"
    assert all(session.start_ns <= span.start_ns and span.end_ns <= session.end_ns for span in found)


def test_a_span_carries_ids_fields_of_both_records_and_its_seconds(found: list[Any]) -> None:
    scope = next(span for span in found if span.kind == "scope" and span.name == "logprob")
    assert scope.policy == "actor"
    assert scope.scope_id is not None
    assert scope.step == 0
    assert {"outer_mode", "depth", "call_site", "restored_mode"} <= set(scope.fields)
    assert scope.seconds == pytest.approx(scope.fields["seconds"], abs=0.05)
    transition = next(span for span in found if span.kind == "transition")
    assert transition.name == "resident -> training"
    assert transition.transition_id == 1
    assert {"reason", "num_moves", "device_bytes"} <= set(transition.fields)
    call = next(span for span in found if span.kind == "call" and span.name == "get_logprobs")
    assert call.seconds == pytest.approx(call.fields["seconds"], abs=1e-6)
    assert call.fields["mode"] == "logprob"


def test_calls_lie_inside_the_scope_they_were_made_in(found: list[Any]) -> None:
    scopes = [span for span in found if span.kind == "scope"]
    for call in (span for span in found if span.kind == "call"):
        assert any(s.start_ns <= call.start_ns and call.end_ns <= s.end_ns and s.policy == call.policy for s in scopes)


def test_steps_of_the_session_are_spans_of_their_own(found: list[Any]) -> None:
    steps = [span for span in found if span.kind == "session_step"]
    assert [(span.name, span.step) for span in steps] == [("step 0", 0), ("step 1", 1)]
    assert steps[0].end_ns <= steps[1].start_ns


@pytest.mark.parametrize("num", [2, 5, 12, 20, 40])
def test_what_has_no_end_is_given_last_and_incomplete(tmp_path: Path, clean_log: Path, num: int) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(clean_log.read_bytes().splitlines(keepends=True)[:num]))
    found = list(spans(path))
    *_, last = read_audit(path)
    incomplete = [span for span in found if not span.complete]
    assert incomplete[0].kind == "session"
    assert incomplete == found[-len(incomplete) :]
    assert {span.end_ns for span in incomplete} == {max(span.end_ns for span in found)}
    assert incomplete[0].end_ns - incomplete[0].start_ns <= last.mono_ns


def test_errors_are_carried(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with AuditLog(path) as log:
        log.write(events.TransitionStarted(from_mode="a", to_mode="b", reason="x"), transition_id=1)
        log.write(events.TransitionRolledBack(from_mode="a", to_mode="b", error="OOM: no"), transition_id=1)
        log.write(events.StepOpened(), policy="p")
        log.write(events.StepAborted(reason="NonFiniteError"), policy="p")
        log.write(events.CallFinished(method="train", mode="training", seconds=0.0, error="E: x"), policy="p")
    assert [(span.kind, span.error) for span in spans(path)] == [
        ("transition", "OOM: no"),
        ("step", "NonFiniteError"),
        ("call", "E: x"),
    ]


def test_engines_and_equal_ids_of_two_sources_are_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    entered = events.ScopeEntered(mode="logprob", outer_mode="offloaded", depth=0, via="scope", call_site="a:1")
    exited = events.ScopeExited(mode="logprob", restored_mode="offloaded", seconds=1.0)
    with (
        AuditLog(path, run_id="r") as one,
        AuditLog(tmp_path / "run.driver:2.jsonl", run_id="r", source="driver:2") as two,
    ):
        one.write(events.EngineWoken(engine="vllm"))
        one.write(entered, scope_id=1)
        two.write(entered, scope_id=1)
        two.write(exited, scope_id=1)
        one.write(exited, scope_id=1)
        one.write(events.EngineSlept(engine="vllm", level=2))
    found = [(span.kind, span.source, span.name, span.complete) for span in spans(path)]
    assert found == [
        ("scope", "driver:2", "logprob", True),
        ("scope", "driver", "logprob", True),
        ("engine", "driver", "vllm", True),
    ]


def test_a_clock_set_back_makes_no_negative_span() -> None:
    builder = SpanBuilder()
    base = {"run_id": "r", "source": "driver", "policy": "p", "scope_id": 1, "transition_id": None, "step": None}
    times = [(10**12, 100), (5 * 10**11, 600)]
    start, end = ({**base, "schema": 1, "seq": n, "time_ns": t, "mono_ns": m} for n, (t, m) in enumerate(times))
    builder.feed({**start, "event": "scope.entered", "mode": "training"})
    (span,) = builder.feed({**end, "event": "scope.exited", "mode": "training"})
    assert span.end_ns - span.start_ns == 500
    assert span.start_ns == 10**12


def test_memory_holds_only_what_is_open(tmp_path: Path) -> None:
    builder = SpanBuilder()
    record = {"schema": 1, "run_id": "r", "source": "d", "policy": "p", "transition_id": None, "step": 1}
    for n in range(2000):
        at = {**record, "seq": 2 * n, "time_ns": n, "mono_ns": n, "scope_id": n}
        builder.feed({**at, "event": "scope.entered", "mode": "m"})
        builder.feed({**at, "event": "scope.exited", "mode": "m"})
    assert len(builder._open) == 1, "the session's step"


def test_a_truncated_real_log_never_raises(tmp_path: Path, clean_log: Path) -> None:
    raw = [orjson.loads(line) for line in clean_log.read_bytes().splitlines()]
    for first in range(0, len(raw), 7):
        builder = SpanBuilder()
        for record in raw[first:]:
            builder.feed(record)
        builder.finish()
