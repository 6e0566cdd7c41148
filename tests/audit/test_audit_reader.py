"""The reader: takes what a crash left, merges the sources of a run, refuses only what is no log at all."""

from __future__ import annotations

import gc
import math
import os
import tracemalloc
from pathlib import Path
from typing import Any

import orjson
import pytest

from rl_session.audit import (
    AuditLog,
    ComponentMoved,
    PolicyClosed,
    ScopeEntered,
    UnknownEvent,
    read_audit,
    sibling_path,
)
from rl_session.audit import reader as reader_module
from rl_session.errors import AuditError

EVENT = PolicyClosed(reason="close")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def line(seq: int = 0, /, **fields: Any) -> bytes:
    envelope = {
        "schema": 1,
        "run_id": "r1",
        "source": "driver",
        "seq": seq,
        "time_ns": 1000 + seq,
        "mono_ns": seq,
        "event": "policy.closed",
        "policy": None,
        "scope_id": None,
        "transition_id": None,
        "step": None,
    }
    return orjson.dumps({**envelope, **({} if "event" in fields else {"reason": "close"}), **fields}) + b"\n"


# -- iterating ------------------------------------------------------------------------------------------


def test_a_reader_can_be_iterated_several_times_and_at_once(path: Path) -> None:
    path.write_bytes(b"".join(line(n) for n in range(3)) + b"damaged\n")
    reader = read_audit(path)
    first = list(reader)
    assert [record.seq for record in first] == [0, 1, 2]
    assert list(reader) == first
    assert reader.skipped == 1
    assert [(a.seq, b.seq) for a, b in zip(reader, reader, strict=True)] == [(0, 0), (1, 1), (2, 2)]
    assert reader.skipped == 1


def test_an_iteration_left_early_closes_its_files(path: Path) -> None:
    path.write_bytes(line(0) + line(1))
    for _record in read_audit(path):
        break
    gc.collect()  # an open file would be a ResourceWarning, and warnings are errors


def test_memory_does_not_grow_with_the_file(path: Path) -> None:
    def peak(num_lines: int) -> int:
        path.write_bytes(b"".join(line(n) for n in range(num_lines)))
        reader = read_audit(path)
        sum(1 for _ in reader)
        tracemalloc.start()
        try:
            assert sum(1 for _ in reader) == num_lines
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(20_000) < peak(2000) + 100_000  # both have more lines than are read at a time


def test_records_carry_the_typed_event_and_the_envelope(path: Path) -> None:
    path.write_bytes(
        line(
            4,
            event="scope.entered",
            policy="actor",
            scope_id=2,
            step=9,
            mode="training",
            outer_mode="offloaded",
            depth=1,
            via="scope",
            call_site="train.py:88",
        )
    )
    (record,) = read_audit(path)
    assert record.event == ScopeEntered(
        mode="training", outer_mode="offloaded", depth=1, via="scope", call_site="train.py:88"
    )
    assert record.name == "scope.entered"
    assert (record.seq, record.time_ns, record.policy, record.scope_id, record.step) == (
        4,
        1004,
        "actor",
        2,
        9,
    )


# -- what a crash, or a later version, leaves -----------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 2, 50, -2], ids=lambda cut: f"cut{cut}")
def test_a_torn_last_line_is_counted_and_the_rest_is_read(path: Path, cut: int) -> None:
    path.write_bytes(line(0) + line(1) + line(2)[:cut])
    reader = read_audit(path)
    assert [record.seq for record in reader] == [0, 1]
    assert (reader.torn, reader.skipped) == (1, 0)


def test_a_last_line_that_lacks_only_its_newline_is_a_record(path: Path) -> None:
    path.write_bytes(line(0) + line(1).rstrip())
    reader = read_audit(path)
    assert [record.seq for record in reader] == [0, 1]
    assert reader.torn == 0


def test_zeros_after_a_power_failure_are_a_torn_line(path: Path) -> None:
    path.write_bytes(line(0) + line(1) + b"\0" * 4096)
    reader = read_audit(path)
    assert [record.seq for record in reader] == [0, 1]
    assert (reader.torn, reader.skipped) == (1, 0)


