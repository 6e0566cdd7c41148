"""Rotation by size: the parts are one log, whose numbers go on, whatever happens in between."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from rl_session.audit import AuditLog, ComponentMoved, PolicyClosed, read_audit, sibling_path
from rl_session.audit.naming import find_parts, find_siblings
from rl_session.errors import AuditError, ConfigError

EVENT = PolicyClosed(reason="close")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def write(path: Path, num: int, **options: Any) -> AuditLog:
    with AuditLog(path, **options) as log:
        for _ in range(num):
            log.write(EVENT)
    return log


def names(folder: Path) -> list[str]:
    return sorted(found.name for found in folder.iterdir())


def test_a_file_is_moved_aside_before_it_would_grow_over_the_limit_and_numbers_go_on(path: Path) -> None:
    write(path, 100, rotate_nbytes=2000)
    parts = [part for _, part in find_parts(path)]
    assert len(parts) > 10
    assert [part.name for part in parts[:2]] == ["run.jsonl.part-1", "run.jsonl.part-2"]
    assert parts[-1].name == f"run.jsonl.part-{len(parts)}", "ten comes after nine"
    assert all(0 < found.stat().st_size <= 2000 for found in [*parts, path])
    assert all(stat.S_IMODE(found.stat().st_mode) == 0o600 for found in [*parts, path])
    reader = read_audit(path)
    assert [record.seq for record in reader] == list(range(100))
    assert reader.paths == (path,)
    assert reader.torn == reader.skipped == 0


def test_a_line_longer_than_the_limit_is_written_whole(path: Path) -> None:
    with AuditLog(path, rotate_nbytes=50) as log:
        log.write(EVENT)
        log.write(PolicyClosed(reason="x" * 500))
        log.write(EVENT)
    assert [record.seq for record in read_audit(path)] == [0, 1, 2]
    assert len(find_parts(path)) == 2


def test_without_a_limit_there_is_one_file(path: Path) -> None:
    write(path, 50)
    assert names(path.parent) == ["run.jsonl"]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_is_not_positive_is_refused(path: Path, limit: int) -> None:
    with pytest.raises(ConfigError, match="rotate_nbytes"):
        AuditLog(path, rotate_nbytes=limit)
    assert not path.exists()


def test_a_new_run_moves_the_parts_of_the_old_one_aside_too(path: Path) -> None:
    write(path, 20, rotate_nbytes=2000, run_id="old")
    num_parts = len(find_parts(path))
    write(path, 3, rotate_nbytes=2000, run_id="new")
    assert [(record.run_id, record.seq) for record in read_audit(path)] == [("new", 0), ("new", 1), ("new", 2)]
    old = path.with_name("run.jsonl.bak-1")
    assert len(find_parts(old)) == num_parts
    assert [record.seq for record in read_audit(old)] == list(range(20))
    write(path, 1, run_id="newest")
    assert read_audit(path.with_name("run.jsonl.bak-2")).run_id == "new"


def test_parts_whose_last_file_is_missing_are_read(path: Path) -> None:
    """What a crash in the middle of a rotation leaves."""
    write(path, 20, rotate_nbytes=2000)
    path.unlink()
    seqs = [record.seq for record in read_audit(path)]
    assert seqs == list(range(len(seqs)))
    assert seqs
    write(path, 1, run_id="next")
    assert [record.run_id for record in read_audit(path)] == ["next"]


def test_a_damaged_part_does_not_hide_the_rest(path: Path) -> None:
    log = write(path, 20, rotate_nbytes=2000)
    find_parts(path)[0][1].write_bytes(b"damaged\n")
    reader = read_audit(path)
    assert reader.run_id == log.run_id
    assert [record.seq for record in reader][-1] == 19
    assert reader.skipped == 1
    assert reader.skipped_at[0].path.endswith(".part-1")


def test_siblings_are_found_with_their_parts(path: Path) -> None:
    log = write(path, 20, rotate_nbytes=2000)
    rank = sibling_path(path, "rank:0")
    write(rank, 20, rotate_nbytes=2000, run_id=log.run_id, source="rank:0")
    assert find_siblings(path) == [rank]
    reader = read_audit(path)
    found = [(record.source, record.seq) for record in reader]
    assert sorted(found) == [(source, n) for source in ("driver", "rank:0") for n in range(20)]
    rank.unlink()  # only its parts are left
    assert find_siblings(path) == [rank]
    assert "rank:0" in {record.source for record in read_audit(path)}


def test_a_rotation_that_fails_is_reported_once_and_no_record_is_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = AuditLog(path, rotate_nbytes=500)

    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EACCES, "no")

    monkeypatch.setattr(Path, "rename", refuse)
    for _ in range(20):
        log.write(EVENT)
    log.close()
    monkeypatch.undo()
    assert [record.seq for record in read_audit(path)] == list(range(20))
    assert log.dropped == 0
    assert len(caplog.records) == 1
    assert "rotated" in caplog.text


def test_a_new_file_that_cannot_be_made_leaves_the_old_one_in_use(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = AuditLog(path, rotate_nbytes=500)
    log.write(EVENT)

    def refuse(*_args: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "open", refuse)
    for _ in range(5):
        log.write(EVENT)
    monkeypatch.undo()
    log.write(EVENT)
    log.close()
    assert [record.seq for record in read_audit(path)] == list(range(7))
    assert log.dropped == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_a_device_is_never_moved_aside() -> None:
    with AuditLog("/dev/null", rotate_nbytes=10) as log:
        for _ in range(5):
            log.write(EVENT)
    assert log.dropped == 0
    assert Path("/dev/null").is_char_device()


def test_names_like_parts_that_are_none_are_left_alone(path: Path) -> None:
    write(path, 2)
    for name in ("run.jsonl.part-0", "run.jsonl.part-x", "run.jsonl.part-1.gz", "run.jsonl.part-01"):
        path.with_name(name).write_text("mine")
    assert find_parts(path) == []
    assert sum(1 for _ in read_audit(path)) == 2
    write(path, 1)
    assert path.with_name("run.jsonl.part-x").read_text() == "mine"


def test_a_missing_log_is_still_refused(path: Path) -> None:
    with pytest.raises(AuditError, match="no such file"):
        read_audit(path)


def test_moved_events_survive_rotation_bit_for_bit(path: Path) -> None:
    events = [
        ComponentMoved(component="params", from_tier="host", to_tier="device", nbytes=n, seconds=n / 7)
        for n in range(30)
    ]
    with AuditLog(path, rotate_nbytes=1000) as log:
        for event in events:
            log.write(event)
    assert [record.event for record in read_audit(path)] == events
