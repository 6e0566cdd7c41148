"""What the audit log costs: records written and read a second, and time and memory of tools over a long log.

    python benchmarks/audit.py                    # a million records
    python benchmarks/audit.py --records 100000

Machines differ and are shared: each number is also given against a yardstick measured beside it, the bare ``os.write``
of a line, or the bare reading and JSON parsing of the file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
from harness import parser, report, show

from rl_session.audit import AuditLog, events, read_audit

_TARGETS = {"written_per_second": 80_000, "seconds": 15.0, "mib": 200.0}


def cycle(number: int) -> Iterator[tuple[events.Event, dict[str, Any]]]:
    """The 13 records of one scope with one call, as the library writes them."""
    scope = {"policy": "actor", "scope_id": number, "step": number // 4}
    way_in, way_out = 2 * number, 2 * number + 1
    sizes = (("params", 2**30), ("buffers", 2**10), ("optimizer", 2**31))
    total = sum(nbytes for _, nbytes in sizes)

    def move(transition: int, start: str, end: str, tiers: tuple[str, str]) -> Iterator[Any]:
        at = {**scope, "transition_id": transition}
        yield events.TransitionStarted(from_mode=start, to_mode=end, reason="training_mode() at train.py:88"), at
        for name, nbytes in sizes:
            yield (
                events.ComponentMoved(
                    component=name, from_tier=tiers[0], to_tier=tiers[1], nbytes=nbytes, seconds=0.01
                ),
                at,
            )
        yield (
            events.TransitionCommitted(
                from_mode=start,
                to_mode=end,
                seconds=0.03,
                bytes_moved=total,
                bytes_elided=0,
                num_moves=3,
                device_bytes=total,
                host_bytes=total,
            ),
            at,
        )

    yield from move(way_in, "offloaded", "training", ("host", "device"))
    yield (
        events.ScopeEntered(
            mode="training", outer_mode="offloaded", depth=0, via="scope", call_site="/home/user/train.py:88"
        ),
        scope,
    )
    call = {"policy": "actor", "step": number // 4}
    yield events.CallFinished(method="train", mode="training", seconds=1.5), call
    yield from move(way_out, "training", "offloaded", ("device", "host"))
    yield events.ScopeExited(mode="training", restored_mode="offloaded", seconds=1.6), scope


def write_log(path: Path, num_records: int) -> float:
    """Write about ``num_records``; returns the seconds of CPU that writing took, without making the events."""
    spent, written, number = 0.0, 2, 0
    placement = dict.fromkeys(("params", "buffers", "optimizer"), "host")
    nbytes = {"params": 2**30, "buffers": 2**10, "optimizer": 2**31}
    log = AuditLog(path)
    log.write(events.SessionOpened(release="eager", verify="off"))
    log.write(events.PolicyCreated(mode="offloaded", placement=placement, nbytes=nbytes), policy="actor")
    while written < num_records:
        batch = [pair for n in range(number, number + 100) for pair in cycle(n)]
        start = time.process_time()
        for event, fields in batch:
            log.write(event, **fields)
        spent += time.process_time() - start
        number, written = number + 100, written + len(batch)
    log.write(events.PolicyClosed(reason="close"), policy="actor")
    log.write(events.SessionClosed(seconds=spent))
    log.close()
    return spent


def best_rate(work: Callable[[], object], num: int = 100, repeat: int = 1000) -> float:
    """The best calls a second of many short rounds.

    A shared machine disturbs and never helps; a round has to be shorter than a time slice, or each one is disturbed.
    """
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(num):
            work()
        best = min(best, time.perf_counter() - start)
    return num / best


def measure_writing(folder: Path, rounds: int) -> dict[str, float]:
    """Records a second: in a file, nowhere, and the bare system call beside them."""
    event = events.ComponentMoved(component="params", from_tier="host", to_tier="device", nbytes=2**30, seconds=0.01)
    log, nowhere = AuditLog(folder / "rate.jsonl"), AuditLog(None)
    line = b"x" * 299 + b"\n"
    fd = os.open(folder / "bare", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    at: dict[str, Any] = {"policy": "actor", "scope_id": 3, "transition_id": 8, "step": 2}
    bare = best_rate(lambda: os.write(fd, line), repeat=rounds)
    written = best_rate(lambda: log.write(event, **at), repeat=rounds)
    silent = best_rate(lambda: nowhere.write(event, **at), repeat=rounds)
    os.close(fd)
    log.close()
    return {
        "written_per_second": written,
        "times_bare_write": bare / written,
        "nowhere_microseconds": 1e6 / silent,
    }


# -- tools, each in a process of its own so that its peak memory is its own -----------------------------------------


def _bare(path: str) -> int:
    with open(path, "rb") as file:  # noqa: PTH123 (the yardstick has no wrapper)
        return sum(1 for line in file if orjson.loads(line))


def _dicts(path: str) -> int:
    return sum(1 for _ in read_audit(path).dicts())


def _typed(path: str) -> int:
    return sum(1 for _ in read_audit(path))


def _check(path: str) -> int:
    from rl_session.audit.check import check

    result = check(path)
    assert result.ok, result
    return result.num_records


def _replay(path: str) -> int:
    from rl_session.audit.replay import replay

    return sum(1 for _ in replay(path))


def _spans(path: str) -> int:
    from rl_session.audit.spans import spans

    return sum(1 for _ in spans(path))


def _summary(path: str) -> int:
    from rl_session.audit.summary import summarize

    summarize(read_audit(path).dicts())
    return 0


_TOOLS: dict[str, Callable[[str], int]] = {
    "bare": _bare,
    "dicts": _dicts,
    "typed": _typed,
    "replay": _replay,
    "spans": _spans,
    "check": _check,
    "summary": _summary,
}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_tool(name: str, path: str) -> dict[str, float]:
    """Time and peak memory of one tool in this process."""
    start, cpu = time.perf_counter(), time.process_time()
    _TOOLS[name](path)
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "mib": _peak_mib(),
    }


def measure_tool(name: str, path: Path) -> dict[str, float] | None:
    """Time and peak memory of one tool in a fresh process; None where it is not there."""
    command = [sys.executable, __file__, "--tool", name, "--log", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(num_records: int, *, rounds: int) -> dict[str, Any]:
    """Everything."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writing = measure_writing(folder, rounds)
        path = folder / "run.jsonl"
        spent = write_log(path, num_records)
        num = path.read_bytes().count(b"\n") if num_records <= 100_000 else sum(1 for _ in path.open("rb"))
        tools = {tool: found for tool in _TOOLS if (found := measure_tool(tool, path)) is not None}
        bare = tools["bare"]["cpu_seconds"]
        for found in tools.values():
            found["records_per_second"] = num / found["seconds"]
            found["times_bare"] = found["cpu_seconds"] / bare
        return {
            "records": num,
            "mib": path.stat().st_size / 2**20,
            "writing": {**writing, "sustained_per_second": num / spent},
            "tools": tools,
        }


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a tool, as a table."""
    rows = []
    for name, tool in found["tools"].items():
        at_goal = name in ("summary", "check")
        rows.append(
            {
                "tool": name,
                "records/s": tool["records_per_second"],
                "x bare, CPU": tool["times_bare"],
                "seconds": tool["seconds"],
                "CPU seconds": tool["cpu_seconds"],
                "peak MiB": tool["mib"],
                "goal at a million": f"{_TARGETS['seconds']:.0f} s, {_TARGETS['mib']:.0f} MiB" if at_goal else "",
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run."""
    made = parser(str(__doc__))
    made.add_argument("--records", type=int, default=1_000_000, help="length of the log (default a million)")
    made.add_argument("--tool", choices=list(_TOOLS), help=argparse.SUPPRESS)
    made.add_argument("--log", help=argparse.SUPPRESS)
    options = made.parse_args(argv)
    if options.tool:
        print(json.dumps(run_tool(options.tool, options.log)))
        return
    found = measure(2_000 if options.smoke else options.records, rounds=10 if options.smoke else 1000)
    writing = found["writing"]
    show(
        "Writing records",
        [
            {
                "records/s": writing["written_per_second"],
                "goal": _TARGETS["written_per_second"],
                "x a bare write": writing["times_bare_write"],
                "in one go, per second of CPU": writing["sustained_per_second"],
                "logging nowhere, us": writing["nowhere_microseconds"],
            }
        ],
    )
    show(f"Reading {found['records']:,} records, {found['mib']:.0f} MiB", rows_of(found))
    report({"audit": found}, options.json)


if __name__ == "__main__":
    main()