@pytest.mark.parametrize(
    "bad",
    [
        b"damaged\n",
        b"\xff\xfe\n",
        b"[1, 2]\n",
        b"null\n",
        b"{}\n",
        b"[" * 5000 + b"\n",
        line(7, seq="seven"),
        line(7, seq=True),
        line(7, event=None),
        line(7, policy=3),
        line(7)[:-20] + b"\n",
    ],
    ids=[f"bad-{n}" for n in range(11)],
)
def test_a_bad_line_in_the_middle_is_skipped_and_counted(path: Path, bad: bytes) -> None:
    path.write_bytes(line(0) + bad + line(1))
    reader = read_audit(path)
    assert [record.seq for record in reader] == [0, 1]
    assert (reader.torn, reader.skipped) == (0, 1)


def test_a_bad_first_line_does_not_hide_the_rest(path: Path) -> None:
    path.write_bytes(b"damaged\n" + line(0))
    reader = read_audit(path)
    assert [record.seq for record in reader] == [0]
    assert reader.skipped == 1


def test_a_line_without_end_is_read_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_MAX_LINE_NBYTES", 1024)
    path.write_bytes(line(0) + b"x" * 5000 + b"\n" + line(1))
    reader = read_audit(path)
    assert [record.seq for record in reader] == [0, 1]
    assert reader.skipped > 0
    assert reader.torn == 0


def test_an_event_of_a_later_version_is_carried_through(path: Path) -> None:
    later = line(0, schema=2, event="moon.landed", crew=["a"])
    path.write_bytes(later)
    (record,) = read_audit(path)
    assert record.schema == 2
    assert record.name == "moon.landed"
    assert record.event == UnknownEvent(name="moon.landed", fields={"crew": ["a"]})
    assert record.to_dict() == orjson.loads(later)


def test_unknown_fields_of_a_known_event_are_kept_beside_it(path: Path) -> None:
    later = line(0, schema=2, colour="red")
    path.write_bytes(later)
    (record,) = read_audit(path)
    assert record.event == EVENT.__class__(reason="close")
    assert record.extra == {"colour": "red"}
    assert record.to_dict() == orjson.loads(later)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"reason": None},
        {"reason": 3},
        {"reason": ["close"]},
    ],
    ids=["missing", "null", "number", "list"],
)
def test_a_known_event_whose_fields_do_not_fit_is_shown_as_it_is(path: Path, fields: dict[str, Any]) -> None:
    path.write_bytes(line(0, event="policy.closed", **fields))
    (record,) = read_audit(path)
    assert record.event == UnknownEvent(name="policy.closed", fields=fields)


@pytest.mark.parametrize(
    "change",
    [{"nbytes": 1.5}, {"nbytes": True}, {"elided": 1}, {"seconds": "1"}, {"seconds": True}, {"component": 1}],
    ids=str,
)
def test_values_are_checked_and_never_coerced(path: Path, change: dict[str, Any]) -> None:
    fields = ComponentMoved(component="params", from_tier="host", to_tier="device", nbytes=1, seconds=0.1)
    path.write_bytes(line(0, event="component.moved", **{**fields.to_fields(), **change}))
    (record,) = read_audit(path)
    assert isinstance(record.event, UnknownEvent)


def test_a_nan_that_json_could_not_hold_comes_back_as_nan(path: Path) -> None:
    moved = ComponentMoved(component="params", from_tier="host", to_tier="device", nbytes=1, seconds=float("nan"))
    with AuditLog(path) as log:
        log.write(moved)
    (record,) = read_audit(path)
    assert isinstance(record.event, ComponentMoved)
    assert math.isnan(record.event.seconds)


# -- sources --------------------------------------------------------------------------------------------


def test_the_files_of_other_sources_are_found_and_merged_by_time(path: Path) -> None:
    path.write_bytes(line(0, time_ns=10) + line(1, time_ns=40) + line(2, time_ns=41))
    sibling_path(path, "rank:0").write_bytes(
        line(0, time_ns=20, source="rank:0") + line(1, time_ns=30, source="rank:0")
    )
    sibling_path(path, "driver:a/b").write_bytes(line(0, time_ns=25, source="driver:a/b"))
    reader = read_audit(path)
    assert [(record.time_ns, record.source) for record in reader] == [
        (10, "driver"),
        (20, "rank:0"),
        (25, "driver:a/b"),
        (30, "rank:0"),
        (40, "driver"),
        (41, "driver"),
    ]
    assert len(reader.paths) == 3


