"""``rl-session audit summary``: totals, one step, trouble and memory, in bounded time and memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from rl_session.audit import read_audit
from rl_session.audit.summary import summarize
from rl_session.cli import _app

GB = 10**9


def summary(*arguments: object) -> str:
    result = CliRunner().invoke(_app, ["audit", "summary", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*arguments: object) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(summary("--json", *arguments))
    return value


def test_totals_are_those_of_the_records(whole_run: Path) -> None:
    said = as_json(whole_run)
    records = [record for record in read_audit(whole_run).dicts() if record["event"] == "transition.committed"]
    assert said["total"]["count"] == len(records) == 12
    assert said["total"]["bytes_moved"] == sum(record["bytes_moved"] for record in records) == 120 * GB
    assert said["total"]["seconds"] == pytest.approx(sum(record["seconds"] for record in records))
    assert said["is_closed"]
    assert said["unfinished"] == []


def test_time_is_told_by_policy_mode_method_and_direction(whole_run: Path) -> None:
    said = as_json(whole_run)
    scopes = {(row["policy"], row["mode"]): row for row in said["scopes"]}
    assert scopes["actor", "training"]["count"] == 3
    assert scopes["actor", "training"]["seconds"] == pytest.approx(3 * 1.453)
    calls = {row["method"]: row["seconds"] for row in said["calls"]}
    assert calls == pytest.approx({"train": 3.0, "get_logprobs": 0.75})
    ways = {(row["from_mode"], row["to_mode"]): row for row in said["transitions"]}
    assert ways["offloaded", "training"]["gb_per_second"] == pytest.approx(200)
    assert ways["training", "logprob"]["gb_per_second"] is None


def test_where_did_the_time_of_a_step_go(whole_run: Path) -> None:
    output = summary(whole_run, "--step", 1)
    assert "Step 1 took 1.45 s" in output
    table = dict(re.findall(r"^  (calls|moving|everything else) +(\S+ \w+) +\S+%$", output, re.MULTILINE))
    assert table == {"calls": "1.25 s", "moving": "202 ms", "everything else": "21.0 us"} or set(table) == {
        "calls",
        "moving",
        "everything else",
    }
    said = as_json(whole_run, "--step", 1)
    assert said["steps"][0]["calling"] == pytest.approx(1.25)
    assert said["steps"][0]["moving"] == pytest.approx(0.202)


def test_a_step_that_is_not_there_is_refused(whole_run: Path) -> None:
    result = CliRunner().invoke(_app, ["audit", "summary", str(whole_run), "--step", "99"])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[1:] == [
        "  the log has no record of that step; its steps are 0 to 2",
        f"  write: rl-session audit summary {whole_run} --step 2",
    ]
    piped = CliRunner().invoke(_app, ["audit", "summary", "-", "--step", "99"], input=whole_run.read_bytes())
    assert piped.exit_code == 2
    assert piped.stderr.splitlines()[1:] == [
        "  the log has no record of that step",
        "  write: rl-session audit summary -",
    ]


def test_which_transition_was_slowest_and_which_moved_the_most(fake_run) -> None:  # noqa: ANN001
    fake_run.open("actor")
    for step, seconds in enumerate((0.1, 0.7, 0.2)):
        fake_run.training_step(step, seconds=seconds)
    fake_run.close()
    said = as_json(fake_run.save())
    assert [row["step"] for row in said["slowest"]] == [1, 1, 2, 2, 0]
    assert said["slowest"][0]["seconds"] == pytest.approx(0.7)
    assert said["slowest"][0]["reason"] == "entering training_mode() at train.py:88"
    assert {row["bytes_moved"] for row in said["largest"]} == {20 * GB}


def test_trouble_is_told_refused_calls_warnings_lost_workers_and_what_never_ended(bad_run: Path) -> None:
    output = summary(bad_run)
    assert "no end recorded" in output
    assert re.search(r"actor +train +logprob +training, resident +1", output)
    assert "slow_pin  actor: pinning failed" in output
    assert "critic rank 2 lost at 4.305 s: exit code -9" in output or "critic rank 2 lost at" in output
    said = as_json(bad_run)
    assert [text.partition(":")[0] for text in said["unfinished"]] == [
        "transition 13 of actor",
        "scope training of critic, entered at train.py",
    ]
    failed = {(row["from_mode"], row["to_mode"]): row["num_failed"] for row in said["transitions"] if row["num_failed"]}
    assert failed == {("offloaded", "training"): 1}


def test_who_held_the_memory_at_the_crash(bad_run: Path) -> None:
    said = as_json(bad_run)
    assert said["memory"]["critic"] == {"params": {"device": 4 * GB}, "optimizer": {"device": 16 * GB}}
    output = summary(bad_run)
    assert "Memory at the last record" in output
    assert re.search(r"critic +together +20\.0 GB +-", output)
    assert "critic is faulted: where its bytes are is not certain" in output


def test_memory_of_a_step_is_that_at_its_end(whole_run: Path) -> None:
    assert as_json(whole_run, "--step", 0)["memory"]["actor"]["params"] == {"host": 4 * GB}


def test_lines_that_cannot_be_read_are_counted_on_stderr(whole_run: Path) -> None:
    whole_run.write_bytes(whole_run.read_bytes() + b'not a record\n{"schema":1,"run_id":"fa')
    result = CliRunner().invoke(_app, ["audit", "summary", str(whole_run), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["skipped"] == 1
    assert result.stderr.splitlines() == [
        f"warning: {whole_run}: 1 file ends in half a line, as after a crash",
        f"warning: {whole_run}: 1 line is no record, and skipped",
    ]


def test_fields_of_another_kind_cost_themselves_alone() -> None:
    envelope = {
        "schema": 1,
        "run_id": "r",
        "source": "driver",
        "policy": "a",
        "scope_id": 1,
        "transition_id": 1,
        "step": 0,
    }
    odd = [
        {"event": "transition.started", "reason": 5},
        {"event": "component.moved", "nbytes": "many", "component": None},
        {"event": "transition.committed", "seconds": None, "bytes_moved": 1.5, "from_mode": []},
        {"event": "scope.entered"},
        {"event": "scope.exited", "seconds": "long"},
        {"event": "call.finished", "method": {"a": 1}, "changed": "much"},
        {"event": "guard.rejected", "needs": None},
        {"event": "warning"},
        {"event": "worker.lost"},
        {"event": "later.version", "nbytes": 3},
    ]
    records = [{**envelope, "seq": n, "time_ns": n, "mono_ns": n, **record} for n, record in enumerate(odd)]
    assert summarize(records).num_records == len(odd)


@pytest.mark.slow
def test_a_long_log_takes_bounded_memory_and_time(fake_run) -> None:  # noqa: ANN001
    for step in range(3):
        fake_run.training_step(step, num_ranks=1)
    loop = [orjson.loads(line) for line in fake_run.save().read_bytes().splitlines()]
    with fake_run.path.open("wb") as file:
        for n in range(100_000):
            lap, index = divmod(n, len(loop))
            at = lap * 10**10
            record = {
                **loop[index],
                "seq": n,
                "time_ns": loop[index]["time_ns"] + at,
                "mono_ns": loop[index]["mono_ns"] + at,
            }
            record["step"] += 3 * lap
            file.write(orjson.dumps(record) + b"\n")
    program = (
        "import sys, time; sys.argv = ['rl-session', 'audit', 'summary', sys.argv[1]]\n"
        "from rl_session.cli import main\n"
        "try: main()\n"
        # The peak of this program alone: getrusage counts what the process was before it became this one.
        "finally: print(time.process_time(), open('/proc/self/status').read().split('VmHWM:')[1].split()[0], file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(fake_run.path)], capture_output=True, text=True, check=True
    )
    seconds, kilobytes = map(float, result.stderr.split())
    assert "100,000 records" in result.stdout
    assert kilobytes < 80_000
    assert seconds < 10  # one and a half, where nobody else computes
