"""What the commands say to what is no log: three parts on stderr, status 2, and never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rl_session.cli import _app

COMMANDS = ["show", "summary", "check", "timeline", "trace"]
MAIN = [sys.executable, "-c", "from rl_session.cli import main; main()", "audit"]


def _missing(path: Path) -> Path:
    return path / "missing.jsonl"


def _directory(path: Path) -> Path:
    return path


def _binary(path: Path) -> Path:
    (path / "model.bin").write_bytes(bytes(range(256)) * 100)
    return path / "model.bin"


def _empty(path: Path) -> Path:
    (path / "empty.jsonl").touch()
    return path / "empty.jsonl"


def _other(path: Path) -> Path:
    (path / "other.jsonl").write_text('{"loss": 1.5}\n' * 100)
    return path / "other.jsonl"


def _text(path: Path) -> Path:
    (path / "README.md").write_text("# not a log\n")
    return path / "README.md"


INPUTS = {
    "missing": (_missing, "there is no such file"),
    "directory": (_directory, "it is a directory"),
    "binary": (_binary, "binary"),
    "empty": (_empty, "empty"),
    "other": (_other, "audit record"),
    "text": (_text, "audit record"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", INPUTS)
def test_what_is_no_log_is_refused_in_three_parts(command: str, name: str, tmp_path: Path) -> None:
    make, fact = INPUTS[name]
    result = CliRunner().invoke(_app, ["audit", command, str(make(tmp_path))])
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0].startswith("AuditError: [RLS205] reading ")
    assert any(fact in line for line in lines[1:-1]), result.stderr
    # In words of the command that was given, not in Python.
    assert lines[-1] == f"  write: rl-session audit {command} RUN, with the file that the run was given as audit_path"


@pytest.mark.parametrize("which", [0, 1])
def test_both_logs_of_a_diff_must_be_logs(which: int, whole_run: Path, tmp_path: Path) -> None:
    paths = [str(whole_run), str(_missing(tmp_path))]
    result = CliRunner().invoke(_app, ["audit", "diff", *(paths if which else reversed(paths))])
    assert result.exit_code == 2
    assert "there is no such file" in result.stderr
    assert "write: rl-session audit diff A B, with" in result.stderr


@pytest.mark.parametrize("data", [b"", b"\0\1\2" * 100, b"hello\n"])
def test_standard_input_is_refused_likewise(data: bytes) -> None:
    result = CliRunner().invoke(_app, ["audit", "summary", "-"], input=data)
    assert result.exit_code == 2
    assert result.stderr.startswith("AuditError: [RLS205]")


@pytest.mark.parametrize("command", ["timeline", "trace"])
def test_a_place_that_cannot_be_written_is_refused(command: str, whole_run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(_app, ["audit", command, str(whole_run), "-o", str(tmp_path / "no" / "where")])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0].startswith("AuditError: writing ")
    assert result.stderr.splitlines()[-1].startswith("  write: -o ")


@pytest.mark.parametrize("command", ["show", "summary", "trace"])
def test_a_reader_that_has_seen_enough_ends_a_command_quietly(command: str, fake_run) -> None:  # noqa: ANN001
    fake_run.open("actor")
    for step in range(200):
        fake_run.training_step(step)
    extra = ["-o", "-"] if command == "trace" else ["--json"] if command == "show" else []
    process = subprocess.Popen(
        [*MAIN, command, str(fake_run.save()), *extra], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 0


def test_what_a_terminal_cannot_encode_is_written_as_an_escape(hostile_run) -> None:  # noqa: ANN001
    path = hostile_run("\N{SNOWMAN}")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([*MAIN, "show", str(path)], capture_output=True, check=True, env=environment)
    assert b"\\u2603" in result.stdout


HEAVY = {"torch", "ray", "numpy", "structlog", "rich", "pydantic", "typer"}
# What making the classes of the events takes, a small log is read in.
TYPED = {"cattrs", "rl_session.audit.events"}


@pytest.mark.parametrize(
    ("words", "unwanted"),
    [
        ("--help", HEAVY | TYPED | {"attr", "orjson", "rl_session.errors"}),
        ("audit summary RUN", HEAVY | TYPED),
        ("audit show RUN", HEAVY | TYPED),
        ("audit check RUN", HEAVY | {"cattrs"}),
    ],
)
def test_the_commands_do_not_load_what_they_do_not_need(words: str, unwanted: set[str], whole_run: Path) -> None:
    program = (
        "import sys; sys.argv[0] = 'rl-session'\n"
        "from rl_session.cli import main\n"
        "try: main()\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    arguments = words.replace("RUN", str(whole_run)).split()
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert result.stdout
    loaded = set(result.stderr.split())
    assert "rl_session.cli" in loaded
    assert unwanted & loaded == set()


@pytest.mark.parametrize("command", [*COMMANDS, "diff"])
def test_absurd_values_of_a_damaged_log_are_survived(command: str, fake_run, tmp_path: Path) -> None:  # noqa: ANN001
    fake_run.open("actor", "\N{SNOWMAN}" * 10_000)
    scopes = [fake_run.new_scope() for _ in range(3000)]
    for depth, scope in enumerate(scopes):
        fake_run.enter("actor", scope, "training", "training", depth)
    fake_run.write("call.finished", policy="actor", method="train", mode=None, seconds=1e300, error=7, changed={"a": 1})
    for nbytes in (2**63, -5, None, "many"):
        ids = {"policy": "actor", "scope_id": scopes[-1], "transition_id": 1}
        fake_run.write("transition.started", **ids, from_mode=[], to_mode=None, reason={"why": 1})
        fake_run.write(
            "component.moved", **ids, component=3, from_tier="moon", to_tier="device", nbytes=nbytes, seconds=-1e300
        )
        fake_run.write("transition.committed", **ids, seconds="long", bytes_moved=nbytes, bytes_elided=2**64 - 1)
    fake_run.write(
        "policy.created", policy="critic", mode="odd", placement={"params": "moon"}, nbytes={"params": 2**62}
    )
    fake_run.write("later.event", policy="critic", seconds=-1e300, nbytes=2**64 - 1)
    path = fake_run.save()
    extra = (
        [str(path)] if command == "diff" else ["-o", str(tmp_path / "out")] if command in {"timeline", "trace"} else []
    )
    result = CliRunner().invoke(_app, ["audit", command, str(path), *extra])
    assert result.exit_code in {0, 1}, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
