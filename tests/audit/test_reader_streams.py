"""Plain dictionaries, streams, long lines, and files that are still being written."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from rl_session.audit import AuditLog, PolicyClosed, read_audit, sibling_path
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
    return orjson.dumps({**envelope, "reason": "close", **fields}) + b"\n"


# -- dictionaries ----------------------------------------------------------------------------------------------


def test_dicts_are_the_lines_in_the_order_of_the_typed_records(path: Path) -> None:
    path.write_bytes(line(0, time_ns=10) + line(1, time_ns=40))
    sibling_path(path, "rank:0").write_bytes(line(0, time_ns=20, source="rank:0", colour="red"))
    reader = read_audit(path)
    assert list(reader.dicts()) == [record.to_dict() for record in reader]
    assert [record["time_ns"] for record in reader.dicts()] == [10, 20, 40]


def test_dicts_have_every_key_of_the_envelope_also_where_the_line_has_not(path: Path) -> None:
    bare = orjson.loads(line(0))
    for key in ("policy", "scope_id", "transition_id", "step"):
        del bare[key]
    path.write_bytes(orjson.dumps(bare) + b"\n")
    (record,) = read_audit(path).dicts()
    assert record == {**bare, "policy": None, "scope_id": None, "transition_id": None, "step": None}


def test_dicts_are_the_callers_to_change(path: Path) -> None:
    path.write_bytes(line(0) + line(1))
    reader = read_audit(path)
    for record in reader.dicts():
        record.clear()
    assert len(list(reader.dicts())) == 2


def test_walking_says_where_each_record_is(path: Path) -> None:
    path.write_bytes(line(0) + b"damaged\n\n" + line(1))
    sibling_path(path, "rank:0").write_bytes(line(0, source="rank:0"))
    reader = read_audit(path)
    places = [(record["source"], cursor.path.name, cursor.line) for record, cursor in reader.walk()]
    assert places == [("driver", "run.jsonl", 1), ("rank:0", "run.rank:0.jsonl", 1), ("driver", "run.jsonl", 4)]
    assert [str(place) for place in reader.skipped_at] == [f"{path}:2"]


# -- what is not text, or too long -----------------------------------------------------------------------------


def test_invalid_utf8_is_a_damaged_line(path: Path) -> None:
    path.write_bytes(line(0) + line(1).replace(b"close", b"cl\xff\xfese") + line(2))
    reader = read_audit(path)
    assert [record.seq for record in reader] == [0, 2]
    assert reader.skipped == 1


def test_a_line_of_a_hundred_megabytes_is_skipped_in_bounded_memory(path: Path) -> None:
    with path.open("wb") as file:
        file.write(line(0))
        for _ in range(100):
            file.write(b"x" * 2**20)
        file.write(b"\n" + line(1))
    reader = read_audit(path)
    tracemalloc.start()
    try:
        assert [record["seq"] for record in reader.dicts()] == [0, 1]
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()
    assert (reader.skipped, reader.torn) == (1, 0)
    assert reader.skipped_at[0].line == 2


@pytest.mark.parametrize("size", [10, 1023, 1024, 1025, 100_000])
def test_a_line_over_the_limit_is_one_skipped_line_wherever_chunks_end(
    path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_MAX_LINE_NBYTES", 1024)
    monkeypatch.setattr(reader_module, "_CHUNK_NBYTES", 512)
    path.write_bytes(line(0) + b"x" * size + b"\n" + line(1) + b"x" * size + b"\n" + line(2))
    reader = read_audit(path)
    assert [record.seq for record in reader] == [0, 1, 2]
    assert (reader.skipped, reader.torn) == (2, 0)


def test_an_endless_last_line_is_torn(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_MAX_LINE_NBYTES", 1024)
    path.write_bytes(line(0) + b"x" * 200_000)
    reader = read_audit(path)
    assert [record.seq for record in reader] == [0]
    assert [place.line for place in reader.torn_at] == [2]


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 333])
def test_every_way_of_cutting_into_chunks_gives_the_same(
    path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = line(0) + b"\n" + b"damaged\n" + line(1) + line(2)[:-9]
    path.write_bytes(content)
    monkeypatch.setattr(reader_module, "_CHUNK_NBYTES", chunk)
    reader = read_audit(io.BytesIO(content)) if chunk > 300 else read_audit(path)
    assert [record.seq for record in reader] == [0, 1]
    assert (reader.skipped, reader.torn) == (1, 1)


# -- streams ---------------------------------------------------------------------------------------------------


def test_a_file_object_is_read_once(path: Path) -> None:
    content = b"".join(line(n) for n in range(3000)) + line(3000)[:20]
    reader = read_audit(io.BytesIO(content))
    assert reader.run_id == "r1"
    assert [record["seq"] for record in reader.dicts()] == list(range(3000))
    assert reader.torn == 1
    with pytest.raises(AuditError, match="read before"):
        list(reader)


def test_standard_input_is_read_by_the_name_of_a_dash(path: Path) -> None:
    code = "from rl_session.audit import read_audit; print([r['seq'] for r in read_audit('-').dicts()])"
    done = subprocess.run(
        [sys.executable, "-c", code], input=line(0) + line(1), capture_output=True, check=True, timeout=60
    )
    assert done.stdout.strip() == b"[0, 1]"


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"", "empty"),
        (b"\x7fELF\0\0\n", "binary"),
        (b"once upon a time\n" * 1000, "none of its first"),
        (line(0)[:30], "none of its first"),
    ],
    ids=["empty", "binary", "text", "torn"],
)
def test_a_stream_of_another_kind_is_refused(content: bytes, fact: str) -> None:
    with pytest.raises(AuditError) as caught:
        read_audit(io.BytesIO(content))
    assert fact in caught.value.facts[0]


def test_a_stream_of_one_record_without_a_newline_is_read() -> None:
    assert [record.seq for record in read_audit(io.BytesIO(line(0).rstrip()))] == [0]


# -- following -------------------------------------------------------------------------------------------------


class Follower:
    """Follows a log in a thread, and keeps what it gets."""

    def __init__(self, path: Path) -> None:
        self.reader = read_audit(path, follow=True, poll_seconds=0.005)
        self.got: list[tuple[str, int]] = []
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        for record in self.reader:
            self.got.append((record.source, record.seq))

    def wait_for(self, num: int) -> None:
        """Wait until that many records have come."""
        deadline = time.monotonic() + 30
        while len(self.got) < num and time.monotonic() < deadline:
            time.sleep(0.002)
        assert len(self.got) == num

    def stop(self) -> None:
        self.reader.stop()
        self.thread.join(timeout=30)
        assert not self.thread.is_alive()


@pytest.fixture
def follow() -> Iterator[Callable[[Path], Follower]]:
    made: list[Follower] = []

    def start(path: Path) -> Follower:
        made.append(Follower(path))
        return made[-1]

    yield start
    for follower in made:
        follower.stop()


def test_following_gives_records_as_they_are_written_until_it_is_stopped(
    path: Path, follow: Callable[[Path], Follower]
) -> None:
    with AuditLog(path) as log:
        log.write(EVENT)
        follower = follow(path)
        for num in range(1, 6):
            follower.wait_for(num)
            log.write(EVENT)
        follower.wait_for(6)
        log.write(EVENT)
    follower.stop()
    assert follower.got == [("driver", n) for n in range(7)], "what was written before the stop is given"


def test_half_a_line_is_waited_for_and_torn_only_when_stopped(path: Path, follow: Callable[[Path], Follower]) -> None:
    path.write_bytes(line(0) + line(1)[:50])
    follower = follow(path)
    follower.wait_for(1)
    with path.open("ab") as file:
        file.write(line(1)[50:] + line(2)[:30])
    follower.wait_for(2)
    assert follower.reader.torn == 0
    follower.stop()
    assert follower.reader.torn == 1


def test_following_goes_on_through_rotations_and_finds_new_siblings(
    path: Path, follow: Callable[[Path], Follower]
) -> None:
    with AuditLog(path, rotate_nbytes=1000) as log:
        log.write(EVENT)
        follower = follow(path)
        for n in range(200):
            log.write(EVENT)
            if n == 100:
                with AuditLog(sibling_path(path, "rank:0"), run_id=log.run_id, source="rank:0") as rank:
                    rank.write(EVENT)
        follower.wait_for(202)
    follower.stop()
    assert [seq for source, seq in follower.got if source == "driver"] == list(range(201))
    assert ("rank:0", 0) in follower.got


def test_an_empty_file_can_be_followed(path: Path, follow: Callable[[Path], Follower]) -> None:
    path.touch()
    follower = follow(path)
    assert follower.reader.run_id == ""
    with path.open("ab") as file:
        file.write(line(0))
    follower.wait_for(1)
    assert follower.reader.run_id == "r1"


def test_a_file_that_is_replaced_by_another_run_ends_the_iteration(
    path: Path, follow: Callable[[Path], Follower]
) -> None:
    with AuditLog(path, run_id="old") as log:
        log.write(EVENT)
    follower = follow(path)
    follower.wait_for(1)
    with AuditLog(path, run_id="new") as log:
        log.write(EVENT)
        follower.thread.join(timeout=30)
    assert follower.got == [("driver", 0)]


def test_a_missing_file_is_refused_also_when_following(path: Path) -> None:
    with pytest.raises(AuditError, match="no such file"):
        read_audit(path, follow=True)


def test_stopping_before_iterating_gives_what_is_there(path: Path) -> None:
    path.write_bytes(line(0) + line(1))
    reader = read_audit(path, follow=True)
    reader.stop()
    assert [record.seq for record in reader] == [0, 1]
