"""The writer: one line by one write, numbers without gaps, and no error that reaches training."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_session.audit import (
    AuditLog,
    PolicyClosed,
    PolicyCreated,
    StepCommitted,
    WarningIssued,
    read_audit,
    sibling_path,
)
from rl_session.audit.envelope import ENVELOPE
from rl_session.audit.render import render_line
from rl_session.errors import AuditError

EVENT = PolicyClosed(reason="close")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


class Writes:
    """Stands in for ``os.write``: counts, and fails or falls short when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[bytes] = []
        self.error: OSError | None = None
        self.limits: list[int] = []
        self._write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, fd: int, data: bytes) -> int:
        self.calls.append(bytes(data))
        if self.limits:
            return self._write(fd, data[: self.limits.pop(0)])
        if self.error is not None:
            raise self.error
        return self._write(fd, data)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes(monkeypatch)


# -- lines ----------------------------------------------------------------------------------------------


def test_a_line_has_the_whole_envelope_in_order_and_the_fields_flat_beside_it(path: Path) -> None:
    with AuditLog(path, run_id="r1", source="rank:0") as log:
        assert log.write(EVENT, policy="actor") == 0
    (line,) = lines_of(path)
    assert list(line) == [*ENVELOPE, "reason"]
    assert line["event"] == "policy.closed"
    assert line["source"] == "rank:0"
    assert line["step"] is None


def test_each_event_is_exactly_one_write_and_is_in_the_file_when_write_returns(path: Path, writes: Writes) -> None:
    log = AuditLog(path)
    for n in range(1, 4):
        log.write(EVENT)
        assert len(writes.calls) == n
        assert writes.calls[-1].endswith(b"\n")
        assert len(lines_of(path)) == n
    log.close()
    assert len(writes.calls) == 3


