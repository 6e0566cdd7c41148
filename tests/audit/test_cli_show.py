"""``rl-session audit show``: the tree, its filters, and the records as JSON."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rl_session.audit import EVENTS
from rl_session.cli import _app


def show(*arguments: object) -> str:
    result = CliRunner().invoke(_app, ["audit", "show", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def names(output: str) -> list[str]:
    """What the lines of a tree are about, indented as they are."""
    return [match[1].rstrip() for line in output.splitlines() if (match := re.match(r" *\d+\.\d{3}  (.{1,34})", line))]


def test_a_step_is_a_tree_of_scopes_with_what_happened_inside(whole_run: Path) -> None:
    output = show(whole_run, "--step", 1)
    assert names(output) == [
        "step 1  1.45 s, 14% of it moving,",
        "training",
        "├─ offloaded → training",
        "├─ train()",
        "├─ logprob",
        "│  ├─ training → logprob",
        "│  ├─ get_logprobs()",
        "│  └─ logprob → training",
        "└─ training → offloaded",
    ]
    assert "20.0 GB moved at 200 GB/s" in output
    assert "train.py:88" in output


def test_every_step_and_what_lies_between_has_a_heading(whole_run: Path) -> None:
    assert [name.split("  ")[0] for name in names(show(whole_run)) if name.startswith(("step", "between"))] == [
        "step 0",
        "step 1",
        "step 2",
        "between steps",
    ]


def test_a_rank_is_shown_with_its_moves_and_nobody_else(whole_run: Path) -> None:
    output = show(whole_run, "--rank", 2, "--step", 0)
    assert names(output)[2:5] == [
        "├─ offloaded → training",
        "│  ├─ rank:2  params host → device",
        "│  └─ rank:2  optimizer host → dev",
    ]
    assert "rank:1" not in output


def test_moves_are_shown_on_request(whole_run: Path) -> None:
    assert "rank:3" not in show(whole_run)
    assert show(whole_run, "--moves").count("rank:3") == 3 * 4


def test_an_event_is_shown_with_the_scopes_around_it(bad_run: Path) -> None:
    output = show(bad_run, "--event", "guard.rejected")
    assert [name.strip("└─ ") for name in names(output)[1:]] == ["logprob", "guard.rejected"]
    assert 'method train  mode logprob  needs ["training","resident"]' in output


def test_a_window_of_time_takes_seconds_or_a_date(bad_run: Path) -> None:
    by_seconds = show(bad_run, "--since", 1.5, "--until", 1.9)
    assert names(by_seconds)[0].startswith("step 1")
    assert "step 2" not in by_seconds
    start = 1_796_064_853
    from datetime import UTC, datetime

    dates = [datetime.fromtimestamp(start + at, UTC).isoformat() for at in (1.5, 1.9)]
    assert show(bad_run, "--since", dates[0], "--until", dates[1]) == by_seconds


def test_what_failed_says_why_and_what_never_ended_says_so(bad_run: Path) -> None:
    output = show(bad_run)
    assert re.search(r"offloaded → training .*rolled back  DeviceMemoryError: rank 2 needs", output)
    assert re.search(r"training +100 ms +actor  never entered", output)
    assert re.search(r"get_logprobs\(\) .*NonFiniteError", output)
    assert re.search(r"training +unfinished  critic  train.py:120", output)
    assert re.search(r"└─ offloaded → training +unfinished", output)


def test_facts_written_during_a_call_are_shown_inside_it(fake_run) -> None:  # noqa: ANN001
    fake_run.open("actor")
    scope = fake_run.new_scope()
    fake_run.enter("actor", scope, "logprob", "resident", 0)
    fake_run.now += 0.2
    fake_run.write("reference.swapped", policy="actor", direction="in", nbytes=5, kind="copy", seconds=0.01)
    fake_run.call("actor", "get_reference_policy_logprobs", "logprob", 0.2)
    fake_run.now = 0.21
    fake_run.leave("actor", scope, "logprob", "resident", 0.2)
    lines = names(show(fake_run.save()))
    at = next(index for index, line in enumerate(lines) if "get_reference" in line)
    assert "reference.swapped" in lines[at - 1] or "reference.swapped" in lines[at + 1]


def test_json_gives_the_records_that_pass_one_a_line(whole_run: Path) -> None:
    records = [
        json.loads(line) for line in show(whole_run, "--json", "--event", "transition.*", "--step", 2).splitlines()
    ]
    assert {record["step"] for record in records} == {2}
    assert {record["event"] for record in records} == {"transition.started", "transition.committed"}
    assert [record["seq"] for record in records] == sorted(record["seq"] for record in records)


def test_what_json_prints_can_be_read_again(whole_run: Path) -> None:
    lines = show(whole_run, "--json")
    result = CliRunner().invoke(_app, ["audit", "summary", "-"], input=lines)
    assert result.exit_code == 0, result.output
    assert "120 GB moved" in result.stdout


def test_nothing_that_matches_is_said_so(whole_run: Path) -> None:
    result = CliRunner().invoke(_app, ["audit", "show", str(whole_run), "--policy", "nobody"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "nothing matches\n")


def refusal(run: object, *arguments: str, input: bytes | None = None) -> list[str]:  # noqa: A002  # CliRunner's own name
    """The lines of a refusal, which says nothing else."""
    result = CliRunner().invoke(_app, ["audit", "show", str(run), *arguments], input=input)
    assert (result.exit_code, result.stdout) == (2, "")
    first, *lines = result.stderr.splitlines()
    assert first == "AuditError: reading the filters"
    return lines


@pytest.mark.parametrize(
    ("option", "word", "fact", "remedy"),
    [
        ("--step", "seven", "is neither a number nor a range", "--step 7 or --step 3-9"),
        ("--since", "soon", "is neither a number of seconds nor a date and time", "--since 12.5 or --since '2026-"),
        ("--until", "1-1", "is neither a number of seconds nor a date and time", "--until 12.5 or --until '2026-"),
    ],
)
def test_a_bad_filter_is_refused_with_what_to_write(
    option: str, word: str, fact: str, remedy: str, whole_run: Path
) -> None:
    said, write = refusal(whole_run, option, word)
    assert said == f"  {option} '{word}' {fact}"
    assert write.startswith(f"  write: {remedy}")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("guard.rejcted", "--event guard.rejected"),
        ("gaurd.*", "--event 'guard.*'"),
        ("GUARD.REJECTED", "--event guard.rejected"),
        ("step", "--event with one of step.opened, step.committed, step.aborted"),
        ("nope", f"--event with one of {', '.join(EVENTS)}"),
        ("", f"--event with one of {', '.join(EVENTS)}"),
    ],
)
def test_a_name_that_no_event_has_is_refused_with_those_that_are_near(name: str, near: str, whole_run: Path) -> None:
    # Beside a name that there is: that one has something to show, and would hide the mistake.
    assert refusal(whole_run, "--event", "scope.entered", "--event", name) == [
        f"  no event is called {name!r}",
        f"  write: {near}",
    ]
    assert refusal("-", "--event", name, input=whole_run.read_bytes()) == refusal(whole_run, "--event", name)


def test_an_event_that_only_a_later_version_has_can_be_asked_for(fake_run) -> None:  # noqa: ANN001
    fake_run.open("actor")
    fake_run.write("later.thought", policy="actor", depth=3)
    path = fake_run.save()
    assert names(show(path, "--event", "later.*")) == ["later.thought"]
    assert names(show(path, "--event", "later.thought", "--event", "guard.rejected")) == ["later.thought"]
    assert refusal(path, "--event", "later.thoughts") == [
        "  no event is called 'later.thoughts'",
        "  write: --event later.thought",
    ]


def test_control_characters_of_a_name_do_not_reach_the_terminal(hostile_run) -> None:  # noqa: ANN001
    output = show(hostile_run("evil\x1b[2J\x07\nname"))
    assert "\x1b" not in output
    assert "evil\\x1b[2J\\x07\\nname" in output


def test_colours_are_there_when_forced_and_never_with_no_color(
    whole_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in show(whole_run)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in show(whole_run)


def test_follow_prints_what_is_written_later_and_ends_with_the_session(fake_run) -> None:  # noqa: ANN001
    fake_run.open("actor")
    fake_run.training_step(0, num_ranks=1)
    path = fake_run.save()
    before = path.read_bytes()
    fake_run.training_step(1, num_ranks=1)
    fake_run.close()
    rest = fake_run.save().read_bytes()[len(before) :]
    path.write_bytes(before)
    command = [sys.executable, "-c", "from rl_session.cli import main; main()", "audit", "show", "--follow", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        assert b"session.opened" in process.stdout.readline()  # it reads now
        with path.open("ab", buffering=0) as file:
            file.write(rest[:-20])  # half a line is not taken for a whole one
            file.write(rest[-20:])
        output = process.stdout.read().decode()
        assert process.wait(60) == 0
    assert output.count("\N{BLACK LEFT-POINTING SMALL TRIANGLE} training") == 2
    assert "session.closed" in output.splitlines()[-1]


def test_scopes_whose_ends_are_lost_do_not_nest_those_that_follow(fake_run) -> None:  # noqa: ANN001
    fake_run.open("actor")
    for step in range(3):
        fake_run.training_step(step, num_ranks=1)
    path = fake_run.save()
    path.write_bytes(
        b"".join(line for line in path.read_bytes().splitlines(keepends=True) if b"scope.exited" not in line)
    )
    output = show(path, "--step", 2)
    assert names(output)[1:5] == ["training", "├─ offloaded → training", "├─ train()", "├─ logprob"]
    assert "unfinished" in output


def test_an_interrupt_ends_following_quietly(fake_run) -> None:  # noqa: ANN001
    fake_run.open("actor")
    command = [
        sys.executable,
        "-c",
        "from rl_session.cli import main; main()",
        "audit",
        "show",
        "-f",
        str(fake_run.save()),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b""
        assert process.wait(60) == 0
