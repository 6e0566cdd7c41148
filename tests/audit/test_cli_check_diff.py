"""``rl-session audit check``, ``diff`` and ``schema``: what they say, and their exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result

from rl_session.audit import EVENTS
from rl_session.cli import _app


def run(*arguments: object, input: bytes | None = None) -> Result:  # noqa: A002  # CliRunner's own name
    return CliRunner().invoke(_app, ["audit", *map(str, arguments)], input=input)


def other(path: Path, lines: list[bytes]) -> Path:
    copy = path.with_name("other.jsonl")
    copy.write_bytes(b"".join(lines))
    return copy


# -- check -----------------------------------------------------------------------------------------------


def test_a_whole_log_is_ok(whole_run: Path) -> None:
    result = run("check", whole_run)
    assert (result.exit_code, result.stdout.split()[0]) == (0, "ok")


def test_a_log_that_contradicts_itself_is_not_and_the_first_line_at_fault_is_shown(whole_run: Path) -> None:
    lines = whole_run.read_bytes().splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if b"scope.entered" in line)
    record = orjson.loads(lines[at])
    lines[at] = orjson.dumps({**record, "depth": 7}) + b"\n"
    whole_run.write_bytes(b"".join(lines))
    result = run("check", whole_run)
    assert result.exit_code == 1
    assert "depth" in result.stdout
    said = json.loads(run("check", "--json", whole_run).stdout)
    assert said["ok"] is False
    assert said["findings"][0]["line"] == at + 1
    assert f"Line {at + 1} of {whole_run}\n  {{" in result.stdout


def test_a_crash_is_no_fault_of_the_log_unless_it_must_be_complete(bad_run: Path) -> None:
    result = run("check", bad_run)
    assert result.exit_code == 0
    assert "transition 13 offloaded -> training of actor" in result.stdout
    assert run("check", bad_run, "--complete").exit_code == 1


# -- diff ------------------------------------------------------------------------------------------------


def test_a_run_has_its_own_shape(whole_run: Path) -> None:
    result = run("diff", whole_run, whole_run)
    assert result.exit_code == 0
    assert result.stdout.startswith("the same shape")


def test_time_and_ids_do_not_count(whole_run: Path) -> None:
    records = [orjson.loads(line) for line in whole_run.read_bytes().splitlines()]
    slower = [
        orjson.dumps(
            {**record, "run_id": "another", "time_ns": record["time_ns"] * 2, "mono_ns": 3 * record["mono_ns"]}
        )
        + b"\n"
        for record in records
    ]
    alone = other(whole_run, slower)
    driver_only = other(whole_run, slower)
    assert alone == driver_only
    reference = whole_run.with_name("reference.jsonl")
    reference.write_bytes(whole_run.read_bytes())  # its siblings are not beside it
    assert run("diff", reference, driver_only).exit_code == 0


def test_the_first_point_where_two_runs_part_is_shown(whole_run: Path) -> None:
    reference = whole_run.with_name("reference.jsonl")
    reference.write_bytes(whole_run.read_bytes())
    lines = whole_run.read_bytes().splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if b'"get_logprobs"' in line)
    changed = other(whole_run, [*lines[:at], *lines[at + 1 :]])
    result = run("diff", reference, changed)
    assert result.exit_code == 1
    assert f"They part after {at} records of driver" in result.stdout
    assert "A call.finished of actor in step 0 mode=logprob method=get_logprobs" in result.stdout
    assert "B transition.started of actor in step 0 from_mode=logprob to_mode=training" in result.stdout
    said = json.loads(run("diff", "--json", reference, changed).stdout)
    assert said["parting"]["index"] == at
    assert {"event": "call.finished", "a": 6, "b": 5} in said["events"]


def test_a_run_that_ends_earlier_differs(whole_run: Path) -> None:
    lines = whole_run.read_bytes().splitlines(keepends=True)
    reference = whole_run.with_name("reference.jsonl")
    reference.write_bytes(b"".join(lines))
    result = run("diff", reference, other(whole_run, lines[:-1]))
    assert result.exit_code == 1
    assert "B (ends here)" in result.stdout


def test_other_bytes_differ_only_when_asked(whole_run: Path) -> None:
    reference = whole_run.with_name("reference.jsonl")
    reference.write_bytes(whole_run.read_bytes())
    text = whole_run.read_bytes().replace(b'"bytes_moved":20000000000', b'"bytes_moved":20000000001')
    more = other(whole_run, text.splitlines(keepends=True))
    assert run("diff", reference, more).exit_code == 0
    assert run("diff", reference, more, "--bytes").exit_code == 1


def test_the_order_of_ranks_is_chance_and_does_not_count(whole_run: Path) -> None:
    records = [
        orjson.loads(line)
        for path in sorted(whole_run.parent.glob("*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]
    shifted = [
        {**record, "time_ns": record["time_ns"] + (50_000_000 if record["source"] == "rank:1" else 0)}
        for record in records
    ]
    from rl_session.audit.diff import diff

    by_time = [sorted(rows, key=lambda record: record["time_ns"]) for rows in (records, shifted)]
    assert diff(*by_time).is_same_shape


# -- schema ----------------------------------------------------------------------------------------------


def test_the_schema_names_every_event() -> None:
    result = run("schema")
    assert result.exit_code == 0
    assert set(EVENTS) <= set(json.loads(result.stdout)["$defs"])


@pytest.mark.parametrize("command", ["show", "summary", "check", "diff", "timeline", "trace", "schema"])
def test_every_command_has_help_with_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"rl-session audit {command}" in result.stdout
    assert ("Arguments:\n" in result.stdout) == (command != "schema")
    if command not in {"diff", "schema"}:
        assert "  RUN  The log: the file given as audit_path. - reads standard input.\n" in result.stdout
