"""``rl-session migrate``: what is printed, what is written, and with which status it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result

from rl_session.cli import _app

LOOP = "def f(policy, b):\n    policy.prepare_for_training()\n    policy.train(b, None)\n"
LEFT = "def f(policy, later):\n    later(policy.offload_to_cpu)\n"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(_app, ["migrate", *map(str, arguments)])


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    path = tmp_path / "loop.py"
    path.write_text(LOOP, encoding="utf-8")
    return path


def test_a_tree_without_sites_is_left_and_the_run_succeeds(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n", encoding="utf-8")
    result = run(tmp_path, "--check")
    assert result.exit_code == 0
    assert "1 files, 1 lines" in result.output
    assert "0 to rewrite" in result.output
    assert "policy and value sites: 0 found, 0 rewritten, 0 left (100% rewritten)" in result.output


def test_nothing_is_written_unless_asked(loop: Path) -> None:
    result = run(loop)
    assert result.exit_code == 0
    assert loop.read_text(encoding="utf-8") == LOOP
    assert "1 to rewrite (nothing written; --write does)" in result.output
    assert "policy and value sites: 1 found, 1 rewritten, 0 left (100% rewritten)" in result.output
    assert "taken for granted:" in result.output


def test_write_writes_and_a_second_time_changes_nothing(loop: Path) -> None:
    assert run(loop, "--write").exit_code == 0
    text = loop.read_text(encoding="utf-8")
    assert "with scopes(policy).training_mode():" in text
    assert run(loop, "--write").exit_code == 0
    assert loop.read_text(encoding="utf-8") == text
    assert run(loop, "--check").exit_code == 0


def test_diff_is_a_patch(loop: Path) -> None:
    result = run(loop, "--diff", "--quiet")
    assert result.output.startswith(f"--- a/{loop.as_posix()}\n+++ b/{loop.as_posix()}\n@@")
    assert "\n-    policy.prepare_for_training()\n" in result.output
    assert "\n+    with scopes(policy).training_mode():\n" in result.output
    loop.write_text(LOOP.rstrip("\n"), encoding="utf-8")
    assert "\\ No newline at end of file" in run(loop, "--diff", "--quiet").output


def test_check_says_whether_something_is_left_to_do(loop: Path) -> None:
    assert run(loop, "--check").exit_code == 1
    loop.write_text(LEFT, encoding="utf-8")
    assert run(loop, "--write").exit_code == 0
    assert run(loop, "--check").exit_code == 1  # a site stays


def test_what_stays_is_listed_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "left.py"
    path.write_text(LEFT, encoding="utf-8")
    result = run(path)
    assert f"  {path}:2:11: policy.offload_to_cpu stays: the method is passed as a value" in result.output
    assert "why sites stay:\n     1  the method is passed as a value" in result.output


def test_the_report_is_json(loop: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert run(loop, "--report", report, "--quiet").output == ""
    document = orjson.loads(report.read_bytes())
    assert document["totals"]["policy_and_value"]["rewritten"] == 1


def test_a_file_that_is_no_python_fails_the_run_and_not_the_others(loop: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n", encoding="utf-8")
    result = run(tmp_path, "--write")
    assert result.exit_code == 1
    assert "broken.py: line 1, column 7: no Python" in result.output
    assert "training_mode" in loop.read_text(encoding="utf-8")


def test_a_file_that_cannot_be_written_fails_the_run(loop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("rl_session_migrate.codemod.files.os.replace", fail)
    result = run(loop, "--write")
    assert result.exit_code == 1
    assert "not written: Read-only file system" in result.output
    assert loop.read_text(encoding="utf-8") == LOOP


def test_usage_errors(tmp_path: Path) -> None:
    assert run(tmp_path / "missing").exit_code == 2
    assert run().exit_code == 2
    assert run(tmp_path, "--jobs", 0).exit_code == 2
    (tmp_path / "pyproject.toml").write_text("[tool.rl-session.migrate]\nnames = 1\n", encoding="utf-8")
    assert run(tmp_path).exit_code == 2


def test_files_can_be_left_out(loop: Path, tmp_path: Path) -> None:
    assert "0 files" in run(tmp_path, "--exclude", "loop.py").output
    (tmp_path / "pyproject.toml").write_text('[tool.rl-session.migrate]\nexclude = ["loop.py"]\n', encoding="utf-8")
    assert "0 files" in run(tmp_path).output
    assert "1 files" in run(loop).output  # named by hand


def test_the_codemod_loads_neither_torch_nor_ray(loop: Path) -> None:
    code = (
        "import sys\nfrom rl_session.cli import _app\n"
        f"try:\n    _app(['migrate', {str(loop)!r}, '--quiet'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