def test_parents_are_made_and_only_the_owner_may_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "run.jsonl"
    with AuditLog(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_numbers_have_no_gap_and_clocks_grow_under_threads(path: Path) -> None:
    num_threads, num_events = 8, 200
    log = AuditLog(path)
    start = threading.Barrier(num_threads)
    returned: list[int] = []

    def work() -> None:
        start.wait()
        returned.extend(log.write(EVENT) for _ in range(num_events))

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()

    lines = lines_of(path)
    assert [line["seq"] for line in lines] == list(range(num_threads * num_events))
    assert sorted(returned) == list(range(num_threads * num_events))
    monotonic = [line["mono_ns"] for line in lines]
    assert monotonic == sorted(monotonic)


def test_a_run_id_is_made_up_and_the_same_on_every_line(tmp_path: Path) -> None:
    logs = [AuditLog(tmp_path / f"{n}.jsonl") for n in range(2)]
    for log in logs:
        log.write(EVENT)
        log.write(EVENT)
        log.close()
        assert {line["run_id"] for line in lines_of(log.path or Path())} == {log.run_id}
    assert logs[0].run_id != logs[1].run_id


# -- files ----------------------------------------------------------------------------------------------


def test_a_non_empty_file_is_moved_aside_and_never_appended_to(path: Path) -> None:
    for n in range(3):
        with AuditLog(path, run_id=f"run-{n}") as log:
            log.write(EVENT)
    assert [line["run_id"] for line in lines_of(path)] == ["run-2"]
    assert [line["run_id"] for line in lines_of(path.with_name("run.jsonl.bak-1"))] == ["run-0"]
    assert [line["run_id"] for line in lines_of(path.with_name("run.jsonl.bak-2"))] == ["run-1"]
    assert [record.run_id for record in read_audit(path)] == ["run-2"]
    assert [record.run_id for record in read_audit(path.with_name("run.jsonl.bak-1"))] == ["run-0"]


def test_an_empty_file_is_used_as_it_is(path: Path) -> None:
    path.touch()
    with AuditLog(path) as log:
        log.write(EVENT)
    assert len(lines_of(path)) == 1
    assert [found.name for found in path.parent.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize("kind", ["directory", "below-a-file"])
def test_a_file_that_cannot_be_made_is_an_error_at_once(tmp_path: Path, kind: str) -> None:
    if kind == "directory":
        bad = tmp_path
    else:
        (tmp_path / "file").write_text("x")
        bad = tmp_path / "file" / "run.jsonl"
    with pytest.raises(AuditError) as caught:
        AuditLog(bad)
    assert str(bad) in str(caught.value)
    assert "audit_path" in caught.value.remedy


def test_a_source_is_part_of_the_file_name_whatever_is_in_it(tmp_path: Path) -> None:
    assert sibling_path(tmp_path / "run.jsonl", "rank:0") == tmp_path / "run.rank:0.jsonl"
    assert sibling_path(tmp_path / "run.jsonl", "driver:a/b").parent == tmp_path
    assert sibling_path(tmp_path / "run", "rank:0") == tmp_path / "run.rank:0.jsonl"


# -- close, fork and nowhere ----------------------------------------------------------------------------


def test_close_is_idempotent_and_a_later_write_is_counted_and_not_raised(path: Path) -> None:
    log = AuditLog(path)
    log.write(EVENT)
    log.close()
    log.close()
    assert log.write(EVENT) == -1
    assert log.dropped == 1
    assert len(lines_of(path)) == 1
    assert "closed" in repr(log)


def test_a_write_after_close_does_not_go_to_the_next_file_that_got_the_descriptor(path: Path) -> None:
    log = AuditLog(path)
    log.close()
    other = path.with_name("other")
    with other.open("wb"):
        log.write(EVENT)
    assert other.read_bytes() == b""


def test_a_log_without_a_path_numbers_and_calls_processors_and_touches_no_file(tmp_path: Path, writes: Writes) -> None:
    seen: list[Any] = []

    def watch(_logger: Any, _method: str, record: Any) -> Any:
        seen.append(dict(record))
        return record

    silent = AuditLog(None)
    watched = AuditLog(None, processors=[watch], run_id="r1")
    assert [silent.write(EVENT), silent.write(EVENT)] == [0, 1]
    assert [watched.write(EVENT, policy="actor"), watched.write(EVENT)] == [0, 1]
    assert seen[0]["event"] == "policy.closed"
    assert seen[0]["policy"] == "actor"
    assert seen[1]["seq"] == 1
    assert silent.dropped == watched.dropped == 0
    assert not writes.calls
    assert not list(tmp_path.iterdir())
    silent.close()
    watched.close()


FORK = """
import os, sys, threading
from rl_session.audit import AuditLog, PolicyClosed

log = AuditLog(sys.argv[1])
log.write(PolicyClosed(reason="parent"))
holding, done = threading.Event(), threading.Event()

def hold():
    with log._lock:
        holding.set()
        done.wait()

thread = threading.Thread(target=hold)
if sys.argv[2] == "locked":
    thread.start()
    holding.wait()
child = os.fork()
if child == 0:
    ok = log.write(PolicyClosed(reason="child")) == -1 and log.dropped == 1
    log.close()
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
done.set()
log.write(PolicyClosed(reason="parent"))
assert log.dropped == 0
log.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("lock", ["free", "locked"])
def test_a_forked_child_neither_writes_to_the_file_nor_waits_for_a_lock_it_inherited(path: Path, lock: str) -> None:
    # In a process of its own: forking one with threads is exactly what is tested, and warned about.
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(path), lock]
    subprocess.run(command, check=True, env=environ, timeout=60)
    assert [(line["seq"], line["reason"]) for line in lines_of(path)] == [(0, "parent"), (1, "parent")]


def test_the_audit_imports_neither_torch_nor_ray() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "import sys, rl_session.audit; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, env=environ, timeout=60)


# -- disks ----------------------------------------------------------------------------------------------


def test_a_full_disk_is_reported_once_counted_and_visible_as_a_gap(
    path: Path, writes: Writes, caplog: pytest.LogCaptureFixture
) -> None:
    log = AuditLog(path)
    log.write(EVENT)
    writes.error = OSError(errno.ENOSPC, "No space left on device")
    with caplog.at_level(logging.ERROR, logger="rl_session.audit"):
        assert [log.write(EVENT), log.write(EVENT)] == [1, 2]
    writes.error = None
    assert log.write(EVENT) == 3
    log.close()

    assert log.dropped == 2
    (complaint,) = caplog.records
    assert complaint.name == "rl_session.audit"
    assert "No space left" in complaint.getMessage()
    assert str(path) in complaint.getMessage()
    reader = read_audit(path)
    assert [record.seq for record in reader] == [0, 3]
    assert reader.skipped == reader.torn == 0


def test_a_short_write_is_completed(path: Path, writes: Writes) -> None:
    writes.limits = [10, 1]
    with AuditLog(path) as log:
        log.write(EVENT)
        log.write(EVENT)
    assert [line["seq"] for line in lines_of(path)] == [0, 1]
    assert log.dropped == 0


def test_a_line_cut_short_by_a_full_disk_does_not_spoil_the_next(path: Path, writes: Writes) -> None:
    log = AuditLog(path)
    log.write(EVENT)
    writes.limits, writes.error = [10], OSError(errno.ENOSPC, "No space left on device")
    log.write(EVENT)
    writes.error = None
    log.write(EVENT)
    log.write(EVENT)
    log.close()
    assert log.dropped == 1
    reader = read_audit(path)
    assert [record.seq for record in reader] == [0, 2, 3]
    assert (reader.skipped, reader.torn) == (1, 0)


def test_an_interrupt_inside_a_write_leaves_the_log_usable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(path)
    write = os.write

    def interrupted(fd: int, data: bytes) -> int:
        write(fd, data[:7])
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        log.write(EVENT)
    monkeypatch.setattr(os, "write", write)
    log.write(EVENT)
    log.close()
    reader = read_audit(path)
    assert [record.seq for record in reader] == [1]
    assert reader.skipped == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_a_really_full_device_does_not_raise(caplog: pytest.LogCaptureFixture) -> None:
    with AuditLog("/dev/full") as log:
        assert [log.write(EVENT), log.write(EVENT)] == [0, 1]
    assert log.dropped == 2
    assert len(caplog.records) == 1


def test_a_logging_handler_that_raises_does_not_reach_training_either(path: Path, writes: Writes) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError

    handler = Broken()
    logging.getLogger("rl_session.audit").addHandler(handler)
    try:
        with AuditLog(path) as log:
            writes.error = OSError(errno.EIO, "gone")
            assert log.write(EVENT) == 0
    finally:
        logging.getLogger("rl_session.audit").removeHandler(handler)
    assert log.dropped == 1


def test_a_file_that_takes_no_bytes_does_not_hang(path: Path, writes: Writes) -> None:
    writes.limits = [0]
    with AuditLog(path) as log:
        assert log.write(EVENT) == 0
    assert log.dropped == 1


def test_a_close_that_fails_is_reported_and_not_raised(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog(path)
    assert log._file is not None
    os.close(log._file._fd)
    log.close()
    log.close()
    assert len(caplog.records) == 1


def test_a_signal_handler_may_log_while_the_same_thread_holds_the_lock(path: Path) -> None:
    sig = signal.SIGUSR1
    inside = False

    def interrupt(_logger: Any, _method: str, record: Any) -> Any:
        signal.raise_signal(sig)
        return record

    log = AuditLog(path, processors=[interrupt])

    def handler(_signum: int, _frame: object) -> None:
        nonlocal inside
        if not inside:
            inside = True
            log.write(PolicyClosed(reason="handler"))

    previous = signal.signal(sig, handler)
    try:
        log.write(PolicyClosed(reason="body"))
    finally:
        signal.signal(sig, previous)
    log.close()
    assert {(line["seq"], line["reason"]) for line in lines_of(path)} == {(0, "body"), (1, "handler")}


# -- odd values -----------------------------------------------------------------------------------------


class BrokenRepr:
    def __repr__(self) -> str:
        raise RuntimeError


class ArrayLike:
    def __array__(self) -> None:
        raise AssertionError

    def __repr__(self) -> str:
        raise AssertionError


def circular() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


ODD: dict[str, tuple[Any, Any]] = {
    "nan": (float("nan"), None),
    "inf": (float("inf"), None),
    "float32": (np.float32(0.5), 0.5),
    "float64": (np.float64(0.5), 0.5),
    "int64": (np.int64(3), 3),
    "path": (Path("/a"), "/a"),
    "surrogate": ("bad \udcff name", "bad \\udcff name"),
    "surrogate-path": (Path("bad \udcff"), "bad \\udcff"),
    "large-int": (2**70, str(2**70)),
    "tuple": ((1, "a"), [1, "a"]),
    "int-key": ({1: 2}, {"1": 2}),
    "odd-key": ({(1, 2): "\udcff"}, {"(1, 2)": "\\udcff"}),
    "broken-repr": (BrokenRepr(), "<unprintable BrokenRepr>"),
    "broken-and-surrogate": ([BrokenRepr(), "\udcff"], ["<unprintable BrokenRepr>", "\\udcff"]),
    "function": (len, "<built-in function len>"),
}


@pytest.mark.parametrize(("value", "written"), ODD.values(), ids=ODD)
def test_odd_values_are_written_as_well_as_json_can(path: Path, value: Any, written: Any) -> None:
    with AuditLog(path) as log:
        log.write(StepCommitted(loss=value))
    (line,) = lines_of(path)
    assert line["loss"] == written
    assert log.dropped == 0


@pytest.mark.parametrize("value", [np.zeros(1000), ArrayLike()], ids=["numpy", "array-like"])
def test_arrays_never_enter_the_log_but_for_the_name_of_their_type(path: Path, value: Any) -> None:
    with AuditLog(path) as log:
        log.write(StepCommitted(loss=value))
    (line,) = lines_of(path)
    assert line["loss"] == f"<{type(value).__module__}.{type(value).__qualname__}>"


def test_circular_and_very_deep_values_are_cut_and_long_reprs_shortened(path: Path) -> None:
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]
    with AuditLog(path) as log:
        log.write(StepCommitted(loss=circular()))  # type: ignore[arg-type]
        log.write(StepCommitted(loss=deep))  # type: ignore[arg-type]
        log.write(StepCommitted(loss={"x" * 10_000}))  # type: ignore[arg-type]
    assert log.dropped == 0
    lines = path.read_bytes().splitlines()
    assert len(lines) == 3
    assert all(json.loads(line) and len(line) < 2000 for line in lines)


def test_a_policy_name_with_a_surrogate_or_a_newline_stays_on_one_line(path: Path) -> None:
    with AuditLog(path, source="driver:\udcff") as log:
        log.write(EVENT, policy="a\nb\udcff")
    (record,) = read_audit(path)
    assert record.policy == "a\nb\\udcff"


def test_something_that_is_no_event_is_counted_and_reported_and_not_raised(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with AuditLog(path) as log:
        assert log.write("no event") == 0  # type: ignore[arg-type]
        assert log.write(EVENT) == 1
    assert log.dropped == 1
    assert len(caplog.records) == 1


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(alphabet=st.characters(exclude_categories=()))  # surrogates too
    | st.binary()
    | st.builds(object),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.integers() | st.text(alphabet=st.characters(exclude_categories=())), inner)
        | st.tuples(inner)
    ),
    max_leaves=10,
)


@settings(deadline=None)
@given(value=ANY)
def test_any_value_at_all_makes_exactly_one_line_of_json(value: Any) -> None:
    line = render_line({"seq": 0, "value": value})
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert json.loads(line)["seq"] == 0


# -- processors and structlog ---------------------------------------------------------------------------


def test_a_processor_may_add_to_a_record_and_drop_one(path: Path) -> None:
    def host(_logger: Any, _method: str, record: Any) -> Any:
        if record["event"] == "warning":
            raise structlog.DropEvent
        record["host"] = "node-1"
        return record

    with AuditLog(path, processors=[host, structlog.processors.add_log_level]) as log:
        log.write(EVENT)
        log.write(WarningIssued(code="x", message="y"))
        log.write(EVENT)
    records = list(read_audit(path))
    assert [record.seq for record in records] == [0, 2]
    assert records[0].extra == {"host": "node-1", "level": "info"}
    assert log.dropped == 0


def test_a_failing_processor_costs_its_own_change_and_not_the_record(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_logger: Any, _method: str, record: Any) -> Any:
        raise ZeroDivisionError

    def forgets_to_return(_logger: Any, _method: str, record: Any) -> Any:
        return None

    with AuditLog(path, processors=[fails, forgets_to_return]) as log:
        log.write(EVENT)
        log.write(EVENT)
    assert len(lines_of(path)) == 2
    assert log.dropped == 0
    assert len(caplog.records) == 1
    assert "ZeroDivisionError" in caplog.text


class Planted(dict[Any, Any]):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, planted=1, **kwargs)


@pytest.fixture
def application_logs() -> Iterator[list[Any]]:
    """Configure structlog as an application would, in a way that would break the log if it were used."""
    seen: list[Any] = []

    def swallow(_logger: Any, _method: str, record: Any) -> Any:
        seen.append(record)
        raise structlog.DropEvent

    structlog.configure(processors=[swallow], context_class=Planted, cache_logger_on_first_use=True)
    yield seen
    structlog.reset_defaults()


def test_the_applications_structlog_neither_changes_the_log_nor_is_changed(
    path: Path, application_logs: list[Any]
) -> None:
    before = structlog.get_config()
    structlog.contextvars.bind_contextvars(request="r")
    try:
        with AuditLog(path) as log:
            log.write(EVENT)
            assert not application_logs
            structlog.get_logger().info("hello")
            log.write(EVENT)
    finally:
        structlog.contextvars.clear_contextvars()
    assert len(application_logs) == 1
    assert structlog.get_config() == before
    assert [set(line) for line in lines_of(path)] == [{*ENVELOPE, "reason"}] * 2


def test_configuring_structlog_after_the_log_was_opened_changes_nothing(path: Path) -> None:
    with AuditLog(path) as log:
        log.write(EVENT)
        structlog.configure(processors=[structlog.processors.KeyValueRenderer()])
        try:
            log.write(EVENT)
        finally:
            structlog.reset_defaults()
    assert [line["seq"] for line in lines_of(path)] == [0, 1]


def test_a_live_dictionary_is_written_as_it_was(path: Path) -> None:
    placement = {"params": "device"}
    with AuditLog(path) as log:
        log.write(PolicyCreated(mode="resident", placement=placement, nbytes={"params": 8}))
        placement["params"] = "host"
    (line,) = lines_of(path)
    assert line["placement"] == {"params": "device"}
