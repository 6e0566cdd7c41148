"""Type checkers know what a mode allows, and what the public functions take."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SNIPPET = Path(__file__).with_name("snippet.py")
EXPECTED = {number for number, line in enumerate(SNIPPET.read_text().splitlines(), 1) if line.endswith("# no")}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_mypy_rejects_exactly_the_marked_lines(tmp_path: Path) -> None:
    config = tmp_path / "mypy.ini"  # torch is big, and not what is asked about
    config.write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    file = shutil.copy(SNIPPET, tmp_path / "snippet.py")
    result = run(
        [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path / "cache"), str(file)]
    )
    rejected = {int(line) for line in re.findall(r"snippet\.py:(\d+): error", result.stdout)}
    assert rejected == EXPECTED, result.stdout + result.stderr


@pytest.mark.slow
def test_pyright_rejects_exactly_the_marked_lines(tmp_path: Path) -> None:
    file = shutil.copy(SNIPPET, tmp_path / "snippet.py")
    result = run([sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", str(file)])
    found = json.loads(result.stdout)["generalDiagnostics"]
    rejected = {each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"}
    assert rejected == EXPECTED, result.stdout + result.stderr