def test_a_sibling_given_by_itself_is_read_alone(path: Path) -> None:
    path.write_bytes(line(0))
    sibling = sibling_path(path, "rank:0")
    sibling.write_bytes(line(0, source="rank:0"))
    assert [record.source for record in read_audit(sibling)] == ["rank:0"]


def test_logs_share_a_run_by_run_id(path: Path) -> None:
    with AuditLog(path) as driver:
        driver.write(EVENT)
        with AuditLog(sibling_path(path, "rank:1"), run_id=driver.run_id, source="rank:1") as rank:
            rank.write(EVENT)
        driver.write(EVENT)
    assert [(record.source, record.seq) for record in read_audit(path)] == [
        ("driver", 0),
        ("rank:1", 0),
        ("driver", 1),
    ]


def test_files_that_are_only_called_like_siblings_are_left_out(path: Path) -> None:
    path.write_bytes(line(0))
    path.with_name("run.b.jsonl").write_bytes(line(0, run_id="another"))
    path.with_name("run.metrics.jsonl").write_text('{"loss": 1}\n')
    path.with_name("run.empty.jsonl").touch()
    path.with_name("run.folder.jsonl").mkdir()
    path.with_name("run.jsonl.bak-1").write_bytes(line(0))
    path.with_name("runner.rank:0.jsonl").write_bytes(line(0))
    reader = read_audit(path)
    assert reader.paths == (path,)
    assert sum(1 for _ in reader) == 1


def test_a_name_with_glob_characters_finds_its_own_siblings_only(tmp_path: Path) -> None:
    path = tmp_path / "run[ab]*.jsonl"
    path.write_bytes(line(0))
    sibling_path(path, "rank:0").write_bytes(line(0, source="rank:0"))
    (tmp_path / "runa.rank:1.jsonl").write_bytes(line(0, source="rank:1"))
    assert [record.source for record in read_audit(path)] == ["driver", "rank:0"]


def test_a_clock_set_back_does_not_reorder_a_source(path: Path) -> None:
    path.write_bytes(line(0, time_ns=100) + line(1, time_ns=5) + line(2, time_ns=200))
    sibling_path(path, "rank:0").write_bytes(line(0, time_ns=150, source="rank:0"))
    assert [record.seq for record in read_audit(path) if record.source == "driver"] == [0, 1, 2]


def test_torn_and_skipped_are_summed_over_the_files(path: Path) -> None:
    path.write_bytes(line(0) + b"damaged\n" + b"{")
    sibling_path(path, "rank:0").write_bytes(line(0, source="rank:0") + b"{")
    reader = read_audit(path)
    assert len(list(reader)) == 2
    assert (reader.torn, reader.skipped) == (2, 1)


# -- what is no audit log -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"", "empty"),
        (b"\x7fELF\0\0\0", "binary"),
        (b"once upon a time\n" * 1000, "none of its first"),
        (b'{"loss": 1.0}\n' * 10, "none of its first"),
        (line(0)[:30], "none of its first"),
    ],
    ids=["empty", "binary", "text", "other-json", "only-torn"],
)
def test_a_file_of_another_kind_is_refused_with_what_it_is(path: Path, content: bytes, fact: str) -> None:
    path.write_bytes(content)
    with pytest.raises(AuditError) as caught:
        read_audit(path)
    assert str(path) in caught.value.attempted
    assert fact in caught.value.facts[0]
    assert "read_audit" in caught.value.remedy


def test_a_missing_file_a_directory_and_a_pipe_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, fact in (("missing", "no such file"), ("", "directory"), ("pipe", "not a regular file")):
        with pytest.raises(AuditError) as caught:
            read_audit(tmp_path / name)
        assert fact in caught.value.facts[0]


def test_a_file_that_vanishes_between_opening_and_reading_is_an_audit_error(path: Path) -> None:
    path.write_bytes(line(0))
    reader = read_audit(path)
    path.unlink()
    with pytest.raises(AuditError):
        list(reader)
